// Draws over links.h: ends, slices, rows that follow. Up to 16 walks go on side by side, a hop each in turn, each having asked for
// its next Link in advance: their cache misses overlap. What is drawn lies in [lo, hi) and is right if the rows are still there
// afterwards, which the gather finds out.
#pragma once
#include "links.h"
#include "random.h"
#include <vector>

namespace shmbuf {

enum class SliceBy : u8 { trajectory, start };
struct SliceOptions {
  u64 length = 1;
  bool strict = true;                // only of trajectories that long; otherwise shorter ones are taken whole
  SliceBy by = SliceBy::trajectory;  // a trajectory uniformly, then its start; or uniformly of all starts there are
  u64 left = 0, right = 0;           // a slice may begin so many rows before its trajectory does, and end so many behind: it is cut
  bool scan = true;                  // look at all trajectories for the rare ones that are long enough; or say `rare`
};
enum class SliceStatus : u8 {
  ok,
  rare,    // nothing long enough was met by chance
  none,    // no trajectory is long enough: `longest` tells. Final only if the window is still the same afterwards
  lapped,  // some walk met rows being overwritten again and again: its length is 0
};
struct SliceDraw {
  SliceStatus status;
  u64 longest;
};

class Slices {
 public:
  Slices(const Links &links, u64 lo, u64 hi) : links_(links), lo_(lo), hi_(hi) {}

  // The last row of a live trajectory, each as likely; kNoRow if the window is empty.
  u64 draw_end(Rng &rng) const {
    if (lo_ >= hi_) return kNoRow;
    for (u64 tries = 0; tries < kTries; ++tries) {
      u64 total = links_.ends().count(), rank = rng.below(total), slot;
      if (!total) break;
      links_.ends().select(&rank, 1, &slot);
      if (slot == kNoRow) continue;
      if (u64 id = links_.end_at(slot, lo_, hi_); id != kNoRow) return id;
    }
    u64 n = 0, drawn = kNoRow;  // the few there are keep moving
    links_.for_each_end(lo_, hi_, [&](u64 id) { drawn = rng.below(++n) ? drawn : id; });
    return drawn;
  }

  // n slices: lens[j] ids from ids[j * length], ascending.
  SliceDraw draw(Rng &rng, const SliceOptions &o, u64 n, u64 *ids, u64 *lens) const {
    SliceDraw result{SliceStatus::ok, 0};
    std::fill(lens, lens + n, 0);
    if (lo_ >= hi_ || !o.length) return {SliceStatus::none, 0};
    Lane lane[kTogether];
    std::vector<Live> live;
    bool scanned = false;
    u64 next = 0, m = 0;
    while (m < kTogether && next < n) lane[m++].begin(next++);
    while (m) {
      if (scanned) known(rng, o, live, lane, m);
      else if (o.by == SliceBy::trajectory) by_trajectory(rng, o, lane, m);
      else by_start(rng, o, lane, m);
      walk(o, lane, m, ids);
      for (u64 k = 0; k < m;) {
        Lane &l = lane[k];
        bool give_up = !l.on && ++l.tries >= kTries;
        if (give_up && !scanned) {  // rare ones are not found by chance
          if (!o.scan) return {SliceStatus::rare, 0};
          result.longest = scan(o, live);
          if (live.empty()) return {std::any_of(lens, lens + n, [](u64 len) { return len; }) ? SliceStatus::lapped : SliceStatus::none, result.longest};
          scanned = true;
          for (u64 i = 0; i < m; ++i) lane[i].tries = 0;
          give_up = false;
        }
        if (!l.on && !give_up) { ++k; continue; }
        if (give_up) result.status = SliceStatus::lapped;
        lens[l.j] = give_up ? 0 : l.len;
        if (next < n) lane[k++].begin(next++);
        else lane[k] = lane[--m];
      }
    }
    return result;
  }

  // From each anchor itself, every dilation-th row that follows it in its trajectory (backward: that came before), `steps` at
  // most: lens[j] ids from out[j * steps].
  void walk(const u64 *anchor, u64 n, u64 steps, u64 dilation, bool backward, u64 *out, u64 *lens) const {
    struct Follower { Links::Row at; u64 j, left; } f[kTogether];
    u64 next = 0, m = 0;
    auto begin = [&](Follower &to) {
      for (; next < n; ++next) {
        lens[next] = 0;
        if (!steps || anchor[next] < lo_ || anchor[next] >= hi_) continue;
        to = {links_.row(anchor[next]), next, dilation};
        links_.prefetch(to.at);
        out[next * steps] = anchor[next], lens[next++] = 1;
        return true;
      }
      return false;
    };
    while (m < kTogether && begin(f[m])) ++m;
    while (m)
      for (u64 k = 0; k < m;) {
        Follower &l = f[k];
        bool more = lens[l.j] < steps && (backward ? links_.to_previous(l.at, lo_) : links_.forward(l.at, hi_));
        if (more && --l.left == 0) out[l.j * steps + lens[l.j]++] = l.at.id, l.left = dilation;
        if (more) backward ? links_.prefetch(l.at) : links_.prefetch_next(l.at), ++k;
        else if (!begin(l)) f[k] = f[--m];
        else ++k;
      }
  }
  // How many rows of the trajectory up to `end` live: 0 if that does not.
  u64 rows(u64 end) const {
    if (end < lo_ || end >= hi_) return 0;
    const u64 first = links_.first_live(end, lo_);
    return first == kNoRow ? 0 : u64(links_.step(end)) - links_.step(first) + 1;
  }
  // The `length` rows of a trajectory of which the last lies `back` rows before `end`, ascending; false if they are not all there.
  bool stretch(u64 end, u64 back, u64 length, u64 *out) const {
    if (!length || end < lo_ || end >= hi_) return false;
    u64 id = back ? links_.ancestor(end, back, lo_) : end;
    for (u64 j = length; id != kNoRow; id = links_.previous(id, lo_)) {
      out[--j] = id;
      if (!j) return true;
    }
    return false;
  }

 private:
  static constexpr u64 kTogether = Ends::kTogether, kTries = 64;
  struct Live { u64 end, rows, upto; };  // a trajectory; upto: the weights before it and its own
  struct Lane {                          // one slice being drawn
    u64 j = 0, tries = 0, len = 0, left = 0, rows = 0, beyond = 0;  // len rows, the last of them `left` before `at`; rows in the trajectory; see by_start
    Links::Row at{0, 0}, first{0, 0};
    Skew depth{0};
    bool on = false;                     // still in the running in this round
    void begin(u64 slice) { j = slice, tries = 0, on = false; }
  };
  // step(lane) until it says false, for every lane with on, in turn.
  template <class Step> static void together(Lane *lane, u64 m, Step step) {
    u32 going = 0;
    for (u64 k = 0; k < m; ++k) going |= u32(lane[k].on) << k;
    while (going)
      for (u32 g = going; g; g &= g - 1) {
        u32 k = u32(std::countr_zero(g));
        if (!step(lane[k])) going &= ~(1u << k);
      }
  }
  // Ends for the lanes with on; from those that get none it is taken.
  void draw_ends(Rng &rng, Lane *lane, u64 m) const {
    u64 total = links_.ends().count(), rank[kTogether], slot[kTogether];
    for (u64 k = 0; k < m; ++k) rank[k] = rng.below(total);
    links_.ends().select(rank, m, slot);
    for (u64 k = 0; k < m; ++k)
      if (slot[k] != kNoRow) links_.prefetch({0, slot[k]});
    for (u64 k = 0; k < m; ++k) {
      if (!lane[k].on) continue;
      u64 id = slot[k] == kNoRow || !total ? kNoRow : links_.end_at(slot[k], lo_, hi_);
      lane[k].on = id != kNoRow;
      if (lane[k].on) lane[k].at = links_.row(id);
    }
  }
  // first, rows: the trajectory up to `at`, as far as it lives.
  void measure(Lane *lane, u64 m) const {
    for (u64 k = 0; k < m; ++k) lane[k].first = lane[k].at, lane[k].left = 0;
    together(lane, m, [&](Lane &l) {
      if (links_.towards_first(l.first, lo_)) {
        links_.prefetch(l.first);
        return l.on = ++l.left < Links::kMaxHops;
      }
      u64 depth = load(links_.at(l.at.slot).step, relaxed), first = load(links_.at(l.first.slot).step, relaxed);
      l.rows = depth - first + 1;
      l.on = depth >= first && l.rows <= hi_ - lo_;
      return false;
    });
  }
  struct Starts {  // what may be drawn of a trajectory of so many rows
    u64 length, left, right, n;
    Starts(const SliceOptions &o, u64 rows) {
      length = std::min(o.length, rows), left = std::min(o.left, length - 1), right = std::min(o.right, length - 1);
      n = o.strict && rows < o.length ? 0 : rows - length + 1 + left + right;
    }
  };
  // The start-th slice of the trajectory that ends `at`.
  static void choose(const SliceOptions &o, Lane &l, u64 start) {
    Starts s(o, l.rows);
    u64 from = std::max(start, s.left) - s.left, to = std::min(start + s.length - s.left, l.rows);
    l.len = to - from, l.left = l.rows - to;
  }
  void by_trajectory(Rng &rng, const SliceOptions &o, Lane *lane, u64 m) const {
    for (u64 k = 0; k < m; ++k) lane[k].on = true;
    draw_ends(rng, lane, m);
    measure(lane, m);
    for (u64 k = 0; k < m; ++k) {
      Lane &l = lane[k];
      if (!l.on) continue;
      u64 starts = Starts(o, l.rows).n;
      l.on = starts != 0;
      if (l.on) choose(o, l, rng.below(starts));
    }
  }
  // Every start stands under the row that its slice, uncut, ends with, or would if its trajectory went on: so a row is drawn, or an
  // end and how far beyond it, and refused if no start stands there.
  void by_start(Rng &rng, const SliceOptions &o, Lane *lane, u64 m) const {
    const u64 right = std::min(o.right, o.length - 1), left = std::min(o.left, o.length - 1), rows = hi_ - lo_;
    const u64 beyond = right ? links_.ends().count() * right : 0;
    bool simple = o.strict && left == 0 && beyond == 0;
    u64 of_ends = 0;
    for (u64 k = 0; k < m; ++k) {
      u64 x = rng.below(rows + beyond);
      lane[k].beyond = x < rows ? 0 : 1 + (x - rows) % right;
      lane[k].on = x >= rows, of_ends += lane[k].on;
      if (x < rows) links_.prefetch(lane[k].at = links_.row(lo_ + x));
    }
    if (of_ends) draw_ends(rng, lane, m);
    for (u64 k = 0; k < m; ++k) {
      Lane &l = lane[k];
      if (!l.beyond) l.on = !simple || load(links_.at(l.at.slot).step, relaxed) >= o.length - 1;
      l.len = o.length, l.left = 0;
    }
    if (simple) return;  // walk() finds out
    measure(lane, m);
    for (u64 k = 0; k < m; ++k) {
      Lane &l = lane[k];
      l.left = 0;
      if (!l.on) continue;
      if (l.beyond) {
        Starts s(o, l.rows);
        l.on = s.n && l.beyond <= s.right, l.len = s.length - l.beyond;
      } else if (l.rows < o.length) {  // it would begin before the trajectory, or is one of a short one
        u64 missing = o.length - l.rows, follow = 0, most = std::min(missing, left + 1);
        for (Links::Row r = l.at; follow < most && links_.forward(r, hi_);) ++follow;
        l.on = follow == missing ? missing <= left : !o.strict && follow <= left;
        l.len = l.rows;
      }
    }
  }
  void known(Rng &rng, const SliceOptions &o, const std::vector<Live> &live, Lane *lane, u64 m) const {
    for (u64 k = 0; k < m; ++k) {
      u64 x = rng.below(live.back().upto);
      auto t = std::upper_bound(live.begin(), live.end(), x, [](u64 v, const Live &e) { return v < e.upto; });
      u64 starts = Starts(o, t->rows).n;
      lane[k].on = true, lane[k].at = links_.row(t->end), lane[k].rows = t->rows;
      links_.prefetch(lane[k].at);
      choose(o, lane[k], o.by == SliceBy::trajectory ? rng.below(starts) : x - (t->upto - starts));
    }
  }
  // All that can be drawn from; returns the longest live length.
  u64 scan(const SliceOptions &o, std::vector<Live> &live) const {
    u64 longest = 0, total = 0, m = 0;
    Lane lane[kTogether];
    auto flush = [&] {
      measure(lane, m);
      for (u64 k = 0; k < m; ++k) {
        if (!lane[k].on) continue;
        longest = std::max(longest, lane[k].rows);
        u64 starts = Starts(o, lane[k].rows).n;
        if (starts) live.push_back({lane[k].at.id, lane[k].rows, total += o.by == SliceBy::start ? starts : 1});
      }
      m = 0;
    };
    links_.for_each_end(lo_, hi_, [&](u64 id) {
      lane[m].on = true, lane[m].at = links_.row(id);
      if (++m == kTogether) flush();
    });
    flush();
    return longest;
  }
  // From `at` to the slice's last row, then through the slice. on stays with those that have it whole.
  void walk(const SliceOptions &o, Lane *lane, u64 m, u64 *ids) const {
    for (u64 k = 0; k < m; ++k) {
      Lane &l = lane[k];
      u64 depth = l.on && l.left ? load(links_.at(l.at.slot).step, relaxed) : 0;
      if (l.left > depth) l.on = false;
      if (l.on) l.depth = Skew(depth), l.rows = 0;
    }
    together(lane, m, [&](Lane &l) {
      if (!l.left) return false;
      l.on = ++l.rows <= Links::kMaxHops && links_.towards(l.at, l.depth, l.left, lo_);
      links_.prefetch(l.at);
      return l.on;
    });
    for (u64 k = 0; k < m; ++k) lane[k].rows = lane[k].len;
    together(lane, m, [&](Lane &l) {
      ids[l.j * o.length + --l.rows] = l.at.id;
      if (!l.rows) return false;
      l.on = links_.back(l.at, load(links_.at(l.at.slot).prev, relaxed), lo_);
      links_.prefetch(l.at);
      return l.on;
    });
  }

  const Links &links_;
  u64 lo_, hi_;
};

}  // namespace shmbuf
