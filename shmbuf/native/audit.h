// Is what lies there sound? Reads only, every index bounded by what is mapped, so that it may be asked of a damaged segment and of
// one at work. What must hold at every instant is a finding when it does not; what holds only at rest (`quiet`: nothing changed from
// the first look to the last) is one only then. A sum may lag behind its leaves for a second after an updater's death, so a stale
// node is a finding when neither it nor a child has changed for longer than that.
#pragma once
#include "sampling.h"
#include "segment.h"
#include <string>
#include <vector>

namespace shmbuf {

class Auditor {
 public:
  std::vector<std::string> findings;
  u64 rings = 0, records = 0, rows = 0, leaves = 0, nodes = 0, links = 0, trajectories = 0;
  bool quiet = false;

  Auditor(Segment &s, const u8 *file) : s_(s), c_(s.control()), file_(file) {}
  // patience: how long a sum may lag behind, ns.
  template <class Nap> void run(bool ready, Nap nap, u64 patience = kStale) {
    patience_ = patience;
    header(ready);
    if (!ready) return;
    Stamp before = stamp();
    cursors();
    for (u32 i = 0; i < s_.n_slots(); ++i) ring(i);
    tree(nap);
    chains();
    // A transaction that nobody runs now, because its writer died or is stopped, is not rest.
    quiet = before == stamp() && before.plan != before.seq + 1 && before.done + 1 != before.seq;
    u64 all = n_always_;
    if (quiet) {
      all += n_at_rest_;
      for (auto &f : for_rest_) findings.push_back(std::move(f));
    }
    if (all > kShown) findings.resize(kShown), findings.push_back("… and " + std::to_string(all - kShown) + " more");
  }

  static constexpr u64 kStale = 1'300'000'000;

 private:
  static constexpr u64 kShown = 40;
  struct Stamp {
    u64 seq, plan, done, begun, ended, tails, heads;
    bool operator==(const Stamp &) const = default;
  };
  Stamp stamp() const {
    u64 tails = 0, heads = 0;
    for (u32 i = 0; i < s_.n_slots(); ++i) tails += load(s_.slot(i).tail, acquire), heads += load(s_.slot(i).head_pub, acquire);
    const Priorities &p = c_.priorities;
    return {load(c_.commit_seq, acquire), load(c_.plan_seq, acquire), load(c_.done_seq, acquire), load(p.begun, acquire), load(p.ended, acquire), tails, heads};
  }
  void wrong(std::string what) {
    if (++n_always_ <= kShown) findings.push_back(std::move(what));
  }
  void wrong_at_rest(std::string what) {
    if (++n_at_rest_ <= kShown) for_rest_.push_back(std::move(what));
  }
  template <class... T> static std::string text(const T &...parts) {
    std::string out;
    auto one = [&](const auto &p) {
      if constexpr (std::is_arithmetic_v<std::decay_t<decltype(p)>>) out += std::to_string(p);
      else out += p;
    };
    (one(parts), ...);
    return out;
  }

  void header(bool ready) {
    try {
      check_header(s_.map, s_.mapped_bytes);
      if (ready) check_built(s_.header(), file_, s_.header().built.file_bytes);
    } catch (const FormatError &e) {
      wrong(std::string("header: ") + e.what());
    }
  }
  void cursors() {
    const u64 cursor = load(c_.cursor, acquire), base = load(c_.base, acquire), reserve = load(c_.reserve, acquire), seq = load(c_.commit_seq, acquire);
    CommitBlock b{};
    for (int tries = 0; tries < 1000 && !read_block(s_, b, nullptr, 0); ++tries) {}
    const Window w = window(s_);
    rows = w.hi - w.live_lo;
    if (reserve < cursor && cursor > base) wrong(  // an emptying moves the cursor on alone
        text("cursor: ", cursor, " is beyond reserve ", reserve));
    if (base > cursor) wrong_at_rest(text("base: ", base, " is beyond the cursor ", cursor));
    if (b.cursor < cursor) wrong(text("cursor: ", cursor, " is beyond the committed one, ", b.cursor));
    if (b.base > b.cursor) wrong(text("commit block: base ", b.base, " is beyond cursor ", b.cursor));
    if (b.n_slots > s_.header().max_collectors) wrong(text("commit block: ", b.n_slots, " rings of at most ", s_.header().max_collectors));
    if (b.write_count > b.rows_total) wrong(text("commit block: write_count ", b.write_count, " of ", b.rows_total, " rows ever stored"));
    const u64 done = load(c_.done_seq, acquire), plan = load(c_.plan_seq, acquire), later = load(c_.commit_seq, acquire);
    if (done > later) wrong(text("done_seq: ", done, " is beyond commit_seq ", later));
    if (plan > later + 1) wrong(text("plan_seq: ", plan, " is beyond the one after commit_seq ", later));
    u64 odd = load(c_.edit_word, acquire) & 1;
    for (u32 &stripe : s_.edits().stripe) odd += load(stripe, acquire) & 1;
    if (odd) wrong_at_rest(text("edits: ", odd, " counters are odd, and nobody edits"));
    if (done + 1 < seq) wrong_at_rest(text("done_seq: ", done, " beside commit_seq ", seq));
    if (b.seq != seq) wrong_at_rest(text("commit block: seq ", b.seq, ", commit_seq ", seq));
    if (done == seq && cursor != b.cursor) wrong_at_rest(text("cursor: ", cursor, ", committed ", b.cursor, ", nothing in progress"));
  }
  void ring(u32 i) {
    const Slot &slot = s_.slot(i);
    ++rings;
    const u64 before = load(slot.head_pub, acquire);
    const CommitBlock &b = s_.block(load(c_.commit_seq, acquire));
    const u64 head = i < b.n_slots ? load(b.slot[i].head, relaxed) : 0, stored = i < b.n_slots ? load(b.slot[i].stored_rows, relaxed) : 0;
    const u64 tail = load(slot.tail, acquire);
    std::string bad;
    u64 n = 0;
    if (before > head) bad = text("published head ", before, " is beyond the committed one, ", head);
    else if (head > tail || tail - head > s_.ring_bytes) bad = text("head ", head, ", tail ", tail, ", ", s_.ring_bytes, " bytes");
    else if (head % kRecordAlign || tail % kRecordAlign) bad = text("head ", head, ", tail ", tail, ": not multiples of ", kRecordAlign);
    for (u64 at = head; bad.empty() && at != tail; ++n) {
      Record r = record_at(s_.ring(i), s_.ring_bytes, at);
      if (!well_formed(r, tail - at, s_.ring_bytes, s_.row_bytes, has_device_ring(s_, i))) bad = text("record at ", at, ": kind ", r.kind, ", ", r.n_rows, " rows, ", r.bytes, " bytes");
      at += r.bytes;
    }
    if (bad.empty() && stored > load(slot.put_rows, acquire)) bad = text(stored, " rows stored of ", load(slot.put_rows, acquire), " put");
    records += n;
    if (bad.empty()) return;
    if (load(slot.head_pub, acquire) == before && load(slot.tail, acquire) == tail) wrong_at_rest(text("ring ", i, ": ", bad));
  }
  template <class Nap> void tree(Nap nap) {
    const Priorities &p = c_.priorities;
    if (!load(p.ready, acquire)) return;
    PriorityTree tree(s_.tree, s_.capacity);
    tree.keep_max(Formula(p).live_maximum);
    nodes = tree.nodes();
    std::vector<bool> live(s_.capacity);
    const Window w = window(s_);
    for (u64 id = w.lo; id < w.hi; ++id) {
      const float leaf = tree.leaf(id % s_.capacity);
      const bool own = tree.is_of(id);
      if (id + s_.capacity < load(c_.reserve, acquire)) continue;  // overwritten meanwhile
      live[id % s_.capacity] = true, ++leaves;
      if (!own) wrong_at_rest(text("leaf of row ", id, ": it belongs to another row"));  // an emptying changes them before it is committed
      else if (!(leaf >= 0) || !std::isfinite(leaf)) wrong(text("leaf of row ", id, ": ", leaf));
      else if (leaf == 0 && std::signbit(leaf)) wrong_at_rest(text("leaf of row ", id, ": never published"));
    }
    for (u64 slot = 0; slot < s_.capacity; ++slot)
      if (!live[slot] && tree.leaf(slot) > 0) wrong_at_rest(text("leaf of slot ", slot, ": ", tree.leaf(slot), ", but no row lies there"));
    struct Place { u32 level; u64 index, print; };
    std::vector<Place> stale;
    tree.each_stale([&](u32 l, u64 i, u64 print) { stale.push_back({l, i, print}); });
    for (const u64 since = now_ns(); !stale.empty() && now_ns() - since < patience_;) {
      nap();
      std::erase_if(stale, [&](const Place &at) { u64 print; return !tree.is_stale(at.level, at.index, print) || print != at.print; });
    }
    // In a transaction sums are too large from T2 to T6; of an updater that died nobody need have taken notice yet.
    const u64 begun = load(p.begun, acquire), ended = load(p.ended, acquire);
    if (begun - ended > load(p.healed, acquire)) return;
    for (const Place &at : stale) wrong_at_rest(text("tree, level ", at.level, ", node ", at.index, ": not the sum of what is below"));
  }
  void chains() {
    if (!s_.links) return;
    const Links links_now(s_.links, s_.capacity);
    const Window w = window(s_);
    u64 open = 0;
    auto live = [&](u64 id) { return id + s_.capacity >= load(c_.reserve, acquire) && id >= load(c_.base, acquire); };
    for (u64 id = w.lo; id < w.hi; ++id) {
      const Link &l = links_now.of(id);
      const u64 back = load(l.prev, relaxed), step = load(l.step, relaxed), next = load(l.next, relaxed);
      open += next == 0;
      if (!back) continue;
      if (back >= s_.capacity) {
        if (live(id)) wrong(text("link of row ", id, ": ", back, " rows back, of ", s_.capacity));
        continue;
      }
      if (back > id - w.lo) continue;  // its predecessor is not stored any more
      ++links;
      const Link &before = links_now.of(id - back);
      const u64 on = load(before.next, relaxed), depth = load(before.step, relaxed);
      if (!live(id - back)) continue;
      if (on != back) wrong(text("link of row ", id - back, ": ", on, " rows on, but row ", id, " says ", back));
      else if (depth + 1 != step) wrong(text("link of row ", id, ": step ", step, " after step ", depth));
    }
    links_now.for_each_end(w.lo, w.hi, [&](u64) { ++trajectories; });
    if (trajectories != open) wrong_at_rest(text("links: ", open, " rows without a successor, ", trajectories, " last rows marked"));
    if (u64 n = links_now.ends().check()) wrong_at_rest(text("links: ", n, " counts of last rows differ from the marks"));
  }

  Segment &s_;
  Control &c_;
  const u8 *file_;
  std::vector<std::string> for_rest_;
  u64 n_always_ = 0, n_at_rest_ = 0, patience_ = kStale;
};

}  // namespace shmbuf
