// Every row remembers its predecessor in its stream, so slices and trajectories are right however many streams interleave and
// wherever the storage wraps, at a cost of O(log n) a look. Zeroed memory is empty.
//
//   Link     24 bytes a slot: distances, in ids, to other rows of the row's trajectory, and its depth in it
//              jump ──────────────────┐   the skew-binary pointer (Myers): which depth it leads to depends on the depth alone
//              prev ──┐               │   0 = none, not live any more, or too far for 32 bits
//            … row  row  row  row  row …
//                              └── next   set by the successor; believed only if its prev points back
//   ends     a bit a slot: the row is the last one, so far, of its trajectory: one bit for each live trajectory
//   counts   of the bits: u32 per 512 (a line), then per 16 counts, up to one root; each level rounded up to whole lines
//   Stream   where each stream of a collector stands: a table per collector, kept elsewhere, seen by the writer alone
//
//   writer    T2  evict    the bits of what will be overwritten go (after T1, so that readers reject what they still find)
//             T6  append   after the commit, in id order: Link, next of the predecessor, bits, Stream.last
//                 settle   the counts above all that was appended; then `cursor` may be published                    [pairs with G1]
//   reader    relaxed loads, every distance checked against the window: garbage ends a walk, it leads nowhere else. Rows found
//             are right if they still are there afterwards: the gather's look at `reserve`                           [G2]
//
// The writer may be killed anywhere and the transaction be done again by another: Stream.last is stored when all else of a row is
// done, and whoever finds it there only counts again. So an entry that this transaction has touched is not given to another stream
// in it; and counts are never incremented, always added up.
#pragma once
#include "failpoint.h"
#include "layout.h"
#include <algorithm>
#include <bit>
#include <vector>

namespace shmbuf {

inline constexpr u64 kNoRow = ~0ull;

struct Link {
  enum : u32 { kHeadMissing = 1, kEnd = 2 };  // an earlier part may exist but is not linked; the row itself says done
  u32 prev, jump, next;
  u32 step;   // of its trajectory, as far as it is linked: 0, 1, 2 …
  u32 flags;  // kHeadMissing is inherited
  u32 spare;
};
static_assert(sizeof(Link) == 24);

struct Stream {
  u64 key;   // 0: empty. Of an incarnation and a stream, so that the table of a slot that changes hands needs no clearing
  u64 last;  // id + 1 of its last row; and Links::kEnded …
};

// A depth in skew-binary: the weights 2^k − 1 whose sum it is, each once, but the least perhaps twice. A jump takes the least away.
struct Skew {
  u64 weights = 0;  // bit i: 2^(i+1) − 1
  bool twice = false;
  explicit Skew(u64 depth) {
    while (depth) {
      u32 i = u32(std::bit_width(depth + 1)) - 2;
      twice = weights >> i & 1;
      weights |= 1ull << i;
      depth -= (2ull << i) - 1;
    }
  }
  u64 jump() const { return (weights & -weights) * 2 - 1; }  // how many rows far; only if depth > 0
  void take_jump() { twice ? void(twice = false) : void(weights &= weights - 1); }
  void take_prev() {
    u64 least = weights & -weights;
    take_jump();
    if (least > 1) weights |= least >> 1, twice = true;
  }
  void add_row() {
    u64 to = 1;
    if (twice) to = (weights & -weights) << 1, weights &= weights - 1;
    twice = weights & to;
    weights |= to;
  }
};

class Ends {
 public:
  static constexpr u64 kLineBits = 512, kFanOut = 16, kTogether = 16;
  static constexpr u32 kMaxLevels = 16;

  static u64 bytes(u64 capacity) {
    u64 lines = over(capacity, kLineBits), n = lines * 64;
    for (u64 c = lines;; c = over(c, kFanOut)) {
      n += align_up(c * sizeof(u32), 64);
      if (c == 1) return n;
    }
  }
  Ends(u8 *memory, u64 capacity) : capacity_(capacity), bits_(reinterpret_cast<u64 *>(memory)) {
    if (!memory) return;  // none are kept
    memory += over(capacity, kLineBits) * 64;
    for (u64 c = over(capacity, kLineBits);; c = over(c, kFanOut)) {
      level_[levels_] = reinterpret_cast<u32 *>(memory), count_[levels_++] = c;
      memory += align_up(c * sizeof(u32), 64);
      if (c == 1) return;
    }
  }

  // ---- the writer ----
  void set(u64 slot) {
    u64 &w = bits_[slot / 64];
    store(w, load(w, relaxed) | u64(1) << slot % 64, release);  // after the Link that a reader of the bit will read
  }
  void clear(u64 slot) {
    u64 &w = bits_[slot / 64];
    store(w, load(w, relaxed) & ~(u64(1) << slot % 64), release);
  }
  void clear_range(u64 lo, u64 hi) {  // slots; counts too
    if (lo >= hi) return;
    for (u64 w = lo / 64; w <= (hi - 1) / 64; ++w) {
      u64 keep = 0, was = load(bits_[w], relaxed);
      if (w == lo / 64) keep |= (1ull << lo % 64) - 1;
      if (w == (hi - 1) / 64 && hi % 64) keep |= ~0ull << hi % 64;
      if (was & ~keep) store(bits_[w], was & keep, relaxed);
    }
    FAILPOINT(link_evicted);
    lo /= kLineBits, hi = over(hi, kLineBits);
    for (u32 l = 0; l < levels_; ++l, lo /= kFanOut, hi = over(hi, kFanOut)) {
      for (u64 i = lo; i < hi; ++i) refresh(l, i);
      FAILPOINT(link_counted);
    }
  }
  // Every count above these lines, in any order, which is lost.
  void refresh_above(u64 *line, u64 n) {
    for (u32 l = 0; l < levels_; ++l) {
      if (n > 1) std::sort(line, line + n), n = u64(std::unique(line, line + n) - line);
      for (u64 j = 0; j < n; ++j) refresh(l, line[j]), line[j] /= kFanOut;
      FAILPOINT(link_counted);
    }
  }

  // ---- readers ----
  u64 count() const { return load(level_[levels_ - 1][0], relaxed); }
  bool test(u64 slot) const { return load(bits_[slot / 64], acquire) >> slot % 64 & 1; }
  // The slots of the rank[k]-th bits, of m ≤ kTogether at once; kNoRow where the counts changed on the way.
  void select(u64 *rank, u64 m, u64 *slot) const {
    for (u64 k = 0; k < m; ++k) slot[k] = 0;
    for (u32 l = levels_ - 1; l > 0; --l)
      for (u64 k = 0; k < m; ++k) {
        if (slot[k] == kNoRow) continue;
        u64 c = slot[k] * kFanOut, end = std::min(c + kFanOut, count_[l - 1]);
        for (u64 n; c < end && rank[k] >= (n = load(level_[l - 1][c], relaxed)); ++c) rank[k] -= n;
        slot[k] = c < end ? c : kNoRow;
        if (c < end) l > 1 ? __builtin_prefetch(&level_[l - 2][c * kFanOut]) : __builtin_prefetch(&bits_[c * (kLineBits / 64)]);
      }
    for (u64 k = 0; k < m; ++k)
      if (slot[k] != kNoRow) slot[k] = select_in_line(slot[k], rank[k]);
  }
  // f(slot) for every bit in [lo, hi), in order. Without the counts, which come later than the bits: none that stays is missed.
  template <class F> void each(u64 lo, u64 hi, F f) const {
    for (u64 w = lo / 64; w * 64 < hi; ++w) {
      u64 bits = load(bits_[w], acquire);
      if (w == lo / 64) bits &= ~0ull << lo % 64;
      for (; bits; bits &= bits - 1) {
        u64 slot = w * 64 + u64(std::countr_zero(bits));
        if (slot >= hi) return;
        f(slot);
      }
    }
  }
  u64 check() const {  // how many counts differ from what is below: 0 at rest
    u64 wrong = 0;
    for (u32 l = 0; l < levels_; ++l)
      for (u64 i = 0; i < count_[l]; ++i) wrong += level_[l][i] != fold(l, i);
    return wrong;
  }

 private:
  static u64 over(u64 n, u64 by) { return (n + by - 1) / by; }
  u32 fold(u32 l, u64 i) const {
    u32 n = 0;
    if (l == 0) {
      for (u64 w = i * 8; w < i * 8 + 8; ++w)
        if (u64 bits = load(bits_[w], relaxed)) n += u32(std::popcount(bits));
    } else {
      for (u64 c = i * kFanOut, end = std::min(c + kFanOut, count_[l - 1]); c < end; ++c) n += load(level_[l - 1][c], relaxed);
    }
    return n;
  }
  void refresh(u32 l, u64 i) {
    if (u32 n = fold(l, i); n != load(level_[l][i], relaxed)) store(level_[l][i], n, relaxed);
  }
  u64 select_in_line(u64 line, u64 rank) const {
    for (u64 w = line * 8; w < line * 8 + 8; ++w) {
      u64 bits = load(bits_[w], acquire), n = bits ? u64(std::popcount(bits)) : 0;
      if (rank >= n) {
        rank -= n;
        continue;
      }
      while (rank--) bits &= bits - 1;
      return std::min(w * 64 + u64(std::countr_zero(bits)), capacity_ - 1);
    }
    return kNoRow;
  }
  u64 capacity_, *bits_;
  u32 *level_[kMaxLevels] = {};
  u64 count_[kMaxLevels] = {};
  u32 levels_ = 0;
};

class Links {
 public:
  static constexpr u64 kEnded = 1ull << 63;  // in Stream.last: that row was the last of its trajectory
  static constexpr u64 kCut = 1ull << 62;    // a stream that was still going on had to give way here: whoever comes new may be it
  static constexpr u64 kCutNow = 1ull << 61; // the same, for whom it gave way to: turns to kCut with his first row
  static constexpr u64 kHeadless = 1ull << 63;  // in the word of a stream that comes with a row: rows before it are missing
  // Entries looked at for one key: runs of linear probing in a half-full table are hardly ever as long (Knuth, TAOCP 3 §6.4).
  static constexpr u64 kProbe = 64;

  static u64 bytes(u64 capacity) { return align_up(capacity * sizeof(Link), 128) + align_up(Ends::bytes(capacity), 128); }
  static u64 stream_bytes(u64 entries) { return align_up(entries * sizeof(Stream), 128); }  // entries: a power of two
  // `memory`: bytes(capacity) of them, aligned to 64. reserve: Control's, for readers beside a writer.
  Links(u8 *memory, u64 capacity, const u64 *reserve = nullptr)
      : reserve_(reserve), capacity_(capacity), link_(reinterpret_cast<Link *>(memory)), ends_(memory ? memory + align_up(capacity * sizeof(Link), 128) : nullptr, capacity) {}

  // ---- the writer ----
  struct Span {   // of one transaction
    u64 first;    // its first id
    u64 live_lo;  // the first id that is live after it: max(base, new cursor − capacity)
  };
  // Before a byte of the rows [first, first + n) is stored, after T1.
  void evict(u64 first, u64 n) {
    u64 k = std::min(n, capacity_), lo = first % capacity_, upto = std::min(capacity_, lo + k);
    ends_.clear_range(lo, upto);
    ends_.clear_range(0, lo + k - upto);
  }
  // A CLEAR, best after base.store: readers of the old window find no ends from here on. Streams are left with last < base, which is
  // as good as none.
  void clear() {
    ends_.clear_range(0, capacity_);
    FAILPOINT(link_cleared);
  }
  // The rows [first, first + n) of the collector that `table` belongs to: key(j) tells the j-th row's stream (mixed, not 0), ended(j)
  // whether it ends its trajectory; headless(j): if its stream is new, whether rows before it are missing. Returns how many streams
  // were cut because the table was full of others.
  template <class Key, class Ended, class Headless>
  u64 append(Stream *table, u64 entries, Span t, u64 first, u64 n, Key key, Ended ended, Headless headless) {
    u64 cut = 0;
    for (u64 j = 0, e; j < n; j = e) {
      u64 k = key(j);
      for (e = j + 1; e < n && key(e) == k;) ++e;
      cut += append_run(table, entries, t, first + j, e - j, k, headless(j), [&, j](u64 i) { return bool(ended(j + i)); });
    }
    return cut;
  }
  template <class Key, class Ended> u64 append(Stream *table, u64 entries, Span t, u64 first, u64 n, Key key, Ended ended) {
    return append(table, entries, t, first, n, key, ended, [](u64) { return false; });
  }
  u64 append(Stream *table, u64 entries, Span t, u64 id, u64 key, bool ended) {
    return append_run(table, entries, t, id, 1, key, false, [=](u64) { return ended; });
  }
  template <class Ended> u64 append_run(Stream *table, u64 entries, Span t, u64 first, u64 n, u64 key, bool headless, Ended ended) {
    u64 cut = 0, id = first, end = first + n;
    Stream *s = find(table, entries, t, key, cut);
    u64 last = s ? load(s->last, relaxed) : 0, sticky = last & (kCut | kCutNow) ? kCut : 0;
    bool fresh = s && (last & kId) == 0;
    for (u64 done = std::min(last & kId, end); id < done; ++id) recount(t, id);  // a redo
    if (id == end) return cut;
    if (id < t.live_lo) {  // rows that this very transaction overwrites
      id = std::min(end, t.live_lo);
      last = id | (ended(id - 1 - first) ? kEnded : 0), fresh = false;
    }
    if (id < end) {
      bool head_missing = fresh ? headless || cut_about(table, entries, key) : !s || !(last & kEnded);
      chain(t, id, end, last & kEnded ? 0 : last & kId, head_missing, [&](u64 i) { return ended(i - first); });
      last = end | (ended(n - 1) ? kEnded : 0);
      FAILPOINT(link_bits);
    }
    if (s) store(s->last, last | sticky, release);  // the row is done: whoever redoes the transaction skips it
    FAILPOINT(link_stream);
    return cut;
  }
  // The counts: after the last append of a transaction, before its cursor is published.
  void settle() {
    ends_.refresh_above(dirty_, n_dirty_);
    n_dirty_ = 0;
    FAILPOINT(link_settled);
  }

  // ---- readers: rows lie in the window [lo, hi) ----
  u64 capacity() const { return capacity_; }
  const Ends &ends() const { return ends_; }
  const Link &at(u64 slot) const { return link_[slot]; }
  const Link &of(u64 id) const { return link_[id % capacity_]; }
  u32 step(u64 id) const { return load(of(id).step, relaxed); }
  u32 flags(u64 id) const { return load(of(id).flags, relaxed); }

  struct Row {  // a walk's place: a division a walk, not a step
    u64 id, slot;
  };
  Row row(u64 id) const { return {id, id % capacity_}; }
  void prefetch(Row r) const { __builtin_prefetch(&link_[r.slot]); }
  void prefetch_next(Row r) const { __builtin_prefetch(&link_[after(r.slot, load(link_[r.slot].next, relaxed))]); }
  bool back(Row &r, u64 far, u64 lo) const {  // false, and nothing changed, if `far` leads out of the window
    if (far == 0 || far >= capacity_ || r.id < lo || far > r.id - lo) return false;
    r.id -= far, r.slot -= far;
    if (r.slot >= capacity_) r.slot += capacity_;  // it went below 0
    return true;
  }
  bool forward(Row &r, u64 hi) const {
    u64 far = load(link_[r.slot].next, relaxed);
    if (far == 0 || far >= capacity_ || r.id >= hi || far >= hi - r.id) return false;
    u64 slot = after(r.slot, far);
    if (load(link_[slot].prev, relaxed) != far) return false;
    r = {r.id + far, slot};
    return true;
  }
  bool to_previous(Row &r, u64 lo) const { return back(r, load(link_[r.slot].prev, relaxed), lo); }
  // One hop of a search for the first live row: false when there.
  bool towards_first(Row &r, u64 lo) const {
    return back(r, load(link_[r.slot].jump, relaxed), lo) || back(r, load(link_[r.slot].prev, relaxed), lo);
  }
  // One hop of a walk of `left` rows back, from the depth d: false if it leaves the window. A jump that may be taken leads to a row
  // not older than the one wanted, so if that is live the jump has always been known.
  bool towards(Row &r, Skew &d, u64 &left, u64 lo) const {
    const Link &l = link_[r.slot];
    u64 rows = d.jump();
    bool jump = rows <= left;
    if (!back(r, load(jump ? l.jump : l.prev, relaxed), lo)) return false;
    jump ? d.take_jump() : d.take_prev();
    left -= jump ? rows : 1;
    return true;
  }
  static constexpr u32 kMaxHops = 128;  // a search makes at most about 3 log2(n): more are garbage's

  u64 previous(u64 id, u64 lo) const {
    Row r = row(id);
    return back(r, load(link_[r.slot].prev, relaxed), lo) ? r.id : kNoRow;
  }
  u64 following(u64 id, u64 hi) const {
    Row r = row(id);
    return forward(r, hi) ? r.id : kNoRow;
  }
  u64 ancestor(u64 id, u64 rows, u64 lo) const {
    Row r = row(id);
    u64 depth = load(link_[r.slot].step, relaxed);
    if (rows > depth || id < lo) return kNoRow;
    Skew d(depth);
    for (u32 hops = 0; rows; ++hops)
      if (hops == kMaxHops || !towards(r, d, rows, lo)) return kNoRow;
    return r.id;
  }
  u64 first_live(u64 id, u64 lo) const {
    Row r = row(id);
    for (u32 hops = 0; hops < kMaxHops; ++hops)
      if (!towards_first(r, lo)) return r.id;
    return kNoRow;
  }
  // The end in the window that the bit at `slot` stands for; kNoRow if it has moved or gone. One that has moved beyond hi since
  // the window was read leads back into it.
  u64 end_at(u64 slot, u64 lo, u64 hi) const {
    Row r{lo - lo % capacity_ + slot, slot};
    if (r.id < lo) r.id += capacity_;
    return end_before(r, lo, hi);
  }
  // The last row before hi of the trajectory of r; kNoRow: it has none there, or it goes on there.
  u64 end_before(Row r, u64 lo, u64 hi) const {
    for (u32 hops = 0; r.id >= hi; ++hops)
      if (hops == kMaxHops || !(back(r, load(link_[r.slot].jump, relaxed), hi) || back(r, load(link_[r.slot].prev, relaxed), lo))) return kNoRow;
    Row on = r;
    return forward(on, hi) ? kNoRow : r.id;
  }
  // f(id) for every end in the window, in order. One that moves on meanwhile may come twice, but not never: its new bit is set before
  // the old one is cleared, and looked at later; where it went round into slots that were looked at already, once more.
  template <class F> void for_each_end(u64 lo, u64 hi, F f) const {
    auto found = [&](u64 slot) {
      if (u64 id = end_at(slot, lo, hi); id != kNoRow) f(id);
    };
    u64 from = lo % capacity_;
    ends_.each(from, capacity_, found);
    ends_.each(0, from, found);
    if (!reserve_) return;
    auto upto = [&] { return std::min(load(*reserve_, acquire), lo + 2 * capacity_); };  // T1 comes before any bit of its rows
    for (u64 id = lo + capacity_, end = upto(); id < end; end = ++id == end ? upto() : end)
      if (ends_.test(id % capacity_))
        if (u64 e = end_before(row(id), lo, hi); e != kNoRow) f(e);
  }
  template <class T> struct Unset : std::allocator<T> {  // a vector's memory, to be written once
    template <class U> struct rebind { using other = Unset<U>; };
    template <class U> void construct(U *) noexcept {}
    template <class U, class... A> void construct(U *p, A &&...a) { new (p) U(std::forward<A>(a)...); }
  };
  struct Listing {
    std::vector<u64, Unset<u64>> ids;  // trajectory k: ids[offset[k]] to ids[offset[k + 1] - 1], oldest first
    std::vector<u64> offset;
    std::vector<u8> flags;             // 1: its beginning is gone, 2: it has ended
  };
  // All trajectories in the window, by their first rows. A row that is overwritten meanwhile may lead astray, but only to what stands
  // before it here: whoever finds it gone drops that too.
  Listing list(u64 lo, u64 hi) const {
    struct Run { u64 first, rows; };                // consecutive ids
    struct Piece { u64 first, end, at, runs; };     // runs[at] is the newest one
    std::vector<u64> ends;
    std::vector<Run> runs;
    std::vector<Piece> pieces;
    u64 total = 0;
    for_each_end(lo, hi, [&](u64 id) { ends.push_back(id); });
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    pieces.reserve(ends.size());
    for (u64 end : ends) {
      if (total > 2 * (hi - lo)) break;  // only of damaged links
      Piece p{end, end, runs.size(), 0};
      Row r = row(end);
      Run run{end, 1};
      Skew depth(load(link_[r.slot].step, relaxed));
      for (u64 rows; (rows = run_back(r, depth, run.first, lo)) != 0;) {
        if (rows == kApart) total += run.rows, runs.push_back(run), run = {r.id, 1};
        else run = {r.id, run.rows + rows};
      }
      total += run.rows, runs.push_back(run);
      p.first = run.first, p.runs = runs.size() - p.at;
      pieces.push_back(p);
    }
    std::sort(pieces.begin(), pieces.end(), [](const Piece &a, const Piece &b) { return a.first < b.first; });
    Listing out;
    out.ids.resize(total), out.offset.reserve(pieces.size() + 1), out.flags.reserve(pieces.size());
    u64 at = 0;
    for (const Piece &p : pieces) {
      out.offset.push_back(at);
      out.flags.push_back(u8((step(p.first) || flags(p.first) & Link::kHeadMissing) | (flags(p.end) & Link::kEnd ? 2 : 0)));
      for (u64 i = p.runs; i-- > 0;)
        for (u64 j = 0; j < runs[p.at + i].rows; ++j) out.ids[at++] = runs[p.at + i].first + j;
    }
    out.offset.push_back(at);
    return out;
  }

 private:
  static constexpr u64 kId = kCutNow - 1, kDirty = 256;
  static constexpr u64 kApart = ~0ull;
  // One hop of a walk over all rows, from the depth d. Returns how many rows it has passed, all of consecutive ids; kApart: one, of
  // another id; 0: there is none before. A jump as long in ids as it is in rows has passed consecutive ones.
  u64 run_back(Row &r, Skew &d, u64 from, u64 lo) const {
    const Link &l = link_[r.slot];
    const u64 jump = load(l.jump, relaxed);
    if (jump == d.jump() && back(r, jump, lo)) return d.take_jump(), jump;
    if (!back(r, load(l.prev, relaxed), lo)) return 0;
    d.take_prev();
    return from - r.id == 1 ? 1 : kApart;
  }

  template <class Ended> void chain(Span t, u64 id, u64 end, u64 pred_plus_1, bool head_missing, Ended ended) {
    u64 slot = id % capacity_, room = id - t.live_lo;  // ids from the row back to the oldest live one
    u64 back = 0, pred_jump = 0, pred_slot = 0;        // back: distance to the predecessor, 0 if there is none
    u32 step = 0, flags = head_missing * Link::kHeadMissing;
    Skew pred(0);
    if (pred_plus_1 > t.live_lo) {
      back = id + 1 - pred_plus_1;
      pred_slot = before(slot, back);
      const Link &p = link_[pred_slot];
      step = p.step + 1;
      if (back > ~0u || step == 0) back = step = 0;  // too far for 32 bits
      else pred = Skew(p.step), pred_jump = p.jump, flags = p.flags & Link::kHeadMissing;
    }
    u64 joined = back, joined_slot = pred_slot;
    for (; id < end; ++id, ++room) {
      u64 jump = back;
      if (back && pred.twice) {  // two equal jumps become one; not known if it leads out of what is live
        u64 over = back + pred_jump;
        jump = 0;
        if (pred_jump && over <= room)
          if (u64 far = link_[before(slot, over)].jump; far && over + far <= room && over + far <= ~0u) jump = over + far;
      }
      bool is_end = ended(id), more = !is_end && id + 1 < end;
      put(link_[slot], u32(back), u32(jump), more, step, flags | (is_end ? u32(Link::kEnd) : 0u));
      if (!more) ends_.set(slot), mark(slot);
      if (is_end) {
        step = 0, flags = 0, back = pred_jump = 0, pred = Skew(0);
      } else {
        if (back) pred.add_row();
        ++step, back = 1, pred_jump = jump;
        if (step == 0) back = pred_jump = 0, flags = Link::kHeadMissing, pred = Skew(0), ends_.set(slot), mark(slot);
      }
      if (++slot == capacity_) slot = 0;
    }
    FAILPOINT(link_chained);
    if (joined) {  // the predecessor is not the last one any more
      store(link_[joined_slot].next, u32(joined), relaxed);
      FAILPOINT(link_joined);
      ends_.clear(joined_slot), mark(joined_slot);
    }
  }
  static void put(Link &l, u32 prev, u32 jump, u32 next, u32 step, u32 flags) {
    store(l.prev, prev, relaxed), store(l.jump, jump, relaxed), store(l.next, next, relaxed);
    store(l.step, step, relaxed), store(l.flags, flags, relaxed);
  }
  u64 after(u64 slot, u64 far) const { return far < capacity_ - slot ? slot + far : far < capacity_ ? slot + far - capacity_ : slot; }
  u64 before(u64 slot, u64 far) const { return slot >= far ? slot - far : slot + capacity_ - far; }
  void mark(u64 slot) {
    u64 line = slot / Ends::kLineBits;
    if (n_dirty_ && dirty_[n_dirty_ - 1] == line) return;
    if (n_dirty_ > 1 && dirty_[n_dirty_ - 2] == line) return;
    if (n_dirty_ == kDirty) settle();
    dirty_[n_dirty_++] = line;
  }
  void recount(Span t, u64 id) {  // of a row that is done but perhaps not counted
    if (id < t.live_lo) return;
    u64 slot = id % capacity_;
    mark(slot);
    if (u64 far = link_[slot].prev; far && far < capacity_) mark(before(slot, far));
  }

  // The entry of `key`. A new one is put in place of nobody, of the dead, or of whoever has been silent longest; null if all have
  // rows in this transaction, whose redo will look for them.
  Stream *find(Stream *table, u64 entries, Span t, u64 key, u64 &cut) {
    const u64 width = std::min(entries, kProbe);
    auto entry = [&](u64 i) -> Stream & { return table[(key + i) & (entries - 1)]; };
    for (u64 i = 0; i < width; ++i)
      if (load(entry(i).key, relaxed) == key) return &entry(i);
    Stream *to = nullptr;
    u64 oldest = ~0ull;
    auto alive = [&](u64 last) { return (last & kId) > t.live_lo && !(last & kEnded); };
    for (u64 i = 0; i < width; ++i) {
      Stream &e = entry(i);
      u64 last = load(e.last, relaxed), age = alive(last) ? last & kId : 0;
      if (load(e.key, relaxed) == 0) {  // nobody; or somebody was killed in the middle of what follows
        to = &e;
        break;
      }
      if ((last & kId) <= t.first && age < oldest) to = &e, oldest = age;
    }
    if (!to) {
      ++cut;
      store(entry(0).last, load(entry(0).last, relaxed) | kCut, relaxed);
      return nullptr;
    }
    u64 last = load(to->last, relaxed);
    bool cuts = alive(last) || last & kCutNow;
    cut += cuts;
    store(to->key, u64(0), release);
    FAILPOINT(link_recycling);
    store(to->last, (last & kCut) | (cuts ? kCutNow : 0), release);
    FAILPOINT(link_recycled);
    store(to->key, key, release);
    FAILPOINT(link_claimed);
    return to;
  }
  bool cut_about(const Stream *table, u64 entries, u64 key) const {  // may this stream have been here before?
    for (u64 i = 0; i < std::min(entries, kProbe); ++i)
      if (load(table[(key + i) & (entries - 1)].last, relaxed) & kCut) return true;
    return false;
  }

  const u64 *reserve_;
  u64 capacity_;
  Link *link_;
  Ends ends_;
  u64 dirty_[kDirty], n_dirty_ = 0;
};

}  // namespace shmbuf
