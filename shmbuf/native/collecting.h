// What a handle does as a collector: its ring, its device ring, its tickets; and edits and clearings, which are records of its ring as well.
// `Host` is the Handle, which derives from this: it lends the segment, its role, its waits and its naps.
#pragma once
#include "registry.h"
#include "role.h"
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace shmbuf {

enum class Full : u32 { block = 0, error = 1, drop_newest = 2, drop_oldest = 3 };

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

template <class Host> class Collecting {
 public:
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
    if (!h().s_.device) throw DeviceError("the rows of this buffer lie in the segment: only arrays of the host can be put");
    if (!h().s_.device->mapped()) throw DeviceError(h().s_.device->why_not(), true);
    if (device_ring_lost_)
      throw DeviceError("an earlier put of this handle failed, and its device may still be writing to its ring: attach anew, in a new process if its context is of no more use");
    if (Status s = open_device_ring(); s != Status::ok) return s;
    std::vector<Packed> part(columns, columns + n_columns);
    return put_records(extras, n_rows, full, deadline, wake, true, ticket, check, [&](u64 from, u64 n) {
      for (u64 c = 0; c < n_columns; ++c) part[c].address = columns[c].address + from * columns[c].stride;
      const u64 unsettled = h().s_.device->unsettled();
      try {
        return producer_.publish_device(extras, from, n, [&](u64 at) {
          DeviceMover(*h().s_.device).fill_ring(u32(slot_), u32(device_ring_), at, n, part.data(), n_columns, after);
        });
      } catch (...) {  // nothing of this record was put
        if (h().s_.device->unsettled() == unsettled) store(producer_.slot().device_since, u64(0), release);  // the mover has waited for what it began
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
      if (h().destroyed()) return Status::destroyed;
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
      wake_if_armed(h().s_.control().writer_wait);
    }
    return Status::ok;
  }
  template <class Check> Status clear(u32 flags, const Producer::Restart &restart, u64 deadline, std::shared_ptr<TicketState> &ticket, Check check) {
    Putting mine(*this);
    if (!mine) return Status::concurrent;
    if (Status s = open_producer(); s != Status::ok) return s;
    if (h().destroyed()) return Status::destroyed;
    // What was put before this call, by anybody, is to be forgotten: first let it be stored.
    std::vector<u64> tails(h().s_.n_slots());
    for (u32 i = 0; i < tails.size(); ++i) {
      tails[i] = load(h().s_.slot(i).tail, acquire);
      u64 &past = h().s_.slot(i).clear_to;  // past the limiter; its collector only stores what is beyond his tail
      if (int(i) != slot_) for (u64 seen = load(past, relaxed); seen < tails[i] && !compare_exchange(past, seen, tails[i], relaxed);) {}
    }
    auto stored = [&] {
      for (u32 i = 0; i < tails.size(); ++i)
        if (int(i) != slot_ && load(h().s_.slot(i).head_pub, acquire) < tails[i]) return false;
      return true;
    };
    for (typename Host::Waiting waiting(h()); !stored();) {
      h().role_.help(stored);
      if (stored()) break;
      waiting.on(kForCommit);
      if (Status s = h().abandoned(deadline, check); s != Status::ok) return s == Status::timeout ? Status::full : s;
      h().nap(200'000);
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
    for (typename Host::Waiting waiting(h());;) {
      if (resolve(ticket)) return Status::ok;
      Slot &slot = h().s_.slot(u32(slot_));
      u64 end = ticket.pieces.back().end;
      auto met = [&] { return load(slot.head_pub, acquire) >= end; };
      h().role_.help(met);
      if (met()) continue;
      if (Status s = h().abandoned(deadline, check); s != Status::ok) return s;
      const u32 armed = arm(slot.wait);  // pairs with publish() in transaction.h
      h().role_.help(met);  // once more, armed: a hand-over before we were would have woken nobody (models/role.pml -DRETRY)
      if (!met()) waiting.on(kForCommit), futex_wait(slot.wait, armed, deadline);
    }
  }
  // Without sleeping: look, help with little, look. For callers that keep the GIL.
  bool try_wait(TicketState &t, u64 most_bytes) {
    if (resolve(t)) return true;
    u64 pending = 0;
    for (u32 i = 0; i < h().s_.n_slots(); ++i) pending += load(h().s_.slot(i).tail, relaxed) - load(h().s_.slot(i).head_pub, relaxed);
    if (pending > most_bytes) return false;
    const Slot &slot = h().s_.slot(u32(slot_));
    h().role_.help([&] { return load(slot.head_pub, acquire) >= t.pieces.back().end; });
    return resolve(t);
  }
  // One record that needs neither a wait nor a long copy, through a ring that is open.
  bool fits_at_once(u64 n, u64 most_bytes) const {
    return producer_.is_open() && n * h().s_.row_bytes <= most_bytes && n <= producer_.max_rows_per_record(kStreams | kLeaves);
  }
  bool edits_at_once(u64 n, u64 n_columns, u64 width, u64 most_bytes) const {
    return producer_.is_open() && n * (8 + width) <= most_bytes && n <= producer_.max_rows_per_edit(n_columns, width);
  }
  bool resolve(TicketState &t) {
    std::lock_guard<std::mutex> guard(tickets_mutex_);
    if (t.resolved) return true;
    if (slot_ < 0 || load(h().s_.slot(u32(slot_)).head_pub, acquire) < t.pieces.back().end) return false;
    for (auto &p : t.pieces)
      if (p.first == kPending) learn(t, p);
    return t.resolved = true;
  }
  int slot() const { return slot_; }
  u64 ring_tries() const { return ring_tries_; }  // of getting a device ring, and naps during these
  u64 ring_naps() const { return ring_naps_; }

 protected:
  struct Putting {  // one thread at a time
    Collecting &c;
    bool mine;
    explicit Putting(Collecting &whose) : c(whose), mine(!c.putting_.exchange(true, acquire)) {}
    ~Putting() { if (mine) c.putting_.store(false, release); }
    explicit operator bool() const { return mine; }
  };
  template <class Check, class Publish>
  Status put_records(const Extras &extras, u64 n_rows, Full full, u64 deadline, bool wake, bool may_wait, std::shared_ptr<TicketState> &ticket, Check check, Publish publish) {
    ticket = std::make_shared<TicketState>();
    u64 most = producer_.max_rows_per_record(extras.flags());
    ticket->asked = n_rows, ticket->asked_pieces = u32((n_rows + most - 1) / most);
    for (u64 from = 0; from < n_rows;) {
      u64 n = n_rows - from < most ? n_rows - from : most, need = record_bytes(n, h().s_.row_bytes, extras.flags());
      if (h().destroyed()) return Status::destroyed;
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
      wake_if_armed(h().s_.control().writer_wait);
    }
    return Status::ok;
  }
  Status open_device_ring() {
    if (device_ring_ >= 0) return Status::ok;
    std::lock_guard<std::mutex> guard(h().mutex_);
    Registry registry(h().s_, h().lock_fd_);
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
      if (tries >= 2) ++ring_naps_, h().nap(1'000'000);
      h().help();
      registry.sweep(slot_);
    }
    device_ring_ = int(load(h().s_.slot(u32(slot_)).device_ring, relaxed)) - 1;
    return Status::ok;
  }
  Status open_producer() {
    if (producer_.is_open()) return Status::ok;
    if (h().readonly_) return Status::readonly;
    if (!h().ready()) return Status::not_ready;
    std::lock_guard<std::mutex> guard(h().mutex_);
    Registry registry(h().s_, h().lock_fd_);
    u32 index = 0;
    if (!registry.any_free()) registry.sweep(slot_);  // a ring that was closed is taken before a new one, also where no thread sweeps
    auto got = registry.claim_slot(h().me_, index);
    // The dead and the closed hold slots until these are drained and swept, perhaps by somebody who is at it just now.
    for (int tries = 0; got == Registry::Claim::none_free && tries < 500 && (tries < 20 || registry.any_without_owner(slot_) || registry.any_free()); ++tries) {
      if (tries >= 2) h().nap(1'000'000);
      h().help();
      registry.sweep(slot_);
      got = registry.claim_slot(h().me_, index);
    }
    if (got == Registry::Claim::none_free) return Status::none_free;
    if (got == Registry::Claim::no_memory) return Status::no_memory;
    slot_ = int(index);
    producer_.open(h().s_.slot(index), h().s_.ring(index), h().s_.ring_bytes, h().s_.row_bytes);
    if (h().member_ >= 0) store(h().s_.member(u32(h().member_)).slot_plus_1, index + 1, relaxed);
    h().add_role(kCollector);
    return Status::ok;
  }
  template <class Check> Status make_room(u64 need, Full full, u64 deadline, Check check) {
    if (full == Full::error) return Status::full;
    if (full == Full::drop_newest) return Status::dropped;
    Slot &slot = producer_.slot();
    Control &c = h().s_.control();
    auto room = [&] { return producer_.has_room(need); };
    u64 began = now_ns(), patience = deadline;
    Status out = Status::ok;
    typename Host::Waiting waiting(h());
    for (bool first = true;; first = false) {
      h().role_.help(room);
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
      out = h().abandoned(deadline, check);
      if (out != Status::ok) break;
      const u32 armed = arm(slot.wait);  // pairs with publish() in transaction.h
      h().role_.help(room);  // once more, armed: see wait()
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

  Host &h() { return static_cast<Host &>(*this); }
  const Host &h() const { return static_cast<const Host &>(*this); }

  int slot_ = -1, device_ring_ = -1;
  bool device_ring_lost_ = false;
  u64 refused_state_ = 0, refused_until_ = 0, ring_tries_ = 0, ring_naps_ = 0;  // of a device ring
  std::atomic<bool> putting_{false};
  std::mutex tickets_mutex_;
  Producer producer_;
  struct Outstanding { u64 at; u32 piece; std::shared_ptr<TicketState> ticket; };
  std::deque<Outstanding> outstanding_;
  u64 stuck_at_ = 0;
};

}  // namespace shmbuf
