// The single writer. Whoever holds the role (role.h) runs transactions; each moves whole records from the rings into the
// rows and is all or nothing, whoever dies where:
//
//   plan    fill the next commit block: cursor, base, heads, ring order, skips     FAILPOINT plan_written
//   seal    plan_seq.store(commit_seq + 1, release): from here on exactly this plan is run, by whoever comes
//   T1      reserve.store(new cursor); fence(seq_cst)                              readers reject what may be half written
//           a pin in the way (pins.h)? nothing is written, and the plan stays sealed
//   T2      evict the old rows: leaves fresh, no longer any trajectory's last
//   T3      copy rows ring → storage; the first id into each record's header
//   T4      commit_seq.store(s + 1, release): ONE store moves the cursor and every ring's head
//   T5      link the new rows into their streams; base, cursor
//   T6      their priorities: drawn from now on
//   T7      head_pub of each ring; fence(seq_cst); wake                            T5…T7 idempotent: redone while done_seq is behind
//
// Before T4 nothing moved: a successor finds the sealed plan, the same ring bytes (head_pub ≤ committed head always) and
// writes the same rows to the same ids. After T4 only T5…T7 are left. tests/models/txn.pml has every interleaving.
#pragma once
#include "links.h"
#include "mover.h"
#include "pins.h"
#include "priority_tree.h"
#include "random.h"
#include "registry.h"
#include "ring.h"
#include <vector>

namespace shmbuf {

class Writer {
 public:
  static constexpr u64 kMaxBytes = 8u << 20;

  explicit Writer(Segment &segment, int lock_fd = -1, std::atomic<u32> *pin_flags = nullptr, const Owner *me = nullptr)
      : s_(segment), me_(me ? *me : Owner{}), c_(segment.control()), pins_(segment, lock_fd, pin_flags), tree_(segment.tree, segment.capacity), links_(segment.links, segment.links ? segment.capacity : 1) {
    if (keeps_priorities()) tree_.keep_max(Formula(c_.priorities).live_maximum);
  }

  // On taking the role: finish what was committed but not published. True if there is anything unfinished.
  bool take_over() {
    u64 seq = load(c_.commit_seq, acquire);
    bool sealed = load(c_.plan_seq, acquire) == seq + 1, behind = load(c_.done_seq, acquire) != seq;
    if (behind) publish(s_.block(seq), s_.block(seq - 1), true);  // the block before is whole: nobody has planned since
    return sealed || behind;
  }

  u64 unfinished() const {  // rows of the transaction that take_over or the next step has to finish
    const u64 seq = load(c_.commit_seq, acquire);
    const bool sealed = load(c_.plan_seq, acquire) == seq + 1;
    if (!sealed && load(c_.done_seq, acquire) == seq) return 0;
    const CommitBlock &b = s_.block(seq + sealed);
    return b.kind == kPlanRows ? b.cursor - s_.block(seq + sealed - 1).cursor : 0;
  }

  // One transaction. False when the rings hold nothing that may be moved now.
  bool step() {
    u64 seq = load(c_.commit_seq, relaxed);  // only the role's holder stores it
    CommitBlock &now = s_.block(seq), &next = s_.block(seq + 1);
    if (wanted(c_)) return keep_priorities(now);  // before a plan that a pin may hold up: none has touched the tree yet
    if (load(c_.plan_seq, acquire) != seq + 1) {
      if (!plan(now, next)) return false;
      FAILPOINT(plan_written);
      store(c_.plan_seq, seq + 1, release);  // sealed
      FAILPOINT(plan_sealed);
    }
    if (next.kind == kPlanEdit) run_edit(now, next);
    else if (next.kind != kPlanRows) run_clear(now, next);
    else if (!run_rows(now, next)) return false;
    FAILPOINT(txn_results);
    store(c_.commit_seq, seq + 1, release);  // T4
    FAILPOINT(txn_committed);
    publish(next, now, false);
    bump<u64>(c_.transactions, 1);
    const u64 t = now_ns();
    store(c_.last_transaction_ns, t, relaxed);
    Chronicle(s_).tick(now.cursor, next.cursor, t);
    return true;
  }

  // May a transaction move anything now? (Asked without the role: a hint, exact after a fence.)
  static bool runnable(const Segment &s) {
    const Control &c = s.control();
    if (wanted(c)) return true;
    const u64 room = room_hint(s);
    if (const u64 seq = load(c.commit_seq, acquire); load(c.plan_seq, acquire) == seq + 1)
      return plan_has_room(s, seq, room);
    bool waits = false;
    for (u32 i = 0, n = s.n_slots(); i < n; ++i) {
      const Slot &slot = s.slot(i);
      const u64 tail = load(slot.tail, acquire), head = load(slot.head_pub, acquire);
      if (tail == head) continue;
      if (load(slot.skip_to, relaxed) > head) return true;
      if (!has_room(s, i, head, room)) continue;
      if (load(slot.clear_to, relaxed) > head) return true;
      waits = true;
    }
    return waits && Limiter(s.control().limiter).admit(inserted(s));
  }
  // Whether pins keep all that the rings hold from being stored.
  static bool pinned(const Segment &s) {
    const Control &c = s.control();
    const u64 seq = load(c.commit_seq, acquire), room = room_hint(s);
    if (room == Pins::kUnlimited) return false;
    if (load(c.plan_seq, acquire) == seq + 1) return !plan_has_room(s, seq, room);
    for (u32 i = 0, n = s.n_slots(); i < n; ++i) {
      const u64 tail = load(s.slot(i).tail, acquire), head = load(s.slot(i).head_pub, acquire);
      if (tail != head && has_room(s, i, head, room)) return false;
    }
    return true;
  }
  static u64 inserted(const Segment &s) {
    for (int tries = 0;; ++tries) {  // a block is filled anew once the next one is the truth
      const u64 seq = load(s.control().commit_seq, acquire), n = load(s.block(seq).rows_total, relaxed);
      fence(acquire);
      if (load(s.control().commit_seq, relaxed) == seq || tries == 1000) return n;
    }
  }

 private:
  static BlockSlot entry(const CommitBlock &b, u32 i) { return i < b.n_slots ? b.slot[i] : BlockSlot{}; }  // i < max_collectors
  u32 slots_of(const CommitBlock &b) const {  // bounded by what is mapped, whatever a damaged word says
    return b.n_slots < s_.header().max_collectors ? b.n_slots : s_.header().max_collectors;
  }

  static u64 room_hint(const Segment &s) { return Pins::hint(s, load(s.control().cursor, acquire)); }
  // Whether pins let the sealed plan, or the record at the head of a ring, pass. A CLEAR and an EDIT need no room.
  static bool plan_has_room(const Segment &s, u64 seq, u64 room) {
    const CommitBlock &b = s.block(seq + 1);
    return room == Pins::kUnlimited || load(b.kind, relaxed) != kPlanRows || load(b.cursor, relaxed) - load(s.control().cursor, acquire) <= room;
  }
  static bool has_room(const Segment &s, u32 i, u64 head, u64 room) {
    if (room == Pins::kUnlimited) return true;
    const Record &r = record_at(s.ring(i), s.ring_bytes, head);
    return load(r.kind, relaxed) != kRows || load(r.n_rows, relaxed) <= room;
  }

  bool well_formed(const Record &r, u32 ring, u64 at, u64 tail) const { return shmbuf::well_formed(r, tail - at, s_.ring_bytes, s_.row_bytes, has_device_ring(s_, ring)); }
  Record &record(u32 ring, u64 at) const { return record_at(s_.ring(ring), s_.ring_bytes, at); }

  bool plan(const CommitBlock &now, CommitBlock &next) {
    u32 n = s_.n_slots();
    if (!n) return false;
    copy_bytes(&next, &now, sizeof(CommitBlock));
    for (u32 i = 0; i < n; ++i) {
      next.slot[i] = entry(now, i);
      next.slot[i].skip_to = next.slot[i].rows_end = next.slot[i].head;
    }
    next.seq = now.seq + 1, next.kind = kPlanRows;
    next.n_slots = n, next.start = now.next_start % n;
    u64 admitted = 0;  // rows, by the limiter; asked when a ring holds some. A record may overshoot
    bool asked = false, limited = false;
    const u64 room = pins_.room(now.cursor);
    u64 held_up = 0;
    u64 limit = s_.capacity / 4, by_bytes = kMaxBytes / s_.row_bytes, rows = 0;
    if (by_bytes < limit) limit = by_bytes;
    bool any = false, full = false;
    for (u32 d = 0; d < n && !full; ++d) {
      u32 i = (next.start + d) % n;
      BlockSlot &e = next.slot[i];
      u64 at = e.head, tail = load(s_.slot(i).tail, acquire);  // P1: pairs with Producer::publish
      if (at == tail) continue;
      bool intact = tail - at <= s_.ring_bytes && tail % kRecordAlign == 0 && at % kRecordAlign == 0;
      u64 skip = load(s_.slot(i).skip_to, acquire);
      if (intact && skip > at && skip <= tail) any |= plan_skips(next, i, at, skip, tail);
      u64 before = at;
      while (intact && at != tail) {
        const Record &r = record(i, at);
        if (!(intact = well_formed(r, i, at, tail) && (r.kind != kEdit || edit(i, at).sound(s_.row_bytes)))) break;
        if (r.kind != kRows) {
          if (!any) return r.kind == kClear ? plan_clear(now, next, i, at, r) : plan_edit(now, next, i, at, r);
          next.next_start = i, full = true;  // a CLEAR or an EDIT is a transaction alone: the next one begins here
          break;
        }
        if (!asked) admitted = Limiter(c_.limiter).admit(now.rows_total), asked = true;  // L1
        if (rows >= admitted && at >= load(s_.slot(i).clear_to, relaxed)) {
          if (!limited) next.next_start = at == before ? i : i + 1, limited = true;
          break;
        }
        if (rows && rows + r.n_rows > limit) {
          next.next_start = at == before ? i : i + 1, full = true;  // whoever was served waits for a full round
          break;
        }
        if (rows + r.n_rows > room) {  // shorter ones of other rings may pass
          held_up = std::max(held_up, now.cursor + rows + r.n_rows);
          break;
        }
        rows += r.n_rows, e.stored_rows += r.n_rows, at += r.bytes, any = true;
      }
      e.rows_end = at;
      if (!intact) at = tail, ++next.malformed, any = true;  // quarantine: the rest of this ring is discarded, and counted
      e.head = at;
    }
    pins_.held_up(held_up);
    next.write_count += rows;
    store(next.cursor, now.cursor + rows, relaxed);          // these two are looked at without the role: pinned(), inserted()
    store(next.rows_total, now.rows_total + rows, relaxed);
    return any;
  }
  bool plan_skips(CommitBlock &next, u32 i, u64 &at, u64 skip, u64 tail) {
    BlockSlot &e = next.slot[i];
    u64 rows = 0;
    while (at < skip) {
      const Record &r = record(i, at);
      if (!well_formed(r, i, at, tail) || r.kind != kRows) break;  // never past a CLEAR; damage is met by the caller
      rows += r.n_rows, at += r.bytes;
    }
    e.skip_to = at, e.skipped_rows += rows, next.skipped_total += rows;
    if (rows) FAILPOINT(skip_planned);
    return rows != 0;
  }
  EditRecord edit(u32 i, u64 at) const { return {s_.ring(i), s_.ring_bytes, at, record(i, at)}; }
  bool plan_edit(const CommitBlock &now, CommitBlock &next, u32 i, u64 at, const Record &r) {
    next.kind = kPlanEdit;
    EditRecord e = edit(i, at);
    (void)e.sound(s_.row_bytes);  // plan() has asked; it counts a row's bytes
    std::vector<u64> ids, places;
    for (u64 j = 0; j < e.n; ++j) {
      const u64 id = e.id(j);
      if (id == EditRecord::kOlder) continue;  // said by a planner that died
      if (!is_live(now, s_.capacity, id)) ++next.stale_edits;
      else if (!e.compares()) ++next.edited_rows;
      else ids.push_back(id), places.push_back(j);
    }
    if (!ids.empty())
      with_rows([&](auto &rows) {
        rows.each_field(ids.size(), ids.data(), e.span(0).offset, e.span(0).bytes, [&](u64 k, const u8 *stored) {
          if (e.newer(places[k], stored)) ++next.edited_rows;
          else e.mark(places[k], EditRecord::kOlder);
        });
      });
    next.slot[i].head = next.slot[i].rows_end = at + r.bytes;
    next.start = i, next.next_start = i + 1;
    FAILPOINT(edit_planned);
    return true;
  }
  bool plan_clear(const CommitBlock &now, CommitBlock &next, u32 i, u64 at, const Record &r) {
    next.kind = kPlanClear;
    u64 first = align_up(now.cursor, s_.capacity);  // ids never repeat, indices start again at 0
    if (!(r.flags & kKeepWriteCount)) next.write_count = 0;
    if (r.flags & kRestart) {
      const u64 asked = std::min(extra<u64>(i, at + sizeof(Record)), kMaxId);  // or the next one of the same slot
      first = asked >= now.cursor ? asked : asked + align_up(now.cursor - asked, s_.capacity);
      next.write_count = std::min(extra<u64>(i, at + sizeof(Record) + 8), kMaxId);
      store(next.rows_total, std::max(now.rows_total, next.write_count), relaxed);
    }
    store(next.cursor, first, relaxed), next.base = first;
    ++next.clears;
    next.slot[i].head = next.slot[i].rows_end = at + r.bytes;
    next.next_start = i;
    FAILPOINT(clear_planned);
    return true;
  }

  void run_clear(const CommitBlock &now, const CommitBlock &next) {
    if (keeps_priorities()) {
      tree_.evict(next.base, s_.capacity);  // every leaf gets the generation to come
      store(c_.priorities.highest, 0u, relaxed);
    }
    for (u32 i = 0; i < slots_of(next); ++i)
      if (u64 at = entry(now, i).head; at != next.slot[i].head) store(record(i, at).result, next.base, relaxed);
  }
  void run_edit(const CommitBlock &now, const CommitBlock &next) {
    const u32 i = next.start;
    const u64 at = entry(now, i).head;
    if (i >= slots_of(next) || !well_formed(record(i, at), i, at, bounded(at, next.slot[i].head)) || record(i, at).kind != kEdit) return;  // damaged since
    EditRecord e = edit(i, at);
    if (!e.sound(s_.row_bytes)) return;
    raise_edits(s_, now, e);  // E1
    FAILPOINT(edit_raised);
    with_rows([&](auto &rows) {
      rows.begin(me_);
      store(record(i, at).result, rows.edit(now, e), relaxed);
      rows.settle();
    });
  }
  u64 bounded(u64 from, u64 to) const { return to - from <= s_.ring_bytes ? to : from; }  // a ring holds no more, whatever a damaged word says
  // visit(ring, position, record, first id) for exactly the records that the plan has counted, in id order; kDropped for
  // those that a skip passes.
  template <class Visit> void each_record(const CommitBlock &now, const CommitBlock &next, Visit visit) {
    u64 id = now.cursor;
    const u32 n = slots_of(next);
    for (u32 d = 0; d < n; ++d) {
      u32 i = (next.start + d) % n;
      const BlockSlot &e = next.slot[i];
      for (u64 at = entry(now, i).head, end = bounded(at, e.rows_end); at < end;) {
        Record &r = record(i, at);
        const bool skipped = at < e.skip_to;
        if (!well_formed(r, i, at, end) || id + r.n_rows > next.cursor + (skipped ? r.n_rows : 0)) break;  // damaged since
        visit(i, at, r, skipped ? kDropped : id);
        if (!skipped) id += r.n_rows;
        at += r.bytes;
      }
    }
  }
  bool run_rows(const CommitBlock &now, const CommitBlock &next) {
    const u64 n = next.cursor - now.cursor, before = load(c_.reserve, relaxed);
    if (before < next.cursor && pins_.room(now.cursor) < n) {  // not yet announced: readers need not see reserve go up and down
      FAILPOINT(pin_blocked);
      pins_.held_up(next.cursor);
      return false;
    }
    if (before < next.cursor) store(c_.reserve, next.cursor, relaxed);  // T1, never back once a byte may have been written
    fence(seq_cst);                                                     // pairs with G2 in gather.h
    FAILPOINT(txn_reserved);
    if (pins_.room(now.cursor) < n) {  // it came after the plan: pairs with P1
      if (before < next.cursor) store(c_.reserve, before, relaxed);  // raised by this very call, and nothing written: readers need not wait for the pin
      pins_.held_up(next.cursor);
      return false;
    }
    if (keeps_links()) links_.evict(now.cursor, n);         // T2
    if (keeps_priorities()) tree_.evict_leaves(now.cursor, n);  // the sums above stay too large until T6: a draw that meets them tries again
    FAILPOINT(txn_evicted);
    with_rows([&](auto &rows) {  // T3
      rows.begin(me_);
      each_record(now, next, [&](u32 i, u64 at, Record &r, u64 id) {
        store(r.result, id, relaxed);
        if (id != kDropped) copy_rows(rows, rows.ring(i, r.flags & kDevice), at + sizeof(Record), r.n_rows, id);
      });
      rows.settle();
    });
    FAILPOINT(txn_copied);
    return true;
  }
  // Of a record longer than the capacity only the last rows are written; ids advance over the rest.
  template <class Rows> void copy_rows(Rows &rows, const typename Rows::Ring &from, u64 at, u64 n, u64 id) {
    u64 size = s_.ring_bytes, whole = s_.capacity * s_.row_bytes;
    if (n > s_.capacity) {
      at += (n - s_.capacity) * s_.row_bytes;
      id += n - s_.capacity;
      n = s_.capacity;
    }
    u64 to = (id % s_.capacity) * s_.row_bytes, left = n * s_.row_bytes;
#ifdef SHMBUF_FAILPOINTS
    u64 half = s_.row_bytes / 2;  // die with half a row in place
    if (half && half < size - (at & (size - 1))) rows.copy(to, from, at & (size - 1), half);
    FAILPOINT(txn_mid_row);
#endif
    while (left) {
      u64 o = at & (size - 1), k = left;
      if (k > size - o) k = size - o;
      if (k > whole - to) k = whole - to;
      rows.copy(to, from, o, k);
      at += k, left -= k, to += k;
      if (to == whole) to = 0;
    }
  }

  // T5…T7 of the committed block b. `redo`: it is not known who was woken, so everybody is.
  void publish(const CommitBlock &b, const CommitBlock &before, bool redo) {
    if (b.kind == kPlanRows && keeps_links()) link_rows(before, b);
    if (b.kind == kPlanEdit) settle_edits(s_);  // E2
    store(c_.base, b.base, release);       // base before cursor: readers load cursor before base
    if (b.kind == kPlanClear && keeps_links()) links_.clear();  // not before: rows in the window without ends would mislead
    FAILPOINT(post_base);
    store(c_.cursor, b.cursor, release);   // pairs with G1
    FAILPOINT(post_cursor);
    if (b.kind == kPlanRows && keeps_priorities()) set_first_priorities(before, b);
    const u32 n = slots_of(b);
    for (u32 i = 0; i < n; ++i)
      if (redo || entry(before, i).head != b.slot[i].head) {
        store(s_.slot(i).head_pub, b.slot[i].head, release);  // pairs with R1 in ring.h
        FAILPOINT(post_head);
      }
    fence(seq_cst);                        // also what lets a reader of the block notice that it is being rewritten
    wake_if_armed(c_.data_wait);
    for (u32 i = 0; i < n; ++i)
      if (redo || entry(before, i).head != b.slot[i].head) wake_if_armed(s_.slot(i).wait);
    FAILPOINT(post_woken);
    store(c_.done_seq, b.seq, release);
    FAILPOINT(txn_done);
  }

  // What comes after the rows of a record in its ring; aligned, so no value straddles the ring's end.
  template <class T> T extra(u32 ring, u64 at) const { return *reinterpret_cast<const T *>(s_.ring(ring) + (at & (s_.ring_bytes - 1) & ~(sizeof(T) - 1))); }
  static u64 beyond(u64 n, u64 capacity) { return n > capacity ? n - capacity : 0; }  // first rows of a record that are not stored

  // ---- streams ----
  bool keeps_links() const { return s_.links != nullptr; }
  void link_rows(const CommitBlock &before, const CommitBlock &b) {
    const Built &built = s_.header().built;
    const Links::Span span{before.cursor, std::max(b.base, b.cursor > s_.capacity ? b.cursor - s_.capacity : 0)};
    u64 cut = 0;
    each_record(before, b, [&](u32 i, u64 at, Record &r, u64 first) {
      if (first == kDropped) return;
      const u64 incarnation = word_incarnation(load(s_.slot(i).word, relaxed)), streams = at + sizeof(Record) + r.n_rows * s_.row_bytes;
      auto *table = reinterpret_cast<Stream *>(s_.ring(i) + s_.ring_bytes);
      auto row = [&](u64 j) { return row_in_ring(i, at + sizeof(Record) + j * s_.row_bytes); };  // of one on a device here are only these fields
      auto stream = [&](u64 j) -> u64 {
        if (r.flags & kStreams) return extra<u64>(i, streams + j * 8) & ~(r.flags & kLoaded ? Links::kHeadless : 0);
        return built.trajectory.bytes ? hash_bytes(row(j) + built.trajectory.offset, built.trajectory.bytes) : 0;
      };
      cut += links_.append(table, built.stream_entries, span, first, r.n_rows, [&](u64 j) { return stream_key(incarnation, stream(j)); },
                           [&](u64 j) { return is_end(built, row(j)); },
                           [&](u64 j) { return r.flags & kStreams && r.flags & kLoaded && extra<u64>(i, streams + j * 8) & Links::kHeadless; });
    });
    links_.settle();
    if (cut) bump(c_.streams_cut, cut);
    FAILPOINT(txn_linked);
  }
  static u64 stream_key(u64 incarnation, u64 stream) { return std::max<u64>(1, mix64(incarnation * 0x9e3779b97f4a7c15ull ^ mix64(stream))); }
  const u8 *row_in_ring(u32 ring, u64 at) {
    const u64 o = at & (s_.ring_bytes - 1), n = s_.row_bytes, whole = std::min(n, s_.ring_bytes - o);
    if (whole == n) return s_.ring(ring) + o;
    scratch_.resize(n);
    std::memcpy(scratch_.data(), s_.ring(ring) + o, whole), std::memcpy(scratch_.data() + whole, s_.ring(ring), n - whole);
    return scratch_.data();
  }
  static u64 hash_bytes(const u8 *p, u64 n) {
    u64 h = n;
    for (u64 word; n; p += std::min<u64>(n, 8), n -= std::min<u64>(n, 8)) word = 0, std::memcpy(&word, p, std::min<u64>(n, 8)), h = mix64(h ^ word);
    return h;
  }
  static bool is_end(const Built &built, const u8 *row) {
    for (const Field &f : built.ends)
      for (u32 k = 0; k < f.bytes; ++k)
        if (row[f.offset + k]) return true;
    return false;
  }

  // ---- priorities ----
  bool keeps_priorities() const { return load(c_.priorities.ready, relaxed) != 0; }  // only the role's holder stores it, between transactions
  static bool wanted(const Control &c) { return load(c.priorities.formula.low, relaxed) && !load(c.priorities.ready, relaxed); }
  // The first prioritised reader has come: every row there is gets the priority of a new one.
  bool keep_priorities(const CommitBlock &now) {
    const u64 lo = std::max(now.base, now.cursor > s_.capacity ? now.cursor - s_.capacity : 0), n = now.cursor - lo;
    const Formula formula(c_.priorities);
    tree_.keep_max(formula.live_maximum);
    tree_.format();
    tree_.evict(now.cursor, s_.capacity);  // slots without a row: no id of before an emptying is theirs
    tree_.evict_leaves(lo, n);
    const float p = first_leaf(c_.priorities, formula, tree_);
    tree_.publish(lo, &p, 0, n);
    FAILPOINT(tree_kept);
    store(c_.priorities.ready, 1u, release);  // pairs with Handle::keeps_priorities
    return true;
  }
  void set_first_priorities(const CommitBlock &before, const CommitBlock &b) {
    const Formula formula(c_.priorities);
    if (formula.live_maximum) tree_.refresh(before.cursor, b.cursor - before.cursor);  // of the rows that stay
    const float p = first_leaf(c_.priorities, formula, tree_);
    float highest = 0;
    std::vector<float> given;
    each_record(before, b, [&](u32 i, u64 at, Record &r, u64 first) {
      if (first == kDropped) return;
      const u64 skipped = beyond(r.n_rows, s_.capacity), n = r.n_rows - skipped;
      if (r.flags & kLeaves) {
        u64 from = at + sizeof(Record) + r.n_rows * (s_.row_bytes + (r.flags & kStreams ? 8 : 0)) + skipped * 4;
        given.resize(n);
        for (u64 j = 0; j < n; ++j) {
          float leaf = extra<float>(i, from + j * 4);
          given[j] = leaf >= 0 && leaf <= std::numeric_limits<float>::max() ? leaf : p;  // a damaged ring
          highest = std::max(highest, given[j]);
        }
        tree_.publish_leaves(first + skipped, given.data(), 1, n);
      } else {
        tree_.publish_leaves(first + skipped, &p, 0, n);
      }
    });
    FAILPOINT(tree_leaves_set);
    tree_.refresh(before.cursor, b.cursor - before.cursor);
    raise_highest(c_.priorities, highest);
  }

  // Where the rows are, asked once: the mover of a device keeps its stream as long as the burst lasts.
  template <class Use> void with_rows(Use use) {
    if (s_.device) {
      if (!device_) device_ = std::make_unique<DeviceMover>(*s_.device, true);
      return use(*device_);
    }
    HostMover rows(s_);
    use(rows);
  }

  Segment &s_;
  Owner me_;
  Control &c_;
  Pins pins_;
  PriorityTree tree_;
  Links links_;
  std::vector<u8> scratch_;
  std::unique_ptr<DeviceMover> device_;
};

// A consistent copy of the numbers of the truth, for people and len(); false if transactions outran it (try again).
inline bool read_block(const Segment &s, CommitBlock &out, BlockSlot *slots, u32 n_slots) {
  u64 seq = load(s.control().commit_seq, acquire);
  const CommitBlock &b = s.block(seq);
  copy_bytes(&out, &b, sizeof(CommitBlock));
  for (u32 i = 0; i < n_slots; ++i) slots[i] = i < b.n_slots ? b.slot[i] : BlockSlot{};
  fence(acquire);
  return load(s.control().commit_seq, relaxed) == seq;
}

}  // namespace shmbuf
