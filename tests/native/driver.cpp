// One program over the real headers, without Python: collectors, writers and readers on one segment (here), updaters and drawers on
// one tree (priorities.h), threads of one handle (at the end). Every round has another geometry, drawn from the seed.
//
//   writers      after every transaction, holding the role: the rows of each ring are the next ones, each once, in order, byte for
//                byte; skips are counted; heads, cursor, base and reserve agree with the commit block               (audit)
//   collectors   the result in a record is the id under which that very row is read back, or DROPPED after a skip
//   readers      every row is byte for byte a row that was put; ids of one ring grow with its rows; no word goes back
//   at the end   nothing is left in a ring, every row put is stored or counted as skipped, every slot is given back
#include "priorities.h"

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
    CHECK(who < kMaxRings && is_row(row.data(), who, number), "torn row: id %lu who %lu number %lu", id, who, number);
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
  int e = build(fd, s, reinterpret_cast<const u8 *>("schema"), 6, {g.row_bytes, u32(cuts.size() - 1), g.seed % 3 != 0, {{9, 1}}, {}});
  CHECK(e == 0, "build: %s", std::strerror(e));
  if (g.seed % 2) s.control().priorities.formula = Formula::pack(0.6, 1e-8, g.seed % 4 == 1);
  munmap(s.map, at.bytes);
  return fd;
}
// One mapping for all threads: TSan sees no race through a second address of the same memory.
static Segment map_segment(int fd) {
  Segment s;
  s.mapped_bytes = file_size(fd), s.map = map_file(fd, s.mapped_bytes, false);
  check_header(s.map, s.mapped_bytes);
  check_built(s.header(), s.map, s.mapped_bytes);
  describe(s, s.map);
  return s;
}

// Called by whoever holds the role before each of its transactions, hence after each of anybody's.
static void audit(const Segment &s) {
  const Control &c = s.control();
  u64 seq = load(c.commit_seq, acquire), n = s.capacity;
  if (seq == board->audited) return;
  CHECK(seq == board->audited + 1, "commit_seq went from %lu to %lu", board->audited, seq);
  const CommitBlock &b = s.block(seq), &was = s.block(seq - 1);
  Audit &a = board->audit[seq & 1];
  a = board->audit[(seq - 1) & 1];
  auto before = [&](u32 i) { return i < was.n_slots ? was.slot[i] : BlockSlot{}; };
  u64 id = was.cursor;
  if (b.kind == kPlanClear) {
    CHECK(b.cursor == align_up(id, n) && b.base == b.cursor && b.clears == was.clears + 1, "CLEAR moved the cursor to %lu", b.cursor);
    id = b.cursor;
  }
  for (u32 d = 0; d < b.n_slots; ++d) {
    u32 i = (b.start + d) % b.n_slots;
    u64 stored = b.slot[i].stored_rows - before(i).stored_rows, skipped = b.slot[i].skipped_rows - before(i).skipped_rows;
    a.next[i] += skipped;
    CHECK(b.kind == kPlanRows || stored + skipped == 0, "CLEAR stored or skipped rows of ring %u", i);
    for (u64 j = 0; j < stored; ++j, ++id, ++a.next[i])
      if (id + n >= b.cursor)
        CHECK(is_row(s.row(id), i, a.next[i]), "id %lu is not row %lu of ring %u: lost, doubled, torn or out of order", id, a.next[i], i);
    u64 tail = load(s.slot(i).tail, acquire), head = b.slot[i].head;
    CHECK(head <= tail && tail - head <= s.ring_bytes, "ring %u: head %lu tail %lu", i, head, tail);
    CHECK(load(s.slot(i).head_pub, relaxed) == head, "ring %u: head_pub is not the committed head", i);
  }
  CHECK(id == b.cursor && load(c.cursor, relaxed) == id && load(c.base, relaxed) == b.base, "cursor %lu after rows up to %lu", b.cursor, id);
  CHECK(std::max(load(c.reserve, relaxed), b.base) >= b.cursor, "reserve behind cursor %lu", b.cursor);
  CHECK(load(c.done_seq, relaxed) == seq && b.seq == seq && b.malformed == 0, "block %lu: %lu malformed", seq, b.malformed);
  std::atomic_ref<u64>(board->audited).store(seq, release);
}

struct Desk {  // one description and one role: what the threads of one handle share
  Segment &s;
  int fd;
  WriterRole role;
  Desk(Segment &segment, int file) : s(segment), fd(reopen(file)), role(segment) { role.open(fd, describe_self()); }
  ~Desk() { close(fd); }
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
      const u32 armed = arm(word);
      if (!met()) futex_wait(word, armed);
    }
  }
};

static void writer(Desk &m, u64 life) {
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
    const u32 armed = arm(c.writer_wait);
    if (out == WriterRole::Outcome::busy || !Writer::runnable(m.s)) futex_wait(c.writer_wait, armed);
  }
}

static void collector(Segment &s, int file, u64 life) {
  Desk m(s, file);
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
    CHECK(load(slot.head_pub, acquire) == p.tail(), "slot %u was freed with undrained rows", i);
    u64 most = p.max_rows_per_record(kStreams | kLeaves), acked = load(board->acked[i], acquire), skips = 0;
    u64 number = load(slot.stored_at_claim, relaxed) + load(slot.skipped_at_claim, relaxed);  // the one before may have been killed
    CHECK(number >= acked && number <= acked + (processes ? most : 0), "ring %u: %lu rows acknowledged, %lu there", i, acked, number);
    store(board->acked[i], number, release);
    bool often_clears = rng.below(4) == 0;
    for (u64 records = 1 + rng.below(400); records && !stopped(); --records) {
      u64 dice = rng.below(100), n = dice < 70 ? 1 + rng.below(std::min<u64>(most, 4)) : dice < 96 ? 1 + rng.below((most + 3) / 4) : most;
      bool clear = rng.below(often_clears ? 12 : 400) == 0, drop_oldest = rng.below(4) == 0;
      std::vector<u64> streams(n);  // few streams, then more than a table holds
      std::vector<float> leaves(n);
      for (u64 j = 0; j < n; ++j) streams[j] = rng.below(rng.below(8) ? 3 : 5000), leaves[j] = float(rng.below(4));
      const Extras extras{rng.below(2) ? streams.data() : nullptr, rng.below(2) ? leaves.data() : nullptr};
      u64 need = clear ? sizeof(Record) : record_bytes(n, s.row_bytes, extras.flags());
      auto room = [&] { return p.has_room(need); };
      auto skip = [&] {
        if (drop_oldest) store(slot.skip_to, p.skip_target(need), release), ++skips, count(board->skips);
      };
      if (!room() && rng.below(16) == 0) continue;  // full="error"
      if (!room() && !m.wait(slot.wait, room, skip)) break;
      u64 at = p.tail(), end;
      if (clear) {
        count(board->clears);
        end = p.publish_clear(0, {});
      } else {
        staging.resize(n * s.row_bytes);
        for (u64 j = 0; j < n; ++j) make_row(&staging[j * s.row_bytes], i, number + j);
        std::vector<Column> columns;
        for (u64 k = 0; k + 1 < cuts.size(); ++k) columns.push_back({cuts[k], cuts[k + 1] - cuts[k], &staging[cuts[k]], i64(s.row_bytes)});
        end = p.publish_rows(columns.data(), u32(columns.size()), extras, 0, n);
        store(board->acked[i], number += n, release);
        count(board->rows, n);
      }
      if (rng.below(2)) fence(seq_cst), wake_if_armed(s.control().writer_wait);
      if (rng.below(16)) continue;
      auto committed = [&] { return load(slot.head_pub, acquire) >= end; };
      if (!m.wait(slot.wait, committed, [] {})) break;
      u64 first = p.result(at), id = first + n - 1;
      CHECK(first != kPending && (first != kDropped || skips), "ring %u: a committed record has result %lx", i, first);
      if (clear || first == kDropped) continue;
      u8 valid = 0;
      Gather(s, one.columns.data(), u32(one.columns.size())).fetch(1, &id, &valid);
      if (valid) CHECK(one.check(0, id) == std::make_pair(u64(i), number - 1), "ring %u: id %lu is another row", i, id);
      else CHECK(window(s).lo > id, "ring %u: id %lu is neither there nor overwritten", i, id);
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
    CHECK(w.hi >= cursor && r >= reserve && b >= base, "cursor, reserve or base went back: %lu %lu %lu", w.hi, r, b);
    CHECK(w.live_lo <= w.hi && w.lo <= w.hi && w.hi - w.live_lo <= s.capacity, "window [%lu, %lu)", w.live_lo, w.hi);
    cursor = w.hi, reserve = r, base = b;
    if (rng.below(2)) {
      bool lapped;
      UniformPick pick{s, rng};
      got = gather.draw(0, n, pick, ids, lapped);
      rng.next();
      std::fill(valid, valid + got, u8(1));
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
    for (u64 j = 1; j < seen.size(); ++j) {
      auto [who, id, number] = seen[j];
      auto [whose, id_before, number_before] = seen[j - 1];
      bool good = who != whose || (number >= number_before && (id == id_before) == (number == number_before));
      CHECK(good, "ring %lu: id %lu is row %lu, id %lu is row %lu", who, id_before, number_before, id, number);
    }
  }
}

static void rings() {
  int fd = make_file();
  Segment s = map_segment(fd);
  Desk shared(s, fd);  // two writer threads on one description, one on its own
  std::vector<Body> bodies;
  for (int w = 0; w < 2; ++w)
    bodies.push_back([&](u64 life) {
      if (!processes) return writer(shared, life);
      Desk own(s, fd);
      writer(own, life);
    });
  bodies.push_back([&](u64 life) { Desk own(s, fd); writer(own, life); });
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
    CHECK(there == board->audit[b.seq & 1].next[i], "ring %u: %lu rows counted, %lu seen", i, there, board->audit[b.seq & 1].next[i]);
    CHECK(processes ? there >= acked : there == acked, "ring %u: %lu rows acknowledged, %lu there", i, acked, there);
  }
  CHECK(stored == b.rows_total && skipped == b.skipped_total, "totals: stored %lu, skipped %lu", stored, skipped);
  if (!processes) CHECK(b.clears == board->clears, "%lu CLEARs put, %lu run", board->clears, b.clears);
  Auditor auditor(s, s.map);
  auditor.run(true, [] { usleep(1000); });
  for (auto &f : auditor.findings) CHECK(false, "%s", f.c_str());
  const Window w = window(s);
  if (load(s.control().priorities.ready, relaxed)) {
    PriorityTree tree(s.tree, s.capacity);
    tree.keep_max(Formula(s.control().priorities).live_maximum);
    CHECK(tree.check() == 0, "%lu nodes of the tree differ from their children", tree.check());
    for (u64 id = w.live_lo; id < w.hi; ++id) {
      float p;
      tree.get(&id, 1, &p);
      CHECK(!std::signbit(p) && !std::isnan(p), "row %lu was left without a priority", id);
    }
  }
  if (s.links) {
    Links links(s.links, s.capacity);
    u64 ends = 0, rows = 0;
    CHECK(links.ends().check() == 0, "%lu counts of ends differ from their bits", links.ends().check());
    links.for_each_end(w.live_lo, w.hi, [&](u64 id) {
      ++ends;
      for (u64 at = id; at != kNoRow; at = links.previous(at, w.live_lo)) ++rows;
    });
    CHECK(rows == w.hi - w.live_lo && ends == links.ends().count(), "%lu of %lu rows lie in a trajectory, %lu of %lu ends", rows, w.hi - w.live_lo, ends,
          links.ends().count());
  }
  Registry(s, shared.fd).sweep(-1);
  for (u32 i = 0; i < b.n_slots; ++i) CHECK(word_state(load(s.slot(i).word, acquire)) == kFree, "slot %u is never given back", i);
  munmap(s.map, s.mapped_bytes);
  close(fd);
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
      Status s = at.put(&whole, 1, {}, 1, Full::block, kForever, rng.below(2), true, ticket, go_on);
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
      Status s = at.sampling().draw(16, batch.columns.data(), u32(batch.columns.size()), ids, kForever, true, go_on);
      CHECK(s == Status::ok || s == Status::lapped || stopped(), "draw: status %d", int(s));
      for (u64 j = 0; s == Status::ok && j < 16; ++j) batch.check(j, ids[j]);
    }
  };
  u64 before = board->rows;
  Body puts = [&](u64 life) { put(h, life); }, other_puts = [&](u64 life) { put(other, life); }, reads = [&](u64) { read(h); },
       other_reads = [&](u64) { read(other); }, helps = [&](u64) { while (!stopped()) h.help(), h.sweep(), usleep(300); };
  run({puts, other_puts, reads, reads, other_reads, helps}, [&] { return load(h.segment().control().commit_seq, relaxed); });
  h.close();
  other.help();
  u64 stored = other.segment().block(load(other.segment().control().commit_seq, acquire)).rows_total;
  CHECK(stored == board->rows - before, "%lu rows put, %lu stored", board->rows - before, stored);
  other.close();
  close(fd);
}

int main(int argc, char **argv) {
  u64 seconds = 3, seed = 1, rounds = ~0ull;
  Geometry asked{};
  const std::pair<const char *, u64 *> options[] = {
      {"--seconds", &seconds}, {"--seed", &seed}, {"--rounds", &rounds}, {"--capacity", &asked.capacity},
      {"--row-bytes", &asked.row_bytes}, {"--ring-bytes", &asked.ring_bytes}, {"--collectors", &asked.collectors}};
  for (int i = 1; i < argc; ++i) {
    auto *option = std::find_if(std::begin(options), std::end(options), [&](auto &o) { return !std::strcmp(o.first, argv[i]); });
    if (!std::strcmp(argv[i], "--processes")) processes = true;
    else if (option != std::end(options) && i + 1 < argc) *option->second = std::strtoull(argv[++i], nullptr, 10);
    else return std::puts("driver [--processes], and N after: --seconds --seed --rounds --capacity --row-bytes --ring-bytes --collectors"), 2;
  }
  board = static_cast<Board *>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  Board sum{};
  u64 end = now_ns() + seconds * 1'000'000'000, round = 0;
  for (; round < rounds && (round == 0 || now_ns() < end); ++round) {
    Rng rng{mix64(seed + round)};  // small buffers wrap often; rings of 4 KiB hold fewer rows than the buffer, or more
    g = {seed + round, 1 + rng.below(rng.below(2) ? 40 : 3000), 16 + 8 * rng.below(rng.below(4) ? 12 : 200), 4096ull << rng.below(4),
         1 + rng.below(5)};
    if (asked.capacity) g.capacity = asked.capacity;
    if (asked.row_bytes) g.row_bytes = align_up(std::max<u64>(asked.row_bytes, 16), 8);
    if (asked.ring_bytes) g.ring_bytes = asked.ring_bytes;
    if (asked.collectors) g.collectors = std::min<u64>(asked.collectors, kMaxRings - 1);
    cuts = {0, 8, 16};
    while (cuts.back() < g.row_bytes) cuts.push_back(std::min(g.row_bytes, cuts.back() + 1 + rng.below(rng.below(3) ? 19 : 600)));
    std::memset(static_cast<void *>(board), 0, sizeof *board);
    rings();
    priorities();
    if (!processes) handles();
    for (auto word : {&Board::rows, &Board::checked, &Board::skips, &Board::clears, &Board::swept, &Board::deaths, &Board::updates,
                      &Board::stale, &Board::drawn})
      sum.*word += board->*word;
  }
  std::printf("ok: %lu rounds, %lu killed; %lu rows put, %lu read, %lu skips, %lu CLEARs, %lu slots swept; priorities: %lu set, %lu stale, %lu drawn\n",
              round, sum.deaths, sum.rows, sum.checked, sum.skips, sum.clears, sum.swept, sum.updates, sum.stale, sum.drawn);
}
