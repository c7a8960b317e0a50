// fork: the child shares its parent's descriptions, so it would keep the parent's locks alive after the parent's death. Every handle of
// the process is told in the child, before anything else runs there: it closes its descriptor (which drops nothing), and its
// first use attaches anew.
#pragma once
#include <mutex>
#include <pthread.h>
#include <vector>

namespace shmbuf {

template <class T> class ForkList {  // T::after_fork() may do what is async-signal-safe
 public:
  static void add(T *t) {
    std::lock_guard<std::mutex> guard(mutex());
    static bool hooked = (pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, [] {
                            for (T *each : all()) each->after_fork();
                            mutex().unlock();
                          }), true);
    (void)hooked;
    all().push_back(t);
  }
  static void remove(T *t) {
    std::lock_guard<std::mutex> guard(mutex());
    std::erase(all(), t);
  }

 private:  // never destroyed: handles may end after static objects do
  static std::mutex &mutex() { static auto *m = new std::mutex; return *m; }
  static std::vector<T *> &all() { static auto *v = new std::vector<T *>; return *v; }
};

}  // namespace shmbuf
