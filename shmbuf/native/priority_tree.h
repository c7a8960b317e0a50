// Priorities: a tree whose every node is recomputed from its children (an f-array). Sums cannot drift, and a process killed
// half-way leaves a stale path that the next refresh of it, or the scrub, heals. Nobody owns it: all words change by CAS.
//
//   leaf   {float32 p, u32 generation}             8 bytes, one per slot; p = -0.0 is fresh: evicted, not published yet
//   node   {float64 sum, float32 min, u32 tag}     16 bytes, over 8 children; min is that of the positive ones, 0 if none
//   top    {float32 max, u32 tag}                  8 bytes beside each node, kept only where new rows get the live maximum
//   level  0 over the leaves … the last is the root; each rounded up to whole lines, about 11.5 bytes a row in all
//
//   writer    T2  evict: leaf.store {generation, -0.0}       the old row leaves, the new one cannot be drawn
//             T6  publish: leaf.cas {generation, -0.0} → p   only what is still fresh: redone after a crash, never over a user's p
//   anyone    set: leaf.cas {generation, any} → p            a row overwritten meanwhile has another generation: nothing happens
//   all       then refresh every node above, twice if the first CAS fails: whoever beat the second has read our leaf
//
// All of refresh is seq_cst and its CAS is never skipped, even for an equal sum (tests/models/tree16.pml, tree.c: each fails
// without). A tag repeats after 2^32 refreshes of one node. Zeroed memory is an empty tree. Rows of p = 0, and fresh ones,
// are never drawn and never the minimum.
#pragma once
#include "failpoint.h"
#include "layout.h"
#include "random.h"
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace shmbuf {

class PriorityTree {
 public:
  static constexpr u32 kFanOut = 8, kMaxLevels = 17;
  static constexpr u64 kNowhere = ~0ull;

  static u64 bytes(u64 capacity) {
    u64 n = align_up(capacity * sizeof(u64), kLine);
    for (u64 c = parents(capacity);; c = parents(c)) {
      n += align_up(c * sizeof(Pair), kLine) + align_up(c * sizeof(u64), kLine);
      if (c == 1) return n;
    }
  }
  // `memory`: bytes(capacity) of them, aligned to 128.
  PriorityTree(u8 *memory, u64 capacity) : capacity_(capacity), leaf_(reinterpret_cast<u64 *>(memory)) {
    if (!capacity) return;  // not built yet
    memory += align_up(capacity * sizeof(u64), kLine);
    for (u64 c = parents(capacity);; c = parents(c)) {
      level_[levels_] = reinterpret_cast<Pair *>(memory), count_[levels_] = c;
      memory += align_up(c * sizeof(Pair), kLine);
      top_[levels_++] = reinterpret_cast<u64 *>(memory);
      memory += align_up(c * sizeof(u64), kLine);
      if (c == 1) return;
    }
  }
  void keep_max(bool yes) { keeps_max_ = yes; }  // all who change a tree agree
  void format() { std::memset(static_cast<void *>(leaf_), 0, bytes(capacity_)); }  // for memory that may not be zero

  // ---- changing ----
  // Leaves of rows by id: finite, not negative. Of one row named twice the last stays. applied[j], if asked for: 0 where another
  // row lies in the slot by now. Returns to how many it was applied.
  u64 set(const u64 *ids, const float *p, u64 n, u8 *applied_to = nullptr) {
    u64 applied = 0, above[kBatch];
    for (u64 b = 0; b < n; b += kBatch) {
      u64 e = std::min(n, b + kBatch), m = 0;
      for (u64 j = b; j < e; ++j) {
        if (j + kAhead < e) __builtin_prefetch(&leaf_[ids[j + kAhead] % capacity_], 1);
        u64 slot = ids[j] % capacity_, g = generation(ids[j]), next = g | std::bit_cast<u32>(p[j] + 0.0f);  // -0.0 becomes 0
        bool done = false;
        for (u64 seen = load(leaf_[slot], seq_cst); !done && (seen & kGeneration) == g;) {
          FAILPOINT(tree_leaf_read);
          done = compare_exchange(leaf_[slot], seen, next, seq_cst);
        }
        if (done) above[m++] = slot / kFanOut;
        if (applied_to) applied_to[j] = done;
      }
      FAILPOINT(tree_leaves_set);
      applied += m;
      refresh_above(above, m);
    }
    return applied;
  }
  // T2, by the writer, before a byte of the rows [first, first + n) is stored. T6, after the commit, p: one for all (stride 0)
  // or one a row (stride 1). Each is leaves, then refresh, which may be put off.
  void evict_leaves(u64 first, u64 n) {
    each_leaf(first, n, [&](u64 slot, u64 g, u64) { store(leaf_[slot], g | kFresh, seq_cst); });
  }
  void publish_leaves(u64 first, const float *p, u64 stride, u64 n) {
    each_leaf(first, n, [&](u64 slot, u64 g, u64 j) {
      u64 fresh = g | kFresh;
      compare_exchange(leaf_[slot], fresh, g | std::bit_cast<u32>(p[j * stride] + 0.0f), seq_cst);
    });
  }
  void refresh(u64 first, u64 n) {  // above the slots of these rows
    n = std::min(n, capacity_);
    u64 lo = first % capacity_, before_wrap = std::min(n, capacity_ - lo);
    refresh_range(lo, lo + before_wrap);
    refresh_range(0, n - before_wrap);
  }
  void evict(u64 first, u64 n) { evict_leaves(first, n), FAILPOINT(tree_leaves_set), refresh(first, n); }
  void publish(u64 first, const float *p, u64 stride, u64 n) { publish_leaves(first, p, stride, n), FAILPOINT(tree_leaves_set), refresh(first, n); }
  // Refresh everything above slots [slot, slot + n), by default all. At rest this leaves no stale node, whoever died. Returns
  // how many nodes it changed.
  u64 scrub(u64 slot = 0, u64 n = ~0ull) {
    u64 changed = 0;
    if (n >= capacity_) clear_padding();
    if (slot < capacity_) refresh_range(slot, slot + std::min(n, capacity_ - slot), &changed);
    return changed;
  }

  // ---- looking ----
  double sum() const { return std::bit_cast<double>(load(root().low, seq_cst)); }
  float min() const { return low_float(load(root().high, seq_cst)); }  // the smallest positive p, 0 if there is none
  float max() const { return low_float(load(top_[levels_ - 1][0], seq_cst)); }   // where it is kept

  // The priorities of rows by id; NaN if overwritten, -0.0 if not published yet.
  void get(const u64 *ids, u64 n, float *p) const {
    for (u64 j = 0; j < n; ++j) {
      u64 word = load(leaf_[ids[j] % capacity_], acquire);
      p[j] = (word & kGeneration) == generation(ids[j]) ? low_float(word) : std::numeric_limits<float>::quiet_NaN();
    }
  }
  // Rows, each with probability p / sum, for n numbers in [0, 1). Each (id, p) is one leaf at one instant; whether the row is still
  // there the gather finds out. `cursor` supplies the upper bits of the ids. kNowhere where the sums on the way were larger than
  // what is below them now, because they are being changed: draw another number.
  // Returns how many rows it drew.
  u64 draw(u64 cursor, const double *u01, u64 n, u64 *ids, float *p) const {
    // Many begin at a level of no more nodes than there are numbers, by its running sums; one, at the root.
    u32 top = levels_ - 1;
    while (top && count_[top - 1] <= std::min(n, kTable)) --top;
    double upto[kTable], total = 0;
    for (u64 i = 0; i < count_[top]; ++i) upto[i] = total += std::bit_cast<double>(load(level_[top][i].low, seq_cst));
    u64 drawn = 0;
    Descent d[kTogether];
    for (u64 b = 0; b < n; b += kTogether) {  // several at once, level by level: their cache misses overlap
      u64 m = std::min(n - b, kTogether);
      for (u64 k = 0; k < m; ++k) {
        const double u = u01[b + k] * total;
        const u64 at = first_above(upto, count_[top], u);
        d[k] = {at && at < count_[top] ? u - upto[at - 1] : u, at < count_[top] ? at : kNowhere, 0};
        if (d[k].at != kNowhere) prefetch_children(top, d[k].at);
      }
      for (u32 l = top + 1; l-- > 0;)
        for (u64 k = 0; k < m; ++k) {
          if (d[k].at == kNowhere) continue;
          pick(l, d[k]);
          if (l && d[k].at != kNowhere) prefetch_children(l - 1, d[k].at);
        }
      for (u64 k = 0; k < m; ++k) {
        p[b + k] = low_float(d[k].leaf);
        u64 now = cursor / capacity_, g = now + u64(i64(i32(u32(d[k].leaf >> 32) - u32(now))));
        ids[b + k] = d[k].at == kNowhere ? kNowhere : g * capacity_ + d[k].at;
        drawn += d[k].at != kNowhere;
      }
    }
    return drawn;
  }
  // f(level, index, print) for every node that differs from what its children say: none at rest. As long as its print stays the
  // same, neither the node nor a child has changed.
  template <class F> void each_stale(F f) const {
    u64 print;
    for (u32 l = 0; l < levels_; ++l)
      for (u64 i = 0; i < count_[l]; ++i)
        if (is_stale(l, i, print)) f(l, i, print);
  }
  bool is_stale(u32 l, u64 i, u64 &print) const {
    const Pair is{load(level_[l][i].low, seq_cst), load(level_[l][i].high, seq_cst)}, should = fold(l, i);
    print = mix64(mix64(is.low ^ mix64(is.high)) ^ mix64(should.low ^ mix64(should.high)));
    bool stale = is.low != should.low || u32(is.high) != u32(should.high);
    if (keeps_max_) {
      const u64 top = load(top_[l][i], seq_cst);
      const float most_now = most(l, i);
      print = mix64(print ^ mix64(top ^ std::bit_cast<u32>(most_now))), stale |= low_float(top) != most_now;
    }
    return stale;
  }
  u64 check() const {
    u64 wrong = 0;
    each_stale([&](u32, u64, u64) { ++wrong; });
    return wrong;
  }
  u64 nodes() const {
    u64 n = 0;
    for (u32 l = 0; l < levels_; ++l) n += count_[l];
    return n;
  }
  // Of a slot: the leaf, and whether it belongs to this row.
  float leaf(u64 slot) const { return low_float(load(leaf_[slot], acquire)); }
  bool is_of(u64 id) const { return (load(leaf_[id % capacity_], acquire) & kGeneration) == generation(id); }

 private:
  using i32 = std::int32_t;
  static constexpr u64 kLine = 128, kBatch = 1024, kAhead = 16, kTogether = 16, kFewNodes = 16384, kTable = 256;
  static constexpr u64 kGeneration = 0xffffffffull << 32, kFresh = 0x80000000ull;  // the bits of -0.0f
  static constexpr u32 kInfinity = 0x7f800000;
  struct Descent {
    double u;  // what is left of the number drawn, below the sum of the node where we are
    u64 at;    // index in its level, in the end the slot; kNowhere: the children had shrunk
    u64 leaf;  // the word found
  };
  static u64 parents(u64 n) { return (n + kFanOut - 1) / kFanOut; }
  static float low_float(u64 word) { return std::bit_cast<float>(u32(word)); }
  u64 generation(u64 id) const { return (id / capacity_) << 32; }
  const Pair &root() const { return level_[levels_ - 1][0]; }

  // The node that the 8 children say; always added in the same order, so equal children give equal bits.
  Pair fold(u32 l, u64 i) const {
    double sum[kFanOut];
    u32 least = ~0u;  // bits − 1 order the positive floats; 0 and −0.0 come after all of them
    if (l) {
      const Pair *child = level_[l - 1] + i * kFanOut;
      for (u64 c = 0; c < kFanOut; ++c) {
        sum[c] = std::bit_cast<double>(load(child[c].low, seq_cst));
        least = std::min(least, u32(load(child[c].high, seq_cst)) - 1);
      }
    } else {
      for (u64 c = 0; c < kFanOut; ++c) {
        const u64 word = load(leaf_[i * kFanOut + c], seq_cst);
        sum[c] = low_float(word);
        least = std::min(least, u32(word) - 1);
      }
    }
    const double all = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    return {std::bit_cast<u64>(all), least < kInfinity ? least + 1 : 0};
  }
  float most(u32 l, u64 i) const {
    float most = 0;
    for (u64 c = i * kFanOut; c < i * kFanOut + kFanOut; ++c) most = std::max(most, low_float(load(l ? top_[l - 1][c] : leaf_[c], seq_cst)));
    return most;
  }
  bool refresh_top(u32 l, u64 i) {
    u64 old = load(top_[l][i], seq_cst);
    return compare_exchange(top_[l][i], old, ((old >> 32) + 1) << 32 | std::bit_cast<u32>(most(l, i)), seq_cst);
  }
  bool refresh_node(u32 l, u64 i, u64 *changed) {
    Pair &node = level_[l][i], old;
    old.low = load(node.low, seq_cst);
    old.high = load(node.high, seq_cst);  // the tag before the first child
    Pair now = fold(l, i);
    if (changed) *changed += now.low != old.low || u32(now.high) != u32(old.high);
    now.high |= ((old.high >> 32) + 1) << 32;
    FAILPOINT(tree_children_read);
    return compare_exchange(node, old, now);
  }
  void refresh_twice(u32 l, u64 i, u64 *changed = nullptr) {
    if (!refresh_node(l, i, changed)) refresh_node(l, i, changed);
    if (keeps_max_ && !refresh_top(l, i)) refresh_top(l, i);
  }
  // Above scattered nodes of level 0. Of a level of few nodes each is refreshed once, in order, by a bit each; of others only those
  // that come one after another are the same: sorting them costs more than what it spares.
  void refresh_above(u64 *at, u64 n) {
    u64 bits[kFewNodes / 64];
    for (u32 l = 0; l < levels_; ++l) {
      if (count_[l] <= kFewNodes) {
        const u64 words = (count_[l] + 63) / 64;
        std::fill_n(bits, words, 0);
        for (u64 j = 0; j < n; ++j) bits[at[j] / 64] |= 1ull << at[j] % 64;
        n = 0;
        for (u64 w = 0; w < words; ++w)
          for (u64 b = bits[w]; b; b &= b - 1) at[n++] = w * 64 + u64(std::countr_zero(b));
      } else {
        n = u64(std::unique(at, at + n) - at);
      }
      for (u64 j = 0; j < n; ++j) {
        if (j + 4 < n) __builtin_prefetch(&level_[l][at[j + 4]], 1), prefetch_children(l, at[j + 4]);
        refresh_twice(l, at[j]);
        at[j] /= kFanOut;
      }
      FAILPOINT(tree_level_done);
    }
  }
  void refresh_range(u64 lo, u64 hi, u64 *changed = nullptr) {  // above slots [lo, hi)
    for (u32 l = 0; l < levels_ && lo < hi; ++l) {
      lo /= kFanOut, hi = parents(hi);
      for (u64 i = lo; i < hi; ++i) refresh_twice(l, i, changed);
      FAILPOINT(tree_level_done);
    }
  }
  void clear_padding() {  // what is behind the last leaf or node of a level counts as its sibling: damage there would stay
    for (u64 c = capacity_; c < align_up(capacity_, kFanOut); ++c) store(leaf_[c], u64(0), seq_cst);
    for (u32 l = 0; l < levels_; ++l)
      for (u64 c = count_[l]; c < align_up(count_[l], kFanOut); ++c) {
        store(level_[l][c].low, u64(0), seq_cst), store(level_[l][c].high, u64(0), seq_cst);
        if (c < align_up(count_[l] * sizeof(u64), kLine) / sizeof(u64)) store(top_[l][c], u64(0), seq_cst);
      }
  }
  template <class Change> void each_leaf(u64 first, u64 n, Change change) {
    u64 j = n > capacity_ ? n - capacity_ : 0;  // of more rows than there are slots the last ones stay
    for (; j < n; ++j) change((first + j) % capacity_, generation(first + j), j);
  }

  // The first of n running sums above u, n if none is: by bisection, without a branch that nothing could predict.
  static u64 first_above(const double *upto, u64 n, double u) {
    u64 at = 0;
    for (u64 left = n; left > 1;) {
      const u64 half = left / 2;
      at += half & -u64(upto[at + half - 1] <= u), left -= half;
    }
    return at + (upto[at] <= u);
  }
  void prefetch_children(u32 l, u64 i) const {
    if (l == 0) return __builtin_prefetch(leaf_ + i * kFanOut);
    __builtin_prefetch(level_[l - 1] + i * kFanOut);
    __builtin_prefetch(level_[l - 1] + i * kFanOut + kFanOut / 2);
  }
  // Down to the child that holds u; without branches on the sums, which nothing could predict. They are read while others
  // change them, and rounded: u may lie beyond the last child.
  void pick(u32 l, Descent &d) const {
    u64 word[kFanOut], from = d.at * kFanOut, passed = 0;
    double upto = 0, before = 0;
    for (u64 c = 0; c < kFanOut; ++c) {
      word[c] = load(l ? level_[l - 1][from + c].low : leaf_[from + c], acquire);
      upto += l ? std::bit_cast<double>(word[c]) : low_float(word[c]);
      bool past = d.u >= upto;
      passed += past, before = past ? upto : before;
    }
    d.at = from + passed;
    if (passed == kFanOut || d.at >= (l ? count_[l - 1] : capacity_)) return void(d.at = kNowhere);  // the second: damaged memory
    d.u -= before, d.leaf = word[passed];
  }

  u64 capacity_, *leaf_;
  Pair *level_[kMaxLevels] = {};
  u64 *top_[kMaxLevels] = {};
  u64 count_[kMaxLevels] = {};
  u32 levels_ = 0;
  bool keeps_max_ = false;
};

// ---- what a leaf means -------------------------------------------------------------------------------------------
// leaf = (priority + eps)^alpha (Schaul et al. 2016 §3.3, with eps where TorchRL has it). Set once for the life of a buffer.
struct Formula {
  double alpha, eps;
  bool live_maximum;  // new rows at the largest leaf there is, not at the largest there ever was
  explicit Formula(const Priorities &w) {
    alpha = -std::bit_cast<double>(load(w.formula.low, acquire));
    double e = std::bit_cast<double>(load(w.formula.high, acquire));
    eps = std::abs(e), live_maximum = std::signbit(e);
  }
  static Pair pack(double alpha, double eps, bool live_maximum) {  // −0.0 is not 0: no formula looks like none
    return {std::bit_cast<u64>(-alpha), std::bit_cast<u64>(live_maximum ? -eps : eps)};
  }
  double leaf(double p) const { return alpha == 1 ? p + eps : alpha == 0.5 ? std::sqrt(p + eps) : std::pow(p + eps, alpha); }  // in double: a leaf's priority gives that leaf again
  double priority(float leaf) const {  // NaN with alpha 0, under which all leaves are 1
    if (alpha == 0) return std::numeric_limits<double>::quiet_NaN();
    return alpha == 1 ? leaf - eps : std::pow(double(leaf), 1 / alpha) - eps;
  }
};
inline void raise_highest(Priorities &w, float leaf) {  // positive floats order as their bits
  u32 bits = std::bit_cast<u32>(leaf);
  for (u32 seen = load(w.highest, relaxed); seen < bits && !compare_exchange(w.highest, seen, bits, relaxed);) {}
}
inline float first_leaf(const Priorities &w, const Formula &f, const PriorityTree &tree) {
  float highest = f.live_maximum ? tree.max() : std::bit_cast<float>(load(w.highest, relaxed));
  return highest > 0 ? highest : float(f.leaf(1.0));
}

}  // namespace shmbuf
