/* One leaf word per slot, {generation, priority}: evicted, published, set by updaters that come late, while the writer may be killed
   at any step. Guards priority_tree.h (evict, publish, set) and T2/T6 of a transaction. N slots, rows 0..LAST-1, one row each.
   Priorities: FRESH (-0.0), ZERO (a user's 0), P0 (the first one), USER. A set that succeeded stays until the row is evicted, and
   only ever lands on the row it was computed for.
   Mutants: -DNOGEN set stores without comparing the generation   -DPLAIN publish stores over whatever is there
            -DNOSIGN fresh is not told from a user's 0   -DNOREDO a successor does not publish what a dead writer committed */
#define N 2
#ifndef LAST
#define LAST 4
#endif
#ifndef CRASHES
#define CRASHES 2
#endif
#define FRESH 0
#define P0 2
#define USER 3
#ifdef NOSIGN
#define ZERO 0
#else
#define ZERO 1
#endif
byte gen[N], pri[N], touched[N]; byte R, C, ps, ds; byte budget = CRASHES; bool wdone;   /* touched: ghost, what a user set last */
#define CRASH :: atomic { budget > 0 -> budget--; goto start }
#define STEP(x) if :: x CRASH fi
#ifdef PLAIN
#define PUBLISH atomic { pri[s] = P0; assert(touched[s] == 99 || touched[s] == P0) }
#else
#define PUBLISH atomic { if :: gen[s] == g && pri[s] == FRESH -> pri[s] = P0; assert(touched[s] == 99) :: else fi }
#endif
active proctype Writer() {
  byte id, s, g;
start:
#ifndef NOREDO
  if :: C > 0 && ds != C ->                        /* take_over: T6 of the last commit, again */
        id = C - 1; s = id % N; g = id / N + 1;
        STEP(PUBLISH); STEP(ds = C)
     :: else fi;
#endif
  do
  :: C == LAST -> break
  :: C < LAST ->
     id = C; s = id % N; g = id / N + 1;
     STEP(R = (R < id + 1 -> id + 1 : R));         /* T1 */
     STEP(atomic { gen[s] = g; pri[s] = FRESH; touched[s] = 99 });   /* T2: one 8-byte store */
     STEP(C = id + 1);                             /* T4 and the cursor; the rows' bytes are elsewhere */
     STEP(PUBLISH);                                /* T6 */
     STEP(ds = C)
  od;
  wdone = true
}
proctype Updater() {
  byte id, og, op, np;
  do
  :: C == LAST -> break
  :: atomic { C > 0 && C < LAST -> id = C - 1 };   /* the newest row of its window */
     if :: np = USER :: np = ZERO fi;
     if :: id + N >= R ->                          /* the gather validated the row */
           atomic { og = gen[id % N]; op = pri[id % N] };
           if :: og == id / N + 1 ->
#ifdef NOGEN
              atomic { pri[id % N] = np; touched[id % N] = np; assert(gen[id % N] == id / N + 1) }
#else
              atomic { if :: gen[id % N] == og && pri[id % N] == op ->
                             pri[id % N] = np; touched[id % N] = np; assert(gen[id % N] == id / N + 1)
                          :: else fi }
#endif
           :: else fi
        :: else fi;
     atomic { id = 0; og = 0; op = 0; np = 0 }
  od
}
init { run Updater(); run Updater();
  (wdone && _nr_pr <= 2) ->
  byte i = 0;
  do :: i < N -> assert(gen[i] == (LAST - 1 - ((LAST - 1 - i) % N)) / N + 1);
                 assert(pri[i] == (touched[i] == 99 -> P0 : touched[i])); i++
     :: else -> break od }
