// One program over the real headers, without Python. Collectors, writers and readers share one segment, updaters and drawers one
// tree: as threads, so that TSan sees them, or (--processes) as forked processes, of which one is killed every few milliseconds.
// Every round has another geometry, drawn from the seed. What is checked, and by whom:
//
//   writers      after every transaction, holding the role: the rows of each ring are the next ones, exactly once, in order, byte
//                for byte; skips are counted; heads, cursor, base and reserve agree with the commit block            (audit)
//   collectors   the result in a record is the id under which that very row is read back, or DROPPED after a skip
//   readers      every drawn row is byte for byte a row that was put; ids of one ring grow with its rows; no word goes back
//   updaters     a priority is found only under the id it was set for; zero and fresh leaves are never drawn; at rest no node
//                differs from its children, and as many of 4,096 evenly spread draws fall on each leaf as its share
#if defined(__SANITIZE_THREAD__)
// TSan does not know that handing over a file lock orders memory. Until registry.h says so itself, its calls come here.
#include <atomic>
#include <fcntl.h>
inline int ordering_fcntl(int fd, int command, struct flock *l) {
  static std::atomic<int> edge{0};
  edge.fetch_add(1);
  int r = fcntl(fd, command, l);
  edge.fetch_add(1);
  return r;
}
#define fcntl ordering_fcntl
#endif
#include "handle.h"
#include "priority_tree.h"
#undef fcntl
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <functional>
#include <sys/wait.h>
#include <thread>

using namespace shmbuf;

constexpr u32 kMaxRings = 16;
struct Geometry { u64 seed, capacity, row_bytes, ring_bytes, collectors; };
struct Audit { u64 next[kMaxRings], dropped; };  // per ring: the number of the row that must come next
struct Board {                                   // shared by all actors
  u32 stop;
  u64 audited;
  Audit audit[2];                                // selected like the commit block: an auditor may be killed too
  u64 acked[kMaxRings], clears, skips;
  u64 rows, records, draws, checked, lapped, swept;
  u64 tree_first, tree_cursor, tree_reserve, updates, stale, drawn;
};
static Board *board;
static Geometry g;
static bool processes;
static u64 seconds_per_round = 1;

[[noreturn]] static void fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  char text[512];
  std::vsnprintf(text, sizeof text, format, args);
  std::fprintf(stderr, "VIOLATION: %s\n  round: --seed %" PRIu64 " --rounds 1 --capacity %" PRIu64 " --row-bytes %" PRIu64 " --ring-bytes %" PRIu64
               " --collectors %" PRIu64 "%s\n", text, g.seed, g.capacity, g.row_bytes, g.ring_bytes, g.collectors, processes ? " --processes" : "");
  _exit(1);
}
#define CHECK(condition, ...) ((condition) ? void() : fail(__VA_ARGS__))
static bool stopped() { return load(board->stop, acquire) != 0; }
static void count(u64 &what, u64 n = 1) { fetch_add(what, n, relaxed); }

// ---- actors ----------------------------------------------------------------------------------------------------
using Body = std::function<void(u64 life)>;  // life: another number each time it is started

static void run(const std::vector<Body> &bodies, const std::function<u64()> &progress) {
  store(board->stop, 0u, release);
  u64 end = now_ns() + seconds_per_round * 1'000'000'000, moved = now_ns(), seen = progress(), life = g.seed;
  auto watch = [&] {
    if (u64 p = progress(); p != seen) seen = p, moved = now_ns();
    CHECK(now_ns() - moved < 20'000'000'000, "nothing has moved for 20 s (%" PRIu64 ")", seen);
  };
  if (!processes) {
    std::vector<std::thread> threads;
    for (auto &body : bodies) threads.emplace_back(body, life++);
    while (now_ns() < end) usleep(20'000), watch();
    store(board->stop, 1u, release);
    for (auto &t : threads) t.join();
    return;
  }
  std::vector<pid_t> pids(bodies.size());
  auto start = [&](u64 i) {
    pids[i] = fork();
    CHECK(pids[i] >= 0, "fork: %s", std::strerror(errno));
    if (pids[i] == 0) bodies[i](life), _exit(0);
    ++life;
  };
  auto reap = [&](u64 i, bool killed) {
    int status;
    waitpid(pids[i], &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    if (!(killed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) fail("actor %" PRIu64 " ended with status %#x", i, status);
  };
  for (u64 i = 0; i < bodies.size(); ++i) start(i);
  Rng rng{g.seed};
  while (now_ns() < end) {
    usleep(useconds_t(rng.below(8'000)));
    u64 i = rng.below(bodies.size());
    kill(pids[i], SIGKILL);
    reap(i, true);
    start(i);
    watch();
  }
  store(board->stop, 1u, release);
  for (u64 i = 0; i < bodies.size(); ++i) reap(i, false);
}

// ---- rows ------------------------------------------------------------------------------------------------------
static std::vector<u64> cuts;  // columns of every awkward size: [cuts[i], cuts[i + 1]); the first two are `who` and `number`

static void make_row(u8 *row, u64 who, u64 number) {
  std::memcpy(row, &who, 8), std::memcpy(row + 8, &number, 8);
  for (u64 o = 16; o < g.row_bytes; o += 8) {
    u64 word = mix64(who << 56 ^ number << 12 ^ o);
    std::memcpy(row + o, &word, 8);
  }
}
static bool is_row(const u8 *row, u64 who, u64 number) {
  std::vector<u8> want(g.row_bytes);
  make_row(want.data(), who, number);
  return std::memcmp(row, want.data(), g.row_bytes) == 0;
}
struct Batch {  // rows read, packed column by column as the reader leaves them
  std::vector<std::vector<u8>> data;
  std::vector<OutColumn> columns;
  std::vector<u8> row;
  explicit Batch(u64 n) : row(g.row_bytes) {
    for (u64 c = 0; c + 1 < cuts.size(); ++c) data.emplace_back(n * (cuts[c + 1] - cuts[c]));
    for (u64 c = 0; c + 1 < cuts.size(); ++c) columns.push_back({cuts[c], cuts[c + 1] - cuts[c], data[c].data()});
  }
  std::pair<u64, u64> check(u64 j, u64 id) {
    for (auto &c : columns) std::memcpy(row.data() + c.offset, c.data + j * c.bytes, c.bytes);
    u64 who, number;
    std::memcpy(&who, row.data(), 8), std::memcpy(&number, row.data() + 8, 8);
    CHECK(who < kMaxRings && is_row(row.data(), who, number), "torn row: id %" PRIu64 " who %" PRIu64 " number %" PRIu64, id, who, number);
    count(board->checked);
    return {who, number};
  }
};

// ---- the segment -----------------------------------------------------------------------------------------------
static int reopen(int fd) {
  int again = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC);
  CHECK(again >= 0, "reopen: %s", std::strerror(errno));
  return again;
}
static int make_file() {  // formatted and built
  int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  CHECK(fd >= 0, "O_TMPFILE in /dev/shm: %s", std::strerror(errno));
  Header h{};
  h.capacity = g.capacity, h.ring_bytes_asked = g.ring_bytes, h.max_collectors = u32(g.collectors + 1), h.max_members = 8;
  ConfigLayout at(h.max_collectors, h.max_members, 6);
  CHECK(posix_fallocate(fd, 0, i64(at.bytes)) == 0, "posix_fallocate: too little /dev/shm?");
  Segment s;
  s.map = map_file(fd, at.bytes, false);
  format(s.map, h, reinterpret_cast<const u8 *>("driver"), 6);
  int e = build(fd, s, reinterpret_cast<const u8 *>("schema"), 6, g.row_bytes, u32(cuts.size() - 1));
  CHECK(e == 0, "build: %s", std::strerror(e));
  munmap(s.map, at.bytes);
  return fd;
}
// One mapping for all threads: TSan sees no race through a second address of the same memory.
static Segment map_segment(int fd) {
  Segment s;
  s.mapped_bytes = file_size(fd), s.map = map_file(fd, s.mapped_bytes, false);
  check_header(s.map, s.mapped_bytes);
  check_built(s.header(), s.map, s.mapped_bytes);
  const Built &b = s.header().built;
  s.capacity = g.capacity, s.row_bytes = b.row_bytes, s.ring_bytes = b.ring_bytes;
  s.rows = s.map + b.rows_offset, s.rings = s.map + b.rings_offset;
  return s;
}

// Called by whoever holds the role before each of its transactions, hence after each of anybody's.
static void audit(const Segment &s) {
  const Control &c = s.control();
  u64 seq = load(c.commit_seq, acquire), n = s.capacity;
  if (seq == board->audited) return;
  CHECK(seq == board->audited + 1, "commit_seq went from %" PRIu64 " to %" PRIu64, board->audited, seq);
  const CommitBlock &b = s.block(seq), &was = s.block(seq - 1);
  Audit &a = board->audit[seq & 1];
  a = board->audit[(seq - 1) & 1];
  auto before = [&](u32 i) { return i < was.n_slots ? was.slot[i] : BlockSlot{}; };
  u64 id = was.cursor;
  if (b.kind == kPlanClear) {
    CHECK(b.cursor == align_up(id, n) && b.base == b.cursor && b.clears == was.clears + 1, "CLEAR moved the cursor to %" PRIu64, b.cursor);
    id = b.cursor;
  }
  for (u32 d = 0; d < b.n_slots; ++d) {
    u32 i = (b.start + d) % b.n_slots;
    u64 stored = b.slot[i].stored_rows - before(i).stored_rows, skipped = b.slot[i].skipped_rows - before(i).skipped_rows;
    a.next[i] += skipped, a.dropped += skipped;
    CHECK(b.kind == kPlanRows || stored + skipped == 0, "CLEAR stored or skipped rows of ring %u", i);
    for (u64 j = 0; j < stored; ++j, ++id, ++a.next[i])
      if (id + n >= b.cursor)
        CHECK(is_row(s.row(id), i, a.next[i]), "id %" PRIu64 " is not row %" PRIu64 " of ring %u: lost, doubled, torn or out of order", id, a.next[i], i);
    u64 tail = load(s.slot(i).tail, acquire), head = b.slot[i].head;
    CHECK(head <= tail && tail - head <= s.ring_bytes, "ring %u: head %" PRIu64 " tail %" PRIu64, i, head, tail);
    CHECK(load(s.slot(i).head_pub, relaxed) == head, "ring %u: head_pub is not the committed head", i);
  }
  CHECK(id == b.cursor && load(c.cursor, relaxed) == id && load(c.base, relaxed) == b.base, "cursor %" PRIu64 " after rows up to %" PRIu64, b.cursor, id);
  CHECK(std::max(load(c.reserve, relaxed), b.base) >= b.cursor, "reserve behind cursor %" PRIu64, b.cursor);
  CHECK(load(c.done_seq, relaxed) == seq && b.seq == seq && b.malformed == 0, "block %" PRIu64 ": %" PRIu64 " malformed", seq, b.malformed);
  std::atomic_ref<u64>(board->audited).store(seq, release);
}

struct Member_ {  // one description, one role: what threads of one handle share
  Segment &s;
  int fd;
  WriterRole role;
  Member_(Segment &segment, int file) : s(segment), fd(reopen(file)), role(segment) { role.open(fd, describe_self(), -1); }
  ~Member_() { close(fd); }
  template <class Enough> WriterRole::Outcome help(Enough enough) {
    return role.help([&] { return audit(s), enough(); });
  }
  // As in handle.h: help, else arm, look again, sleep. False when the round ends.
  template <class Met, class Before> bool wait(u32 &word, Met met, Before before) {
    for (;;) {
      help(met);
      if (met()) return true;
      if (stopped()) return false;
      before();
      store(word, 1u, relaxed);
      fence(seq_cst);
      if (!met()) futex_wait(word, 1);
    }
  }
};

static void writer(Member_ &m, u64 life) {
  Rng rng{life};
  Control &c = m.s.control();
  while (!stopped()) {
    auto out = m.help(stopped);
    if (rng.below(8) == 0) {
      static std::mutex registry;  // threads of one description are serialised, as by the handle's mutex
      std::lock_guard<std::mutex> guard(registry);
      count(board->swept, Registry(m.s, m.fd).sweep(-1));
    }
    if (out == WriterRole::Outcome::worked) continue;
    store(c.writer_wait, 1u, relaxed);
    fence(seq_cst);
    if (out == WriterRole::Outcome::busy || !Writer::runnable(m.s)) futex_wait(c.writer_wait, 1);
  }
}

static void collector(Segment &s, int file, u64 life) {
  Member_ m(s, file);
  Registry registry(s, m.fd);
  Rng rng{life};
  std::vector<u8> staging;
  Batch one(1);
  while (!stopped()) {
    u32 i;
    auto got = registry.claim_slot(describe_self(), i);
    if (got != Registry::Claim::ok) {
      CHECK(got == Registry::Claim::none_free, "claim: %s", std::strerror(errno));
      m.help([] { return false; });
      count(board->swept, registry.sweep(-1));
      continue;
    }
    Slot &slot = s.slot(i);
    Producer p;
    p.open(slot, s.ring(i), s.ring_bytes, s.row_bytes);
    CHECK(p.used() == 0, "slot %u was freed with undrained rows", i);
    u64 most = p.max_rows_per_record(), number = load(board->acked[i], acquire), skips = 0;
    if (processes) {  // the one before may have been killed between its last tail and our board
      const BlockSlot &b = s.block(load(s.control().commit_seq, acquire)).slot[i];
      u64 truth = i < s.block(load(s.control().commit_seq, acquire)).n_slots ? load(b.stored_rows, relaxed) + load(b.skipped_rows, relaxed) : 0;
      CHECK(truth >= number && truth <= number + most, "ring %u: %" PRIu64 " rows acknowledged, %" PRIu64 " there", i, number, truth);
      store(board->acked[i], number = truth, release);
    }
    for (u64 records = 1 + rng.below(400); records && !stopped(); --records) {
      u64 dice = rng.below(100), n = dice < 70 ? 1 + rng.below(std::min<u64>(most, 4)) : dice < 96 ? 1 + rng.below((most + 3) / 4) : most;
      bool clear = rng.below(300) == 0, drop_oldest = rng.below(4) == 0;
      u64 need = clear ? sizeof(Record) : record_bytes(n, s.row_bytes);
      auto room = [&] { return p.has_room(need); };
      auto skip = [&] {
        if (drop_oldest) store(slot.skip_to, p.skip_target(need), release), ++skips, count(board->skips);
      };
      if (!room() && rng.below(16) == 0) continue;  // full="error"
      if (!room() && !m.wait(slot.wait, room, skip)) break;
      u64 at = p.tail(), end;
      if (clear) {
        count(board->clears);
        end = p.publish_clear(0);
      } else {
        staging.resize(n * s.row_bytes);
        for (u64 j = 0; j < n; ++j) make_row(&staging[j * s.row_bytes], i, number + j);
        std::vector<Column> columns;
        for (u64 k = 0; k + 1 < cuts.size(); ++k) columns.push_back({cuts[k], cuts[k + 1] - cuts[k], &staging[cuts[k]], i64(s.row_bytes)});
        end = p.publish_rows(columns.data(), u32(columns.size()), 0, n);
        store(board->acked[i], number += n, release);
        count(board->rows, n);
      }
      count(board->records);
      if (rng.below(2)) fence(seq_cst), wake_if_armed(s.control().writer_wait);
      if (rng.below(16)) continue;
      auto committed = [&] { return load(slot.head_pub, acquire) >= end; };
      if (!m.wait(slot.wait, committed, [] {})) break;
      u64 first = p.result(at), id = first + n - 1;
      CHECK(first != kPending && (first != kDropped || skips), "ring %u: a committed record has result %" PRIx64, i, first);
      if (clear || first == kDropped) continue;
      u8 valid = 0;
      Gather(s, one.columns.data(), u32(one.columns.size())).fetch(1, &id, &valid);
      if (valid) CHECK(one.check(0, id) == std::make_pair(u64(i), number - 1), "ring %u: id %" PRIu64 " is another row", i, id);
      else CHECK(window(s).lo > id, "ring %u: id %" PRIu64 " is neither there nor overwritten", i, id);
    }
    registry.close_slot(i);
  }
}

static void reader(Segment &s, u64 life) {
  Rng rng{life};
  constexpr u64 most = 64;
  Batch batch(most);
  Gather gather(s, batch.columns.data(), u32(batch.columns.size()));
  u64 ids[most], cursor = 0, reserve = 0, base = 0;
  u8 valid[most];
  while (!stopped()) {
    Window w = window(s);
    u64 r = load(s.control().reserve, relaxed), b = load(s.control().base, relaxed), n = 1 + rng.below(most), got;
    CHECK(w.hi >= cursor && r >= reserve && b >= base, "cursor, reserve or base went back: %" PRIu64 " %" PRIu64 " %" PRIu64, w.hi, r, b);
    CHECK(w.live_lo <= w.hi && w.lo <= w.hi && w.hi - w.live_lo <= s.capacity, "window [%" PRIu64 ", %" PRIu64 ")", w.live_lo, w.hi);
    cursor = w.hi, reserve = r, base = b;
    if (rng.below(2)) {
      bool lapped;
      got = gather.draw(n, rng, ids, lapped);
      std::fill(valid, valid + got, u8(1));
      count(board->lapped, lapped);
      if (!got) usleep(100);
    } else {  // named ids: about the window, some long gone, some not there yet
      for (u64 j = 0; j < (got = n); ++j) ids[j] = w.hi + 3 - std::min(w.hi + 3, rng.below(2 * s.capacity));
      std::fill(valid, valid + n, u8(0));
      gather.fetch(n, ids, valid);
    }
    std::vector<std::array<u64, 3>> seen;
    for (u64 j = 0; j < got; ++j)
      if (valid[j]) {
        auto [who, number] = batch.check(j, ids[j]);
        seen.push_back({who, ids[j], number});
      }
    std::sort(seen.begin(), seen.end());
    for (u64 j = 1; j < seen.size(); ++j)
      if (seen[j][0] == seen[j - 1][0])
        CHECK((seen[j][1] == seen[j - 1][1]) == (seen[j][2] == seen[j - 1][2]) && seen[j][2] >= seen[j - 1][2], "ring %" PRIu64 ": ids out of order", seen[j][0]);
    count(board->draws, seen.size());
  }
}

static void rings() {
  int fd = make_file();
  Segment s = map_segment(fd);
  Member_ shared(s, fd);  // two writer threads on one description, one on its own
  std::vector<Body> bodies;
  for (int w = 0; w < 2; ++w)
    bodies.push_back([&](u64 life) {
      if (!processes) return writer(shared, life);
      Member_ own(s, fd);
      writer(own, life);
    });
  bodies.push_back([&](u64 life) { Member_ own(s, fd); writer(own, life); });
  for (u64 i = 0; i < g.collectors; ++i) bodies.push_back([&](u64 life) { collector(s, fd, life); });
  for (int r = 0; r < 2; ++r) bodies.push_back([&](u64 life) { reader(s, life); });
  run(bodies, [&] { return load(s.control().commit_seq, relaxed); });

  shared.help([] { return false; });
  audit(s);
  CHECK(!Writer::runnable(s), "rows are left in a ring that nobody may move");
  const CommitBlock &b = s.block(load(s.control().commit_seq, acquire));
  u64 stored = 0, skipped = 0;
  for (u32 i = 0; i < b.n_slots; ++i) {
    u64 there = b.slot[i].stored_rows + b.slot[i].skipped_rows, acked = board->acked[i];
    stored += b.slot[i].stored_rows, skipped += b.slot[i].skipped_rows;
    CHECK(there == board->audit[b.seq & 1].next[i], "ring %u: %" PRIu64 " rows counted, %" PRIu64 " seen", i, there, board->audit[b.seq & 1].next[i]);
    CHECK(processes ? there >= acked : there == acked, "ring %u: %" PRIu64 " rows acknowledged, %" PRIu64 " there", i, acked, there);
  }
  CHECK(stored == b.rows_total && skipped == b.skipped_total, "totals: stored %" PRIu64 ", skipped %" PRIu64, stored, skipped);
  if (!processes) CHECK(b.clears == board->clears, "%" PRIu64 " CLEARs put, %" PRIu64 " run", board->clears, b.clears);
  Registry(s, shared.fd).sweep(-1);
  for (u32 i = 0; i < b.n_slots; ++i) CHECK(word_state(load(s.slot(i).word, acquire)) == kFree, "slot %u is never given back", i);
  munmap(s.map, s.mapped_bytes);
  close(fd);
}

// ---- priorities ------------------------------------------------------------------------------------------------
// The values a row may have: its first one (which = 0) and four that updaters choose from. Some are 0, the others 1e-8 to 1e7.
static float priority_of(u64 id, u64 which) {
  u64 x = mix64(id * 5 + which + 1);
  return x % 7 == 0 ? 0 : float(std::pow(10.0, double(x % 16) - 8) * (1 + double(x >> 60)));
}
static bool may_have(u64 id, float p) {
  for (u64 which = 0; which < 5; ++which)
    if (p == priority_of(id, which)) return true;
  return false;
}
static void tree_writer(PriorityTree &t, u64 life) {
  Rng rng{life};
  std::vector<float> first;
  auto publish = [&](u64 from, u64 to) {
    first.clear();
    for (u64 id = from; id < to; ++id) first.push_back(priority_of(id, 0));
    t.publish(from, first.data(), 1, to - from);
  };
  publish(board->tree_first, board->tree_cursor);  // what a killed one committed
  while (!stopped()) {
    u64 from = board->tree_cursor, n = rng.below(50) ? 1 + rng.below(g.capacity / 4 + 1) : 1 + rng.below(3 * g.capacity);
    if (load(board->tree_reserve, relaxed) == from) store(board->tree_reserve, from + n, release);  // the plan, sealed
    u64 to = load(board->tree_reserve, relaxed);
    t.evict(from, to - from);
    store(board->tree_first, from, release);
    store(board->tree_cursor, to, release);
    publish(from, to);
    if (!rng.below(4)) usleep(useconds_t(rng.below(500)));
  }
}
static void updater(PriorityTree &t, u64 life) {
  Rng rng{life};
  u64 ids[300];
  float p[300];
  while (!stopped()) {
    u64 cursor = load(board->tree_cursor, acquire), n = 1 + rng.below(300);
    if (!cursor) continue;
    for (u64 j = 0; j < n; ++j) ids[j] = cursor - 1 - std::min(cursor - 1, rng.below(g.capacity + g.capacity / 8)), p[j] = priority_of(ids[j], 1 + rng.below(4));
    u64 applied = t.set(ids, p, n);
    CHECK(applied <= n, "set applied %" PRIu64 " of %" PRIu64, applied, n);
    count(board->updates, applied), count(board->stale, n - applied);
    t.get(ids, n, p);
    for (u64 j = 0; j < n; ++j)
      CHECK(std::isnan(p[j]) || (p[j] == 0 && std::signbit(p[j])) || may_have(ids[j], p[j]), "id %" PRIu64 " has a priority %g that nobody gave it", ids[j], double(p[j]));
  }
}
static void drawer(const PriorityTree &t, u64 life) {
  Rng rng{life};
  u64 ids[64];
  double u[64];
  float p[64];
  while (!stopped()) {
    u64 n = 1 + rng.below(64), around = load(board->tree_cursor, acquire);
    for (u64 j = 0; j < n; ++j) u[j] = double(rng.next() >> 11) * 0x1p-53;
    u64 got = t.draw(around, u, n, ids, p), cursor = load(board->tree_cursor, acquire);
    for (u64 j = 0; j < got; ++j)
      CHECK(p[j] > 0 && ids[j] < cursor && may_have(ids[j], p[j]), "drew id %" PRIu64 " (cursor %" PRIu64 ") with %g", ids[j], cursor, double(p[j]));
    count(board->drawn, got);
    CHECK(t.sum() >= 0 && std::isfinite(t.sum()) && t.min() >= 0, "sum %g min %g", t.sum(), double(t.min()));
  }
}
static void tree() {
  u64 bytes = PriorityTree::bytes(g.capacity);
  auto *memory = static_cast<u8 *>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  PriorityTree t(memory, g.capacity);
  if (g.seed & 1) std::memset(memory, 0xa5, bytes), t.format();
  std::vector<Body> bodies = {[&](u64 life) { tree_writer(t, life); }};
  for (int i = 0; i < 3; ++i) bodies.push_back([&](u64 life) { updater(t, life); });
  for (int i = 0; i < 2; ++i) bodies.push_back([&](u64 life) { drawer(t, life); });
  run(bodies, [&] { return board->tree_cursor + board->updates; });

  u64 n = g.capacity, hi = board->tree_cursor, lo = hi > n ? hi - n : 0;
  if (processes) {  // the last writer may have been killed before its publish; then the scrub heals what the dead left
    if (board->tree_reserve > hi) t.evict(hi, board->tree_reserve - hi), t.publish(hi, std::vector<float>(board->tree_reserve - hi, 0.0f).data(), 1, board->tree_reserve - hi), lo = hi;
    t.scrub();
  }
  CHECK(t.check() == 0, "%" PRIu64 " nodes differ from their children at rest", t.check());
  long double sum = 0;
  float least = 0;
  std::vector<u64> ids;
  std::vector<float> p(n);
  for (u64 id = lo; id < hi; ++id) ids.push_back(id);
  t.get(ids.data(), ids.size(), p.data());
  for (u64 j = 0; j < ids.size(); ++j) {
    CHECK(processes || (!std::isnan(p[j]) && !(p[j] == 0 && std::signbit(p[j]))), "row %" PRIu64 " was never published", ids[j]);
    if (!std::isnan(p[j])) sum += p[j];
    if (p[j] > 0 && (least == 0 || p[j] < least)) least = p[j];
  }
  if (!processes) {
    CHECK(std::abs(double(sum - (long double)t.sum())) <= 1e-9 * double(sum) && least == t.min(), "root %g, leaves %g; min %g, leaves %g", t.sum(), double(sum), double(t.min()), double(least));
    constexpr u64 kDraws = 4096;
    std::vector<double> u(kDraws);
    std::vector<u64> drawn(kDraws), hits(n);
    std::vector<float> with(kDraws);
    for (u64 j = 0; j < kDraws; ++j) u[j] = (double(j) + 0.5) / kDraws;
    u64 got = t.draw(hi, u.data(), kDraws, drawn.data(), with.data());
    CHECK(got == (t.sum() > 0 ? kDraws : 0), "%" PRIu64 " draws at rest", got);
    for (u64 j = 0; j < got; ++j) CHECK(drawn[j] >= lo && drawn[j] < hi, "drew id %" PRIu64 " at rest", drawn[j]), ++hits[drawn[j] - lo];
    for (u64 j = 0; j < ids.size() && got; ++j)
      CHECK(std::abs(double(hits[j]) - kDraws * double(p[j]) / t.sum()) < 1.01, "leaf of %g among %g was drawn %" PRIu64 " times", double(p[j]), t.sum(), hits[j]);
  }
  munmap(memory, bytes);
}

// ---- one handle, many threads ----------------------------------------------------------------------------------
static void handles() {
  int fd = make_file();
  Handle h(reopen(fd), reopen(fd), 0), other(reopen(fd), reopen(fd), 0);
  h.start_thread(false), other.start_thread(true);
  auto go_on = [] { return !stopped(); };
  auto put = [&](Handle &at, u64 life) {
    Rng rng{life};
    std::vector<u8> row(g.row_bytes);
    for (u64 number = 0; !stopped(); ++number) {
      make_row(row.data(), u64(&at == &h), number);
      Column whole{0, g.row_bytes, row.data(), i64(g.row_bytes)};
      std::shared_ptr<TicketState> ticket;
      Status s = at.put(&whole, 1, 1, Full::block, kForever, rng.below(2), ticket, go_on);
      if (s == Status::ok) count(board->rows);
      if (s == Status::ok && rng.below(8) == 0) s = at.wait(*ticket, kForever, go_on);
      CHECK(s == Status::ok || stopped(), "put or wait: status %d", int(s));
    }
  };
  auto read = [&](Handle &at) {
    Batch batch(16);
    u64 ids[16];
    while (!stopped()) {
      if (at.wait_rows(1, kForever, go_on) != Status::ok) continue;
      Status s = at.draw(16, batch.columns.data(), u32(batch.columns.size()), ids, kForever, go_on);
      CHECK(s == Status::ok || s == Status::lapped || stopped(), "draw: status %d", int(s));
      for (u64 j = 0; s == Status::ok && j < 16; ++j) batch.check(j, ids[j]);
    }
  };
  u64 before = board->rows;
  run({[&](u64 life) { put(h, life); }, [&](u64 life) { put(other, life); }, [&](u64) { read(h); }, [&](u64) { read(h); }, [&](u64) { read(other); },
       [&](u64) { while (!stopped()) h.help(), h.sweep(), usleep(300); }},
      [&] { return load(h.segment().control().commit_seq, relaxed); });
  h.close();
  other.help();
  u64 stored = other.segment().block(load(other.segment().control().commit_seq, acquire)).rows_total;
  CHECK(stored == board->rows - before, "%" PRIu64 " rows put, %" PRIu64 " stored", board->rows - before, stored);
  other.close();
  close(fd);
}

int main(int argc, char **argv) {
  u64 seconds = 3, seed = 1, rounds = ~0ull, asked[4] = {};
  for (int i = 1; i < argc; ++i) {
    std::string a = argv[i];
    const char *names[] = {"--capacity", "--row-bytes", "--ring-bytes", "--collectors"};
    u64 value = i + 1 < argc ? std::strtoull(argv[i + 1], nullptr, 10) : 0;
    auto *name = std::find(names, names + 4, a);
    if (a == "--processes") { processes = true; continue; }
    if (name != names + 4) asked[name - names] = value;
    else if (a == "--seconds") seconds = value;
    else if (a == "--seed") seed = value;
    else if (a == "--rounds") rounds = value;
    else return std::fprintf(stderr, "usage: driver [--seconds S] [--seed N] [--rounds N] [--processes] [--capacity ROWS] [--row-bytes B] [--ring-bytes B] [--collectors C]\n"), 2;
    ++i;
  }
  board = static_cast<Board *>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  Board total{};
  u64 end = now_ns() + seconds * 1'000'000'000;
  for (u64 round = 0; round < rounds && (round == 0 || now_ns() < end); ++round) {
    Rng rng{mix64(seed + round)};
    g = {seed + round, 1 + rng.below(rng.below(2) ? 40 : 3000), 16 + 8 * rng.below(rng.below(4) ? 12 : 200), 4096ull << rng.below(4), 1 + rng.below(5)};
    if (asked[0]) g.capacity = asked[0];
    if (asked[1]) g.row_bytes = asked[1];
    if (asked[2]) g.ring_bytes = asked[2];
    if (asked[3]) g.collectors = std::min<u64>(asked[3], kMaxRings - 1);
    cuts = {0, 8, 16};
    while (cuts.back() < g.row_bytes) cuts.push_back(std::min(g.row_bytes, cuts.back() + 1 + rng.below(rng.below(3) ? 19 : 600)));
    std::memset(static_cast<void *>(board), 0, sizeof *board);
    rings();
    tree();
    if (!processes) handles();
    total.rows += board->rows, total.checked += board->checked, total.updates += board->updates, total.drawn += board->drawn;
    total.swept += board->swept, total.skips += board->skips, total.clears += board->clears, total.lapped += board->lapped, total.stale += board->stale;
  }
  std::printf("ok: %" PRIu64 " rows put, %" PRIu64 " read, %" PRIu64 " skips, %" PRIu64 " CLEARs, %" PRIu64 " slots swept, %" PRIu64 " lapped; %" PRIu64
              " priorities set, %" PRIu64 " stale, %" PRIu64 " drawn\n", total.rows, total.checked, total.skips, total.clears, total.swept, total.lapped,
              total.updates, total.stale, total.drawn);
}
