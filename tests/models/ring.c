/* A collector's ring: bytes before tail, head before reuse. Guards ring.h (publish, has_room) and transaction.h (P1, head_pub). Capacity 1, so
   the one slot is reused. GenMC 0.10.3 when the protocol was designed (RC11, IMM): holds; -DTAIL_ST or -DHEAD_ST
   =memory_order_relaxed fails. TSan sees both as races. */
#include "litmus.h"
#ifndef TAIL_ST
#define TAIL_ST memory_order_release
#endif
#ifndef HEAD_ST
#define HEAD_ST memory_order_release
#endif
atomic_ulong tail, head;
int slot[1];
static void *producer(void *unused) {
  for (unsigned long i = 0; i < 2; i++) {
    while (i - atomic_load_explicit(&head, memory_order_acquire) >= 1) RELAX();
    slot[0] = (int)i + 1;
    atomic_store_explicit(&tail, i + 1, TAIL_ST);
  }
  return unused;
}
static void *consumer(void *unused) {
  for (unsigned long i = 0; i < 2; i++) {
    while (atomic_load_explicit(&tail, memory_order_acquire) <= i) RELAX();
    assert(slot[0] == (int)i + 1);
    atomic_store_explicit(&head, i + 1, HEAD_ST);
  }
  return unused;
}
static void round_(void) {
  tail = head = 0;
  slot[0] = 0;
  both(producer, consumer);
}
MAIN
