// One attachment of one process to one segment: the mapping, the one descriptor that carries its locks, its tickets for
// what it puts (collecting.h) and its drain thread. Everything above it (module.cpp, Python) only converts.
#pragma once
#include "audit.h"
#include "collecting.h"
#include "drainer.h"
#include "forks.h"
#include "role.h"
#include "sampling.h"
#include "segment.h"
#include <memory>
#include <mutex>
#include <pthread.h>
#include <signal.h>
#include <vector>

namespace shmbuf {

struct Gone { Status why; };  // thrown by Use

class Handle : public Collecting<Handle> {
 public:
  enum : u32 { kReadonly = 1, kNoPresence = 2 };

  // Takes both descriptors. map_fd is closed as soon as everything is mapped: a mapping keeps its description open, and a
  // description that is mapped must not carry locks, or they would outlive close().
  Handle(int map_fd, int lock_fd, u32 flags) : map_fd_(map_fd), lock_fd_(lock_fd), readonly_(flags & kReadonly), role_(s_) {
    ForkList<Handle>::add(this);  // before any lock: a fork by another thread must not leave one in its child
    try {
      u64 bytes = file_size(map_fd);
      if (struct stat st; fstat(map_fd, &st) == 0 && st.st_nlink) named();
      if (bytes < 2 * kPage) throw FormatError("the file has " + std::to_string(bytes) + " bytes, less than a header");
      u8 *probe = map_file(map_fd, 2 * kPage, true);
      u64 config_bytes = reinterpret_cast<const Header *>(probe)->config_bytes;
      munmap(probe, 2 * kPage);
      if (config_bytes < 2 * kPage || config_bytes > bytes) config_bytes = 2 * kPage;  // check_header says what is wrong
      s_.map = map_file(map_fd, config_bytes, readonly_);
      s_.mapped_bytes = config_bytes;
      check_header(s_.map, config_bytes);
      presence_ = !(flags & kNoPresence) && lock_byte(lock_fd_, kLockPresence, F_RDLCK);
      refresh();
    } catch (...) {
      ForkList<Handle>::remove(this);
      unmap();
      close_fds();
      throw;
    }
    me_ = describe_self();
    if (!readonly_) member_ = Registry(s_, lock_fd_).claim_member(me_, 0);
    role_.open(readonly_ ? -1 : lock_fd_, me_);
  }
  ~Handle() {
    close();
    ForkList<Handle>::remove(this);
  }
  Handle(const Handle &) = delete;

  // ---- being there ----
  bool present() const { return presence_; }
  bool ready() { return built_.load(acquire) || refresh(); }
  bool forked() const { return forked_; }
  bool closed() const { return closed_.load(acquire); }
  const Segment &segment() const { return s_; }
  Segment &segment() { return s_; }
  const Owner &me() const { return me_; }
  int member() const { return member_; }
  int lock_fd() const { return lock_fd_; }
  bool destroyed() const { return load(s_.control().destroyed, acquire) & kDestroyed; }
  void add_role(u32 role) {
    if (member_ >= 0) std::atomic_ref<u32>(s_.member(u32(member_)).roles).fetch_or(role, relaxed);
  }
  Member *own_entry() { return member_ >= 0 ? &s_.member(u32(member_)) : nullptr; }
  void count_drawn(const u64 *ids, u64 n) {
    if (!readonly_ && n) Chronicle(s_).drawn(ids, n, own_entry());
  }
  // Around a wait: whoever looks at the segment sees what this process sleeps for. on() before each sleep.
  struct Waiting {
    Member *m;
    bool told = false;
    explicit Waiting(Handle &h) : m(h.own_entry()) {}
    void on(Waits what) {
      if (!m) return;
      if (!told) store(m->waiting_since_ns, now_ns(), relaxed), told = true;
      store(m->waits_for, u32(what), relaxed);
    }
    ~Waiting() { if (told) store(m->waits_for, u32(kNothing), relaxed); }
  };
  void wait_for(Waits what) {  // of waits above this floor: kNothing ends it
    if (Member *m = own_entry()) store(m->waiting_since_ns, now_ns(), relaxed), store(m->waits_for, u32(what), relaxed);
  }
  // Every operation runs under a Use, so that close() never unmaps below one. The last Use of a closed handle takes it down:
  // a signal handler may close the handle whose wait it interrupts.
  struct Use {
    Handle &h;
    Use *outer;
    static Use *&innermost() { static thread_local Use *u = nullptr; return u; }
    explicit Use(Handle &handle) : h(handle), outer(innermost()) {
      h.uses_.fetch_add(1, seq_cst);
      // seq_cst both: pairs with close(), which stores closed_ and then looks at uses_.
      Status why = h.forked_ ? Status::forked : h.closed_.load(seq_cst) ? Status::closed : Status::ok;
      if (why != Status::ok) {
        h.leave();
        throw Gone{why};
      }
      innermost() = this;
    }
    ~Use() {
      innermost() = outer;
      if (!h.forked_) h.leave();  // a fork inside a signal handler inside this call: the child counts from 0
    }
  };

  // ---- schema ----
  bool try_lock_build() {  // threads of this handle share its description: the flag excludes them (see role.h)
    u32 nobody = 0;
    if (!building_.compare_exchange_strong(nobody, this_thread(), acquire)) return false;
    if (lock_byte(lock_fd_, kLockBuild, F_WRLCK)) {
      FAILPOINT(build_taken);
      store(s_.control().builder_pid, me_.pid, relaxed);
      return true;
    }
    building_.store(0, release);
    return false;
  }
  void unlock_build() {  // nothing, if this thread does not hold it: whoever was interrupted need not know
    if (building_.load(relaxed) != this_thread()) return;
    unlock_byte(lock_fd_, kLockBuild);
    building_.store(0, release);
  }
  int build(const u8 *schema, u64 bytes, const RowShape &row) { return shmbuf::build(lock_fd_, s_, schema, bytes, row); }
  bool refresh() {  // map rows and rings once somebody has built them
    if (load(s_.control().state, acquire) != kReady) return false;  // pairs with build() in segment.h
    std::lock_guard<std::mutex> guard(mutex_);
    if (built_.load(relaxed)) return true;
    u64 bytes = file_size(map_fd_);
    const Header &h = s_.header();
    u8 *file = map_file(map_fd_, bytes, readonly_);
    try {
      if (h.built.schema_offset > bytes || h.built.schema_bytes > bytes - h.built.schema_offset) throw FormatError("schema: outside the file");
      check_built(h, file, bytes);
    } catch (...) {
      munmap(file, bytes);
      throw;
    }
    file_ = file, file_bytes_ = bytes;
    describe(s_, file);
    if (h.built.home.kind != kHost) device_ = std::make_unique<DeviceRows>(s_), s_.device = device_.get();
    ::close(map_fd_);
    map_fd_ = -1;
    built_.store(true, release);
    return true;
  }
  void named() { linked_.store(true, relaxed); }  // before that, no name is no sign
  const u8 *file() const { return file_; }

  // ---- device rows ----
  DeviceRows *device() const { return s_.device; }
  void map_device(u64 address, u64 bytes, u64 context) {
    if (!ready() || !s_.device) throw DeviceError(ready() ? "the rows of this buffer lie in the segment" : "the buffer has no rows yet");
    s_.device->map(address, bytes, context, own_entry() ? &own_entry()->device_error : nullptr);
    add_role(kOnDevice);
  }
  void unmap_device() {
    if (!ready() || !s_.device || !s_.device->mapped()) return;
    s_.device->unmap();
    if (member_ >= 0) std::atomic_ref<u32>(s_.member(u32(member_)).roles).fetch_and(~u32(kOnDevice), relaxed);
  }

  // ---- reading ----
  u64 size() {
    if (!ready()) return 0;
    Window w = window(s_);
    return w.hi - w.live_lo;
  }
  // Until at least `rows` rows are stored.
  template <class Check> Status wait_rows(u64 rows, u64 deadline, Check check) {
    if (destroyed()) return Status::destroyed;
    for (Waiting waiting(*this);;) {
      bool built = ready();
      if (built && size() >= rows) return Status::ok;
      if (built && !readonly_) role_.help([&] { return size() >= rows; });
      if (built && size() >= rows) return Status::ok;
      if (Status s = abandoned(deadline, check); s != Status::ok) return s;
      if (readonly_) {
        nap(1'000'000);
        continue;
      }
      waiting.on(built ? kForRows : kForSchema);
      u32 &word = built ? s_.control().data_wait : s_.control().ready_wait;
      const u32 armed = arm(word);  // pairs with publish() in transaction.h and build() in segment.h
      if (built) role_.help([&] { return size() >= rows; });  // once more, armed: see wait()
      if (built ? size() < rows : load(s_.control().state, acquire) != kReady) futex_wait(word, armed, deadline);
    }
  }
  Sampling<Handle> sampling() { return Sampling<Handle>(*this); }
  u64 granted() const { return granted_.load(relaxed); }  // the limiter that counted the last samples of this handle, 0: none
  void granted(u64 version) { granted_.store(version, relaxed); }
  u64 next_seed() { return mix64(seed_ ^ mix64(calls_.fetch_add(1, relaxed))); }
  void seed(u64 value) { seed_ = value, calls_.store(0, relaxed); }
  bool readonly() const { return readonly_; }
  void mend() {
    if (!readonly_) mender_.look(s_);
  }
  template <class Enough> void help_until(Enough enough) {
    if (!readonly_) role_.help(enough);
  }
  template <class Check> Status abandoned(u64 deadline, Check check) {
    if (closed()) return Status::closed;
    if (destroyed()) return Status::destroyed;
    if (now_ns() >= deadline) return Status::timeout;
    if (!check()) return Status::interrupted;
    return forked_ ? Status::forked : Status::ok;  // a handler may have forked: in the child this call is nobody's
  }
  void nap(u64 ns) { futex_wait(stop_, 0, kForever, ns); }
  Auditor audit(u64 patience) {
    const bool built = ready();  // maps the file
    Auditor a(s_, file_);
    a.run(built, [&] { nap(std::min<u64>(10'000'000, patience)); }, patience);
    return a;
  }

  // ---- rows that stay ----
  // Ids from lo on, or (first_id ~0) of all that can be read; lo says from where. Not for longer than `until`.
  Status pin(u64 first_id, u64 until, u64 &lo, u64 &hi, u32 &index) {
    if (readonly_) return Status::readonly;
    if (destroyed()) return Status::destroyed;
    if (!ready()) return Status::empty;
    std::lock_guard<std::mutex> guard(mutex_);
    for (int tries = 0; tries < 1000; ++tries) {
      const Window w = window(s_);
      if (w.live_lo == w.hi) return Status::empty;
      const u64 oldest = std::max(w.lo, Pins(s_, -1, nullptr).least());
      lo = first_id == ~0ull ? oldest : first_id;
      if (first_id == ~0ull && lo >= w.hi) {  // all of them are about to be overwritten
        nap(50'000);
        continue;
      }
      if (lo >= w.hi) return Status::unknown_row;
      if (lo < oldest) return Status::lapped;
      Pins::Got got = Pins(s_, lock_fd_, &role_.pin_flags).claim(lo, until, me_, index);
      if (got == Pins::Got::none_free) return Status::none_free;
      if (got == Pins::Got::lapped) continue;
      hi = w.hi;  // not a later one: an emptying in between jumps over ids that no row has
      return Status::ok;
    }
    return Status::lapped;
  }
  bool pin_valid(u32 index, u64 lo) const { return Pins(s_, lock_fd_, nullptr).valid(index, lo); }
  // The counters of edits as they are: a pinned row whose stripe is odd, or another one later, may be half new where it lies.
  std::vector<u32> edit_stripes() const {
    std::vector<u32> out(EditTable::kStripes);
    for (u32 i = 0; i < out.size(); ++i) out[i] = load(s_.edits().stripe[i], acquire);
    return out;
  }
  bool unedited(const std::vector<u32> &before, u64 lo, u64 hi) const {
    fence(acquire);
    auto same = [&](u64 i) { return !(before[i] & 1) && load(s_.edits().stripe[i], relaxed) == before[i]; };
    if (hi - lo >= EditTable::kStripes || s_.capacity < hi - lo) lo = 0, hi = EditTable::kStripes;
    for (u64 id = lo; id < hi; ++id)
      if (!same(hi - lo >= EditTable::kStripes ? id : id % s_.capacity % EditTable::kStripes)) return false;
    return true;
  }
  void unpin(u32 index) {
    Pins(s_, lock_fd_, &role_.pin_flags).drop(index);
    fence(seq_cst);  // pairs with the sleepers' arm; fence; look again
    role_.hand_over();
  }
  // ---- draining ----
  // What the rings hold now; not what others go on putting.
  WriterRole::Outcome help() {
    std::vector<u64> tails(s_.n_slots());
    for (u32 i = 0; i < tails.size(); ++i) tails[i] = load(s_.slot(i).tail, acquire);
    return role_.help([&] {
      for (u32 i = 0; i < tails.size(); ++i)
        if (load(s_.slot(i).head_pub, relaxed) < tails[i]) return stop_help();
      return true;
    });
  }
  bool stop_help() const { return closed_.load(relaxed); }
  WriterRole &role() { return role_; }
  u32 sweep() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (lock_fd_ >= 0 && !readonly_) Registry(s_, lock_fd_).bury_members(member_);
    if (struct stat st; lock_fd_ >= 0 && fstat(lock_fd_, &st) == 0) {
      // Whoever destroyed it was killed before he said so. A name that somebody else removed is no reason to stop.
      if (!st.st_nlink && linked_ && load(s_.control().destroyed, acquire) == kDestroying) mark_destroyed();
    }
    return ready_locked() ? Registry(s_, lock_fd_).sweep(slot_) : 0;
  }
  void start_thread(bool standby) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (thread_running_ || readonly_ || closed()) return;
    standby_ = standby;
    store(stop_, 0u, release);
    SignalsBlocked blocked;
    thread_running_ = pthread_create(&thread_, nullptr, [](void *h) -> void * { Drainer<Handle>(*static_cast<Handle *>(h)).run(); return nullptr; }, this) == 0;
    if (thread_running_) add_role(standby ? kStandby : kDrainer);
  }
  bool has_thread() const { return thread_running_; }

  void unmark_destroying() { std::atomic_ref<u32>(s_.control().destroyed).fetch_and(~u32(kDestroying), seq_cst); }
  void mark_destroying() { std::atomic_ref<u32>(s_.control().destroyed).fetch_or(kDestroying, seq_cst); }  // before the name goes
  // Tell everybody attached that the name is gone.
  void mark_destroyed() {
    if (readonly_) return;  // who sees the end of device memory may be able to look only
    Control &c = s_.control();
    std::atomic_ref<u32>(c.destroyed).fetch_or(kDestroyed, seq_cst);
    for (u32 *w : {&c.data_wait, &c.ready_wait, &c.writer_wait}) wake_always(*w);
    for (u32 i = 0; i < s_.n_slots(); ++i) wake_always(s_.slot(i).wait);
  }
  void close() {
    uses_.fetch_add(1, seq_cst);  // nobody takes it down while the drain thread still runs
    if (!closed_.exchange(true, seq_cst) && !forked_) stop_thread();
    leave();
    for (Use *u = Use::innermost(); u; u = u->outer)
      if (&u->h == this) return;  // called from inside one of our waits: its end takes the handle down
    while (!down_.load(acquire)) usleep(200);  // waits look at closed_ every slice
  }
  // The loop of `python -m shmbuf.drain`; returns when the buffer is destroyed, check() says no, or (alone) nobody is attached.
  template <class Check> void drain_until(bool leave_when_alone, Check check) {
    add_role(kDrainer);
    Drainer<Handle> d(*this);
    u64 looked = now_ns();
    while (!destroyed() && !closed() && check()) {
      d.turn();
      if (leave_when_alone && now_ns() - looked > 1'000'000'000) {
        looked = now_ns();
        if (!byte_is_held(lock_fd_, kLockPresence) && !(ready() && Writer::runnable(s_))) return;
      }
    }
  }

 private:
  static u32 this_thread() { return u32(syscall(SYS_gettid)); }
  void leave() {
    if (uses_.fetch_sub(1, seq_cst) == 1 && closed()) take_down();
  }
  void take_down() {
    if (taking_down_.exchange(true, seq_cst)) return;
    if (!forked_) {
      for (u32 i = 0; i < PinTable::kPins; ++i)  // no other thread is here any more: a bit is a pin
        if (role_.pin_flags.load(relaxed) >> i & 1) Pins(s_, lock_fd_, &role_.pin_flags).drop(i);
      if (!readonly_ && built_.load(acquire)) {
        // Leave nothing behind that nobody may come for; but do not stay for ever with those who keep putting.
        int more = 256;
        role_.help([&] {
          const Slot *own = slot_ >= 0 ? &s_.slot(u32(slot_)) : nullptr;
          return (!own || load(own->head_pub, acquire) == load(own->tail, relaxed)) && --more < 0;
        });
        FAILPOINT(close_drained);
        settle_tickets();
        std::lock_guard<std::mutex> guard(mutex_);
        if (slot_ >= 0) Registry(s_, lock_fd_).close_slot(u32(slot_));
      }
      if (!readonly_) Registry(s_, lock_fd_).release_member(member_);
    }
    close_fds();
    unmap();
    down_.store(true, release);
  }
  friend class Drainer<Handle>;
  friend class Collecting<Handle>;
  void stop_thread() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!thread_running_) return;
      thread_running_ = false;
      store(stop_, 1u, release);
    }
    futex_wake_all(stop_);
    wake_always(s_.control().writer_wait);
    wake_always(s_.control().ready_wait);
    pthread_join(thread_, nullptr);
  }
  bool ready_locked() const { return built_.load(acquire); }
  void unmap() {
    if (device_) device_->unmap();  // its rings are registered with the driver
    if (file_) munmap(file_, file_bytes_);
    if (s_.map) munmap(s_.map, s_.mapped_bytes);
    file_ = nullptr, s_.map = nullptr;
  }
  void close_fds() {
    if (lock_fd_ >= 0) ::close(lock_fd_);
    if (map_fd_ >= 0) ::close(map_fd_);
    lock_fd_ = map_fd_ = -1;
  }

  friend class ForkList<Handle>;
  void after_fork() {  // async-signal-safe: close, and words of our own
    close_fds();
    forked_ = true, thread_running_ = false, presence_ = false;
    if (device_) device_->after_fork();
    role_.after_fork(), role_.pin_flags.store(0, relaxed);
    uses_.store(0, relaxed), putting_.store(false, relaxed), building_.store(0, relaxed);
    new (&mutex_) std::mutex;  // another thread of the parent may have held them
    new (&tickets_mutex_) std::mutex;
    new (&outstanding_) std::deque<Outstanding>;  // leaked: it may have been in the middle of a push
  }

  Segment s_;
  u8 *file_ = nullptr;
  u64 file_bytes_ = 0;
  int map_fd_ = -1, lock_fd_ = -1, member_ = -1;
  std::unique_ptr<DeviceRows> device_;
  bool readonly_, presence_ = false, forked_ = false, thread_running_ = false, standby_ = false;
  std::atomic<bool> built_{false}, linked_{false}, closed_{false}, taking_down_{false}, down_{false};
  std::atomic<u32> building_{0};  // the thread
  std::atomic<u32> uses_{0};
  u32 stop_ = 0;
  pthread_t thread_{};
  Owner me_{};
  std::mutex mutex_;
  WriterRole role_;
  TreeMender mender_;
  u64 seed_ = 0;
  std::atomic<u64> calls_{0}, granted_{0};
};

}  // namespace shmbuf
