/* The rate limiter's sleepers, without any time-out: whenever nothing can move any more, nothing that the inequalities allow may be left
   to do. Guards limiter.h (admit, try_sample, frees_writer), how role.h and handle.h call them, and check_limiter's bound. A collector puts
   PUTS rows through a ring of one; a drain thread; two samplers that take N rows TAKES times; any of them that holds the role commits.
   A sampler may be killed between the CAS on `sampled` and its draw. diff = NUM·inserted − DEN·sampled.
     -DNODRAIN  drain="caller": no drain thread; the collector waits for the last commit
     -DKILLER   a sampler may also die between its CAS and the wake-up: then the others' slice (-DSLICE) is needed, once
   Mutants: -DNOWAKE a grant wakes nobody   -DWAKER_NOFENCE it looks at `blocked` before its CAS   -DWRITER_NOFENCE `sampled` is not looked
            at again after `blocked` is set   -DPLAIN_RUNNABLE after the release, `blocked` is not set   -DNORECHECK not looked again at all
            -DSLEEPER_NOFENCE the sampler looks first and arms then   -DNARROW max_diff − min_diff is one too small
            -DONEBIT the word that samplers sleep on does not count its wake-ups: another who arms anew hides one */
#ifndef NUM
#define NUM 1
#endif
#ifndef DEN
#define DEN 1
#endif
#ifndef N
#define N 1
#endif
#ifndef PUTS
#define PUTS 2
#endif
#ifndef TAKES
#define TAKES 1
#endif
#define MINSIZE 1
#ifdef NARROW
#define MAXD (NUM + N * DEN - 2)
#else
#define MAXD (NUM + N * DEN - 1)   /* min_diff = 0: exactly check_limiter's `deadlock` */
#endif
#ifndef KILLS
#define KILLS 1
#endif
short put, inserted, sampled; bool role, blocked, writer_wait, slot_wait, data_wait, over; byte budget = KILLS;
bool waits_room, waits_rows[2], armed[2];
#define ADMITS (inserted < MINSIZE || (inserted + 1) * NUM - sampled * DEN <= MAXD)
#define GRANTS(rows) (rows >= MINSIZE && rows * NUM - (sampled + N) * DEN >= 0)
#define ROOM (put == inserted)
#ifdef NODRAIN
#define LAST 1
#else
#define LAST 0
#endif
#define SLEEP(word) if :: !word :: over fi
#define WAKE_ROWS data_wait = false; armed[0] = false; armed[1] = false; waits_rows[0] = false; waits_rows[1] = false
#ifdef ONEBIT
#define UNCHANGED data_wait        /* as it was armed, perhaps by the other one, anew */
#else
#define UNCHANGED armed[me]        /* the word counts its wake-ups beside the bit: nobody has woken since I armed */
#endif
inline admit() {                                   /* ok: a row may be moved */
#ifdef WRITER_NOFENCE
  ok = ADMITS;
  if :: ok :: else -> blocked = true fi
#else
  atomic { if :: ADMITS -> ok = true :: else -> blocked = true; ok = false fi };
  if :: ok :: else -> ok = ADMITS fi               /* after the fence */
#endif
}
inline runnable() {
#ifdef NORECHECK
  ok = false
#else
  if :: put == inserted -> ok = false
#ifdef PLAIN_RUNNABLE
     :: else -> ok = ADMITS
#else
     :: else -> admit()
#endif
  fi
#endif
}
inline hand_over() { atomic { if :: writer_wait -> writer_wait = false :: else -> slot_wait = false fi } }
/* WriterRole::help: transactions of one row until the caller's own need, MET, is met. busy: somebody else holds the role. */
#define HELP(MET, again, out) \
again: atomic { if :: role -> busy = true; goto out :: else -> role = true; busy = false fi }; \
  met = false; \
  do :: MET -> met = true; break \
     :: !(MET) && put == inserted -> break \
     :: !(MET) && put != inserted -> admit(); \
        if :: !ok -> break :: else fi; \
        inserted++;              /* T4 */ \
        atomic { WAKE_ROWS; slot_wait = false; ok = false }   /* T7: fence; wake */ \
  od; \
  role = false;                  /* fence; look again */ \
  runnable(); \
  if :: !ok -> goto out :: ok && met -> hand_over(); goto out :: ok && !met -> goto again fi; \
out: atomic { met = false; ok = false }
#ifdef FULL                                        /* help before arming, too, as the code does: more states, no other end */
#define FIRST(help) help
#else
#define FIRST(help) skip
#endif

proctype Collector() { bool busy, met, ok;
  byte n;
  do
  :: n == PUTS + LAST -> break
  :: else ->
     do
     :: ROOM -> break
     :: else ->
        FIRST(HELP(ROOM, a1, o1));
        slot_wait = true;                          /* arm; fence; once more */
        HELP(ROOM, a2, o2);
        busy = false;
        if :: ROOM -> break :: else -> waits_room = true; SLEEP(slot_wait); waits_room = false; if :: over -> goto gone :: else fi fi
     od;
     if :: n < PUTS -> put++;                      /* tail; fence; wake */
           writer_wait = false
        :: else fi;
     n++
  od;
gone: skip
}
proctype Sampler(byte me) { bool busy, met, ok, seen; byte taken; short rows;
  do
  :: taken == TAKES -> break
  :: else ->
again:
#ifdef WAKER_NOFENCE
     seen = blocked;
#endif
     rows = inserted;
     atomic { if :: GRANTS(rows) -> sampled = sampled + N; ok = true :: else -> ok = false fi };   /* CAS */
     if
     :: ok ->
#ifdef KILLER
        if :: atomic { budget > 0 -> budget--; goto gone } :: skip fi;
#endif
#ifndef WAKER_NOFENCE
        seen = blocked;                            /* fence; L2 */
#endif
#ifndef NOWAKE
        if                                         /* rows: from before the CAS; an older number only wakes more */
        :: seen && (rows < MINSIZE || (rows + 1) * NUM - sampled * DEN <= MAXD) ->
           atomic { seen = blocked; blocked = false };   /* exchange */
           if :: seen -> hand_over() :: else fi
        :: else
        fi;
#endif
        atomic { rows = 0; seen = false; ok = false };
        if :: atomic { budget > 0 -> budget--; goto gone } :: skip fi;   /* killed: its rows count as sampled */
        taken++
     :: else ->
        atomic { rows = 0; seen = false };
        FIRST(HELP(GRANTS(inserted), a1, o1));
#ifdef SLEEPER_NOFENCE
        ok = GRANTS(inserted);
        atomic { data_wait = true; armed[me] = true };
        if :: ok -> goto again :: else fi;
#else
        atomic { data_wait = true; armed[me] = true }   /* arm; fence; once more; L3 */
        HELP(GRANTS(inserted), a2, o2);
        if :: atomic { GRANTS(inserted) -> busy = false; armed[me] = false; goto again } :: else fi;
#endif
        busy = false;
        atomic { if :: UNCHANGED -> waits_rows[me] = true; armed[me] = false :: else fi };   /* futex_wait */
        SLEEP(waits_rows[me]);
        if :: over -> goto gone :: else fi
     fi
  od;
gone: skip
}
#ifndef NODRAIN
proctype Drain() { bool busy, met, ok;
  do
  :: over -> break
  :: else ->
     FIRST(HELP(false, a1, o1));
     writer_wait = true;
     HELP(false, a2, o2);
     if :: !busy -> runnable() :: else fi;
     busy = false;
     if :: ok -> ok = false :: else -> SLEEP(writer_wait) fi
  od
}
#endif
init { atomic { run Collector(); run Sampler(0); run Sampler(1);
#ifndef NODRAIN
    run Drain();
#endif
  }
#ifdef SLICE
  byte was = 255;                                                              /* every slice ends, once after the death */
  do :: timeout -> if :: was != budget -> was = budget; writer_wait = false; slot_wait = false; WAKE_ROWS :: else -> break fi od;
#endif
  timeout ->
  assert(!(put != inserted && ADMITS));                                        /* rows lie in the ring that may be moved */
  assert(!((waits_rows[0] || waits_rows[1]) && GRANTS(inserted)));             /* a sampler sleeps that may sample */
  assert(!(waits_room && ROOM));
  assert(!(put != inserted && (waits_rows[0] || waits_rows[1])));              /* neither side may: the bounds are too narrow */
  over = true }
