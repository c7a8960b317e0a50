/* A segment gets its schema: two processes bring different ones, one wins, everybody may be killed anywhere. Guards segment.h (build),
   handle.h (refresh, try_lock_build) and segment.build in Python. What is shared: the file's size, the schema's bytes (written in two
   pieces), Built (two words and their checksum), the state, the BUILD lock byte. Whoever sees READY maps the file: its size, its schema
   and Built belong to one builder and never change again.
     -DTHREADS  the builders are threads of one handle: the lock does not exclude them. -DMUTEX: a try-flag in front of it does.
   Mutants: -DEARLY state is stored before the schema   -DBUILT_EARLY before Built   -DNORECHECK state is not looked at again under the
            lock   -DTHREADS without -DMUTEX */
#ifndef CRASHES
#define CRASHES 2
#endif
byte size, s1, s2, b1, b2, crc, lock, flag, budget = CRASHES, mapped; bool ready;
#define CRASH :: atomic { budget > 0 -> budget--; if :: lock == me -> lock = 0 :: else fi; flag = (flag == me -> 0 : flag); goto start }
#define STEP(x) if :: x CRASH fi
#ifdef THREADS
#define CANLOCK true
#else
#define CANLOCK (lock == 0)
#endif
#ifdef MUTEX
#define FLAG (flag == 0)
#else
#define FLAG true
#endif
inline map() {                               /* handle.refresh */
  m = size; assert(m > 0);
  assert(b1 == m && b2 == m && crc == m);    /* check_built */
  assert(s1 == m && s2 == m);
  atomic { assert(size == m && s1 == m && s2 == m && b1 == m && b2 == m); mapped = m };
}
proctype Builder(byte me) {
  byte m;
start:
  m = 0;
  do
  :: ready -> break
  :: !ready ->
     if :: atomic { CANLOCK && FLAG -> lock = me; flag = me } CRASH :: else -> goto start fi;
#ifndef NORECHECK
     if :: ready -> STEP(atomic { lock = 0; flag = 0 }); break :: else fi;
#endif
#ifdef EARLY
     STEP(ready = true);
#endif
     STEP(atomic { size = 0; s1 = 0; s2 = 0 });          /* ftruncate: what a dead one left */
     if :: STEP(size = me)                               /* posix_fallocate, ftruncate */
        :: STEP(atomic { lock = 0; flag = 0 }); goto out /* no memory: as small as before, an error to the caller */
     fi;
     STEP(s1 = me); STEP(s2 = me);                       /* pwrite */
#ifdef BUILT_EARLY
     STEP(ready = true);
#endif
     STEP(b1 = me); STEP(b2 = me); STEP(crc = me);
     STEP(ready = true);                                 /* THE publication */
     STEP(atomic { lock = 0; flag = 0 })
  od;
  map();
out: skip
}
proctype Attacher() { byte m; if :: ready -> map(); map() :: true fi }
init { atomic { run Builder(1); run Builder(2); run Attacher() } }
