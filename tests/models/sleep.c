/* Store the condition, fence, look for a sleeper || arm, fence, look at the condition. Guards memory.h (wake_if_armed) and every sleeper of
   handle.h. GenMC 0.10.3 when the protocol was designed (RC11, IMM): holds; -DNOFENCE loses the wake-up, also on x86. */
#include "litmus.h"
atomic_int tail, sleeping;
int saw_sleeper, saw_tail;
static void *producer(void *unused) {
  atomic_store_explicit(&tail, 1, memory_order_release);
#ifndef NOFENCE
  atomic_thread_fence(memory_order_seq_cst);
#endif
  saw_sleeper = atomic_load_explicit(&sleeping, memory_order_relaxed);
  return unused;
}
static void *sleeper(void *unused) {
  atomic_store_explicit(&sleeping, 1, memory_order_relaxed);
#ifndef NOFENCE
  atomic_thread_fence(memory_order_seq_cst);
#endif
  saw_tail = atomic_load_explicit(&tail, memory_order_acquire);
  return unused;
}
static void round_(void) {
  tail = sleeping = 0;
  both(producer, sleeper);
  assert(saw_sleeper || saw_tail); /* else: the one sleeps, the other does not wake it */
}
MAIN
