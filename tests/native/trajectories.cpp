// links.h and slices.h beside a plain model in ordinary memory: `make trajectories-run` and the other targets of the Makefile.
//
//   rounds      random streams over some tables, ends, wraps, CLEARs, transactions of up to three times the capacity; with -steps the
//               writer is killed at labelled steps and the transaction done again. After each: every row's predecessor, follower,
//               ancestors, first live row, end; every end, counted, listed and drawn. In the middle of one: what readers still see
//   draws       χ² of ends and slices against what the model says may be drawn, by chance and by the exact scan
//   moving      a trajectory that moves on into slots that were looked at already, while the ends are listed: found all the same
//   garbage     random words for links, bits and counts: no walk leaves the memory or goes on for ever
//   threads     a writer and drawers: every slice that `reserve` lets pass is consecutive rows of one trajectory
#ifdef SHMBUF_FAILPOINTS
#include "failpoint.h"
#undef FAILPOINT
#define FAILPOINT(name) ::passed(#name)
static void passed(const char *label);
#endif
#include "slices.h"
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <sys/mman.h>
#include <thread>

using namespace shmbuf;

static u64 round_seed;
[[noreturn]] static void fail(const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  std::fprintf(stderr, "VIOLATION: %s\n  again: --seed %lu --rounds 1\n", text, round_seed);
  _exit(1);
}
#define CHECK(condition, ...) ((condition) ? void() : fail(__VA_ARGS__))

struct Killed {};
static thread_local u64 dies_in = 0;  // labelled steps; 0: never
static std::map<std::string, u64> deaths;
#ifdef SHMBUF_FAILPOINTS
static void passed(const char *label) {
  if (dies_in && --dies_in == 0) {
    ++deaths[label];
    throw Killed{};
  }
}
constexpr bool kKills = true;
#else
constexpr bool kKills = false;
#endif

// ---- the model -------------------------------------------------------------------------------------------------
#include "trajectory_model.h"

static u64 total_looks, total_redone, total_cuts;
static void round_of(u64 seed) {
  Rng rng{mix64(seed ^ 0x5eed)};
  World w(seed, 1 + rng.below(rng.below(2) ? 40 : 1500), rng.below(3) == 0);
  for (u64 i = 0, n = 10 + rng.below(60); i < n; ++i) {
    if (rng.below(25) == 0) w.empty();
    if (rng.below(15) == 0) {  // another collector takes a slot
      u64 t = rng.below(w.tables);
      ++w.incarnation[t];
      for (u64 s = 0; s < w.streams; ++s) w.stream.erase({t, s});
    }
    w.transaction();
    Links l = w.links();
    w.look(l, w.lo_after(w.cursor), w.cursor, true);
  }
  total_looks += w.looks, total_redone += w.redone, total_cuts += w.cuts;
}

// ---- draws -----------------------------------------------------------------------------------------------------
static void put(World &w, std::initializer_list<std::pair<u64, u64>> trajectories) {  // (stream, rows), one after another
  for (auto [s, rows] : trajectories)
    for (u64 i = 0; i < rows; ++i) {
      Links::Span t{w.cursor, w.lo_after(w.cursor + 1)};
      Links l = w.links();
      l.evict(w.cursor, 1), l.append(w.table.data(), w.entries, t, w.cursor, w.key(0, s), i + 1 == rows), l.settle();
      w.learn(l, {0, s, i + 1 == rows}, w.cursor++, t.live_lo);
    }
}
static void draws(u64 seed) {
  round_seed = seed;
  {
    World w(seed, 10, false);
    w.tables = 1;
    put(w, {{0, 4}, {1, 5}, {2, 4}});  // three rows of the first are overwritten
    Links l = w.links();
    Slices s(l, 3, 13);
    Lists all = w.lists(3, 13);
    SliceOptions o{3, true, SliceBy::start, 0, 0};
    auto c = World::chances(all, o);
    CHECK(c.size() == 5 && c.count({4, 3}) && c.count({5, 3}) && c.count({6, 3}) && c.count({9, 3}) && c.count({10, 3}), "the model's starts");
    for (auto by : {SliceBy::start, SliceBy::trajectory}) o.by = by, w.check_slices(s, all, o, 20000, true, true);
    w.check_ends(s, all, 20000);
    o.length = 6;
    u64 ids[6], len;
    SliceDraw d = s.draw(w.rng, o, 1, ids, &len);
    CHECK(d.status == SliceStatus::none && d.longest == 5 && len == 0, "none is that long: %d, %lu", int(d.status), d.longest);
  }
  {  // one in 400 is long enough: found by the scan
    World w(seed, 1000, false);
    w.tables = 1;
    put(w, {{0, 12}, {1, 14}});
    for (u64 i = 0; i < 399; ++i) put(w, {{2, 1 + i % 2}});
    put(w, {{0, 9}});
    Links l = w.links();
    Slices s(l, 0, w.cursor);
    Lists all = w.lists(0, w.cursor);
    for (auto by : {SliceBy::start, SliceBy::trajectory})
      for (u64 length : {9, 12, 14}) w.check_slices(s, all, {length, true, by, length == 9 ? 2u : 0u, length == 12 ? 3u : 0u}, 20000, true, true);
    w.check_ends(s, all, 20000);
  }
  {  // in the middle of a transaction: the bits are there, the counts not yet
    World w(seed, 100, false);
    for (u64 id = 0; id < 60; ++id) {
      Links l = w.links();  // each forgets what it would have to settle
      l.append(w.table.data(), w.entries, Links::Span{id, 0}, id, w.key(0, id % 3), id % 7 == 0);
      w.learn(l, {0, id % 3, id % 7 == 0}, id, 0);
    }
    Links l = w.links();
    Slices s(l, 0, 60);
    Lists all = w.lists(0, 60);
    CHECK(l.ends().count() == 0, "counts without settle");
    w.check_ends(s, all, 10000);
    w.check_slices(s, all, {2, false, SliceBy::trajectory, 1, 1}, 10000, false, true);
  }
  {  // one entry for several streams
    Memory memory(Links::bytes(100));
    Links l(memory.at(), 100);
    Stream table[1] = {};
    auto put_row = [&](u64 id, u64 key, bool ended, u64 cuts, u32 flags, u32 prev) {
      u64 cut = l.append(table, 1, Links::Span{id, 0}, id, key, ended);
      CHECK(cut == cuts && l.flags(id) == flags && load(l.of(id).prev, relaxed) == prev, "row %lu: cut %lu, flags %u", id, cut, l.flags(id));
    };
    put_row(0, 1, true, 0, Link::kEnd, 0);
    put_row(1, 2, false, 0, 0, 0);                   // nobody is cut: the first one had ended
    put_row(2, 2, false, 0, 0, 1);
    put_row(3, 1, false, 1, 0, 0);
    put_row(4, 2, false, 1, Link::kHeadMissing, 0);  // the one that was cut, or so it may be
    put_row(5, 2, true, 0, Link::kHeadMissing | Link::kEnd, 1);
    put_row(6, 2, false, 0, 0, 0);                   // whose entry stays is known not to be
    u64 cut = l.append(table, 1, Links::Span{7, 0}, 7, 2, [](u64 j) { return 3 + j / 2; }, [](u64) { return false; });
    CHECK(cut == 1 && l.flags(8) == Link::kHeadMissing && l.previous(8, 0) == 7, "a record of one stream: cut %lu", cut);
    cut = l.append(table, 1, Links::Span{10, 0}, 10, 4, [](u64 j) { return 4 + j / 2; }, [](u64) { return false; });
    CHECK(cut == 2 && l.flags(12) == Link::kHeadMissing && l.previous(11, 0) == 10 && l.previous(13, 0) == 12,
          "no entry is left for the second stream of a transaction: cut %lu, flags %u", cut, l.flags(12));
  }
  for (u64 i = 0; i < 6; ++i) {
    World w(seed + i, 30 + 30 * i, false);
    for (u64 k = 0; k < 12; ++k) w.transaction();
    Links l = w.links();
    u64 lo = w.lo_after(w.cursor);
    Slices s(l, lo, w.cursor);
    Lists all = w.lists(lo, w.cursor);
    w.check_ends(s, all, 10000);
    for (u64 k = 0; k < 10; ++k) {
      SliceOptions o{1 + w.rng.below(k < 5 ? 4 : 10), k % 2 == 0, w.rng.below(2) ? SliceBy::start : SliceBy::trajectory, 0, 0};
      if (k % 3) o.left = w.rng.below(o.length + 1);
      if (k % 4) o.right = w.rng.below(o.length + 1);
      w.check_slices(s, all, o, 20000, true, true);
    }
  }
}

// ---- garbage ---------------------------------------------------------------------------------------------------
// Window [96, 160) of 64 slots, looked at from slot 32 on. When the first end is told of, the trajectory that ends in slot 31 goes on in slot 32.
static void moving() {
  World w(1, 64, false);
  w.tables = 1;
  put(w, {{0, 110}, {1, 49}});  // ids up to 158
  auto step = [&](bool ended) {
    Links l = w.links();
    l.evict(w.cursor, 1), l.append(w.table.data(), w.entries, {w.cursor, w.lo_after(w.cursor + 1)}, w.cursor, w.key(0, 2), ended), l.settle();
    ++w.cursor;
  };
  step(false);
  const u64 lo = 96, hi = w.cursor;
  u64 reserve = hi;
  Links reader(w.memory.at(), w.capacity, &reserve);
  std::vector<u64> found;
  reader.for_each_end(lo, hi, [&](u64 id) {
    if (found.empty()) ++reserve, step(false);
    found.push_back(id);
  });
  CHECK(hi == 160 && (found == std::vector<u64>{109, 158, 159}), "%lu of 3 ends are listed of trajectories that move on meanwhile", found.size());
}
static void garbage(u64 seed) {
  Rng rng{mix64(seed ^ 0xbad)};
  u64 capacity = 1 + rng.below(700);
  Memory memory(Links::bytes(capacity));
  Links l(memory.at(), capacity);
  u64 *word = reinterpret_cast<u64 *>(memory.at()), kind = rng.below(3);
  for (u64 i = 0; i < memory.bytes / 8; ++i) word[i] = kind == 0 ? rng.next() : kind == 1 ? rng.below(8) << 32 | rng.below(8) : rng.next() & rng.next() & 0x0000'03ff'0000'03ff;
  u64 lo = rng.below(3 * capacity), hi = lo + 1 + rng.below(capacity), ids[40 * 9], lens[40];
  Slices s(l, lo, hi);
  for (u64 k = 0; k < 40; ++k) {
    u64 id = lo + rng.below(hi - lo), found[] = {l.previous(id, lo), l.following(id, hi), l.ancestor(id, rng.below(50), lo), l.first_live(id, lo), s.draw_end(rng)};
    for (u64 f : found) CHECK(f == kNoRow || (f >= lo && f < hi), "garbage led out of the window");
    CHECK(found[1] == kNoRow || load(l.of(found[1]).prev, relaxed) == found[1] - id, "a follower that does not point back");
    CHECK(l.previous(lo - 1, lo) == kNoRow && l.following(hi, hi) == kNoRow, "a row outside has neighbours");
    ids[k] = id;
  }
  for (u64 k = 0; k < 8; ++k) {
    u64 anchors[40];
    std::copy(ids, ids + 40, anchors);
    s.walk(anchors, 40, 9, 1 + rng.below(2), rng.below(2), ids, lens);
    SliceOptions o{1 + rng.below(9), rng.below(2) != 0, k % 2 ? SliceBy::start : SliceBy::trajectory, rng.below(4), rng.below(4)};
    (void)s.draw(rng, o, 40, ids, lens);
    for (u64 j = 0; j < 40; ++j)
      for (u64 i = 0; i < lens[j]; ++i) CHECK(ids[j * o.length + i] >= lo && ids[j * o.length + i] < hi, "garbage in a slice");
    for (u64 j = 0; j < 40; ++j) ids[j] = anchors[j];
  }
}

// ---- threads ---------------------------------------------------------------------------------------------------
static u64 sliced, outdated;
static void threads(u64 seed, u64 ns) {
  Rng rng{mix64(seed ^ 0x7e)};
  const u64 capacity = 200 + rng.below(3000), streams = 1 + rng.below(30), odds = 5 + rng.below(100), length = 2 + rng.below(12);
  Memory memory(Links::bytes(capacity));
  std::vector<u64> data(capacity);  // stream << 48 | trajectory << 24 | row
  alignas(128) u64 reserve = 0, cursor = 0;
  u64 stop = 0;
  auto writer = [&] {
    Rng r{mix64(seed)};
    Links l(memory.at(), capacity);
    std::vector<Stream> table(64);
    std::vector<u64> trajectory(streams), row(streams), who, value;
    std::vector<u8> ended;
    while (!load(stop, acquire)) {
      u64 n = 1 + r.below(capacity / 4), first = cursor, to = first + n;
      who.clear(), ended.clear(), value.clear();
      while (who.size() < n)
        for (u64 s = r.below(streams), k = 1 + r.below(30), mix = r.below(2); k && who.size() < n; --k, s = mix ? (s + 1) % streams : s) {
          who.push_back(s), value.push_back(s << 48 | (trajectory[s] & 0xffffff) << 24 | row[s]++), ended.push_back(r.below(odds) == 0);
          if (ended.back()) row[s] = 0, ++trajectory[s];
        }
      store(reserve, to, relaxed);
      fence(seq_cst);
      l.evict(first, n);
      for (u64 j = 0; j < n; ++j) store(data[(first + j) % capacity], value[j], relaxed);
      l.append(table.data(), 64, {first, to - std::min(to, capacity)}, first, n, [&](u64 j) { return mix64(who[j] + 1); },
               [&](u64 j) { return ended[j] != 0; });
      l.settle();
      store(cursor, to, release);
      if (r.below(4) == 0) usleep(useconds_t(r.below(100)));
    }
  };
  auto drawer = [&](u64 life) {
    Rng r{mix64(seed + life)};
    const Links l(memory.at(), capacity);
    std::vector<u64> ids(64 * length), lens(64), copy(length), out(64 * length), walked(64);
    u64 good = 0, old = 0;
    while (!load(stop, acquire)) {
      u64 hi = load(cursor, acquire), most = load(reserve, relaxed), lo = most - std::min(most, capacity);
      if (lo >= hi) continue;
      Slices s(l, lo, hi);
      SliceOptions o{length, r.below(2) != 0, r.below(2) ? SliceBy::start : SliceBy::trajectory, 0, 0};
      if (r.below(2)) o.left = r.below(length), o.right = r.below(length);
      SliceDraw d = s.draw(r, o, 64, ids.data(), lens.data());
      if (d.status == SliceStatus::none) {
        CHECK(o.strict || load(reserve, relaxed) > most, "nothing to draw of %lu rows", hi - lo);
        continue;
      }
      auto sound = [&](const u64 *slice, u64 len) {
        for (u64 i = 0; i < len; ++i) copy[i] = load(data[slice[i] % capacity], relaxed);
        fence(acquire);
        if (slice[0] + capacity < load(reserve, relaxed)) return void(++old);
        for (u64 i = 1; i < len; ++i)
          CHECK(copy[i] == copy[i - 1] + 1 && slice[i] > slice[i - 1], "row %lu of stream %lu after row %lu of %lu", copy[i] & 0xffffff, copy[i] >> 48,
                copy[i - 1] & 0xffffff, copy[i - 1] >> 48);
        ++good;
      };
      for (u64 j = 0; j < 64; ++j) {
        CHECK(lens[j] <= length && (lens[j] || d.status == SliceStatus::lapped), "a slice of %lu rows", lens[j]);
        if (lens[j]) sound(&ids[j * length], lens[j]);
      }
      u64 anchors[64];
      for (u64 &a : anchors) a = lo + r.below(hi - lo);
      s.walk(anchors, 64, length, 1, false, out.data(), walked.data());
      for (u64 j = 0; j < 64; ++j) sound(&out[j * length], walked[j]);
      if (u64 end = s.draw_end(r); end == kNoRow) CHECK(load(reserve, relaxed) > most, "no end among %lu rows", hi - lo);
      else CHECK(end >= lo && end < hi, "drew the end %lu", end);
    }
    fetch_add(sliced, good, relaxed), fetch_add(outdated, old, relaxed);
  };
  std::vector<std::thread> all;
  all.emplace_back(writer);
  for (u64 i = 1; i < 4; ++i) all.emplace_back(drawer, i);
  for (u64 end = now_ns() + ns; now_ns() < end;) usleep(10'000);
  store(stop, u64(1), release);
  for (auto &t : all) t.join();
}

// ---- figures ---------------------------------------------------------------------------------------------------
static u64 cpu_ns() {  // of this thread: others run too
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return u64(t.tv_sec) * 1'000'000'000ull + u64(t.tv_nsec);
}
static void measure(u64 capacity) {
  constexpr u64 kRun = 64, kEntries = 256, kStreams = 64;
  Memory memory(Links::bytes(capacity));
  Links l(memory.at(), capacity);
  std::vector<Stream> table(kEntries);
  u64 cursor = 0;
  auto fill = [&](u64 rows, u64 runs_of, auto key) {
    u64 start = cpu_ns();
    for (u64 end = cursor + rows; cursor < end;) {
      u64 n = std::min<u64>(4096, capacity / 4) / kRun * kRun, to = cursor + n;
      Links::Span t{cursor, to - std::min(to, capacity)};
      l.evict(cursor, n);
      for (u64 at = cursor; at < to; at += runs_of)
        l.append(table.data(), kEntries, t, at, runs_of, [&](u64 j) { return mix64(1 + key(at + j)); }, [&](u64 j) { return key(at + j, true); });
      l.settle();
      cursor = to;
    }
    return double(cpu_ns() - start) / double(rows);
  };
  auto one = [](u64 id, bool end = false) { return end ? id % 1000 == 999 : id % 1; };
  auto mixed = [](u64 id, bool end = false) { return end ? id / kStreams % 1000 == 999 : id % kStreams; };
  auto draw = [&](SliceBy by) {
    Rng rng{1};
    std::vector<u64> ids(64 * 32), lens(64);
    Slices s(l, cursor - std::min(cursor, capacity), cursor);
    u64 best = ~0ull, all = 0, tries = 200;
    for (u64 i = 0; i < tries; ++i) {
      u64 start = cpu_ns();
      CHECK(s.draw(rng, {32, true, by, 0, 0}, 64, ids.data(), lens.data()).status == SliceStatus::ok, "measured draw");
      u64 took = cpu_ns() - start;
      best = std::min(best, took), all += took;
    }
    return double(all) / double(tries) / 1000;
  };
  fill(capacity + 64, kRun, one);
  double run_ns = fill(std::max<u64>(capacity, 1'000'000), kRun, one), by_t = draw(SliceBy::trajectory), by_s = draw(SliceBy::start);
  std::printf("%9lu rows: one stream %5.1f ns a row in runs of 64, 64 slices of 32: %6.1f us by trajectory, %6.1f by start\n", capacity, run_ns, by_t, by_s);
  fill(capacity, kRun, mixed);
  double mixed_ns = fill(std::max<u64>(capacity, 1'000'000), kRun, mixed), single_ns = fill(std::max<u64>(capacity, 1'000'000), 1, mixed);
  by_t = draw(SliceBy::trajectory), by_s = draw(SliceBy::start);
  std::printf("%9s       64 streams %4.1f ns, a record each %4.1f ns,  64 slices of 32: %6.1f us by trajectory, %6.1f by start\n", "", mixed_ns, single_ns, by_t, by_s);
}

int main(int argc, char **argv) {
  u64 seconds = 3, seed = 1, rounds = ~0ull, figures = 0;
  const std::pair<const char *, u64 *> options[] = {{"--seconds", &seconds}, {"--seed", &seed}, {"--rounds", &rounds}, {"--figures", &figures}};
  for (int i = 1; i < argc; ++i) {
    auto *option = std::find_if(std::begin(options), std::end(options), [&](auto &o) { return !std::strcmp(o.first, argv[i]); });
    if (option == std::end(options) || i + 1 >= argc) return std::puts("trajectories, and N after: --seconds --seed --rounds --figures"), 2;
    *option->second = std::strtoull(argv[++i], nullptr, 10);
  }
  moving();
  draws(1);  // fixed: χ² fails now and then by right
  u64 end = now_ns() + seconds * 1'000'000'000, round = 0;
  auto missing = [] {  // a label of links.h at which nobody has been killed
    for (const char *label : {"link_evicted", "link_counted", "link_cleared", "link_chained", "link_joined", "link_bits", "link_stream", "link_settled",
                              "link_recycling", "link_recycled", "link_claimed"})
      if (kKills && !deaths.count(label)) return label;
    return static_cast<const char *>(nullptr);
  };
  for (; round < rounds && (round == 0 || now_ns() < end || (missing() && round < 300)); ++round) {
    round_seed = seed + round;
    round_of(round_seed);
    garbage(round_seed);
    if (round % 64 == 0) threads(round_seed, 200'000'000);
  }
  if (figures)
    for (u64 capacity : {10'000ul, 1'000'000ul, 10'000'000ul}) measure(capacity);
  CHECK(rounds < 300 || !missing(), "nobody was killed at %s", missing());
  std::printf("ok: %lu rounds, %lu looks, %lu killed, %lu streams cut; %lu slices read beside the writer, %lu outdated\n", round, total_looks, total_redone,
              total_cuts, sliced, outdated);
}
