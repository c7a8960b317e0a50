// The rate limiter and the shared epoch, each one word or a few, by themselves: what they compute, threads, and processes that are
// killed; in the end all shared words of a segment at once. Every round starts from the seed. (The limiter's sleepers:
// tests/models/limiter.pml.)
//
//   limiter   the inequalities, at their bounds and at the ends of 64 bits; no grant ever leaves them; a reader never sees half a set of
//             parameters; with a slice of half a minute nobody is left asleep
//   epoch     every position of each epoch once, by 8 claimers; consuming: every row `repeat` times, never more whoever is killed;
//             permutations are permutations, even enough, and different each time
//   segment   threads of one handle that put, drain, draw by priority, set priorities, draw slices, claim epochs, are limited and clear,
//             each through Sampling: what they get are rows, slices hang together; at rest sums and counts are right
#if defined(__SANITIZE_THREAD__)
#include <atomic>
#include <fcntl.h>
inline int ordering_fcntl(int fd, int command, struct flock *l) {  // handing over a file lock orders memory, which TSan does not know
  static std::atomic<int> edge{0};
  edge.fetch_add(1);
  int r = fcntl(fd, command, l);
  edge.fetch_add(1);
  return r;
}
#define fcntl ordering_fcntl
extern "C" const char *__tsan_default_suppressions() { return "race:shmbuf::Registry::claim_slot\n"; }  // as in harness.h
#endif
#ifdef SHMBUF_FAILPOINTS
#include "failpoint.h"
#undef FAILPOINT
#define FAILPOINT(name) ::pause_or_die()
static void pause_or_die();
#endif
#include "handle.h"
#undef fcntl
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <functional>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

using namespace shmbuf;

static u64 seed = 1, round_ns = 100'000'000, deaths, life_steps;
static bool processes;
[[noreturn]] static void fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  std::fputs("VIOLATION: ", stderr), std::vfprintf(stderr, format, args);
  std::fprintf(stderr, "\n  again: --seed %lu%s\n", seed, processes ? " --processes" : "");
  _exit(1);
}
#define CHECK(condition, ...) ((condition) ? void() : fail(__VA_ARGS__))
#ifdef SHMBUF_FAILPOINTS
static void pause_or_die() {
  thread_local Rng rng{mix64(now_ns() ^ reinterpret_cast<u64>(&rng))};
  if (rng.below(16) == 0) sched_yield();
  if (life_steps && rng.below(life_steps) == 0) kill(getpid(), SIGKILL);
}
#endif

struct Shared {
  u32 stop, data_wait, writer_wait, slot_wait;
  LimiterWords limiter;
  Pair epoch;
  u64 inserted, put, taken, steps, changes, ended, drawn;
  static constexpr u64 kSeen = 1 << 22;
  u8 seen[kSeen];
};
static Shared *w;
static bool stopped() { return load(w->stop, acquire) != 0; }

// All bodies until the round is over, as threads, or as processes of which one is killed every few milliseconds.
// progress: a word that must still be moving at the end.
static void run(const std::vector<std::function<void(Rng &)>> &bodies, const u64 *progress = nullptr) {
  store(w->stop, 0u, release);
  signal(SIGALRM, [](int) { fail("hangs"); });
  alarm(60);
  u64 end = now_ns() + round_ns, life = seed;
  if (!processes) {
    std::vector<std::thread> threads;
    for (auto &b : bodies) threads.emplace_back([&b, s = life++] { Rng r{mix64(s)}; b(r); });
    while (now_ns() < end) usleep(1000);
    for (u64 i = 0, seen = progress ? load(*progress, relaxed) : 0; progress && load(*progress, relaxed) == seen; ++i, usleep(1000))
      CHECK(i < 10'000, "everybody sleeps: put %lu inserted %lu sampled %lu", w->put, w->inserted, w->limiter.sampled);
    store(w->stop, 1u, release);
    for (u32 *word : {&w->data_wait, &w->writer_wait, &w->slot_wait}) wake_always(*word);
    for (auto &t : threads) t.join();
    return;
  }
  std::vector<pid_t> pids(bodies.size());
  auto start = [&](u64 i) {
    Rng r{mix64(life++)};
    pids[i] = fork();
    CHECK(pids[i] >= 0, "fork");
    if (!pids[i]) prctl(PR_SET_PDEATHSIG, SIGKILL), alarm(60), life_steps = 64ull << r.below(8), bodies[i](r), _exit(0);
  };
  auto died = [&](u64 i, int options) {
    int status;
    if (waitpid(pids[i], &status, options) != pids[i]) return false;
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    CHECK(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "actor %lu ended with status %#x", i, status);
    deaths += killed;
    return true;
  };
  for (u64 i = 0; i < bodies.size(); ++i) start(i);
  for (Rng rng{seed}; now_ns() < end || (progress && !load(*progress, relaxed) && now_ns() < end + 10'000'000'000);) {  // without a free core nobody has begun
    usleep(useconds_t(rng.below(1000)));
    if (now_ns() < end) kill(pids[rng.below(pids.size())], SIGKILL);
    for (u64 i = 0; i < bodies.size(); ++i)
      if (died(i, WNOHANG)) start(i);
  }
  store(w->stop, 1u, release);
  for (u64 i = 0; i < bodies.size(); ++i) died(i, 0);
}
static void fresh() { std::memset(static_cast<void *>(w), 0, sizeof *w); }

// ---- limiter ---------------------------------------------------------------------------------------------------
static void limiter_arithmetic() {
  fresh();
  Limiter l(w->limiter);
  CHECK(l.allowance(1ull << 63) == kUnlimited && l.try_sample(0, kUnlimited) && w->limiter.sampled == 0, "zeroed words limit");

  CHECK(l.change(LimiterParams::queue(3)), "change");
  CHECK(l.allowance(0) == 3 && l.allowance(2) == 1 && l.allowance(3) == 0 && l.allowance(5) == 0, "a queue of 3");
  CHECK(!l.try_sample(0, 1) && l.try_sample(2, 2) && !l.try_sample(2, 1) && l.allowance(2) == 3, "a queue of 3, sampled");
  l.refund(2), CHECK(w->limiter.sampled == 0, "refund"), l.refund(1), CHECK(w->limiter.sampled == 0, "refund of nothing");
  CHECK(l.params().could_ever(3) && !l.params().could_ever(4) && !l.params().could_ever(kUnlimited), "batches of a queue of 3");

  CHECK(l.change(LimiterParams::at_least(10)), "change");
  CHECK(!l.try_sample(9, 1) && l.try_sample(10, 1'000'000) && l.allowance(9) == kUnlimited && l.params().could_ever(kUnlimited), "at least 10");

  w->limiter.sampled = 0;
  LimiterParams p{3, 2, 100, 2 * 50, 2 * 250, 0, 0};  // 1.5 samples a row; diff between 50 and 250
  CHECK(l.change(p), "change");
  CHECK(l.allowance(0) == 166 && l.allowance(99) == 67 && l.allowance(166) == 0, "3/2 rows: %lu", l.allowance(0));
  LimiterState s = l.why(99, 8);
  CHECK(s.too_few && !s.diff_too_small && s.diff == 297, "why, below min_size");
  CHECK(l.try_sample(166, 199) && !l.try_sample(166, 1), "3/2: 166·3 − 199·2 = 100 and no more");
  s = l.why(166, 1);
  CHECK(!s.too_few && s.diff_too_small && s.diff == 100 && s.sampled == 199 && s.allowance == 133 && !s.writer_waits, "why, at min_diff");
  p.min_size = 1000;  // rows are admitted up to min_size, whatever the difference
  CHECK(l.change(p) && l.allowance(400) == 600 && l.admit(400) == 600 && !w->limiter.blocked, "min_size");
  p.min_size = 1, p.base_inserts = 10'000, p.base_sampled = 199;  // counts anew
  CHECK(l.change(p) && l.allowance(10'000) == 166 && !l.may_sample(10'033, 1) && l.may_sample(10'034, 1), "bases");
  CHECK(l.allowance(9'990) == 176, "rows counted before the base: diff is negative");

  CHECK(l.admit(10'166) == 0 && w->limiter.blocked && l.why(10'166, 1).writer_waits, "admit says that it waits");
  CHECK(!l.frees_writer(10'166) && w->limiter.blocked, "still blocked");
  CHECK(l.try_sample(10'166, 2) && l.frees_writer(10'166) && !w->limiter.blocked, "frees the writer, once");
  CHECK(!l.frees_writer(10'166), "twice");

  const u64 far = 1ull << 63;  // nothing overflows
  for (u64 num : {1ull, 7ull, 0xffffffffull})
    for (u64 den : {1ull, 5ull, 0xffffffffull})
      for (u64 i : {u64(0), far - 1, far, ~u64(0)})
        for (u64 k : {u64(0), far, ~u64(0)})
          for (i64 d : {kNoMinDiff, kNoMinDiff + 1, i64(-1), i64(1), kNoMaxDiff - 1, kNoMaxDiff}) {
            LimiterParams q{u32(num), u32(den), i, d, d, k, i};
            long double diff = ((long double)i - k) * num - ((long double)k - i) * den, want = (d - diff) / num;
            u64 got = q.allowance(i, k);
            if (d == kNoMaxDiff) CHECK(got == kUnlimited, "unlimited");
            else CHECK(std::abs((long double)got - std::clamp(want, 0.0L, 18446744073709551615.0L)) <= 2 + std::abs(want) * 1e-15L,
                       "allowance %lu, not %Lf", got, want);
            if (d != kNoMinDiff && i >= k && diff < (long double)d - 1e12L) CHECK(!q.may_sample(i, k, 1), "granted");
            q.could_ever(~u64(0)), q.may_sample(i, k, ~u64(0)), check_limiter(q, ~u64(0), ~u64(0));
          }

  using F = LimiterFault;
  auto fault = [](LimiterParams q, u64 rows, u64 batch, bool strict = true) { return check_limiter(q, rows, batch, strict); };
  CHECK(fault({0, 1, 1, 0, 1, 0, 0}, 1, 1) == F::ratio && fault({1, 0, 1, 0, 1, 0, 0}, 1, 1) == F::ratio, "ratio");
  CHECK(fault({1, 1, 1, 2, 1, 0, 0}, 1, 1) == F::order, "order");
  CHECK(fault(LimiterParams::queue(1), 1, 1, false) == F::none && fault(LimiterParams::queue(1), 1, 2, false) == F::deadlock, "Queue(1)");
  CHECK(fault(LimiterParams::queue(63), 1, 32) == F::narrow && fault(LimiterParams::queue(64), 1, 32) == F::none, "batch of 32");
  CHECK(fault(LimiterParams::queue(63), 32, 1) == F::narrow && fault(LimiterParams::queue(64), 32, 1) == F::none, "record of 32");
  CHECK(fault({4, 1, 1000, 3500, 4500, 0, 0}, 1, 256) == F::none && fault({4, 1, 1126, 3500, 4500, 0, 0}, 1, 256) == F::min_size, "min_size");
  CHECK(fault(LimiterParams::at_least(1000), 1u << 20, 1u << 20) == F::none, "at_least");
  // could_ever is exact for rows one by one: the bounds just allow both sides to wait, or just do not
  for (u32 num = 1; num < 6; ++num)
    for (u32 den = 1; den < 6; ++den)
      for (u64 n = 1; n < 4; ++n)
        for (i64 max = 0; max < 40; ++max) {
          LimiterParams q{num, den, 0, 0, max, 0, 0};
          bool stuck = false;
          for (i64 d = -40; d <= max; ++d) stuck |= d + num > max && d - i64(n * den) < 0;
          CHECK(stuck == !q.could_ever(n), "could_ever %u/%u n %lu max %ld", num, den, n, max);
        }
}

// Every set is made of one number, so half of another shows.
static LimiterParams made_of(u64 x) {
  u64 y = mix64(x);
  return {u32(x) | 1, u32(x >> 32) | 1, y, i64(mix64(y)), i64(mix64(y + 1)), x, mix64(y + 2)};
}
static void limiter_changes() {
  fresh();
  Limiter(w->limiter).change(made_of(seed));
  auto changer = [](Rng &r) {
    Limiter l(w->limiter);
    for (; !stopped(); fetch_add(w->changes, u64(1), relaxed)) CHECK(l.change(made_of(r.next())), "overtaken a thousand times");
  };
  auto reader = [](Rng &) {
    Limiter l(w->limiter);
    for (; !stopped(); fetch_add(w->steps, u64(1), relaxed)) {
      LimiterParams p = l.params(), q = made_of(p.base_inserts);
      CHECK(p.num == q.num && p.den == q.den && p.min_size == q.min_size && p.min_diff == q.min_diff && p.max_diff == q.max_diff &&
                p.base_sampled == q.base_sampled, "half a set of parameters");
    }
  };
  run({changer, changer, changer, reader, reader}, &w->steps);
}

// The three wait loops as limiter.h wants them, with a slice of half a minute: a wake-up that is lost hangs. The role is a spin flag.
static void limiter_sleepers() {
  fresh();
  Rng dice{mix64(seed)};
  u64 n = 1 + dice.below(4);
  LimiterParams p{u32(1 + dice.below(3)), u32(1 + dice.below(3)), dice.below(8), 0, 0, 0, 0};
  p.max_diff = i64(p.num + n * p.den - 1 + dice.below(3));  // as narrow as can be
  CHECK(check_limiter(p, 1, n, false) == LimiterFault::none && Limiter(w->limiter).change(p), "parameters");
  static std::atomic<bool> role;
  role = false;
  constexpr u64 kLong = 30'000'000'000, kRing = 4;
  auto inserted = [] { return load(w->inserted, acquire); };
  auto sleep = [](u32 &word, u32 v) {
    if (!stopped()) futex_wait(word, v, kForever, kLong);
  };
  auto hand_over = [] { wake_if_armed(load(w->writer_wait, relaxed) & 1 ? w->writer_wait : w->slot_wait); };
  auto runnable = [&](Limiter &l) { return load(w->put, acquire) != inserted() && l.admit(inserted()); };
  auto help = [&](Limiter &l, auto enough) {
    for (;;) {
      if (role.exchange(true, acquire)) return false;
      bool met;
      while (!(met = enough()) && load(w->put, acquire) != inserted() && l.admit(inserted())) {
        store(w->inserted, w->inserted + 1, release);
        fence(seq_cst);
        wake_if_armed(w->data_wait), wake_if_armed(w->slot_wait);
      }
      role.store(false, release);
      fence(seq_cst);
      if (!runnable(l)) return true;
      if (met) return hand_over(), true;
    }
  };
  auto collector = [&](Rng &) {
    Limiter l(w->limiter);
    auto room = [&] { return load(w->put, relaxed) - inserted() < kRing; };
    while (!stopped()) {
      if (room()) {
        store(w->put, w->put + 1, release);
        fence(seq_cst);
        wake_if_armed(w->writer_wait);
        continue;
      }
      help(l, room);
      u32 v = arm(w->slot_wait);
      help(l, room);
      if (!room()) sleep(w->slot_wait, v);
    }
  };
  auto sampler = [&](Rng &r) {
    Limiter l(w->limiter);
    auto may = [&] { return l.may_sample(inserted(), n); };
    while (!stopped()) {
      if (l.try_sample(inserted(), n)) {
        if (l.frees_writer(inserted())) hand_over();
        fetch_add(w->taken, n, relaxed);
        u64 rows = inserted();  // first: sampled only grows
        CHECK(rows <= p.min_size || p.diff(rows, load(w->limiter.sampled, acquire)) <= p.max_diff, "more rows than admitted");
        if (r.below(4) == 0)  // is away, and helps nobody, as long as the writer may go on: now and then both are
          while (!stopped() && l.allowance(inserted())) usleep(20);
        continue;
      }
      help(l, may);
      u32 v = arm(w->data_wait);
      help(l, may);
      if (!may()) sleep(w->data_wait, v);
    }
  };
  auto drain = [&](Rng &) {
    Limiter l(w->limiter);
    while (!stopped()) {
      help(l, [] { return stopped(); });
      u32 v = arm(w->writer_wait);
      bool idle = help(l, [] { return stopped(); });
      if (!idle || !runnable(l)) sleep(w->writer_wait, v);
    }
  };
  if (dice.below(2)) run({collector, sampler, sampler, drain}, &w->taken);
  else run({collector, sampler, sampler}, &w->taken);
  u64 s = w->limiter.sampled;
  CHECK(s == w->taken && s, "tokens %lu, rows sampled %lu", s, w->taken);
  CHECK(p.diff(w->inserted, s) >= p.min_diff && (w->inserted <= p.min_size || p.diff(w->inserted, s) <= p.max_diff), "diff left its bounds");
}

// ---- epoch -----------------------------------------------------------------------------------------------------
static void permutations() {
  Rng rng{mix64(seed)};
  for (u64 size : std::vector<u64>{1, 2, 3, 5, 64, 65, 4096, 4097, 100'000, 1 + rng.below(300'000)}) {
    std::vector<bool> seen(size);
    Permutation p(rng.next(), u32(size));
    for (u64 x = 0; x < size; ++x) {
      u32 y = p(u32(x));
      CHECK(y < size && !seen[y], "position %lu of %lu: %u is outside or twice", x, size, y);
      seen[y] = true;
    }
  }
  for (u32 size : {0x80000000u, 0x80000001u, 0xffffffffu}) {  // the largest: injective as far as one can see
    Permutation p(rng.next(), size);
    std::vector<u32> ys;
    for (u32 x = 0; x < 10'000; ++x) ys.push_back(p(size - 1 - x * 7)), CHECK(ys.back() < size, "outside");
    std::sort(ys.begin(), ys.end());
    CHECK(std::adjacent_find(ys.begin(), ys.end()) == ys.end(), "twice, size %u", size);
  }
}
// χ² as a normal deviate (Wilson and Hilferty). The keys are fixed: this either always passes or never.
static double deviate(const std::vector<u64> &count, u64 n) {
  double expected = double(n) / double(count.size()), chi2 = 0, k = double(count.size() - 1), v = 2 / (9 * k);
  for (u64 c : count) chi2 += (double(c) - expected) * (double(c) - expected) / expected;
  return (std::cbrt(chi2 / k) - 1 + v) / std::sqrt(v);
}
static void even(const std::vector<u64> &count, u64 n, u32 size, const char *what) {
  if (double d = deviate(count, n); d > 4) fail("permutations of %u, %s: uneven by %.1f standard deviations", size, what, d);
}
[[maybe_unused]] static void evenness() {
  auto key = [](u64 e) { return mix64(20 ^ mix64(e)); };  // as Epoch makes them
  for (u32 size : {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 33, 64, 100}) {
    std::vector<u64> first(size), last(size), pair(u64(size) * (size - 1)), far(pair);
    auto index = [&](u32 a, u32 b) { return u64(a) * (size - 1) + b - (b > a); };
    u64 n = size > 20 ? 200'000 : 100'000;
    for (u64 e = 0; e < n; ++e) {
      Permutation p(key(e), size);
      u32 a = p(0), b = p(1), z = p(size - 1);
      ++first[a], ++last[z], ++pair[index(a, b)], ++far[index(a, z)];
    }
    even(first, n, size, "first"), even(last, n, size, "last");
    if (size > 2) even(pair, n, size, "first two"), even(far, n, size, "first and last");
  }
  // large: where neighbours go, in 16 × 16 bins, and how far apart
  for (u32 size : {128, 1024, 4096, 4097 * 16 / 17 * 17, 8192, 65536, 1 << 20, 999'999}) {
    u32 bins = 16, cell = size / bins, whole = cell * bins;
    std::vector<u64> two(bins * bins), apart(128);
    u64 n = 0, m = 0;
    for (u64 e = 0; e < 300; ++e) {
      Permutation p(key(e), size);
      for (u32 x = 0; x < 100; ++x) {
        u32 a = p(x), b = p((x + 1 + x % 3 * 31) % size), d = (b + size - a) % size - 1;
        if (a < whole && b < whole && size > 60'000) ++two[a / cell * bins + b / cell], ++n;
        if (u32 w = (size - 1) / 128; w && d / w < 128) ++apart[d / w], ++m;
      }
    }
    if (n) even(two, n, size, "neighbours");
    if (m > 2000) even(apart, m, size, "distance of neighbours");
  }
  // different each epoch: as many fixed points between two as chance has, which is one
  u64 same = 0, n = 2'000;
  for (u64 e = 0; e < n; ++e) {
    Permutation p(mix64(20 ^ mix64(e)), 5000), q(mix64(20 ^ mix64(e + 1)), 5000);
    for (u32 x = 0; x < 50; ++x) same += p(x) == q(x);
  }
  CHECK(same < 60, "epochs are alike: %lu of %lu positions agree, expected 20", same, n * 50);
}
static void epoch_rules() {
  fresh();
  Epoch e(w->epoch);
  auto take = [&](u64 n, u64 lo, u64 hi, const EpochOptions &o) {
    Claim c = e.claim(n, lo, hi, o);
    std::vector<u64> ids(c.n);
    c.ids(ids.data());
    return std::pair(c, ids);
  };
  using Ids = std::vector<u64>;
  EpochOptions o;
  o.shuffle = false;
  CHECK(e.claim(4, 0, 0, o).n == 0 && e.claim(0, 0, 5, o).n == 0, "nothing to claim");
  auto [a, ia] = take(4, 100, 110, o);
  CHECK(a.n == 4 && !a.ran_out && ia == (Ids{100, 101, 102, 103}), "first four");
  take(4, 100, 120, o);
  auto [b, ib] = take(4, 100, 120, o);
  CHECK(b.n == 2 && b.ran_out && ib == (Ids{108, 109}), "TorchRL's 4, 4, 2");
  auto [c, ic] = take(4, 105, 120, o);
  CHECK(c.n == 4 && ic[0] == 105 && c.size == 15 && c.number == b.number + 1, "the next epoch has the window of now");
  auto [d, id] = take(4, 200, 203, o);
  CHECK(d.n == 3 && d.ran_out && id[0] == 200, "a window overwritten whole is over");

  fresh(), o.drop_last = true;
  take(4, 0, 10, o);
  auto [f, jf] = take(4, 0, 10, o);
  CHECK(f.n == 4 && f.ran_out, "drop_last: 2 are left, so it ran out");
  CHECK(take(4, 0, 10, o).first.position == 0 && take(11, 0, 10, o).first.n == 0, "drop_last: never less than asked for");
  CHECK(e.look(0).n == 6, "and what could not be claimed changed nothing");

  fresh(), o = {}, o.shuffle = false, o.consume = true, o.repeat = 2;
  Ids got;
  for (;;) {
    auto [x, ix] = take(4, 0, 6, o);
    if (!x.n) break;
    got.insert(got.end(), ix.begin(), ix.end());
  }
  CHECK(got == (Ids{0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5}), "twice each, then exhausted");
  CHECK(take(4, 0, 5, o).first.n == 0 && e.unseen(0, 5) == 0, "a window seen before others saw theirs");
  auto [g, ig] = take(4, 3, 8, o);
  CHECK(g.n == 2 && ig == (Ids{6, 7}) && e.unseen(3, 9) == 1, "then only what is new");
  auto [h, ih] = take(4, 20, 23, o);
  CHECK(h.n == 3 && ih[0] == 20 && h.skipped == 12, "rows overwritten unseen are skipped, and told: %lu", h.skipped);
  fresh(), o.repeat = 1, o.multiple = 4;
  CHECK(take(4, 0, 3, o).first.n == 0 && take(4, 0, 11, o).first.n == 4 && take(4, 0, 11, o).first.ran_out && e.unseen(0, 11) == 3, "multiple");

  for (u64 base : {(1ull << 48) - 5, 1ull << 48, (7ull << 48) - 1, (1ull << 63) + 3}) {  // ids of more than 48 bits
    fresh(), o.multiple = 1;
    auto [x, ix] = take(10, base, base + 10, o);
    CHECK(x.n == 10 && ix[0] == base && ix[9] == base + 9, "id %#lx", ix[0]);
    auto [y, iy] = take(10, base + 4, base + 12, o);
    CHECK(y.n == 2 && iy[0] == base + 10, "consuming on from %#lx", base);
  }
  fresh(), o = {};
  Claim big = e.claim(1, 5, 5 + (1ull << 33), o);
  CHECK(big.n == 1 && big.size == 0xffffffffu, "a window of more than 32 bits");
}
// Each epoch is recognised by its number and window; every position of it exactly once, by however many claimers.
static void epochs_shared() {
  fresh();
  Rng dice{mix64(seed + 17)};
  static u64 size;
  size = 1 + dice.below(2000);
  const u64 most = Shared::kSeen / size;
  EpochOptions o;
  o.seed = seed, o.shuffle = dice.below(2);
  auto claimer = [=](Rng &r) {
    std::vector<u64> ids(size);
    for (Epoch e(w->epoch); !stopped();) {
      Claim c = e.claim(1 + r.below(size < 64 ? size : 64), 1000, 1000 + size, o);
      CHECK(c.n && c.size == size, "no claim");
      if (c.number >= most || c.number == 0xffff) break;  // before the numbers repeat
      c.ids(ids.data());
      for (u64 j = 0; j < c.n; ++j) {
        CHECK(ids[j] >= 1000 && ids[j] < 1000 + size, "outside");
        u8 &s = w->seen[c.number % most * size + ids[j] - 1000];
        CHECK(std::atomic_ref<u8>(s).fetch_add(1, relaxed) == 0, "id %lu twice in epoch %u", ids[j], c.number);
      }
      fetch_add(w->drawn, c.n, relaxed), fetch_add(w->ended, u64(c.ran_out), relaxed);
    }
  };
  run(std::vector<std::function<void(Rng &)>>(8, claimer));
  if (processes) return;
  Claim now = Epoch(w->epoch).look(1000);
  u64 whole = std::min<u64>(now.number, most);  // numbers begin at 1
  for (u64 i = size; i < whole * size; ++i) CHECK(w->seen[i] == 1, "position %lu of epoch %lu was lost", i % size, i / size);
  CHECK(now.number < 2 || (w->ended && w->drawn), "nothing happened");
}
// A writer appends, claimers consume: each row at most `repeat` times; exactly, if nobody dies.
static void consuming() {
  fresh();
  Rng dice{mix64(seed + 23)};
  EpochOptions o;
  o.seed = seed, o.consume = true, o.repeat = u32(1 + dice.below(4)), o.shuffle = dice.below(4), o.drop_last = false;
  o.multiple = u32(dice.below(2) ? 1 : 8);
  auto writer = [](Rng &r) {
    for (; !stopped() && load(w->inserted, relaxed) + 100 < Shared::kSeen; usleep(useconds_t(r.below(20))))
      fetch_add(w->inserted, 1 + r.below(100), release);
  };
  auto some = [=](u64 n, std::vector<u64> &ids) {
    Claim c = Epoch(w->epoch).claim(n, 0, load(w->inserted, acquire), o);
    CHECK(o.multiple == 1 || c.n == 0 || c.n == n, "cut short: %lu of %lu", c.n, n);
    c.ids(ids.data());
    for (u64 j = 0; j < c.n; ++j) {
      CHECK(ids[j] < load(w->inserted, relaxed), "id %lu was not there", ids[j]);
      CHECK(std::atomic_ref<u8>(w->seen[ids[j]]).fetch_add(1, relaxed) < o.repeat, "id %lu more than %u times", ids[j], o.repeat);
    }
    fetch_add(w->drawn, c.n, relaxed);
    return c.n;
  };
  auto claimer = [=](Rng &r) {
    std::vector<u64> ids(64);
    while (!stopped())
      if (!some(o.multiple > 1 ? o.multiple : 1 + r.below(64), ids)) sched_yield();
  };
  run({writer, claimer, claimer, claimer, claimer}, &w->drawn);
  std::vector<u64> ids(64);
  while (some(o.multiple > 1 ? o.multiple : 64, ids)) {}
  u64 all = w->inserted - w->inserted % o.multiple, lost = 0;
  for (u64 i = 0; i < all; ++i) lost += w->seen[i] < o.repeat;
  if (!processes) all = w->inserted - Epoch(w->epoch).unseen(0, w->inserted);
  for (u64 i = 0; i < all && !processes; ++i) CHECK(w->seen[i] == o.repeat, "id %lu: %u times, not %u", i, w->seen[i], o.repeat);
  CHECK(w->drawn && (processes || w->inserted - all < o.multiple), "%lu rows of %lu are left", w->inserted - all, w->inserted);
  CHECK(lost <= (deaths + 1) * 64, "%lu rows not drawn for %lu deaths", lost, deaths);
}

#include "whole_segment.h"

int main(int argc, char **argv) {
  u64 seconds = 3;
  for (int i = 1; i < argc; ++i) {
    std::string a = argv[i];
    if (a == "--processes") processes = true;
    else if (a == "--seed" && i + 1 < argc) seed = std::stoull(argv[++i]);
    else if (a == "--seconds" && i + 1 < argc) seconds = std::stoull(argv[++i]);
    else return std::fprintf(stderr, "%s [--seconds N] [--seed N] [--processes]\n", argv[0]), 2;
  }
  w = static_cast<Shared *>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  CHECK(w != MAP_FAILED, "mmap");
  u64 end = now_ns() + seconds * 1'000'000'000, rounds = 0;
  if (!processes) limiter_arithmetic(), epoch_rules(), permutations();
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)
  if (!processes) evenness();  // arithmetic only: once is enough
#endif
  for (; !rounds || now_ns() < end; ++seed, ++rounds) {
    limiter_changes();
    if (!processes) limiter_sleepers();
    epochs_shared();
    consuming();
    if (!processes) segment();
  }
  std::printf("ok: shared words, %lu rounds, %lu deaths\n", rounds, deaths);
}
