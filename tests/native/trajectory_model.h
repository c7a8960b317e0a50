// The plain model beside links.h and slices.h: what trajectories there are, and what a reader may be told about them. For trajectories.cpp,
// which says how it fails, dies and counts (CHECK, dies_in, kKills).
#pragma once
#include <cmath>
#include <map>
#include <sys/mman.h>

struct ModelRow {
  u64 id = kNoRow, pred = kNoRow, succ = kNoRow, trajectory = 0;
  u32 step = 0;
  bool ended = false, head_missing = false;
};
struct ModelStream { u64 last; bool ended; };
struct NewRow { u64 table, stream; bool ended; };
using Lists = std::map<u64, std::vector<u64>>;  // trajectory → its live rows

// Zeroed pages whose ends are guarded: what reads outside dies.
struct Memory {
  u64 bytes, pages;
  u8 *map;
  explicit Memory(u64 n) : bytes(align_up(n, 128)), pages(align_up(bytes, kPage)) {
    map = static_cast<u8 *>(mmap(nullptr, pages + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(map + kPage, pages, PROT_READ | PROT_WRITE);
  }
  ~Memory() { munmap(map, pages + 2 * kPage); }
  Memory(const Memory &) = delete;
  u8 *at() { return map + kPage + pages - bytes; }
};

struct World {
  Rng rng;
  u64 capacity, tables, streams, entries, end_odds;
  bool tight;  // tables so small that streams are cut: then the model takes over where the links say so
  Memory memory;
  std::vector<Stream> table;
  std::vector<ModelRow> rows;
  std::map<std::pair<u64, u64>, ModelStream> stream;
  std::vector<u64> incarnation;
  u64 cursor = 0, base = 0, trajectories = 0, cuts = 0, adopted = 0, redone = 0, looks = 0;

  World(u64 seed, u64 capacity_, bool tight_)
      : rng{mix64(seed)}, capacity(capacity_), tables(1 + rng.below(3)), streams(1 + rng.below(rng.below(2) ? 3 : 40)),
        entries(tight_ ? 1ull << rng.below(6) : 512), end_odds(2 + rng.below(rng.below(2) ? 8 : 200)), tight(tight_),
        memory(Links::bytes(capacity)), table(tables * entries), rows(capacity), incarnation(tables) {}
  Links links() { return Links(memory.at(), capacity); }
  u64 key(u64 t, u64 s) const { return mix64(incarnation[t] << 40 | (s + 1)); }
  u64 lo_after(u64 to) const { return std::max(base, to - std::min(to, capacity)); }
  const ModelRow &model(u64 id) const { return rows[id % capacity]; }

  // What one transaction appends: records of one stream each, or of rows of many.
  std::vector<NewRow> some_rows() {
    u64 n = rng.below(20) ? 1 + rng.below(capacity / 4 + 1) : 1 + rng.below(3 * capacity);
    std::vector<NewRow> r;
    while (r.size() < n) {
      u64 t = rng.below(tables), s = rng.below(streams), k = 1 + rng.below(std::min<u64>(n - r.size(), 70)), mix = rng.below(3);
      for (u64 i = 0; i < k; ++i)
        r.push_back({t, mix == 0 ? s : mix == 1 ? (s + i) % streams : rng.below(streams), rng.below(end_odds) == 0});
    }
    return r;
  }
  template <class Act> void until_done(Act act, bool clears = false) {
    for (;;) {
      dies_in = kKills && rng.below(2) ? 1 + rng.below(rng.below(2) ? 20 : 400) : 0;
      try {
        Links l = links();
        act(l);
        dies_in = 0;
        return;
      } catch (Killed) {
        dies_in = 0, ++redone;
      }
      Links reader = links();
      if (!clears) look(reader, lo_after(std::max(cursor, reserve)), cursor, false);
    }
  }
  u64 reserve = 0;
  void transaction() {
    std::vector<NewRow> r = some_rows();
    u64 n = r.size(), to = cursor + n, cut = 0;
    const Links::Span t{cursor, lo_after(to)};
    reserve = to;
    until_done([&](Links &l) { l.evict(cursor, n); });
    Links after_eviction = links();
    look(after_eviction, t.live_lo, cursor, true);
    u64 plan = rng.next();
    until_done([&](Links &l) {  // the same records in the same order, whoever does it
      Rng same{plan};
      cut = 0;
      for (u64 j = 0, e; j < n; j = e) {
        for (e = j + 1; e < n && r[e].table == r[j].table && same.below(30);) ++e;
        Stream *of = &table[r[j].table * entries];
        auto k = [&](u64 i) { return key(r[j].table, r[j + i].stream); };
        if (e - j == 1) cut += l.append(of, entries, t, cursor + j, k(0), r[j].ended);
        else cut += l.append(of, entries, t, cursor + j, e - j, k, [&](u64 i) { return r[j + i].ended; });
      }
      l.settle();
    });
    cuts += cut;
    Links l = links();
    for (u64 j = 0; j < n; ++j) learn(l, r[j], cursor + j, t.live_lo);
    CHECK(tight || cuts == 0, "%lu streams cut in a table with room", cuts);
    CHECK(adopted <= cuts || redone, "%lu trajectories begin anew, %lu streams were cut", adopted, cuts);
    cursor = to;
  }
  void learn(const Links &l, const NewRow &r, u64 id, u64 live_lo) {
    auto at = std::pair(r.table, r.stream);
    auto found = stream.find(at);
    bool known = found != stream.end(), goes_on = known && !found->second.ended;
    if (id >= live_lo) {
      ModelRow m;
      m.id = id, m.ended = r.ended;
      bool linked = goes_on && found->second.last >= live_lo, flag = l.flags(id) & Link::kHeadMissing;
      if (linked && tight && load(l.of(id).prev, relaxed) == 0) {
        CHECK(flag, "row %lu has lost its predecessor without a word", id);
        linked = false, ++adopted;
      }
      if (linked) {
        ModelRow &p = rows[found->second.last % capacity];
        m.pred = p.id, m.step = p.step + 1, m.head_missing = p.head_missing, m.trajectory = p.trajectory;
        p.succ = id;
      } else {
        m.head_missing = tight ? flag : goes_on;
        m.trajectory = ++trajectories;
      }
      rows[id % capacity] = m;
    }
    stream[at] = {id, r.ended};
  }
  void empty() {
    u64 next = align_up(cursor, capacity);
    until_done([](Links &l) { l.clear(); }, true);
    cursor = base = reserve = next;
    Links l = links();
    CHECK(l.ends().count() == 0 && l.ends().check() == 0, "ends after a CLEAR");
  }
  Lists lists(u64 lo, u64 hi) const {
    Lists all;
    for (u64 id = lo; id < hi; ++id)
      if (model(id).id == id) all[model(id).trajectory].push_back(id);
    return all;
  }

  // Rows [lo, hi) through links and through the model. At rest the bits and counts are those of the window.
  void look(const Links &l, u64 lo, u64 hi, bool rest) {
    if (lo >= hi) return;
    ++looks;
    Slices slices(l, lo, hi);
    Lists all = lists(lo, hi);
    std::vector<u64> ends, found;
    for (auto &[trajectory, ids] : all) {
      ends.push_back(ids.back());
      for (u64 p = 0; p < ids.size(); ++p) {
        u64 id = ids[p], next = p + 1 < ids.size() ? ids[p + 1] : kNoRow;
        const ModelRow &m = model(id);
        CHECK(l.step(id) == m.step, "row %lu: step %u, not %u", id, l.step(id), m.step);
        CHECK(l.flags(id) == (m.head_missing ? Link::kHeadMissing : 0u) + (m.ended ? Link::kEnd : 0u), "row %lu: flags %u", id, l.flags(id));
        CHECK(l.previous(id, lo) == (p ? ids[p - 1] : kNoRow), "row %lu follows %lu", id, l.previous(id, lo));
        CHECK(l.following(id, hi) == next, "row %lu is followed by %lu, not %lu", id, l.following(id, hi), next);
        CHECK(l.first_live(id, lo) == ids[0], "row %lu: first live row %lu, not %lu", id, l.first_live(id, lo), ids[0]);
        for (u64 i = 0; i < 4; ++i) {
          u64 k = i == 3 ? p : rng.below(p + 3);
          CHECK(l.ancestor(id, k, lo) == (k <= p ? ids[p - k] : kNoRow), "%lu rows before %lu there is %lu", k, id, l.ancestor(id, k, lo));
        }
        if (rest) CHECK(l.ends().test(id % capacity) == (next == kNoRow), "row %lu: end bit", id);
      }
    }
    std::sort(ends.begin(), ends.end());
    l.for_each_end(lo, hi, [&](u64 id) { found.push_back(id); });
    if (rest) {
      CHECK(found == ends, "%lu ends listed, %lu there", found.size(), ends.size());
      CHECK(l.ends().count() == ends.size() && l.ends().check() == 0, "%lu ends counted, %lu there", l.ends().count(), ends.size());
    } else {
      std::sort(found.begin(), found.end());
      found.erase(std::unique(found.begin(), found.end()), found.end());
      CHECK(found == ends, "in the middle of a transaction %lu ends are listed, %lu there", found.size(), ends.size());
    }
    u64 end = slices.draw_end(rng);
    CHECK(std::binary_search(ends.begin(), ends.end(), end), "drew the end %lu", end);
    check_forward(slices, all);
    SliceOptions o{1 + rng.below(12), rng.below(2) != 0, rng.below(2) ? SliceBy::start : SliceBy::trajectory, 0, 0};
    if (rng.below(2)) o.left = rng.below(o.length + 2);
    if (rng.below(2)) o.right = rng.below(o.length + 2);
    check_slices(slices, all, o, 40, rest);
  }
  void check_forward(const Slices &slices, const Lists &all) {
    std::vector<u64> anchors, want;
    u64 steps = 1 + rng.below(6), dilation = 1 + rng.below(3);
    std::vector<const std::vector<u64> *> of;
    for (auto &[t, ids] : all) {
      anchors.push_back(ids[rng.below(ids.size())]), of.push_back(&ids);
      if (anchors.size() == 40) break;
    }
    std::vector<u64> out(anchors.size() * steps), lens(anchors.size());
    for (bool backward : {false, true}) {
      slices.walk(anchors.data(), anchors.size(), steps, dilation, backward, out.data(), lens.data());
      for (u64 j = 0; j < anchors.size(); ++j) {
        want.clear();
        i64 p = std::lower_bound(of[j]->begin(), of[j]->end(), anchors[j]) - of[j]->begin(), by = backward ? -i64(dilation) : i64(dilation);
        for (; p >= 0 && p < i64(of[j]->size()) && want.size() < steps; p += by) want.push_back((*of[j])[u64(p)]);
        CHECK(want.size() == lens[j] && std::equal(want.begin(), want.end(), out.begin() + i64(j * steps)), "walked %lu rows %s from %lu, not %lu",
              lens[j], backward ? "back" : "on", anchors[j], want.size());
      }
    }
    for (auto &[t, ids] : all) {
      u64 back = rng.below(ids.size()), length = 1 + rng.below(ids.size() + 1), end = ids.size() - back;
      CHECK(slices.rows(ids.back()) == ids.size(), "a trajectory of %lu rows, not %lu", slices.rows(ids.back()), ids.size());
      std::vector<u64> got(length);
      bool there = slices.stretch(ids.back(), back, length, got.data());
      CHECK(there == (length <= end), "a stretch of %lu rows, %lu before the end of %lu: %d", length, back, ids.size(), there);
      if (there) CHECK(std::equal(got.begin(), got.end(), ids.begin() + i64(end - length)), "a stretch of %lu rows is another", length);
    }
  }
  // By (first id, length) → its probability.
  using Chances = std::map<std::pair<u64, u64>, double>;
  static Chances chances(const Lists &all, const SliceOptions &o) {
    Chances c;
    double trajectories = 0, starts = 0;
    for (int pass = 0; pass < 2; ++pass)
      for (auto &[t, ids] : all) {
        i64 rows = i64(ids.size()), length = std::min(i64(o.length), rows), n = 0;
        if (o.strict && rows < i64(o.length)) continue;
        i64 left = std::min(i64(o.left), length - 1), right = std::min(i64(o.right), length - 1);
        for (i64 s = -left; s + length <= rows + right; ++s) ++n;
        if (pass == 0) ++trajectories, starts += double(n);
        else
          for (i64 s = -left; s + length <= rows + right; ++s) {
            i64 from = std::max<i64>(s, 0), to = std::min(s + length, rows);
            c[{ids[u64(from)], u64(to - from)}] += o.by == SliceBy::start ? 1 / starts : 1 / trajectories / double(n);
          }
      }
    return c;
  }
  void check_slices(const Slices &slices, const Lists &all, const SliceOptions &o, u64 n, bool rest, bool chi = false) {
    Chances may = chances(all, o);
    std::map<std::pair<u64, u64>, u64> drawn;
    std::vector<u64> ids(n * o.length), lens(n);
    SliceDraw d = slices.draw(rng, o, n, ids.data(), lens.data());
    u64 longest = 0;
    for (auto &[t, r] : all) longest = std::max<u64>(longest, r.size());
    if (may.empty()) return CHECK(d.status == SliceStatus::none && d.longest == longest, "drew of nothing: %d, longest %lu", int(d.status), d.longest);
    CHECK(d.status == SliceStatus::ok, "draw: %d, length %lu strict %d by %d left %lu right %lu rest %d", int(d.status), o.length, o.strict, int(o.by),
          o.left, o.right, rest);
    for (u64 j = 0; j < n; ++j) {
      u64 *s = &ids[j * o.length];
      CHECK(may.count({s[0], lens[j]}), "drew %lu rows from %lu on", lens[j], s[0]);
      for (u64 i = 1; i < lens[j]; ++i) CHECK(model(s[i]).pred == s[i - 1], "slice: %lu after %lu", s[i], s[i - 1]);
      ++drawn[{s[0], lens[j]}];
    }
    if (!chi) return;
    double x = 0;
    for (auto &[slice, p] : may) {
      auto got = drawn.find(slice);
      double expected = p * double(n), off = (got == drawn.end() ? 0 : double(got->second)) - expected;
      x += off * off / expected;
    }
    double df = double(may.size() - 1);
    CHECK(x <= df + 6 * std::sqrt(2 * df) + 12, "χ² %.1f of %lu slices, length %lu strict %d by %d left %lu right %lu", x, may.size(), o.length, o.strict,
          int(o.by), o.left, o.right);
  }
  void check_ends(const Slices &slices, const Lists &all, u64 n) {
    std::map<u64, u64> drawn;
    for (u64 j = 0; j < n; ++j) ++drawn[slices.draw_end(rng)];
    double x = 0, expected = double(n) / double(all.size()), df = double(all.size() - 1);
    for (auto &[t, ids] : all) x += std::pow(double(drawn[ids.back()]) - expected, 2) / expected;
    CHECK(x <= df + 6 * std::sqrt(2 * df) + 12, "χ² %.1f of %lu ends", x, all.size());
  }
};
