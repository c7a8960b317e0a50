// What a reader does with one segment: draws rows, uniformly or by priority, and updates priorities. `Host` (handle.h) lends its
// help, its waits and its random numbers.
#pragma once
#include "epoch.h"
#include "gather.h"
#include "slices.h"
#include "transaction.h"

namespace shmbuf {

enum class Status : int {
  ok = 0, full, dropped, closed, destroyed, forked, concurrent, none_free, no_memory, interrupted, not_ready, timeout, empty, lapped, readonly,
  would_wait, no_priority, other_formula, bad_priority, unknown_row, limited, never, too_short, unmapped, device, no_device_ring
};

// Leaf and sums are changed one after another: an updater that dies between them leaves a stale path. He has begun an update
// and not ended it: who sees one more of these than were ever healed for a third of a second heals the whole tree. As one that was
// only slow may go just when another dies, the tree is healed once a second as long as any are open and updates go on.
class TreeMender {
 public:
  void look(Segment &s) {
    if (busy_.test_and_set(acquire)) return;  // another thread of this handle is at it
    look_alone(s);
    busy_.clear(release);
  }

 private:
  void look_alone(Segment &s) {
    Priorities &w = s.control().priorities;
    if (!load(w.ready, acquire)) return;
    u64 ended = load(w.ended, acquire), begun = load(w.begun, acquire), open = begun - ended, healed = load(w.healed, relaxed), now = now_ns();
    if (open < healed) compare_exchange(w.healed, healed, open, relaxed);  // one that was only slow
    if (open < least_ || !since_ || !open) since_ = now, least_ = open;
    if (!open || now - since_ < kPatience) return;
    const bool more = least_ > healed;
    if (!more && begun == begun_) return;
    u64 last = load(w.scrubbed_ns, relaxed);
    if (now - last < (more ? kPatience : 3 * kPatience) || !compare_exchange(w.scrubbed_ns, last, now, relaxed)) return;
    PriorityTree tree(s.tree, s.capacity);
    tree.keep_max(Formula(w).live_maximum);
    tree.scrub();
    compare_exchange(w.healed, healed, least_, relaxed);
    fetch_add<u64>(w.scrubs, 1, relaxed);
    begun_ = begun, since_ = 0;
  }
  static constexpr u64 kPatience = 300'000'000;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  u64 since_ = 0, least_ = 0, begun_ = 0;
};

struct UniformPick {
  const Segment &s;
  Rng rng;
  u64 operator()(u64, u64 k, u64 *ids) {
    const Window w = window(s);
    if (w.lo == w.hi) return 0;
    for (u64 j = 0; j < k; ++j) ids[j] = w.lo + rng.below(w.hi - w.lo);
    return k;
  }
};
struct PriorityPick {  // leaves: of the whole draw; of: its size, for strata
  const Segment &s;
  const PriorityTree &tree;
  Rng rng;
  float *leaves;
  u64 of;
  bool stratified;
  u64 operator()(u64 from, u64 k, u64 *ids) {
    constexpr u64 kAtOnce = 256;
    double u[kAtOnce];
    for (u64 b = 0; b < k; b += kAtOnce) {
      const u64 m = std::min(kAtOnce, k - b);
      for (u64 j = 0; j < m; ++j) u[j] = stratified ? (double(from + b + j) + rng.unit()) / double(of) : rng.unit();
      const u64 cursor = load(s.control().cursor, acquire);
      tree.draw(cursor, u, m, ids + b, leaves + from + b);
      for (u64 j = b; j < b + m; ++j)
        if (nowhere(ids[j]) && !again(cursor, from + j, ids + j)) return j;
    }
    return k;
  }
  // A draw that met sums over rows that a transaction has just evicted: another number, first of the same stratum. Many such in a
  // row: they are nearly all there is.
  bool again(u64 cursor, u64 j, u64 *id) {
    for (int tries = 0; tries < 1000 && nowhere(*id); ++tries) {
      const double u = stratified && tries < 8 ? (double(j) + rng.unit()) / double(of) : rng.unit();
      tree.draw(cursor, &u, 1, id, leaves + j);
    }
    return !nowhere(*id);
  }
  // Also a row that has never been stored: its leaf is damaged. The cursor passes a row before its leaf is published.
  bool nowhere(u64 id) const { return id >= load(s.control().cursor, acquire); }
};

template <class Host> class Sampling {
 public:
  explicit Sampling(Host &host) : h_(host), s_(host.segment()), tree_(s_.tree, s_.capacity), links_(s_.links, s_.links ? s_.capacity : 1, &s_.control().reserve) {
    if (keeps_priorities()) tree_.keep_max(Formula(words()).live_maximum);
  }

  // ---- drawing ----
  template <class Check>
  Status draw(u64 n, const OutColumn *columns, u32 n_columns, u64 *ids, u64 deadline, bool may_wait, Check check, const Outputs &out = {}) {
    return draw_with([&](Rng rng) { return UniformPick{s_, rng}; }, [&] { Window w = window(s_); return w.lo < w.hi; }, [] { return false; }, n, columns, n_columns, ids,
                     deadline, may_wait, check, out);
  }
  struct Weighting { double beta; bool stratified, by_batch; };
  // As draw; each row with probability leaf / sum. weight = (p / p_min)^-beta, p_min of the buffer, or of the batch.
  template <class Check>
  Status draw_by_priority(u64 n, const Weighting &how, const OutColumn *columns, u32 n_columns, u64 *ids, float *weights, u64 deadline, bool may_wait,
                          Check check, const Outputs &where = {}) {
    if (h_.ready() && !keeps_priorities()) {
      if (!load(words().formula.low, acquire)) return Status::not_ready;
      if (!may_wait) return Status::would_wait;
      if (Status s = until_kept(std::max(deadline, now_ns() + 1'000'000'000), check); s != Status::ok) return s;  // the schema has just come
    }
    h_.mend();
    auto any = [&] { return tree_.sum() > 0; };
    auto all_zero = [&] { Window w = window(s_); return w.lo < w.hi && quiet() && !any(); };
    Status out = draw_with([&](Rng rng) { return PriorityPick{s_, tree_, rng, weights, n, how.stratified}; }, any, all_zero, n, columns, n_columns, ids,
                           deadline, may_wait, check, where);
    if (out == Status::ok && n) weigh(weights, n, how);
    return out;
  }
  u64 fetch(u64 n, const OutColumn *columns, u32 n_columns, const u64 *ids, u8 *done, const Outputs &out = {}) {
    return fetch_in_parts(s_, columns, n_columns, n, ids, done, out);
  }

  // ---- the limiter ----
  // May n rows be sampled now? Waits until; who is granted and then draws nothing gives back by refund().
  template <class Check> Status acquire_samples(u64 n, u64 deadline, bool may_wait, Check check) {
    Limiter limiter(s_.control().limiter);
    if (!limiter.params().den) return h_.granted(0), Status::ok;  // not before: another thread may be about to refund
    if (h_.readonly()) return Status::readonly;
    const u64 version = limiter.version();
    if (!limiter.params().could_ever(n)) return Status::never;
    auto inserted = [&] { return h_.ready() ? Writer::inserted(s_) : 0; };
    auto may = [&] { return limiter.may_sample(inserted(), n); };
    for (typename Host::Waiting waiting(h_);;) {
      if (limiter.try_sample(inserted(), n)) {
        h_.granted(version);
        if (limiter.frees_writer(inserted())) h_.role().hand_over();  // L2
        return Status::ok;
      }
      if (!may_wait) return Status::would_wait;
      if (h_.ready()) h_.help_until(may);
      if (may()) continue;
      if (Status s = h_.abandoned(deadline, check); s != Status::ok) return s == Status::timeout ? Status::limited : s;
      u32 &word = h_.ready() ? s_.control().data_wait : s_.control().ready_wait;
      const u32 armed = arm(word);  // L3, pairs with publish() in transaction.h
      if (h_.ready()) h_.help_until(may);
      if (!may()) waiting.on(kForLimiter), futex_wait(word, armed, deadline);
    }
  }
  void refund_samples(u64 n) {  // what was counted, and by the limiter that there is
    Limiter limiter(s_.control().limiter);
    if (h_.granted() && h_.granted() == limiter.version()) limiter.refund(n), wake_all();
  }
  bool set_limiter(const LimiterParams &p) {
    const bool done = Limiter(s_.control().limiter).change(p);
    wake_all();
    return done;
  }

  // ---- choosing without copying: the ids may be gone by the time of the gather, which finds out ----
  u64 choose(u64 n, u64 *ids) {
    UniformPick pick{s_, Rng{h_.next_seed()}};
    return pick(0, n, ids);
  }
  u64 choose_by_priority(u64 n, bool stratified, u64 *ids, float *leaves) {
    PriorityPick pick{s_, tree_, Rng{h_.next_seed()}, leaves, n, stratified};
    return pick(0, n, ids);
  }
  SliceDraw choose_slices(const SliceOptions &o, u64 n, u64 *ids, u64 *lens) {
    Rng rng{h_.next_seed()};
    for (int tries = 0;; ++tries) {
      const Window w = window(s_);
      const SliceDraw out = Slices(links_, w.lo, w.hi).draw(rng, o, n, ids, lens);
      if (out.status != SliceStatus::none || tries == 1) return out;
      if (const Window now = window(s_); now.lo == w.lo && now.hi == w.hi) return out;  // it is final
    }
  }
  Slices slices() const {  // valid as long as this is
    const Window w = window(s_);
    return Slices(links_, w.lo, w.hi);
  }
  // Shared: word is one of the segment's; options that differ from those of the first user are refused.
  bool share_epoch(u32 which, u64 options) {
    u64 seen = 0;
    return compare_exchange(s_.control().epochs[which].options, seen, options, seq_cst) || seen == options;
  }
  Claim claim(Pair &word, u64 n, const EpochOptions &o, std::optional<u64> of = {}) {
    const Window w = window(s_);
    return Epoch(word).claim(n, w.lo, w.hi, o, of);
  }
  void weigh(float *leaves, u64 n, const Weighting &how) const {
    float least = *std::min_element(leaves, leaves + n);
    if (!how.by_batch)
      if (float m = tree_.min(); m > 0) least = std::min(least, m);  // the root may be a moment behind what was drawn
    for (u64 j = 0; j < n; ++j) {
      const double ratio = double(leaves[j]) / least;
      // In float, a third of the time, while rounding beta costs no more than rounding the result (3e-7).
      const auto power = [&] { return ratio < 1e4 ? std::pow(float(ratio), -float(how.beta)) : float(std::pow(ratio, -how.beta)); };
      leaves[j] = how.beta == 1 ? float(1 / ratio) : how.beta == 0.5 ? float(1 / std::sqrt(ratio)) : power();
    }
  }

  // ---- priorities ----
  bool keeps_priorities() const { return h_.ready() && load(words().ready, acquire); }
  // Until the tree covers every row, whoever has to make it so.
  template <class Check> Status keep_priorities(double alpha, double eps, bool live_maximum, u64 deadline, Check check) {
    const Pair want = Formula::pack(alpha, eps, live_maximum), none{};
    Pair &word = words().formula;
    if (h_.destroyed()) return Status::destroyed;
    if (!load(word.low, acquire)) {
      if (h_.readonly()) return Status::readonly;
      compare_exchange(word, none, want);
    }
    if (load(word.low, acquire) != want.low || load(word.high, relaxed) != want.high) return Status::other_formula;
    return until_kept(deadline, check);
  }
  // All or nothing: `bad` is the position of what cannot be taken. applied[j] = 0: the row has been overwritten.
  template <class Number> Status leaves_of(const Number *p, u64 n, float *leaves, u64 &bad) const {
    const Formula f(words());
    for (u64 j = 0; j < n; ++j) {
      const double v = double(p[j]), leaf = f.leaf(v);
      leaves[j] = float(leaf);
      // neither may p^alpha leave the float range, nor a row that is to be drawn become one that is not
      if (!(v >= 0) || !std::isfinite(v) || !std::isfinite(leaves[j]) || (leaf > 0 && leaves[j] == 0)) return bad = j, Status::bad_priority;
    }
    return Status::ok;
  }
  // What a new row gets is this at least: of a checkpoint, where the row that once had it is gone.
  Status raise_new_row(double priority) {
    if (h_.readonly()) return Status::readonly;
    float leaf;
    u64 bad;
    if (!keeps_priorities()) return Status::not_ready;
    if (const Status s = leaves_of(&priority, 1, &leaf, bad); s != Status::ok) return s;
    raise_highest(words(), leaf);
    return Status::ok;
  }
  template <class Number> Status set_priorities(const u64 *ids, const Number *p, u64 n, u8 *applied, u64 &bad) {
    if (h_.readonly()) return Status::readonly;
    if (h_.destroyed()) return Status::destroyed;
    if (!keeps_priorities()) return Status::not_ready;
    h_.mend();
    const u64 end = load(s_.control().cursor, acquire);
    for (u64 j = 0; j < n; ++j)
      if (ids[j] >= end) return bad = j, Status::unknown_row;
    std::vector<float> leaves(n);
    if (Status s = leaves_of(p, n, leaves.data(), bad); s != Status::ok) return s;
    Priorities &w = words();
    fetch_add<u64>(w.begun, 1, seq_cst);  // pairs with TreeMender
    const u64 done = tree_.set(ids, leaves.data(), n, applied);
    fetch_add<u64>(w.ended, 1, seq_cst);
    float highest = 0;
    for (u64 j = 0; j < n; ++j)
      if (applied[j]) highest = std::max(highest, leaves[j]);
    raise_highest(w, highest);
    fetch_add(w.applied, done, relaxed);
    if (done < n) fetch_add(w.stale, n - done, relaxed);
    return Status::ok;
  }
  // As they were set; NaN for a row that is not stored.
  void get_priorities(const u64 *ids, u64 n, double *out) const {
    const Formula f(words());
    std::vector<float> leaves(n);
    tree_.get(ids, n, leaves.data());
    const Window w = window(s_);
    for (u64 j = 0; j < n; ++j) {
      const bool fresh = leaves[j] == 0 && std::signbit(leaves[j]);  // committed, its priority just not published yet
      const bool stored = ids[j] >= w.live_lo && ids[j] < w.hi && !std::isnan(leaves[j]);
      out[j] = stored ? std::max(f.priority(fresh ? first_leaf(words(), f, tree_) : leaves[j]), 0.0) : std::numeric_limits<double>::quiet_NaN();
    }
  }
  const PriorityTree &tree() const { return tree_; }
  u64 scrub() { return tree_.scrub(); }

 private:
  template <class Check> Status until_kept(u64 deadline, Check check) {
    while (h_.ready() && !keeps_priorities()) {
      h_.help_until([&] { return keeps_priorities(); });
      if (keeps_priorities()) break;
      if (Status s = h_.abandoned(deadline, check); s != Status::ok) return s;
      h_.nap(200'000);
    }
    return Status::ok;
  }
  Priorities &words() const { return s_.control().priorities; }

  template <class NewPick, class Any, class AllZero, class Check>
  Status draw_with(NewPick new_pick, Any any, AllZero all_zero, u64 n, const OutColumn *columns, u32 n_columns, u64 *ids, u64 deadline, bool may_wait, Check check, const Outputs &out) {
    if (h_.destroyed()) return Status::destroyed;  // a learner that only samples must hear of it, too
    if (!h_.ready()) return Status::empty;
    u64 patience = 0;
    for (int tries = 0;; ++tries) {
      bool lapped;
      if (draw_in_parts(s_, columns, n_columns, out, n, h_.next_seed(), new_pick, ids, lapped) == n) return Status::ok;
      if (lapped) return Status::lapped;
      if (!may_wait) return Status::would_wait;
      // Nothing can be drawn: empty, or one transaction is overwriting all there is, or all priorities are 0. Help, then tell.
      h_.help_until(any);
      if (any() && tries < 3) continue;  // not for ever: a writer that is stopped in T2 leaves a sum over leaves that are gone
      const Window w = window(s_);
      if (w.live_lo == w.hi) return Status::empty;
      if (all_zero()) return Status::no_priority;
      if (!patience) patience = std::max(deadline, now_ns() + 1'000'000'000);  // a transaction is short, unless its writer is stopped
      if (Status s = h_.abandoned(patience, check); s != Status::ok) return s;
      h_.nap(50'000);
    }
  }
  bool quiet() const {  // no transaction between its plan and its end
    const Control &c = s_.control();
    const u64 seq = load(c.commit_seq, acquire);
    return load(c.done_seq, acquire) == seq && load(c.plan_seq, acquire) != seq + 1;
  }
  void wake_all() {
    Control &c = s_.control();
    fence(seq_cst);
    for (u32 *w : {&c.data_wait, &c.writer_wait, &c.ready_wait}) wake_if_armed(*w);
    for (u32 i = 0; i < s_.n_slots(); ++i) wake_if_armed(s_.slot(i).wait);
  }
  Host &h_;
  Segment &s_;
  PriorityTree tree_;
  Links links_;
};

}  // namespace shmbuf
