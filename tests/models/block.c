/* The double-buffered commit block: a reader copies the one that commit_seq selects and looks at commit_seq again. Guards transaction.h
   (read_block; the fence is publish()'s, after the commit). GenMC 0.10.3 when the protocol was designed (RC11, IMM; a release fence is
   enough): holds; -DNO_REL fails. */
#include "litmus.h"
atomic_ulong commit_seq;
atomic_int x[2], y[2];
static void *writer(void *unused) {
  for (int s = 1; s <= 2; s++) {
#ifndef NO_REL
    atomic_thread_fence(memory_order_seq_cst);
#endif
    atomic_store_explicit(&x[s & 1], s, memory_order_relaxed);
    atomic_store_explicit(&y[s & 1], s, memory_order_relaxed);
    atomic_store_explicit(&commit_seq, s, memory_order_release);
  }
  return unused;
}
static void *reader(void *unused) {
  unsigned long s = atomic_load_explicit(&commit_seq, memory_order_acquire);
  int p = atomic_load_explicit(&x[s & 1], memory_order_relaxed), q = atomic_load_explicit(&y[s & 1], memory_order_relaxed);
  atomic_thread_fence(memory_order_acquire);
  if (atomic_load_explicit(&commit_seq, memory_order_relaxed) == s) assert(p == (int)s && q == (int)s);
  return unused;
}
static void round_(void) {
  commit_seq = 0;
  x[0] = x[1] = y[0] = y[1] = 0;
  both(writer, reader);
}
MAIN
