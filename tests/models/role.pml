/* The writer role: taken for a burst, given back, handed over. Guards role.h (try_take, give_back, help, hand_over) and the sleepers of
   handle.h (wait, make_room, wait_rows, Drainer.turn). Two collectors put a record each and wait for its commit; a helper runs
   transactions until its own need, anything, is met; -DDRAIN: a drain thread too; -DREADER: the helper waits for all rows and sleeps.
   Every sleep must be ended by somebody, else the model stops in an invalid end state.
     -DSLICE   a sleep also ends by itself (kSlice): the code. Without it, the code as it is FAILS: a hand-over that looks for sleepers
               just before one arms is lost, and rows lie until the slice ends.
     -DRETRY   who has armed tries the role once more before it sleeps: then no sleep needs its slice, unless a process dies or a
               reader waits where nobody drains (no put wakes a reader).
     -DCRASH1  the holder may die once: freed by the kernel, nobody is woken.   -DSAMEFD the collectors are threads of one handle:
               the lock does not exclude them; -DMUTEX a try-flag in front of it does.
   Mutants: -DNORECHECK no look at the tails after the release   -DNOHAND a met helper just goes away   -DSAMEFD without -DMUTEX */
bool tail[2], head[2], wait[2], writer_wait, data_wait, flag; byte lockown, inrole, fin;
#ifdef CRASH1
byte budget = 1;
#else
byte budget = 0;
#endif
#define RUNNABLE ((tail[0] && !head[0]) || (tail[1] && !head[1]))
#ifdef SLICE
#define SLEEP(word) if :: !word :: true fi
#else
#define SLEEP(word) !word
#endif

inline try_take(me, shares) {
  atomic { got = false;
    if
    :: shares ->
#ifdef MUTEX
       if :: !flag && lockown == 0 -> flag = true; lockown = me; got = true :: else fi
#else
       if :: lockown == 0 || lockown == 1 || lockown == 2 -> lockown = me; got = true :: else fi
#endif
    :: !shares -> if :: lockown == 0 -> lockown = me; got = true :: else fi
    fi }
}
inline commit(i) { head[i] = true; data_wait = false; wait[i] = false }      /* T5..T7: publish, then wake who is armed */
inline hand_over() {
#ifdef NOHAND
  skip
#else
  if
  :: writer_wait -> writer_wait = false
  :: else -> wait[0] = false; wait[1] = false
  fi
#endif
}
/* MET: the caller's own need. met is left true if it was. DEAD: where a killed process goes. */
#define HELP(me, shares, MET, again, out, DEAD) \
again: try_take(me, shares); \
  if :: !got -> goto out :: got -> inrole++; assert(inrole == 1) fi; \
  met = false; \
  do :: MET -> met = true; break \
     :: !(MET) && tail[0] && !head[0] -> commit(0) \
     :: !(MET) && tail[1] && !head[1] -> commit(1) \
     :: !(MET) && !RUNNABLE -> break \
     :: atomic { budget > 0 -> budget--; inrole--; lockown = 0; flag = false; goto DEAD } \
  od; \
  atomic { inrole--; lockown = 0; flag = false }; \
  RECHECK(again, out) \
out: skip
#ifdef NORECHECK
#define RECHECK(again, out) goto out;
#else
#define RECHECK(again, out) if :: !RUNNABLE -> goto out :: else fi; if :: met -> hand_over(); goto out :: else -> goto again fi;
#endif
#ifdef SAMEFD
#define SHARES true
#else
#define SHARES false
#endif

proctype Collector(byte i) {
  bool got, met;
  tail[i] = true;
  writer_wait = false;                           /* fence; wake_if_armed */
  if :: goto gone :: skip fi;                    /* put without waiting, or wait for the commit */
  do
  :: head[i] -> break
  :: else ->
     HELP(i + 1, SHARES, head[i], a1, o1, dead);
     if :: head[i] -> break :: else fi;
     wait[i] = true;                             /* arm; fence; look again */
#ifdef RETRY
     HELP(i + 1, SHARES, head[i], a2, o2, dead);
#endif
     if :: head[i] -> break :: else -> SLEEP(wait[i]) fi
  od;
gone: fin++; goto out;
dead: fin++;
out: skip
}
proctype Helper() {
  bool got, met, enough;
#ifdef READER
  do
  :: head[0] && head[1] -> break
  :: else ->
     HELP(3, false, (head[0] && head[1]), a1, o1, dead);
     if :: head[0] && head[1] -> break :: else fi;
     data_wait = true;
#ifdef RETRY
     HELP(3, false, (head[0] && head[1]), a2, o2, dead);
#endif
     if :: head[0] && head[1] -> break :: else -> SLEEP(data_wait) fi
  od;
#else
  do :: enough = true; break :: enough = false; break od;
  HELP(3, false, (enough || head[0] || head[1]), a1, o1, dead);
#endif
  fin++; goto out;
dead: fin++;
out: skip
}
#ifdef DRAIN
proctype Drain() {
  bool got, met;
end:
  do
  :: fin == 3 -> break
  :: fin < 3 ->
     HELP(4, false, false, a1, o1, dead);
     writer_wait = true;
#ifdef RETRY
     HELP(4, false, false, a2, o2, dead);
#endif
     if :: got && RUNNABLE -> skip :: else -> if :: !writer_wait :: fin == 3
#ifdef SLICE
       :: true
#endif
       fi fi
  od;
dead: skip
}
#endif
init { atomic { run Collector(0); run Collector(1); run Helper();
#ifdef DRAIN
    run Drain()
#endif
  } }
