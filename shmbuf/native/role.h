// The writer role: a lock byte, taken for a burst of work and given back when idle, so no process is indispensable and taking
// over from a dead one is not a special case. Threads of one handle share its description, which does not exclude them: a
// try-flag in front of the byte does (tests/models/role.pml; without it: -DSAMEFD fails).
//
// Release: unlock; fence; look at all tails again; take it back while there is work. A helper whose own need is met does not
// take it back: it wakes the drain thread, or else the sleeping collectors, of whom one takes it. Otherwise busy producers
// could keep a waiting one at work for them for ever. Who misses even that wake-up (its sender was killed) retries at the
// end of its slice.
//
// Where rows lie in device memory, only a handle that maps them takes the role, and none before what a dead holder had under way
// there is over (registry.h); one whose device fails gives it back and leaves the plan as it is, for others and for a later try.
#pragma once
#include "registry.h"
#include "transaction.h"

namespace shmbuf {

class WriterRole {
 public:
  WriterRole(Segment &s) : s_(s) {}
  void open(int lock_fd, const Owner &me) { fd_ = lock_fd, me_ = me; }
  void after_fork() { taken_.store(false, relaxed), fd_ = -1; }

  bool held_here() const { return taken_.load(relaxed); }
  bool try_take() {
    if (s_.device && !s_.device->writes()) return false;
    if (taken_.exchange(true, acquire)) return false;
    if (fd_ < 0 || !lock_byte(fd_, kLockWriter, F_WRLCK)) {
      taken_.store(false, release);
      return false;
    }
    FAILPOINT(role_locked);
    Control &c = s_.control();
    if (s_.device) {
      DeviceWork &w = c.device_work;
      if (!device_work_over(load(w.since_ns, acquire), w.dead_ns, w.pid, w.start_ticks, w.pid_namespace)) {
        unlock_byte(fd_, kLockWriter);
        taken_.store(false, release);
        return false;
      }
      FAILPOINT(device_settled);
    }
    const u64 now = now_ns();
    const u64 since = load(c.writer_since_ns, relaxed);
    after_death_ = since != 0;
    if (since) {  // whoever held it died with it
      const u64 sign = std::max(since, load(c.last_transaction_ns, relaxed));
      Chronicle log(s_);
      const u32 pid = load(c.writer_pid, relaxed);
      log.died(kWriterDied, since, pid, log.comm_of(pid), Writer(s_).unfinished(), now > sign ? now - sign : 0);
    }
    store(c.writer_pid, me_.pid, relaxed), store(c.writer_pid_namespace, me_.pid_namespace, relaxed);
    store(c.writer_since_ns, now, relaxed);
    FAILPOINT(role_taken);
    return true;
  }
  void give_back() {
    store(s_.control().writer_since_ns, u64(0), relaxed);
    FAILPOINT(role_leaving);
    unlock_byte(fd_, kLockWriter);
    taken_.store(false, release);
    FAILPOINT(role_released);
    fence(seq_cst);  // then look again: whoever published before saw the role taken and went to sleep
  }

  enum class Outcome { busy, idle, worked };  // somebody else writes; nothing to do; ran at least one transaction
  // Run transactions until the rings are empty or enough() says so.
  template <class Enough> Outcome help(Enough enough) {
    Outcome out = Outcome::idle;
    for (int idle_turns = 0;;) {
      if (!try_take()) return out == Outcome::idle ? Outcome::busy : out;
      bool met = false;
      bool moved = false;
      bool failed = false;
      const u64 unsettled = s_.device ? s_.device->unsettled() : 0;
      try {
        Writer writer(s_, fd_, &pin_flags, &me_);
        if (writer.take_over() && after_death_) bump<u64>(s_.control().takeovers, 1);
        while (!(met = enough()) && (!s_.device || s_.device->writes()) && writer.step()) moved = true;
      } catch (const DeviceError &e) {
        s_.device->failed(e);
        if (s_.device->unsettled() == unsettled) store(s_.control().device_work.since_ns, u64(0), release);  // the writer has waited for its stream
        failed = true;
      }
      if (moved) out = Outcome::worked;
      give_back();
      if (failed) return out == Outcome::idle ? Outcome::busy : out;
      if (!Writer::runnable(s_)) return out;
      // Work was seen, none was found, and again: what is seen is a damaged head_pub, not a record that has just come.
      if (!moved && !met && ++idle_turns > 3) {
        hand_over();
        return out;
      }
      if (met) {
        hand_over();
        return out;
      }
    }
  }

  // Somebody who sleeps shall look.
  void hand_over() {
    Control &c = s_.control();
    if (load(c.writer_wait, relaxed) & 1) return wake_if_armed(c.writer_wait);
    u32 n = s_.n_slots();
    for (u32 i = 0; i < n; ++i) wake_if_armed(s_.slot(i).wait);
  }

  std::atomic<u32> pin_flags{0};  // pins.h

 private:
  Segment &s_;
  int fd_ = -1;
  Owner me_{};
  bool after_death_ = false;  // of the role's last holder
  std::atomic<bool> taken_{false};
};

}  // namespace shmbuf
