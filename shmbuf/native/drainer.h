// The body of the drain thread, of a standby and of the drain process. `Host` is a Handle: it lends its role, its naps and its sweep.
#pragma once
#include "role.h"
#include <sys/prctl.h>

namespace shmbuf {

template <class Host> class Drainer {
 public:
  explicit Drainer(Host &host) : h_(host), c_(host.s_.control()) {}

  void turn() {
    if (!h_.ready()) {
      const u32 armed = arm(c_.ready_wait);  // pairs with build() in segment.h
      if (load(c_.state, acquire) != kReady) futex_wait(c_.ready_wait, armed);
      return;
    }
    auto stop = [&] { return load(h_.stop_, relaxed) != 0; };
    auto out = h_.role_.help(stop);
    idle_ = out == WriterRole::Outcome::worked ? 0 : idle_ + 1;
    if (u64 t = now_ns(); t - swept_ > 50'000'000) swept_ = t, h_.sweep(), h_.mend();
    // While rows keep coming, nap unarmed: producers then pay no wake-up, and one turn moves many records.
    if (idle_ < 8) return h_.nap(100'000);
    const u32 armed = arm(c_.writer_wait);  // pairs with put(): publish; fence; wake_if_armed
    if (out == WriterRole::Outcome::busy) out = h_.role_.help(stop);  // once more, armed
    if (out == WriterRole::Outcome::busy || !Writer::runnable(h_.s_)) futex_wait(c_.writer_wait, armed);
  }
  void run() {  // a thread's life
    prctl(PR_SET_TIMERSLACK, 1000);
    prctl(PR_SET_NAME, h_.standby_ ? "shmbuf-standby" : "shmbuf-drain");
    while (!load(h_.stop_, acquire) && !h_.destroyed()) {
      try {
        h_.standby_ ? stand_by() : turn();
      } catch (const std::exception &) {  // a damaged Built: readers and collectors report it; there is nothing to drain
        h_.nap(kSlice);
      }
    }
  }

 private:
  void stand_by() {
    h_.nap(kSlice);
    if (!h_.ready()) return;
    if (Writer::runnable(h_.s_) || Writer::pinned(h_.s_)) h_.help();  // a dead one's pin counts until the role's holder sweeps it
    h_.mend();
    if (++idle_ % 50 == 0) h_.sweep();  // nobody else may be there to tell of the dead
  }
  Host &h_;
  Control &c_;
  u32 idle_ = 0;
  u64 swept_ = 0;
};

}  // namespace shmbuf
