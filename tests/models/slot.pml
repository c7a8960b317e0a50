/* One collector slot: claimed, filled, closed, swept, with everybody killed anywhere. Guards registry.h (claim_slot, close_slot, sweep).
   Two collectors come and go, two sweepers look, the writer drains. Never two owners; a claim finds the ring drained and funded;
   a slot is freed only with a drained ring; whoever changes the word holds its byte; in the end every row has been drained and the
   slot is free.
   Mutants: -DNORECHECK a claim looks for FREE before locking only   -DNOREDRAIN a sweep looks at the ring before locking only
            -DNOLOCK a sweep takes no lock   -DUNLOCKFIRST close unlocks before it stores CLOSED */
#ifndef CRASHES
#define CRASHES 2
#endif
#define FREE 0
#define ACTIVE 1
#define CLOSED 2
#define ROWS 3
byte word, inc, lock, owners, tail, head, budget = CRASHES, gone; bool funded;
#define SET(value) atomic { assert(lock == me); word = value }
#define TRY(held) atomic { if :: lock == 0 -> lock = me; held = true :: else -> held = false fi }
#define CRASH :: atomic { budget > 0 -> budget--; if :: lock == me -> lock = 0 :: else fi; owners = owners - own; own = 0; goto start }
#define STEP(x) if :: x CRASH fi

proctype Collector(byte me) {
  byte own, lives; bool held;
start:                                       /* killed, it comes back as another process */
  atomic { held = false; own = 0 };
  do
  :: atomic { lives == 2 -> goto out }
  :: lives < 2 ->
     if :: word == FREE :: goto away fi;     /* another slot, another day */
     STEP(TRY(held));
     if :: !held -> goto away :: else fi;
#ifndef NORECHECK
     if :: word != FREE -> STEP(lock = 0); goto away :: else fi;
#endif
     STEP(funded = true);
     STEP(skip);                             /* describe: owner, counters at claim */
     if :: atomic { SET(ACTIVE); inc++; own = 1; owners++; assert(owners == 1); assert(head == tail) } CRASH fi;
     do
     :: tail < ROWS -> atomic { assert(funded && word == ACTIVE) }; STEP(tail = tail + 1)
     :: break
     od;
#ifdef UNLOCKFIRST
     if :: atomic { own = 0; owners--; lock = 0 } CRASH fi;
     STEP(word = CLOSED);
 #else
     STEP(SET(CLOSED));
     if :: atomic { own = 0; owners--; lock = 0 } CRASH fi;
#endif
away: lives++
  od;
out: gone++
}
#define DRAINED (head == tail)
proctype Sweeper(byte me) {
  byte own; bool held;
start:
  held = false;
end:
  do
  :: word != FREE && DRAINED ->
#ifndef NOLOCK
     STEP(TRY(held));
     if :: !held -> goto start :: else fi;
#endif
     if
#ifdef NOREDRAIN
     :: word != FREE ->
#else
     :: word != FREE && DRAINED ->
#endif
        STEP(funded = false);                /* punch a hole: what lies in the ring is gone */
#ifdef NOLOCK
        STEP(word = FREE);
#else
        atomic { assert(DRAINED) };
        STEP(SET(FREE));
#endif
     :: else
     fi;
     STEP(lock = (lock == me -> 0 : lock));
     held = false
  od
}
active proctype Writer() {
end:
  do :: head < tail -> atomic { assert(funded); head = head + 1 } od
}
init {
  atomic { run Collector(1); run Collector(2); run Sweeper(3); run Sweeper(4) };
  /* when all is quiet, nothing is left behind */
  (timeout) -> assert(gone == 2 && DRAINED && word == FREE && lock == 0 && owners == 0)
}
