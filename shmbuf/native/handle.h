// One attachment of one process to one segment: the mapping, the one descriptor that carries its locks, its ring, its tickets
// and its drain thread. Everything above it (module.cpp, Python) only converts.
#pragma once
#include "audit.h"
#include "drainer.h"
#include "forks.h"
#include "role.h"
#include "sampling.h"
#include "segment.h"
#include <deque>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <signal.h>
#include <vector>

namespace shmbuf {

enum class Full : u32 { block = 0, error = 1, drop_newest = 2, drop_oldest = 3 };
struct Gone { Status why; };  // thrown by Use

// The records of one put and, once committed, their first ids.
struct TicketState {
  struct Piece { u64 at, end, n, first; };  // first: of an edit, how many of its rows were still there
  std::vector<Piece> pieces;
  std::vector<u8> applied;  // an edit's, row by row: 1: made; 0: overwritten before; 2: its version is not older
  bool edits = false;
  u64 asked = 0;            // rows that were to be put
  u32 asked_pieces = 1;     // records they make
  bool resolved = false;
};

class Handle {
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
  int slot() const { return slot_; }
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
  u64 ring_tries() const { return ring_tries_; }  // of getting a device ring, and naps during these
  u64 ring_naps() const { return ring_naps_; }
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

  // ---- putting ----
  // check() is called between slices of a wait, with nothing locked; false abandons the wait.
  // may_wait false: would_wait, with nothing done, where the first record finds no room.
  template <class Check>
  Status put(const Column *columns, u32 n_columns, const Extras &extras, u64 n_rows, Full full, u64 deadline, bool wake, bool may_wait, std::shared_ptr<TicketState> &ticket,
             Check check) {
    Putting mine(*this);
    if (!mine) return Status::concurrent;
    if (Status s = open_producer(); s != Status::ok) return s;
    return put_records(extras, n_rows, full, deadline, wake, may_wait, ticket, check,
                       [&](u64 from, u64 n) { return producer_.publish_rows(columns, n_columns, extras, from, n); });
  }
  // The same of packed columns in device memory, whose making `after` may still be at.
  template <class Check>
  Status put_device(const Packed *columns, u64 n_columns, cuda::Stream after, const Extras &extras, u64 n_rows, Full full, u64 deadline, bool wake,
                    std::shared_ptr<TicketState> &ticket, Check check) {
    Putting mine(*this);
    if (!mine) return Status::concurrent;
    if (Status s = open_producer(); s != Status::ok) return s;
    if (!s_.device) throw DeviceError("the rows of this buffer lie in the segment: only arrays of the host can be put");
    if (!s_.device->mapped()) throw DeviceError(s_.device->why_not(), true);
    if (device_ring_lost_)
      throw DeviceError("an earlier put of this handle failed, and its device may still be writing to its ring: attach anew, in a new process if its context is of no more use");
    if (Status s = open_device_ring(); s != Status::ok) return s;
    std::vector<Packed> part(columns, columns + n_columns);
    return put_records(extras, n_rows, full, deadline, wake, true, ticket, check, [&](u64 from, u64 n) {
      for (u64 c = 0; c < n_columns; ++c) part[c].address = columns[c].address + from * columns[c].stride;
      const u64 unsettled = s_.device->unsettled();
      try {
        return producer_.publish_device(extras, from, n, [&](u64 at) {
          DeviceMover(*s_.device).fill_ring(u32(slot_), u32(device_ring_), at, n, part.data(), n_columns, after);
        });
      } catch (...) {  // nothing of this record was put
        if (s_.device->unsettled() == unsettled) store(producer_.slot().device_since, u64(0), release);  // the mover has waited for what it began
        else device_ring_lost_ = true;
        throw;
      }
    });
  }
  // New bytes of the rows ids[0, n): the columns' offsets and bytes are the spans of a row. version: a Versions of the first, or 0.
  template <class Check>
  Status edit(const Column *columns, u32 n_columns, u32 version, const u64 *ids, u64 n_rows, u64 deadline, bool wake, bool may_wait, std::shared_ptr<TicketState> &ticket, Check check) {
    Putting mine(*this);
    if (!mine) return Status::concurrent;
    if (Status s = open_producer(); s != Status::ok) return s;
    ticket = std::make_shared<TicketState>();
    u64 width = 0;
    for (u32 c = 0; c < n_columns; ++c) width += columns[c].bytes;
    const u64 most = producer_.max_rows_per_edit(n_columns, width);
    if (!most) return Status::never;
    ticket->edits = true, ticket->asked = n_rows, ticket->asked_pieces = u32((n_rows + most - 1) / most), ticket->applied.reserve(n_rows);
    for (u64 from = 0; from < n_rows;) {
      const u64 n = std::min(most, n_rows - from), need = edit_bytes(n, n_columns, width);
      if (destroyed()) return Status::destroyed;
      if (!producer_.has_room(need)) {
        if (!may_wait && !from) return Status::would_wait;
        if (Status s = make_room(need, Full::block, deadline, check); s != Status::ok) {
          ticket->asked_pieces = u32(ticket->pieces.size());
          return s;
        }
      }
      harvest(need);
      const u64 at = producer_.tail(), end = producer_.publish_edit(columns, n_columns, version, width, ids, from, n);
      remember(ticket, {at, end, n, kPending});
      from += n;
    }
    if (wake) {
      fence(seq_cst);  // as put()
      wake_if_armed(s_.control().writer_wait);
    }
    return Status::ok;
  }
  template <class Check> Status clear(u32 flags, const Producer::Restart &restart, u64 deadline, std::shared_ptr<TicketState> &ticket, Check check) {
    Putting mine(*this);
    if (!mine) return Status::concurrent;
    if (Status s = open_producer(); s != Status::ok) return s;
    if (destroyed()) return Status::destroyed;
    // What was put before this call, by anybody, is to be forgotten: first let it be stored.
    std::vector<u64> tails(s_.n_slots());
    for (u32 i = 0; i < tails.size(); ++i) {
      tails[i] = load(s_.slot(i).tail, acquire);
      u64 &past = s_.slot(i).clear_to;  // past the limiter; its collector only stores what is beyond his tail
      if (int(i) != slot_) for (u64 seen = load(past, relaxed); seen < tails[i] && !compare_exchange(past, seen, tails[i], relaxed);) {}
    }
    auto stored = [&] {
      for (u32 i = 0; i < tails.size(); ++i)
        if (int(i) != slot_ && load(s_.slot(i).head_pub, acquire) < tails[i]) return false;
      return true;
    };
    for (Waiting waiting(*this); !stored();) {
      role_.help(stored);
      if (stored()) break;
      waiting.on(kForCommit);
      if (Status s = abandoned(deadline, check); s != Status::ok) return s == Status::timeout ? Status::full : s;
      nap(200'000);
    }
    ticket = std::make_shared<TicketState>();
    const u64 need = clear_bytes(flags);
    if (!producer_.has_room(need))
      if (Status s = make_room(need, Full::block, deadline, check); s != Status::ok) return s;
    harvest(need);
    u64 at = producer_.tail(), end = producer_.publish_clear(flags, restart);
    remember(ticket, {at, end, 0, kPending});
    return Status::ok;
  }
  // Until every record of the ticket is committed and can be drawn.
  template <class Check> Status wait(TicketState &ticket, u64 deadline, Check check) {
    for (Waiting waiting(*this);;) {
      if (resolve(ticket)) return Status::ok;
      Slot &slot = s_.slot(u32(slot_));
      u64 end = ticket.pieces.back().end;
      auto met = [&] { return load(slot.head_pub, acquire) >= end; };
      role_.help(met);
      if (met()) continue;
      if (Status s = abandoned(deadline, check); s != Status::ok) return s;
      const u32 armed = arm(slot.wait);  // pairs with publish() in transaction.h
      role_.help(met);  // once more, armed: a hand-over before we were would have woken nobody (models/role.pml -DRETRY)
      if (!met()) waiting.on(kForCommit), futex_wait(slot.wait, armed, deadline);
    }
  }
  // Without sleeping: look, help with little, look. For callers that keep the GIL.
  bool try_wait(TicketState &t, u64 most_bytes) {
    if (resolve(t)) return true;
    u64 pending = 0;
    for (u32 i = 0; i < s_.n_slots(); ++i) pending += load(s_.slot(i).tail, relaxed) - load(s_.slot(i).head_pub, relaxed);
    if (pending > most_bytes) return false;
    const Slot &slot = s_.slot(u32(slot_));
    role_.help([&] { return load(slot.head_pub, acquire) >= t.pieces.back().end; });
    return resolve(t);
  }
  // One record that needs neither a wait nor a long copy, through a ring that is open.
  bool fits_at_once(u64 n, u64 most_bytes) const {
    return producer_.is_open() && n * s_.row_bytes <= most_bytes && n <= producer_.max_rows_per_record(kStreams | kLeaves);
  }
  bool edits_at_once(u64 n, u64 n_columns, u64 width, u64 most_bytes) const {
    return producer_.is_open() && n * (8 + width) <= most_bytes && n <= producer_.max_rows_per_edit(n_columns, width);
  }
  bool resolve(TicketState &t) {
    std::lock_guard<std::mutex> guard(tickets_mutex_);
    if (t.resolved) return true;
    if (slot_ < 0 || load(s_.slot(u32(slot_)).head_pub, acquire) < t.pieces.back().end) return false;
    for (auto &p : t.pieces)
      if (p.first == kPending) learn(t, p);
    return t.resolved = true;
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
  struct Putting {  // one thread at a time
    Handle &h;
    bool mine;
    explicit Putting(Handle &handle) : h(handle), mine(!h.putting_.exchange(true, acquire)) {}
    ~Putting() { if (mine) h.putting_.store(false, release); }
    explicit operator bool() const { return mine; }
  };
  template <class Check, class Publish>
  Status put_records(const Extras &extras, u64 n_rows, Full full, u64 deadline, bool wake, bool may_wait, std::shared_ptr<TicketState> &ticket, Check check, Publish publish) {
    ticket = std::make_shared<TicketState>();
    u64 most = producer_.max_rows_per_record(extras.flags());
    ticket->asked = n_rows, ticket->asked_pieces = u32((n_rows + most - 1) / most);
    for (u64 from = 0; from < n_rows;) {
      u64 n = n_rows - from < most ? n_rows - from : most, need = record_bytes(n, s_.row_bytes, extras.flags());
      if (destroyed()) return Status::destroyed;
      if (!producer_.has_room(need)) {
        if (!may_wait && !from) return Status::would_wait;
        if (Status s = make_room(need, full, deadline, check); s != Status::ok) {
          if (s == Status::dropped) bump(producer_.slot().dropped_rows, n_rows - from);
          if (s == Status::full) bump(producer_.slot().refused_rows, n_rows - from);
          ticket->asked_pieces = u32(ticket->pieces.size());  // no more will come
          return s;
        }
      }
      harvest(need);
      u64 at = producer_.tail(), end = publish(from, n);
      remember(ticket, {at, end, n, kPending});
      from += n;
    }
    if (wake) {
      fence(seq_cst);  // pairs with the drain thread's arm; fence; look again
      wake_if_armed(s_.control().writer_wait);
    }
    return Status::ok;
  }
  Status open_device_ring() {
    if (device_ring_ >= 0) return Status::ok;
    std::lock_guard<std::mutex> guard(mutex_);
    Registry registry(s_, lock_fd_);
    const u64 began = now_ns(), state = registry.state_of_all();
    if (state == refused_state_ && began < refused_until_) return Status::no_device_ring;  // he puts by way of the host: not at the price of this for each put
    ++ring_tries_;
    // As in open_producer: the dead and the closed hold theirs until they are drained and swept. Where there are none, nothing will change.
    for (int tries = 0; !registry.claim_device_ring(u32(slot_)); ++tries) {
      if (tries == 500 || !registry.any_without_owner(slot_)) {
        const u64 now = now_ns();
        refused_state_ = registry.state_of_all(), refused_until_ = now + std::max<u64>(1'000'000'000, 20 * (now - began));
        return Status::no_device_ring;
      }
      if (tries >= 2) ++ring_naps_, nap(1'000'000);
      help();
      registry.sweep(slot_);
    }
    device_ring_ = int(load(s_.slot(u32(slot_)).device_ring, relaxed)) - 1;
    return Status::ok;
  }
  Status open_producer() {
    if (producer_.is_open()) return Status::ok;
    if (readonly_) return Status::readonly;
    if (!ready()) return Status::not_ready;
    std::lock_guard<std::mutex> guard(mutex_);
    Registry registry(s_, lock_fd_);
    u32 index = 0;
    if (!registry.any_free()) registry.sweep(slot_);  // a ring that was closed is taken before a new one, also where no thread sweeps
    auto got = registry.claim_slot(me_, index);
    // The dead and the closed hold slots until these are drained and swept, perhaps by somebody who is at it just now.
    for (int tries = 0; got == Registry::Claim::none_free && tries < 500 && (tries < 20 || registry.any_without_owner(slot_) || registry.any_free()); ++tries) {
      if (tries >= 2) nap(1'000'000);
      help();
      registry.sweep(slot_);
      got = registry.claim_slot(me_, index);
    }
    if (got == Registry::Claim::none_free) return Status::none_free;
    if (got == Registry::Claim::no_memory) return Status::no_memory;
    slot_ = int(index);
    producer_.open(s_.slot(index), s_.ring(index), s_.ring_bytes, s_.row_bytes);
    if (member_ >= 0) store(s_.member(u32(member_)).slot_plus_1, index + 1, relaxed);
    add_role(kCollector);
    return Status::ok;
  }
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
  template <class Check> Status make_room(u64 need, Full full, u64 deadline, Check check) {
    if (full == Full::error) return Status::full;
    if (full == Full::drop_newest) return Status::dropped;
    Slot &slot = producer_.slot();
    Control &c = s_.control();
    auto room = [&] { return producer_.has_room(need); };
    u64 began = now_ns(), patience = deadline;
    Status out = Status::ok;
    Waiting waiting(*this);
    for (bool first = true;; first = false) {
      role_.help(room);
      if (room()) break;
      if (full == Full::drop_oldest) {  // the writer drops them, in a transaction; if it is stuck, nobody can, and the new rows go
        u64 seq = load(c.commit_seq, acquire);
        if (stuck_at_ == seq + 1) { out = Status::dropped; break; }
        store(slot.skip_to, producer_.skip_target(need), release);  // pairs with plan() in transaction.h
        if (first) {
          patience = began + kSlice < deadline ? began + kSlice : deadline;
          continue;
        }
        if (now_ns() >= patience) {
          store(slot.skip_to, u64(0), release);  // what is in the ring stays: the new rows go instead
          if (room()) break;
          stuck_at_ = seq + 1, out = Status::dropped;
          break;
        }
      }
      out = abandoned(deadline, check);
      if (out != Status::ok) break;
      const u32 armed = arm(slot.wait);  // pairs with publish() in transaction.h
      role_.help(room);  // once more, armed: see wait()
      if (!room()) waiting.on(kForRoom), futex_wait(slot.wait, armed, patience);
    }
    bump(slot.blocked_ns, now_ns() - began);
    return out == Status::timeout ? Status::full : out;
  }
  void remember(const std::shared_ptr<TicketState> &t, TicketState::Piece p) {
    std::lock_guard<std::mutex> guard(tickets_mutex_);
    t->pieces.push_back(p);
    outstanding_.push_back({p.at, u32(t->pieces.size() - 1), t});
  }
  // Before the bytes of old records are written over, read what became of them for those who may still ask.
  void harvest(u64 need) {
    std::lock_guard<std::mutex> guard(tickets_mutex_);
    while (!outstanding_.empty() && outstanding_.front().at + producer_.size() < producer_.tail() + need) {
      auto &o = outstanding_.front();
      if (o.ticket.use_count() > 1) {
        auto &p = o.ticket->pieces[o.piece];
        if (p.first == kPending) learn(*o.ticket, p);
        if (o.piece + 1 == o.ticket->asked_pieces) o.ticket->resolved = true;  // the last one
      }
      outstanding_.pop_front();
    }
  }
  void learn(TicketState &t, TicketState::Piece &p) {  // of a committed record, whose bytes are still there; in order
    p.first = producer_.result(p.at);
    if (!t.edits) return;
    const EditRecord e(producer_.ring(), producer_.size(), p.at, record_at(const_cast<u8 *>(producer_.ring()), producer_.size(), p.at));
    for (u64 j = 0; j < p.n; ++j) t.applied.push_back(e.id(j) == EditRecord::kStale ? 0 : e.id(j) == EditRecord::kOlder ? 2 : 1);
  }
  void settle_tickets() {
    for (auto &o : outstanding_) resolve(*o.ticket);
    outstanding_.clear();
  }

  friend class Drainer<Handle>;
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
  int map_fd_ = -1, lock_fd_ = -1, member_ = -1, slot_ = -1, device_ring_ = -1;
  u64 refused_state_ = 0, refused_until_ = 0, ring_tries_ = 0, ring_naps_ = 0;  // of a device ring
  std::unique_ptr<DeviceRows> device_;
  bool readonly_, presence_ = false, forked_ = false, thread_running_ = false, standby_ = false, device_ring_lost_ = false;
  std::atomic<bool> built_{false}, linked_{false}, closed_{false}, taking_down_{false}, down_{false}, putting_{false};
  std::atomic<u32> building_{0};  // the thread
  std::atomic<u32> uses_{0};
  u32 stop_ = 0;
  pthread_t thread_{};
  Owner me_{};
  std::mutex mutex_, tickets_mutex_;
  WriterRole role_;
  Producer producer_;
  struct Outstanding { u64 at; u32 piece; std::shared_ptr<TicketState> ticket; };
  std::deque<Outstanding> outstanding_;
  TreeMender mender_;
  u64 stuck_at_ = 0, seed_ = 0;
  std::atomic<u64> calls_{0}, granted_{0};
};

}  // namespace shmbuf
