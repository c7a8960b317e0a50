/* The 16-byte node {sum | min, tag}: the own node is read as two loads, sum first, the children's sum and min as separate loads, then one
   CAS over both words, twice if the first fails. Guards priority_tree.h (refresh, refresh_twice, scrub). Three levels: leaves 0,1 -> node
   0; leaves 2,3 -> node 1; nodes 0,1 -> node 2, the root. At rest every node equals its children in both components.
     -DTHREE   three updaters instead of two   -DDIE an updater may die anywhere; one scrub, bottom up, must then heal
   Mutants: -DSINGLE one refresh   -DTHREE with -DTAGLAST (the tag read after the children), -DSKIPEQ (no CAS if nothing changed),
            -DCAS8 (two 8-byte CASes), -DNOTAG */
#define INF 9
byte leaf[4]; byte sum[3], mn[3], tag[3]; byte done;
#define MIN(a,b) (a < b -> a : b)
#define NZ(x) (x == 0 -> INF : x)
#ifdef DIE
byte budget = 2;
#define STEP(x) if :: x :: atomic { budget > 0 -> budget--; goto dead } fi
#else
#define STEP(x) x
#endif
inline own_lo(i) { STEP(olds = sum[i]) }
inline own_hi(i) { STEP(atomic { oldm = mn[i]; oldt = tag[i] }) }
inline fold(i) {
  s = 0; m = INF; k = 0;
  if
  :: (i) < 2 ->
     STEP(atomic { v = leaf[2*(i)];     s = v;     m = NZ(v) });
     STEP(atomic { v = leaf[2*(i) + 1]; s = s + v; m = MIN(m, NZ(v)) })
  :: else ->
     STEP(s = sum[0]); STEP(m = mn[0]);
     STEP(s = s + sum[1]); STEP(m = MIN(m, mn[1]))
  fi
}
inline refresh(i) {
  own_lo(i);
#ifndef TAGLAST
  own_hi(i);
#endif
  fold(i);
#ifdef TAGLAST
  own_hi(i);
#endif
#ifdef SKIPEQ
  if :: s == olds && m == oldm -> ok = true :: else ->
#else
  if :: true ->
#endif
#ifdef CAS8
  STEP(atomic { if :: sum[i] == olds -> sum[i] = s; ok = true :: else -> ok = false fi });
  STEP(atomic { if :: mn[i] == oldm && tag[i] == oldt -> mn[i] = m; tag[i]++ :: else -> ok = false fi })
#else
#ifdef NOTAG
  STEP(atomic { if :: sum[i] == olds && mn[i] == oldm -> sum[i] = s; mn[i] = m; ok = true :: else -> ok = false fi })
#else
  STEP(atomic { if :: sum[i] == olds && mn[i] == oldm && tag[i] == oldt -> sum[i] = s; mn[i] = m; tag[i]++; ok = true :: else -> ok = false fi })
#endif
#endif
  fi
}
inline level(i) {
  refresh(i);
#ifndef SINGLE
  if :: !ok -> refresh(i) :: else fi
#endif
}
inline update(l, x) { STEP(leaf[l] = x); level((l / 2)); level(2) }
proctype Up(byte a; byte xa; byte b; byte xb; bool two) {
  bool ok; byte olds, oldm, oldt, s, m, v, k;
  update(a, xa);
  if :: two -> update(b, xb) :: else fi;
  done++; goto out;
dead: done++;
out: skip
}
init {
  bool ok; byte olds, oldm, oldt, s, m, v, k;
  atomic { mn[0] = INF; mn[1] = INF; mn[2] = INF;
#ifdef THREE
    run Up(0, 1, 0, 0, true); run Up(1, 2, 0, 0, false); run Up(1, 3, 0, 0, false)
#else
    run Up(0, 1, 0, 3, true); run Up(1, 2, 2, 1, true)
#endif
  }
#ifdef THREE
  done == 3;
#else
  done == 2;
#endif
#ifdef DIE
  budget = 0;
  atomic { refresh(0); assert(ok); refresh(1); assert(ok); refresh(2); assert(ok) }
dead:
#endif
  atomic {
  assert(sum[0] == leaf[0] + leaf[1] && sum[1] == leaf[2] + leaf[3] && sum[2] == sum[0] + sum[1]);
  assert(mn[0] == MIN(NZ(leaf[0]), NZ(leaf[1])) && mn[1] == MIN(NZ(leaf[2]), NZ(leaf[3])) && mn[2] == MIN(mn[0], mn[1])) }
}
