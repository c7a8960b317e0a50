/* Two updaters on two leaves of one node, refreshed twice each. Guards priority_tree.h (refresh: seq_cst on all four accesses). The node is
   tag << 16 | sum. GenMC 0.10.3 when the protocol was designed (RC11, two updates each): seq_cst everywhere holds (578 executions);
   -DMO_LD=memory_order_acquire, -DMO_CAS=memory_order_acq_rel or both with -DMO_LEAF=memory_order_release leave a wrong sum, as
   do -DSINGLE, -DUNTAGGED and -DSKIP_EQUAL. The last -DMO_LEAF fails on x86, too: its store waits in the store buffer. */
#include "litmus.h"
#ifndef MO_LEAF
#define MO_LEAF memory_order_seq_cst
#endif
#ifndef MO_LD
#define MO_LD memory_order_seq_cst
#endif
#ifndef MO_CAS
#define MO_CAS memory_order_seq_cst
#endif
#ifndef UPDATES
#define UPDATES 2
#endif
atomic_uint leaf[2];
atomic_ulong node;
static int refresh(void) {
  unsigned long old = atomic_load_explicit(&node, MO_LD);
  unsigned sum = atomic_load_explicit(&leaf[0], MO_LD) + atomic_load_explicit(&leaf[1], MO_LD);
#ifdef SKIP_EQUAL
  if ((old & 0xffff) == sum) return 1;
#endif
#ifdef UNTAGGED
  return atomic_compare_exchange_strong_explicit(&node, &old, (unsigned long)sum, MO_CAS, memory_order_relaxed);
#else
  return atomic_compare_exchange_strong_explicit(&node, &old, ((old >> 16) + 1) << 16 | sum, MO_CAS, memory_order_relaxed);
#endif
}
static void update(unsigned i) {
  for (unsigned k = 0; k < UPDATES; k++) {
    atomic_store_explicit(&leaf[i], k == 0 ? i + 1 : 0, MO_LEAF);
    int done = refresh();
#ifndef SINGLE
    if (!done) refresh();
#else
    (void)done;
#endif
  }
}
static void *first(void *unused) { return update(0), unused; }
static void *second(void *unused) { return update(1), unused; }
static void round_(void) {
  node = 0;
  leaf[0] = leaf[1] = 0;
  both(first, second);
  assert((node & 0xffff) == leaf[0] + leaf[1]);
}
MAIN
