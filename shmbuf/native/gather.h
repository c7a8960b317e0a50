// The reader. Copy, fence, one load of `reserve`: if it has not passed id + capacity, no byte of that row can have been
// overwritten while it was copied. Nothing is written to the segment, so a reader can neither block nor be waited for.
//
//   G1  window: cursor.load(acquire), then base, then reserve        [pairs with publish() in transaction.h]
//   G2  copy; fence(acquire); reserve.load: id + N < reserve → rejected   [pairs with T1's store and fence; models/reserve.c]
#pragma once
#include "edits.h"
#include "random.h"
#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace shmbuf {

struct Window {  // ids [lo, hi) can be read now; [live_lo, hi) are stored, of which the first may be being overwritten
  u64 lo, hi, live_lo;
};
inline Window window(const Segment &s) {
  const Control &c = s.control();
  u64 hi = load(c.cursor, acquire), base = load(c.base, acquire), r = load(c.reserve, relaxed), n = s.capacity;  // G1
  Window w{base, hi, base};
  if (hi > n && hi - n > w.live_lo) w.live_lo = hi - n;
  if (r > n && r - n > w.lo) w.lo = r - n;
  if (w.lo < w.live_lo) w.lo = w.live_lo;  // only if a word is damaged: nobody walks further than the capacity
  if (w.live_lo > hi) w.live_lo = hi;
  if (w.lo > hi) w.lo = hi;
  return w;
}

struct OutColumn {
  u64 offset, bytes;  // inside the row
  u8 *data;           // packed: one value after another
};

class Gather {
 public:
  Gather(const Segment &s, const OutColumn *columns, u32 n_columns) : s_(s), columns_(columns), n_columns_(n_columns) {}

  // n rows that pick(from, k, ids) chooses: for draws [from, from + k) it stores k ids, or says how many it could. A row that was
  // overwritten meanwhile is chosen again. Returns how many were filled: fewer than n when nothing can be drawn now (empty, or
  // one transaction overwrites everything) or the writer laps every try.
  template <class Pick> u64 draw(u64 from, u64 n, Pick &pick, u64 *ids, bool &lapped) const {
    lapped = false;
    if (pick(from, n, ids) < n) return 0;
    return copy(n, ids, [&](u64 j) {
      for (int tries = 0; tries < 1000; ++tries) {
        if (!pick(from + j, 1, ids + j)) return false;
        if (copy_valid(ids[j], j)) return true;
      }
      lapped = true;
      return false;
    });
  }
  // The rows named by ids. Rows with done[j] != 0 are left alone; done[j] becomes 1 for each that was copied whole. One that is
  // not stored (yet, or any more) keeps 0 and its output bytes are arbitrary. Returns how many are done.
  u64 fetch(u64 n, const u64 *ids, u8 *done) const {
    for (int tries = 0; tries < 20; ++tries) {
      const Window w = window(s_);
      bool any = false, announced = false;
      for (u64 j = 0; j < n; ++j) {
        if (done[j] || ids[j] < w.live_lo || ids[j] >= w.hi) continue;
        ids[j] >= w.lo ? (done[j] = kWanted, any = true) : announced = true;
      }
      if (!any && !announced) break;  // the usual second look: what was rejected is gone
      if (!any) {  // being overwritten, or a writer has just met a pin, and takes `reserve` back
        std::this_thread::yield();
        continue;
      }
      copy(n, ids, [&](u64 j) {
        if (done[j] == kWanted) done[j] = 0;
        return true;
      }, done);
      for (u64 j = 0; j < n; ++j)
        if (done[j] == kWanted) done[j] = 1;
    }
    u64 good = 0;
    for (u64 j = 0; j < n; ++j) good += done[j] = done[j] != 0;
    return good;
  }

 private:
  static constexpr u8 kWanted = 2;
  static constexpr u64 kAhead = 24, kBlock = 16;  // rows prefetched ahead, rows validated by one load of reserve

  void prefetch(u64 id) const {
    const u8 *p = s_.row(id);
    u64 bytes = s_.row_bytes < 512 ? s_.row_bytes : 512;  // longer rows are the hardware prefetcher's
    for (u64 o = 0; o < bytes; o += 64) __builtin_prefetch(p + o);
    __builtin_prefetch(p + bytes - 1);
  }
  void copy_row(u64 id, u64 j) const {
    const u8 *p = s_.row(id);
    for (u32 c = 0; c < n_columns_; ++c) copy_bytes(columns_[c].data + j * columns_[c].bytes, p + columns_[c].offset, columns_[c].bytes);
  }
  bool still(u64 id) const { return id + s_.capacity >= load(s_.control().reserve, relaxed); }
  bool copy_valid(u64 id, u64 j) const {
    const u64 word = load(s_.control().edit_word, acquire);
    copy_row(id, j);
    fence(acquire);  // G2, E3
    return still(id) && (unmoved(word) || copy_edited(id, j));
  }
  bool unmoved(u64 word) const { return !(word & 1) && load(s_.control().edit_word, relaxed) == word; }
  // E3, of a row that may have been copied while it was edited. False: overwritten, or edited anew on every try.
  bool copy_edited(u64 id, u64 j) const {
    constexpr int kTries = 100'000;
    for (int tries = 0; tries < kTries; ++tries) {
      const u32 &stripe = stripe_of(s_, id), before = load(stripe, acquire);
      const u64 seq = load(s_.control().commit_seq, acquire);
      if (before & 1) {
        if (spins_ > 0) {  // in all, not for each row: the writer may be stopped
          --spins_, std::this_thread::yield();
          continue;
        }
        if (!copy_as_it_will_be(id, j, seq)) continue;
      } else {
        copy_row(id, j);
      }
      fence(acquire);
      if (load(stripe, relaxed) == before && (!(before & 1) || load(s_.control().commit_seq, relaxed) == seq)) return still(id);
    }
    return false;
  }
  // E4. False: the writer went on meanwhile.
  bool copy_as_it_will_be(u64 id, u64 j, u64 seq) const {
    copy_row(id, j);
    if (load(s_.control().plan_seq, acquire) != seq + 1) return true;  // committed: its bytes are all there
    const CommitBlock &now = s_.block(seq), &next = s_.block(seq + 1);
    const u32 i = load(next.start, relaxed);
    if (load(next.kind, relaxed) != kPlanEdit || i >= s_.n_slots()) return false;
    const u64 at = i < load(now.n_slots, relaxed) ? load(now.slot[i].head, relaxed) : 0;
    const Record &r = record_at(s_.ring(i), s_.ring_bytes, at);
    if (!well_formed(r, s_.ring_bytes, s_.ring_bytes, s_.row_bytes) || r.kind != kEdit) return false;
    EditRecord e(s_.ring(i), s_.ring_bytes, at, r);
    if (!e.sound(s_.row_bytes)) return false;
    if (sorted_for_ != seq) sort_ids(e), sorted_for_ = seq;
    for (auto k = std::lower_bound(edited_.begin(), edited_.end(), std::pair{id, u64(0)}); k != edited_.end() && k->first == id; ++k)
      e.each_span(k->second, [&](u64 offset, u64 from, u64 bytes) {
        for (u32 c = 0; c < n_columns_; ++c) {
          const u64 lo = std::max(offset, columns_[c].offset), hi = std::min(offset + bytes, columns_[c].offset + columns_[c].bytes);
          if (lo < hi) e.read(columns_[c].data + j * columns_[c].bytes + (lo - columns_[c].offset), from + (lo - offset), hi - lo);
        }
      });
    return true;
  }
  void sort_ids(const EditRecord &e) const {
    edited_.clear();
    for (u64 k = 0; k < e.n; ++k) edited_.emplace_back(e.id(k), k);
    if (!std::is_sorted(edited_.begin(), edited_.end())) std::sort(edited_.begin(), edited_.end());
  }
  // Copy all; rejected(j) decides about each row that was overwritten meanwhile. Stops when it says false.
  template <class Rejected> u64 copy(u64 n, const u64 *ids, Rejected rejected, const u8 *wanted = nullptr) const {
    for (u64 j = 0; j < n && j < kAhead; ++j) prefetch(ids[j]);
    for (u64 b = 0; b < n; b += kBlock) {
      u64 e = b + kBlock < n ? b + kBlock : n;
      u64 r = load(s_.control().reserve, relaxed);
      const u64 word = load(s_.control().edit_word, acquire);
      for (u64 j = b; j < e; ++j) {
        if (j + kAhead < n) prefetch(ids[j + kAhead]);
        if ((!wanted || wanted[j] == kWanted) && ids[j] + s_.capacity >= r) copy_row(ids[j], j);
      }
      fence(acquire);  // G2, E3
      r = load(s_.control().reserve, relaxed);
      const bool edited = !unmoved(word);
      for (u64 j = b; j < e; ++j)
        if ((!wanted || wanted[j] == kWanted) && (ids[j] + s_.capacity < r || (edited && !copy_edited(ids[j], j))))
          if (!rejected(j)) return j;
    }
    return n;
  }
  const Segment &s_;
  const OutColumn *columns_;
  u32 n_columns_;
  // Of rows met in the middle of an edit, over all of this gather:
  mutable int spins_ = 200;
  mutable u64 sorted_for_ = ~0ull;                     // the commit after which the edit was planned
  mutable std::vector<std::pair<u64, u64>> edited_;    // (id, place in the record)
};

// Many rows are copied in parts of fixed size: one core does not use all of the memory's bandwidth, two do. work(part, first row, rows,
// columns that begin there).
template <class Work> void in_parts(const Segment &s, const OutColumn *columns, u32 n_columns, u64 n, Work work) {
  constexpr u64 kPartBytes = 1 << 20, kMaxThreads = 4;
  const u64 part_rows = std::max<u64>(1, kPartBytes / s.row_bytes), parts = (n + part_rows - 1) / part_rows;
  u64 next = 0;
  auto some = [&] {
    std::vector<OutColumn> mine(columns, columns + n_columns);
    for (u64 p; (p = fetch_add<u64>(next, 1, relaxed)) < parts;) {
      const u64 from = p * part_rows;
      for (u32 c = 0; c < n_columns; ++c) mine[c].data = columns[c].data + from * columns[c].bytes;
      work(p, from, std::min(part_rows, n - from), mine.data());
    }
  };
  u64 threads = parts < 4 ? 1 : std::min({parts, kMaxThreads, u64(std::max(1u, std::thread::hardware_concurrency()))});
  std::vector<std::thread> others;
  if (threads > 1) {
    SignalsBlocked blocked;
    try {
      for (u64 t = 1; t < threads; ++t) others.emplace_back(some);
    } catch (const std::system_error &) {  // no more threads to be had: this one does it
    }
  }
  some();
  for (auto &t : others) t.join();
}

// Each part of a draw has its own random numbers, so that the same seed gives the same rows however many threads copy.
// new_pick(rng) makes a part's pick.
template <class NewPick>
u64 draw_in_parts(const Segment &s, const OutColumn *columns, u32 n_columns, u64 n, u64 seed, NewPick new_pick, u64 *ids, bool &lapped) {
  u64 filled = 0;
  u32 any_lapped = 0;
  in_parts(s, columns, n_columns, n, [&](u64 part, u64 from, u64 k, const OutColumn *mine) {
    Rng rng{mix64(seed ^ mix64(part))};
    auto pick = new_pick(rng);
    bool was_lapped;
    fetch_add(filled, Gather(s, mine, n_columns).draw(from, k, pick, ids + from, was_lapped), relaxed);
    if (was_lapped) store(any_lapped, 1u, relaxed);
  });
  lapped = any_lapped;
  return filled;
}
inline u64 fetch_in_parts(const Segment &s, const OutColumn *columns, u32 n_columns, u64 n, const u64 *ids, u8 *done) {
  u64 good = 0;
  in_parts(s, columns, n_columns, n, [&](u64, u64 from, u64 k, const OutColumn *mine) { fetch_add(good, Gather(s, mine, n_columns).fetch(k, ids + from, done + from), relaxed); });
  return good;
}

}  // namespace shmbuf
