/* Reserve, fence, overwrite || copy, fence, look at reserve. Guards transaction.h (T1) and gather.h (G2). One slot: row 0 is committed; rows 1
   and 2 overwrite it. GenMC 0.10.3 when the protocol was designed (RC11, IMM; a release fence is enough for this part of T1): holds;
   -DNO_REL or -DNO_ACQ returns a torn or another row. */
#include "litmus.h"
atomic_ulong cursor, reserve;
atomic_int first_half, second_half;
static void *writer(void *unused) {
  for (int id = 1; id <= 2; id++) {
    atomic_store_explicit(&reserve, id + 1, memory_order_relaxed);
#ifndef NO_REL
    atomic_thread_fence(memory_order_seq_cst);
#endif
    atomic_store_explicit(&first_half, id, memory_order_relaxed);
    atomic_store_explicit(&second_half, id, memory_order_relaxed);
    atomic_store_explicit(&cursor, id + 1, memory_order_release);
  }
  return unused;
}
static void *reader(void *unused) {
  unsigned long id = atomic_load_explicit(&cursor, memory_order_acquire) - 1;
  int x = atomic_load_explicit(&first_half, memory_order_relaxed), y = atomic_load_explicit(&second_half, memory_order_relaxed);
#ifndef NO_ACQ
  atomic_thread_fence(memory_order_acquire);
#endif
  unsigned long r = atomic_load_explicit(&reserve, memory_order_relaxed);
  if (id + 1 >= r) assert(x == (int)id && y == (int)id);
  return unused;
}
static void round_(void) {
  cursor = reserve = 1;
  first_half = second_half = 0;
  both(writer, reader);
}
MAIN
