// A part of shared_words.cpp: all shared words of one segment at once, through Sampling, by threads of one handle.
#pragma once

struct Step { u64 stream, k, ends; };  // a row: the k-th of its stream; every seventh ends its trajectory
static bool is_row(const Step &r) { return r.stream < 64 && r.ends == (r.k % 7 == 6); }

static int small_segment() {
  int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  Header h{};
  h.capacity = 64 + seed % 500, h.ring_bytes_asked = 4096, h.max_collectors = 4, h.max_members = 8;
  ConfigLayout at(h.max_collectors, h.max_members, 5);
  CHECK(fd >= 0 && posix_fallocate(fd, 0, i64(at.bytes)) == 0, "too little /dev/shm?");
  Segment s;
  s.map = map_file(fd, at.bytes, false);
  format(s.map, h, reinterpret_cast<const u8 *>("words"), 5);
  CHECK(build(fd, s, reinterpret_cast<const u8 *>("schema"), 6, {sizeof(Step), 1, true, {{offsetof(Step, ends), 8}}, {}}) == 0, "build");
  munmap(s.map, at.bytes);
  return fd;
}
static void segment() {
  const int fd = small_segment();
  auto again = [&] { return open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC); };
  Handle h(again(), again(), 0), other(again(), again(), 0);  // TSan sees races through one mapping: nearly all goes through h
  auto soon = [] { return now_ns() + 5'000'000; };
  auto go_on = [] { return !stopped(); };
  CHECK(h.sampling().keep_priorities(0.6, 1e-6, seed % 2, kForever, go_on) == Status::ok, "keep_priorities");
  h.start_thread(false), other.start_thread(true);
  auto put = [&](Handle &at, u64 tag, Rng &rng) {
    u64 next[4] = {}, streams[8];
    Step rows[8];
    float leaves[8];
    while (!stopped()) {
      const u64 n = 1 + rng.below(8);
      u64 ahead[4] = {};
      for (u64 j = 0; j < n; ++j) {
        streams[j] = rng.below(4), leaves[j] = float(rng.below(9));
        const u64 k = next[streams[j]] + ahead[streams[j]]++;
        rows[j] = {tag * 4 + streams[j], k, k % 7 == 6};
      }
      const Column whole{0, sizeof(Step), reinterpret_cast<u8 *>(rows), sizeof(Step)};
      std::shared_ptr<TicketState> ticket;
      const Status s = at.put(&whole, 1, {streams, rng.below(2) ? leaves : nullptr}, n, Full::block, soon(), rng.below(2), true, ticket, go_on);
      CHECK(s == Status::ok || s == Status::full || s == Status::interrupted, "put: status %d", int(s));
      if (s == Status::ok) {
        for (u64 k = 0; k < 4; ++k) next[k] += ahead[k];
        if (rng.below(4) == 0) at.wait(*ticket, soon(), go_on);
        fetch_add(w->put, n, relaxed);
        if (rng.below(8) == 0 && at.wait(*ticket, soon(), go_on) == Status::ok && ticket->pieces[0].n == n && ticket->pieces[0].first < kDropped) {
          u64 ids[8];  // the same bytes again, where the rows lie by now or do not
          for (u64 j = 0; j < n; ++j) ids[j] = ticket->pieces[0].first + j;
          if (at.edit(&whole, 1, kNoVersion, ids, n, soon(), rng.below(2), true, ticket, go_on) == Status::ok) at.wait(*ticket, soon(), go_on);
        }
      }
      if (rng.below(512) == 0) at.clear(0, {}, soon(), ticket, go_on);
    }
  };
  auto by_priority = [&](Rng &rng) {
    Step rows[16];
    const OutColumn out{0, sizeof(Step), reinterpret_cast<u8 *>(rows)};
    u64 ids[16], bad;
    u8 applied[16];
    float weights[16];
    double p[16];
    while (!stopped()) {
      if (h.sampling().draw_by_priority(16, {0.4, rng.below(2) == 0, rng.below(2) == 0}, &out, 1, ids, weights, soon(), true, go_on) != Status::ok) continue;
      for (u64 j = 0; j < 16; ++j) CHECK(is_row(rows[j]) && weights[j] > 0, "by priority: stream %lu, row %lu, weight %g", rows[j].stream, rows[j].k, double(weights[j]));
      for (double &x : p) x = double(rng.below(100)) / 10;
      CHECK(h.sampling().set_priorities(ids, p, 16, applied, bad) == Status::ok, "set_priorities");
      h.sampling().get_priorities(ids, 16, p);
      if (rng.below(64) == 0) h.sampling().scrub(), h.mend();
      fetch_add<u64>(w->steps, 1, relaxed);
    }
  };
  auto slices = [&](Rng &rng) {
    constexpr u64 n = 8, length = 3;
    Step rows[n * length];
    const OutColumn out{0, sizeof(Step), reinterpret_cast<u8 *>(rows)};
    u64 ids[n * length], lens[n];
    while (!stopped()) {
      auto sampling = h.sampling();
      const SliceOptions o{length, rng.below(2) == 0, rng.below(2) ? SliceBy::start : SliceBy::trajectory, 0, 0, true};
      if (sampling.choose_slices(o, n, ids, lens).status != SliceStatus::ok) continue;
      u8 done[n * length] = {};
      for (u64 j = 0; j < n; ++j)
        for (u64 t = lens[j]; t < length; ++t) ids[j * length + t] = kNoRow;
      sampling.fetch(n * length, &out, 1, ids, done);
      for (u64 j = 0; j < n; ++j)
        for (u64 t = 0; t < lens[j]; ++t) {
          const Step &r = rows[j * length + t], &before = rows[j * length + t - (t > 0)];
          if (!done[j * length + t] || !done[j * length + t - (t > 0)]) continue;
          CHECK(is_row(r) && (!t || (r.stream == before.stream && r.k == before.k + 1 && !before.ends)), "a slice: stream %lu row %lu after stream %lu row %lu",
                r.stream, r.k, before.stream, before.k);
        }
      fetch_add<u64>(w->drawn, 1, relaxed);
    }
  };
  auto claims = [&](Rng &rng) {
    Step rows[16];
    const OutColumn out{0, sizeof(Step), reinterpret_cast<u8 *>(rows)};
    u64 ids[16];
    while (!stopped()) {
      const u64 which = rng.below(2);
      auto sampling = h.sampling();
      const Claim c = sampling.claim(h.segment().control().epochs[which].word, 16, {which, true, false, which == 1, 2, 1});
      u8 done[16] = {};
      c.ids(ids);
      sampling.fetch(c.n, &out, 1, ids, done);
      for (u64 j = 0; j < c.n; ++j) CHECK(!done[j] || is_row(rows[j]), "of an epoch: id %lu, stream %lu, row %lu", ids[j], rows[j].stream, rows[j].k);
      fetch_add<u64>(w->ended, c.ran_out, relaxed);
    }
  };
  auto limited = [&](Rng &rng) {
    while (!stopped()) {
      if (h.sampling().acquire_samples(1 + rng.below(8), soon(), true, go_on) == Status::ok && rng.below(4) == 0) h.sampling().refund_samples(1);
      const u32 spi = u32(1 + rng.below(3));
      if (rng.below(32) == 0) CHECK(h.sampling().set_limiter(rng.below(2) ? LimiterParams{} : LimiterParams{spi, 1, 1, -1000, 1000, Writer::inserted(h.segment()), 0}), "set_limiter");
      h.size(), h.sweep(), h.help();
    }
  };
  run({[&](Rng &r) { put(h, 0, r); }, [&](Rng &r) { put(other, 1, r); }, by_priority, by_priority, slices, claims, limited}, &w->steps);
  CHECK(h.sampling().set_limiter({}), "set_limiter");
  other.close();
  h.help();
  while (!h.role().try_take()) usleep(100);  // nobody is in the middle of a transaction
  const Window win = window(h.segment());
  u64 rows = 0, ends = 0;
  const Links links(h.segment().links, h.segment().capacity);
  links.for_each_end(win.lo, win.hi, [&](u64 id) {
    ++ends;
    for (u64 at = id; at != kNoRow; at = links.previous(at, win.lo)) ++rows;
  });
  CHECK(h.sampling().tree().check() == 0 && links.ends().check() == 0, "%lu sums and %lu counts are wrong at rest", h.sampling().tree().check(), links.ends().check());
  CHECK(rows == win.hi - win.lo && ends == links.ends().count(), "%lu of %lu rows lie in a trajectory, %lu of %lu ends", rows, win.hi - win.lo, ends, links.ends().count());
  h.role().give_back();
  h.close();
  close(fd);
}
