/* One ring, the rows, one writer, one reader: any of them may be killed at any step, and the next one starts from shared memory.
   Guards transaction.h (step, publish, take_over), ring.h (publish, result, reuse of bytes) and gather.h (window, validation).
   Row id must equal record number, so any loss, doubling, reordering or torn row breaks an assertion, and so does a result that
   the collector reads before it reuses the record's bytes.
     -DFREE    plans are not sealed: a successor may choose another batch. The monotonic reserve alone keeps this right.
   Mutants: -DFREE -DM1 reserve may go back   -DM2 head published before the commit   -DFREE -DM3 cursor and heads by two stores
            -DM4 result stored after the commit   -DM5 no redo on taking over */
#define N 3
#define RC 2
#ifndef MAXREC
#define MAXREC 4
#endif
#ifndef CRASHES
#define CRASHES 2
#endif
#define BAD 77
#ifdef M3
#define NOW 0                                   /* one block, changed in place */
#else
#define NOW (s & 1)
#endif
byte ring[RC], res[RC]; byte tail, head_pub, R, C, cs, ps, ds; byte bcur[2], bhead[2]; byte lo[N], hi[N];
byte budget = CRASHES;
#define CRASH :: atomic { budget > 0 -> budget--; goto start }
#define STEP(x) if :: x CRASH fi
active proctype Collector() {
  byte mine;                                    /* its first record: what another left in the ring is not asked for */
start:
  mine = tail;
  do
  :: tail == MAXREC -> break
  :: tail < MAXREC && tail < head_pub + RC ->
     if :: tail >= mine + RC -> assert(res[tail % RC] == tail - RC) :: else fi;   /* harvest, before the bytes are reused */
     STEP(ring[tail % RC] = BAD);               /* half a record */
     STEP(res[tail % RC] = BAD);
     STEP(ring[tail % RC] = tail);
     STEP(tail = tail + 1)                      /* the ring's commit point */
  od
}
active proctype Writer() {
  byte s, cur, head, ncur, nhead, k, j;
start:                                          /* the role is taken: nothing private survives */
  atomic { s = cs; cur = bcur[NOW]; head = bhead[NOW]; k = 0; j = 0; ncur = 0; nhead = 0 };
#ifdef M3
  goto post;
#endif
#ifndef M5
  if :: ds != s -> goto post :: else fi;        /* take_over */
#endif
next:
  do
  :: head == MAXREC -> assert(cur == MAXREC && C == cur && head_pub == head); goto fin
  :: tail > head -> break
  od;
  if
#ifndef FREE
  :: ps == s + 1 -> atomic { ncur = bcur[(s + 1) & 1]; nhead = bhead[(s + 1) & 1] }
  :: ps != s + 1 ->
#else
  :: true ->
#endif
     if :: k = 1 :: tail - head > 1 -> k = 2 fi;
     ncur = cur + k; nhead = head + k;
#ifndef M3
     STEP(bcur[(s + 1) & 1] = ncur);
     STEP(bhead[(s + 1) & 1] = nhead);
     STEP(ps = s + 1)                           /* sealed */
#endif
  fi;
#ifdef M1
  STEP(R = ncur);
#else
  if :: R < ncur -> STEP(R = ncur) :: else fi;  /* T1 */
#endif
#ifdef M2
  STEP(head_pub = nhead);
#endif
  j = 0;
  do :: head + j < nhead ->                     /* T3 */
        STEP(lo[(cur + j) % N] = ring[(head + j) % RC]);
        STEP(hi[(cur + j) % N] = ring[(head + j) % RC]);
#ifndef M4
        STEP(res[(head + j) % RC] = cur + j);
#endif
        j++
     :: else -> break
  od;
#ifdef M3
  STEP(bcur[NOW] = ncur);
  STEP(bhead[NOW] = nhead);
#endif
  if :: atomic { cs = s + 1; s = s + 1; cur = ncur; k = head; head = nhead }    /* T4: one store */
     CRASH fi;
#ifdef M4
  j = k;
  do :: j < nhead -> STEP(res[j % RC] = j); j++ :: else -> break od;
#endif
post:
  STEP(C = cur);                                /* T5..T7 */
  STEP(head_pub = head);
  STEP(ds = s);
  goto next;
fin: skip
}
active proctype Reader() {
  byte id, c, r, a, b;
  do
  :: c = C; r = R;
     if :: r > N -> id = r - N :: else -> id = 0 fi;
     do :: id + 1 < c -> id++ :: break od;
     if
     :: id < c ->
        a = lo[id % N]; b = hi[id % N];
        if :: id + N >= R -> assert(a == b && a == id) :: else fi
     :: else
     fi
  :: C == MAXREC -> break
  od
}
