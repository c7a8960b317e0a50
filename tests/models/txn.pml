/* Transactions over two rings that hold ROWS, CLEAR and (later) EDIT records. The role's holder may be killed at every step, and the
   next one may plan otherwise. Guards transaction.h: plan, seal, T1..T7, take_over; steps are named as there. Rows are two bytes.
     -DSEAL   the plan is sealed (the next commit block, then plan_seq) before the first store: the code. Without it a successor chooses
              anew, and readers see a torn row or a new row gone at once (-DRELAX asks only about the transaction's own rows).
     SC=1 ROWS, EDIT, EDIT   SC=2 a record longer than the capacity   SC=3 -DLINKS stream links   SC=4 CLEAR against ROWS, with leaves
     SC=5 -DVICTIM replacing writers   SC=6 drop_oldest: skip_to moves at any time; results say which rows went
   Not in the code yet: EDIT, links, replacing writers, and the leaves (T2, T6, CLEAR's new generation: priority_tree.h has them).
   Mutants with -DSEAL: SC=1 -DLATESEAL sealed after the first store   SC=4 -DBASE_FIRST a reader loads base before cursor
     SC=4 -DUPD -DKEEPGEN CLEAR keeps the generation   SC=5 without -DVICTIM the victim is chosen when it is overwritten
     SC=6 -DSKIPNOW a successor drops up to skip_to as it is now, not as planned */
#define N 2
#ifndef CRASHES
#define CRASHES 2
#endif
#define ROWS 1
#define EDIT 2
#define CLEAR 3
#define REPLACE 4          /* max-value writer on a full buffer: the writer chooses the victim (lowest value) */
#define IDS 12
#define DROPPED 200
byte kind[8], rows[8], val[8];        /* record r of ring q is [q*4 + r] */
byte nrec[2];
byte R, C, base, cs, ps, ctr, done_seq;
byte bcur[2], bbase[2], bh0[2], bh1[2], border[2], bfirst[2], bvict[2], bskip[2];
byte skip_to, res[8];                 /* drop_oldest of ring 0, in records; what became of each record */
byte lo[N], hi[N], prv[N], nxt[N], last[2];
byte lgen[N]; bit lpri[N];            /* leaf: generation, priority 0/1 */
byte gval[IDS], gold[IDS], gstr[IDS]; byte seen[8];   /* ghosts, set at the commit */
byte budget = CRASHES; bool wdone;
#define CRASH :: atomic { budget > 0 -> budget--; goto start }
#define STEP(x) if :: x CRASH fi
#ifdef KEEPGEN
#define CLRGEN
#else
#define CLRGEN lgen[j] = nbs / N;
#endif
#define MAX(a,b) (a > b -> a : b)
#define LOWC(c) ((c) > N -> (c) - N : 0)
proctype Writer() {
  byte vict, cur, bs, h0, h1, n0, n1, sk, s, q, r, e, k, j, id, x, ncur, nbs, ord, lst[2], fst; bool live;
start:
  /* every acquisition: the truth is the commit block, nothing private survives */
  atomic { s = cs; cur = bcur[s & 1]; bs = bbase[s & 1]; h0 = bh0[s & 1]; h1 = bh1[s & 1] };
  if
  :: done_seq != s ->
     x = bfirst[s & 1];                                 /* post-commit redo of transaction s, from its own block */
     nbs = bs;
     goto post
  :: else
  fi;
next:
  if
  :: h0 == nrec[0] && h1 == nrec[1] -> goto fin
  :: else
  fi;
#ifdef SEAL
  if
  :: ps == s + 1 -> atomic { n0 = bh0[(s+1)&1]; n1 = bh1[(s+1)&1]; ncur = bcur[(s+1)&1]; nbs = bbase[(s+1)&1]; ord = border[(s+1)&1];
#ifdef SKIPNOW
           sk = (skip_to > h0 -> skip_to : h0)
#else
           sk = bskip[(s+1)&1]
#endif
     }
  :: else ->
#else
  if :: true ->
#endif
     atomic {
     /* plan: one EDIT or CLEAR alone, or up to one ROWS record of each ring, in either order */
     n0 = h0; n1 = h1; ncur = cur; nbs = bs; ord = 0; sk = h0;
     if
     :: skip_to > h0 -> sk = skip_to; n0 = sk;          /* only ROWS lie before it */
        if :: sk < nrec[0] && kind[sk] == ROWS -> n0 = sk + 1 :: skip fi;
        if :: h1 < nrec[1] && kind[4 + h1] == ROWS -> n1 = h1 + 1; if :: ord = 0 :: ord = 1 fi :: skip fi
     :: h0 < nrec[0] -> n0 = h0 + 1;
        if :: kind[h0] == ROWS && h1 < nrec[1] && kind[4 + h1] == ROWS -> if :: n1 = h1 + 1; if :: ord = 0 :: ord = 1 fi :: skip fi :: else fi
     :: h1 < nrec[1] -> n1 = h1 + 1
     fi;
     if :: n0 > sk && kind[sk] == ROWS -> ncur = ncur + rows[sk]
        :: n0 > h0 && kind[h0] == CLEAR -> ncur = ((cur + N - 1) / N) * N; nbs = ncur
        :: else fi;
     if :: n1 > h1 && kind[4+h1] == ROWS -> ncur = ncur + rows[4+h1]
        :: n1 > h1 && kind[4+h1] == CLEAR -> ncur = ((cur + N - 1) / N) * N; nbs = ncur
        :: else fi }
#ifdef SEAL
     ; STEP(atomic { bcur[(s+1)&1] = ncur; bbase[(s+1)&1] = nbs; bh0[(s+1)&1] = n0; bh1[(s+1)&1] = n1; border[(s+1)&1] = ord; bfirst[(s+1)&1] = cur; bskip[(s+1)&1] = sk; bvict[(s+1)&1] = (lo[0] <= lo[1] -> 0 : 1) });
#ifndef LATESEAL
     STEP(ps = s + 1)                                   /* sealed */
#endif
#endif
  fi;
  /* ---- run the plan */
  if
  :: (n0 > h0 && (kind[h0] == EDIT || kind[h0] == REPLACE)) || (n1 > h1 && kind[4+h1] == EDIT) ->
     if :: n0 > h0 -> r = h0 :: else -> r = 4 + h1 fi;
     e = rows[r];                                       /* target id */
     if :: kind[r] == REPLACE ->
#ifdef VICTIM
           e = bvict[(s+1)&1]                           /* decided before the seal, part of the plan */
#else
           atomic { if :: lo[0] <= lo[1] -> e = 0 :: else -> e = 1 fi }
#endif
           ; vict = e
        :: else fi;
     live = (e >= bs && e < cur && e + N >= R);
     if :: live ->
        if :: (ctr & 1) == 0 -> STEP(ctr = ctr + 1) :: else fi;
        STEP(lo[e % N] = val[r]); STEP(hi[e % N] = val[r])
     :: else fi
  :: else ->
     live = false;
     /* T1 */
     if :: ncur > cur && nbs == bs && R < ncur -> STEP(R = ncur) :: else fi;
#ifndef CLEAR_POST
     if :: nbs > bs || ((n0 > h0 && kind[h0] == CLEAR) || (n1 > h1 && kind[4+h1] == CLEAR)) ->
        j = 0; do :: j < N -> STEP(atomic { CLRGEN lpri[j] = 0 }); j++ :: else -> break od
     :: else fi;
#endif
     atomic { lst[0] = last[0]; lst[1] = last[1] };
     r = h0;
     do :: r < sk -> STEP(res[r] = DROPPED); r++ :: else -> break od;
     if :: n0 > sk && kind[sk] == CLEAR -> STEP(res[sk] = nbs) :: else fi;
     if :: n1 > h1 && kind[4+h1] == CLEAR -> STEP(res[4+h1] = nbs) :: else fi;
     id = cur; k = 0;
     do
     :: k < 2 ->
        q = (k + ord) % 2;
        if :: q == 0 && n0 > sk && kind[sk] == ROWS -> r = sk
           :: q == 1 && n1 > h1 && kind[4+h1] == ROWS -> r = 4 + h1
           :: else -> r = 99 fi;
        if :: r != 99 ->
           j = 0;
           STEP(res[r] = id);
           do :: j < rows[r] ->
                 if :: rows[r] - j <= N ->              /* rows of an oversize record that could never be seen are not written */
                    STEP(atomic { lgen[id % N] = id / N; lpri[id % N] = 0 });      /* T2 */
                    STEP(lo[id % N] = val[r] + j); STEP(hi[id % N] = val[r] + j);
#ifdef LINKS
                    STEP(atomic { prv[id % N] = lst[q]; nxt[id % N] = 0 });
#ifdef LINK_T3
                    if :: lst[q] > 0 && lst[q] - 1 + N > id && lst[q] - 1 >= bs -> STEP(nxt[(lst[q] - 1) % N] = id + 1) :: else fi;
#endif
#endif
                    lst[q] = id + 1
                 :: else fi;
                 id++; j++
              :: else -> break od
        :: else fi;
        k++
     :: else -> break
     od
  fi;
#ifdef LATESEAL
  STEP(ps = s + 1);
#endif
  /* T4: the commit (ghosts move with it) */
#ifndef SEAL
  STEP(atomic { bcur[(s+1)&1] = ncur; bbase[(s+1)&1] = nbs; bh0[(s+1)&1] = n0; bh1[(s+1)&1] = n1; border[(s+1)&1] = ord; bfirst[(s+1)&1] = cur });
#endif
  if
  :: atomic {
     id = cur; k = 0; r = h0;
     do :: r < sk -> assert(seen[r] == 0 && kind[r] == ROWS && res[r] == DROPPED); seen[r] = 1; r++ :: else -> break od;
     do :: k < 2 -> q = (k + ord) % 2;
           if :: q == 0 && n0 > sk -> r = sk :: q == 1 && n1 > h1 -> r = 4 + h1 :: else -> r = 99 fi;
           if :: r != 99 -> assert(seen[r] == 0); seen[r] = 1;
                 assert(kind[r] != ROWS || res[r] == id); assert(kind[r] != CLEAR || res[r] == ncur);
                 if :: kind[r] == ROWS -> j = 0; do :: j < rows[r] -> gval[id] = val[r] + j; gold[id] = val[r] + j; gstr[id] = q; id++; j++ :: else -> break od
                    :: kind[r] == EDIT && live -> gval[rows[r]] = val[r]
                    :: kind[r] == REPLACE -> gval[vict] = val[r]
                    :: else fi
              :: else fi; k++
        :: else -> break od;
     cs = s + 1; x = cur; s = s + 1; cur = ncur; bs = nbs; h0 = n0; h1 = n1 }
  CRASH
  fi;
post:
  /* after the commit: idempotent redo */
#ifdef LINKS
#ifndef LINK_T3
  /* links and stream table: walk the ids of transaction s in order */
  atomic { id = x; if :: id < LOWC(cur) -> id = LOWC(cur) :: else fi };
  do :: id < cur && nbs == bs && id >= bs ->
        if :: prv[id % N] > 0 && prv[id % N] - 1 >= bs && prv[id % N] - 1 + N >= R -> STEP(nxt[(prv[id % N] - 1) % N] = id + 1) :: else fi;
        id++
     :: else -> break od;
#endif
#endif
#ifdef LINKS
  atomic { id = MAX(x, LOWC(cur)); skip };
  do :: id < cur && id >= bs -> STEP(last[gstr[id]] = id + 1); id++ :: else -> break od;
#endif
  if :: (ctr & 1) -> STEP(ctr = ctr + 1) :: else fi;
  STEP(base = bs);
  STEP(C = cur);
#ifdef CLEAR_POST
  if :: bs == cur -> j = 0; do :: j < N -> STEP(atomic { if :: lgen[j] < bs / N -> lgen[j] = bs / N; lpri[j] = 0 :: else fi }); j++ :: else -> break od :: else fi;
#endif
  id = MAX(bs, LOWC(cur));
  do :: id < cur -> STEP(atomic { if :: lgen[id % N] == id / N -> lpri[id % N] = 1 :: else fi }); id++ :: else -> break od;
  /* what must hold whenever a transaction is finished and nobody is inside the next one */
#ifdef RELAX
#define FROM x                            /* only the rows of this transaction: nothing committed may vanish at once */
#else
#define FROM bs
#endif
  atomic { id = MAX(FROM, LOWC(cur)); id = MAX(id, bs);
     do :: id < cur -> assert(id + N >= R);                                   /* committed, within the last N: must be readable */
           assert(ctr & 1 || (lo[id % N] == gval[id] && hi[id % N] == gval[id]));
           assert(lgen[id % N] == id / N && lpri[id % N] == 1); id++ :: else -> break od;
#ifdef UPD
     if :: bs == cur -> j = 0; do :: j < N -> assert(lpri[j] == 0); j++ :: else -> break od :: else fi
#endif
  };
  STEP(done_seq = s);
  goto next;
fin:
  atomic { k = 0; do :: k < 8 -> assert(seen[k] == ((k < 4 -> k < nrec[0] : k - 4 < nrec[1]) -> 1 : 0)); k++ :: else -> break od };
  wdone = true
}
proctype Dropper() { do :: skip_to < 2 -> skip_to++ :: break od }     /* the collector of ring 0 needs room */
proctype Reader() {
  byte id, c, r, a, b, g, n, bb;
  do
#ifdef BASE_FIRST
  :: atomic { !wdone; bb = base }; c = C; r = R;                  /* mutant: base before C */
#else
  :: atomic { !wdone; c = C }; bb = base; r = R;                  /* C first: the writer stores base before C */
#endif
     atomic { id = MAX(bb, LOWC(r)); do :: id + 1 < c -> id++ :: break od };
     if :: id < c ->
        g = ctr;
        if :: (g & 1) == 0 ->
           a = lo[id % N]; b = hi[id % N];
#ifdef LINKS
           n = nxt[id % N];
#endif
           atomic { if :: id + N >= R && g == ctr -> assert(a == b); assert(a == gval[id] || a == gold[id] || a >= 90);
#ifdef LINKS
              if :: n > 0 && n - 1 < C && n - 1 >= base -> assert(gstr[n - 1] == gstr[id]) :: else fi
#endif
              :: else fi }
        :: else fi
     :: else fi
  :: wdone -> break
  od
}
proctype Updater() {      /* got an id from a sample, comes late */
  byte id, c;
  do
  :: atomic { !wdone; c = C; id = MAX(base, LOWC(R)); do :: id + 1 < c -> id++ :: break od };
     if :: id < c -> atomic { if :: lgen[id % N] == id / N -> lpri[id % N] = 1; :: else fi } :: else fi
  :: wdone -> break
  od
}
init { atomic {
#if SC == 1     /* ring 0: two rows, then EDIT of id 0;  ring 1: EDIT of id 1, one row */
  kind[0] = ROWS; rows[0] = 2; val[0] = 1;  kind[1] = EDIT; rows[1] = 0; val[1] = 91; nrec[0] = 2;
  kind[4] = EDIT; rows[4] = 1; val[4] = 92; kind[5] = ROWS; rows[5] = 1; val[5] = 20; nrec[1] = 2;
#elif SC == 2   /* a record of 3 rows into 2 slots; one row from the other ring */
  kind[0] = ROWS; rows[0] = 1; val[0] = 1;  kind[1] = ROWS; rows[1] = 3; val[1] = 2; nrec[0] = 2;
  kind[4] = ROWS; rows[4] = 1; val[4] = 20; kind[5] = ROWS; rows[5] = 1; val[5] = 21; nrec[1] = 2;
#elif SC == 3   /* links: two streams interleave */
  kind[0] = ROWS; rows[0] = 1; val[0] = 1;  kind[1] = ROWS; rows[1] = 1; val[1] = 2;  kind[2] = ROWS; rows[2] = 1; val[2] = 3; nrec[0] = 3;
  kind[4] = ROWS; rows[4] = 1; val[4] = 20; kind[5] = ROWS; rows[5] = 1; val[5] = 21; nrec[1] = 2;
#elif SC == 5   /* max-value: three replacements in a full buffer */
  kind[0] = ROWS; rows[0] = 2; val[0] = 3;  kind[1] = REPLACE; val[1] = 91;  kind[2] = REPLACE; val[2] = 90; nrec[0] = 3;
#elif SC == 6   /* three records that may be dropped, and another ring */
  kind[0] = ROWS; rows[0] = 1; val[0] = 1;  kind[1] = ROWS; rows[1] = 2; val[1] = 5;  kind[2] = ROWS; rows[2] = 1; val[2] = 9; nrec[0] = 3;
  kind[4] = ROWS; rows[4] = 1; val[4] = 20; nrec[1] = 1;
  run Dropper();
#else           /* CLEAR against rows */
  kind[0] = ROWS; rows[0] = 1; val[0] = 1;  kind[1] = CLEAR; kind[2] = ROWS; rows[2] = 1; val[2] = 3; nrec[0] = 3;
  kind[4] = ROWS; rows[4] = 2; val[4] = 20; kind[5] = ROWS; rows[5] = 1; val[5] = 22; nrec[1] = 2;
#endif
  run Writer();
#ifdef UPD
  run Updater()
#elif SC != 6
  run Reader()
#endif
  } }
