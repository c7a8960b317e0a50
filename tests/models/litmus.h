/* The frame of the litmus files. Under a model checker (GenMC) each is one round of two new threads. With -DMILLISECONDS=n the two threads stay
   and start each round together, so that they really meet, for so long. */
#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#ifndef MILLISECONDS
#define RELAX()
static void both(void *(*a)(void *), void *(*b)(void *)) {
  pthread_t p, q;
  pthread_create(&p, 0, a, 0);
  pthread_create(&q, 0, b, 0);
  pthread_join(p, 0);
  pthread_join(q, 0);
}
#define MAIN int main(void) { return round_(), 0; }
#else
#include <sched.h>
#include <stdio.h>
#include <time.h>
#define RELAX() sched_yield()
static atomic_long wanted, started, finished; /* rounds; wanted < 0: no more */
static void *(*other_body)(void *);
static void wait_for(atomic_long *word, long n) {
  for (int spins = 0; atomic_load(word) < n;)
    if (++spins > 2000) sched_yield();
}
static void *other(void *unused) {
  for (long n = 1;; n++) {
    for (int spins = 0; atomic_load(&wanted) < n;) {
      if (atomic_load(&wanted) < 0) return unused;
      if (++spins > 2000) sched_yield();
    }
    atomic_store(&started, n);
    other_body(0);
    atomic_store(&finished, n);
  }
}
static long rounds;
static void both(void *(*a)(void *), void *(*b)(void *)) {
  other_body = b;
  atomic_store(&wanted, ++rounds);
  wait_for(&started, rounds);
  a(0);
  wait_for(&finished, rounds);
}
static void round_(void);
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}
static int main_(void) {
  pthread_t thread;
  pthread_create(&thread, 0, other, 0);
  for (double end = now() + MILLISECONDS; now() < end;) round_();
  atomic_store(&wanted, -1);
  pthread_join(thread, 0);
  printf("%ld rounds\n", rounds);
  return 0;
}
#define MAIN int main(void) { return main_(); }
#endif
