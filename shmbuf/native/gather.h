// The reader. Copy, fence, one load of `reserve`: if it has not passed id + capacity, no byte of that row can have been
// overwritten while it was copied. Nothing is written to the segment, so a reader can neither block nor be waited for.
//
//   G1  window: cursor.load(acquire), then base, then reserve        [pairs with publish() in transaction.h]
//   G2  copy; fence(acquire); reserve.load: id + N < reserve → rejected   [pairs with T1's store and fence; models/reserve.c]
#pragma once
#include "mover.h"
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
struct Outputs {      // where these lie
  bool on_device = false;
  cuda::Stream after = nullptr;  // whose work comes before any write to them
};

// ---- copying rows out ------------------------------------------------------------------------------------------------------
// Row ids[k] to place k, or to places[k]: all there when it returns.
class HostRows {
 public:
  static constexpr bool kInBatches = false;
  HostRows(const Segment &s, const OutColumn *columns, u32 n_columns, const Outputs &) : s_(s), columns_(columns), n_columns_(n_columns) {}
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
  void patch(const EditRecord &e, u32 c, u64 j, u64 offset, u64 from, u64 bytes) const { e.read(columns_[c].data + j * columns_[c].bytes + offset, from, bytes); }
  const OutColumn &column(u32 c) const { return columns_[c]; }

 private:
  const Segment &s_;
  const OutColumn *columns_;
  u32 n_columns_;
};
class RowsOfDevice {  // a kernel for each batch: straight to where the columns are, or by way of pinned memory
 public:
  static constexpr bool kInBatches = true;
  static constexpr u64 kMostRows = 1 << 17;
  RowsOfDevice(const Segment &s, const OutColumn *columns, u32 n_columns, const Outputs &out)
      : mover_(*s.device), columns_(columns), n_columns_(n_columns), out_(out), packed_(n_columns), part_(std::min(kMostRows, std::max<u64>(1, DeviceMover::kStaged / s.row_bytes))) {
    if (out.on_device) part_ = kMostRows, mover_.lane().after(out.after);
  }
  u64 part() const { return part_; }  // rows that are copied, and then looked at, together
  template <class Id, class Place> void copy_rows(u64 n, Id id, Place place, bool places) {
    u64 bytes_out = 0;
    for (u32 c = 0; c < n_columns_; ++c) bytes_out += align_up(n * columns_[c].bytes, 16);
    u8 *at = mover_.stage(n, out_.on_device ? 0 : bytes_out, id, place, places && out_.on_device);
    for (u32 c = 0; c < n_columns_; ++c) {
      const OutColumn &o = columns_[c];
      u8 *to = !out_.on_device ? at : places ? o.data : o.data + place(0) * o.bytes;
      packed_[c] = {o.offset, o.bytes, reinterpret_cast<u64>(to), o.bytes};
      at += align_up(n * o.bytes, 16);
    }
    mover_.kernels().gather(mover_.lane().stream, mover_.rows(), n, packed_.data(), n_columns_);
    mover_.lane().wait();
    if (out_.on_device) return;
    for (u32 c = 0; c < n_columns_; ++c) {
      const u64 bytes = columns_[c].bytes;
      const u8 *from = reinterpret_cast<const u8 *>(packed_[c].address);
      if (!places) copy_bytes(columns_[c].data + place(0) * bytes, from, n * bytes);
      else
        for (u64 k = 0; k < n; ++k) copy_bytes(columns_[c].data + place(k) * bytes, from + k * bytes, bytes);
    }
  }
  u32 slot(u64 k) const { return mover_.staged(k); }  // of the k-th row that copy_rows() copied last
  void copy_row(u64 id, u64 j) { copy_rows(1, [&](u64) { return id; }, [&](u64) { return u32(j); }, true); }
  void patch(const EditRecord &e, u32 c, u64 j, u64 offset, u64 from, u64 bytes) {
    u8 *to = columns_[c].data + j * columns_[c].bytes + offset;
    if (!out_.on_device) return e.read(to, from, bytes);
    u8 *staged = mover_.lane().host(bytes);
    e.read(staged, from, bytes);
    mover_.check(mover_.d().host_to_device(reinterpret_cast<u64>(to), staged, bytes, mover_.lane().stream), "cuMemcpyHtoDAsync");
    mover_.lane().wait();
  }
  const OutColumn &column(u32 c) const { return columns_[c]; }

 private:
  DeviceMover mover_;
  const OutColumn *columns_;
  u32 n_columns_;
  Outputs out_;
  std::vector<Packed> packed_;
  u64 part_;
};

template <class Rows> class GatherFrom {
 public:
  GatherFrom(const Segment &s, const OutColumn *columns, u32 n_columns, const Outputs &out) : s_(s), rows_(s, columns, n_columns, out), n_columns_(n_columns) {}

  template <class Pick> u64 draw(u64 from, u64 n, Pick &pick, u64 *ids, bool &lapped) {
    lapped_ = false;
    u64 done = 0;
    if (pick(from, n, ids) >= n) done = copy(n, ids, [&](u64 j) { return pick(from + j, 1, ids + j) ? Again::anew : Again::stop; });
    lapped = lapped_;
    return done;
  }
  u64 fetch(u64 n, const u64 *ids, u8 *done) {
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
        return Again::leave;
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
  static constexpr int kTries = 1000;             // of one draw
  enum class Again { stop, leave, anew };         // of a row that was overwritten while it was copied: anew: ids[j] is another one now

  bool still(u64 id) const { return id + s_.capacity >= load(s_.control().reserve, relaxed); }
  bool copy_valid(u64 id, u64 j) {
    const u64 word = load(s_.control().edit_word, acquire);
    rows_.copy_row(id, j);
    fence(acquire);  // G2, E3
    return still(id) && (unmoved(word) || copy_edited(id, j));
  }
  bool unmoved(u64 word) const { return !(word & 1) && load(s_.control().edit_word, relaxed) == word; }
  // E3, of a row that may have been copied while it was edited. False: overwritten, or edited anew on every try.
  bool copy_edited(u64 id, u64 j) {
    for (int tries = 0; tries < 100'000; ++tries) {
      const u32 &stripe = stripe_of(s_, id), before = load(stripe, acquire);
      const u64 seq = load(s_.control().commit_seq, acquire);
      if (before & 1) {
        if (spins_ > 0) {  // in all, not for each row: the writer may be stopped
          --spins_, std::this_thread::yield();
          continue;
        }
        if (!copy_as_it_will_be(id, j, seq)) continue;
      } else {
        rows_.copy_row(id, j);
      }
      fence(acquire);
      if (load(stripe, relaxed) == before && (!(before & 1) || load(s_.control().commit_seq, relaxed) == seq)) return still(id);
    }
    return false;
  }
  // E4. False: the writer went on meanwhile.
  bool copy_as_it_will_be(u64 id, u64 j, u64 seq) {
    rows_.copy_row(id, j);
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
          const OutColumn &o = rows_.column(c);
          const u64 lo = std::max(offset, o.offset), hi = std::min(offset + bytes, o.offset + o.bytes);
          if (lo < hi) rows_.patch(e, c, j, lo - o.offset, from + (lo - offset), hi - lo);
        }
      });
    return true;
  }
  void sort_ids(const EditRecord &e) {
    edited_.clear();
    for (u64 k = 0; k < e.n; ++k) edited_.emplace_back(e.id(k), k);
    if (!std::is_sorted(edited_.begin(), edited_.end())) std::sort(edited_.begin(), edited_.end());
  }
  // Copy all; again(j) decides about each row that was overwritten meanwhile. Stops when it says so, or when a draw lapses.
  template <class Decide> u64 copy(u64 n, const u64 *ids, Decide again, const u8 *wanted = nullptr) {
    if constexpr (Rows::kInBatches) return copy_batches(n, ids, again, wanted);
    else return copy_blocks(n, ids, again, wanted);
  }
  template <class Decide> u64 copy_blocks(u64 n, const u64 *ids, Decide again, const u8 *wanted) {
    for (u64 j = 0; j < n && j < kAhead; ++j) rows_.prefetch(ids[j]);
    for (u64 b = 0; b < n; b += kBlock) {
      u64 e = b + kBlock < n ? b + kBlock : n;
      u64 r = load(s_.control().reserve, relaxed);
      const u64 word = load(s_.control().edit_word, acquire);
      for (u64 j = b; j < e; ++j) {
        if (j + kAhead < n) rows_.prefetch(ids[j + kAhead]);
        if ((!wanted || wanted[j] == kWanted) && ids[j] + s_.capacity >= r) rows_.copy_row(ids[j], j);
      }
      fence(acquire);  // G2, E3
      r = load(s_.control().reserve, relaxed);
      const bool edited = !unmoved(word);
      for (u64 j = b; j < e; ++j)
        if ((!wanted || wanted[j] == kWanted) && (ids[j] + s_.capacity < r || (edited && !copy_edited(ids[j], j))))
          for (int tries = 0;; ++tries) {
            if (tries == kTries) return lapped_ = true, j;
            const Again what = again(j);
            if (what == Again::stop) return j;
            if (what == Again::leave || copy_valid(ids[j], j)) break;
          }
    }
    return n;
  }
  // The same, a batch at a time: those that were overwritten, or edited, meanwhile make the next batch.
  template <class Decide> u64 copy_batches(u64 n, const u64 *ids, Decide again, const u8 *wanted) {
    std::vector<u32> todo, edited, stripes;  // stripes as they were before the copy; none as long as nobody edits
    if (const u64 word = load(s_.control().edit_word, relaxed); s_.device->edits_moved(word) || word & 1) stripes.resize(EditTable::kStripes);
    for (u64 b = 0; b < n; b += rows_.part()) {
      const u64 e = std::min(n, b + rows_.part());
      todo.clear();
      for (u64 j = b; j < e; ++j)
        if (!wanted || wanted[j] == kWanted) todo.push_back(u32(j - b));
      bool all = todo.size() == e - b;
      for (int tries = 0; !todo.empty(); ++tries, all = false) {
        if (tries == kTries) return lapped_ = true, b + todo[0];
        const u64 word = load(s_.control().edit_word, acquire);
        for (u32 i = 0; i < stripes.size(); ++i) stripes[i] = load(s_.edits().stripe[i], acquire);
        rows_.copy_rows(todo.size(), [&](u64 k) { return ids[b + todo[k]]; }, [&](u64 k) { return u32(b + todo[k]); }, !all);
        fence(acquire);  // G2, E3
        const u64 r = load(s_.control().reserve, relaxed);
        const bool moved = !unmoved(word);
        edited.clear();
        u64 left = 0;
        auto overwritten = [&](u64 j) {  // false: stop
          const Again what = again(j);
          if (what == Again::anew) todo[left++] = u32(j - b);
          return what != Again::stop;
        };
        for (u64 k = 0; k < todo.size(); ++k) {
          const u64 j = b + todo[k];
          if (ids[j] + s_.capacity < r) {
            if (!overwritten(j)) return j;
          } else if (moved && changed(stripes, rows_.slot(k))) {
            if (spins_ > 0) todo[left++] = u32(j - b);
            else edited.push_back(u32(j - b));
          }
        }
        if (left && spins_ > 0 && !stripes.empty()) --spins_, std::this_thread::yield();
        if (moved) stripes.resize(EditTable::kStripes);
        for (const u32 k : edited)  // for long: one by one, as they will be
          if (!copy_edited(ids[b + k], b + k) && !overwritten(b + k)) return b + k;
        todo.resize(left);
      }
    }
    return n;
  }
  bool changed(const std::vector<u32> &before, u32 slot) const {
    const u32 i = slot % EditTable::kStripes;
    if (before.empty()) return true;  // nothing tells which
    const u32 now = load(s_.edits().stripe[i], relaxed);
    return now != before[i] || now & 1;
  }
  const Segment &s_;
  Rows rows_;
  u32 n_columns_;
  bool lapped_ = false;
  // Of rows met in the middle of an edit, over all of this gather:
  int spins_ = 200;
  u64 sorted_for_ = ~0ull;                     // the commit after which the edit was planned
  std::vector<std::pair<u64, u64>> edited_;    // (id, place in the record)
};

class Gather {
 public:
  Gather(const Segment &s, const OutColumn *columns, u32 n_columns, Outputs out = {}) : s_(s), columns_(columns), n_columns_(n_columns), out_(out) {}

  // n rows that pick(from, k, ids) chooses: for draws [from, from + k) it stores k ids, or says how many it could. A row that was
  // overwritten meanwhile is chosen again. Returns how many were filled: fewer than n when nothing can be drawn now (empty, or
  // one transaction overwrites everything) or the writer laps every try.
  template <class Pick> u64 draw(u64 from, u64 n, Pick &pick, u64 *ids, bool &lapped) const {
    return s_.device ? of<RowsOfDevice>().draw(from, n, pick, ids, lapped) : of<HostRows>().draw(from, n, pick, ids, lapped);
  }
  // The rows named by ids. Rows with done[j] != 0 are left alone; done[j] becomes 1 for each that was copied whole. One that is
  // not stored (yet, or any more) keeps 0 and its output bytes are arbitrary. Returns how many are done.
  u64 fetch(u64 n, const u64 *ids, u8 *done) const { return s_.device ? of<RowsOfDevice>().fetch(n, ids, done) : of<HostRows>().fetch(n, ids, done); }

 private:
  template <class Rows> GatherFrom<Rows> of() const { return GatherFrom<Rows>(s_, columns_, n_columns_, out_); }
  const Segment &s_;
  const OutColumn *columns_;
  u32 n_columns_;
  Outputs out_;
};

inline u64 rows_of_part(const Segment &s) { return std::max<u64>(1, (1 << 20) / s.row_bytes); }
// Many rows are copied in parts of fixed size: one core does not use all of the memory's bandwidth, two do. work(part, first row, rows,
// columns that begin there).
template <class Work> void in_parts(const Segment &s, const OutColumn *columns, u32 n_columns, u64 n, Work work) {
  constexpr u64 kMaxThreads = 4;
  const u64 part_rows = rows_of_part(s), parts = (n + part_rows - 1) / part_rows;
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
// new_pick(rng) makes a part's pick. From a device it is one gather: ids of the same parts, then all rows together.
template <class NewPick>
u64 draw_in_parts(const Segment &s, const OutColumn *columns, u32 n_columns, const Outputs &out, u64 n, u64 seed, NewPick new_pick, u64 *ids, bool &lapped) {
  if (s.device) {
    const u64 part_rows = rows_of_part(s);
    std::vector<std::decay_t<decltype(new_pick(Rng{0}))>> picks;
    for (u64 p = 0; p * part_rows < n; ++p) picks.push_back(new_pick(Rng{mix64(seed ^ mix64(p))}));
    auto pick = [&](u64 from, u64 k, u64 *to) {
      for (u64 done = 0; done < k;) {
        const u64 p = (from + done) / part_rows, m = std::min(k - done, (p + 1) * part_rows - from - done), got = picks[p](from + done, m, to + done);
        done += got;
        if (got < m) return done;
      }
      return k;
    };
    return Gather(s, columns, n_columns, out).draw(0, n, pick, ids, lapped);
  }
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
inline u64 fetch_in_parts(const Segment &s, const OutColumn *columns, u32 n_columns, u64 n, const u64 *ids, u8 *done, const Outputs &out) {
  if (s.device) return Gather(s, columns, n_columns, out).fetch(n, ids, done);
  u64 good = 0;
  in_parts(s, columns, n_columns, n, [&](u64, u64 from, u64 k, const OutColumn *mine) { fetch_add(good, Gather(s, mine, n_columns).fetch(k, ids + from, done + from), relaxed); });
  return good;
}

}  // namespace shmbuf
