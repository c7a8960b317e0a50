// Updaters, drawers and the writer on one priority tree.
//
//   always    a priority is found only under the id it was set for; zero and fresh leaves are never drawn
//   at rest   no node differs from its children, the root is the sum and the minimum of the leaves, and of 4,096 evenly spread
//             draws each leaf gets its share. Where actors were killed: after the writer's redo and a scrub
#pragma once
#include "harness.h"
#include <barrier>

// The values a row may have: its first one (which = 0) and four that updaters choose from. Some are 0, the others 1e-8 to 1e8.
inline float priority_of(u64 id, u64 which) {
  u64 x = mix64(id * 5 + which + 1);
  return x % 7 == 0 ? 0 : float(std::pow(10.0, double(x % 16) - 8) * (1 + double(x >> 60)));
}
inline bool is_fresh(float p) { return p == 0 && std::signbit(p); }
inline bool may_have(u64 id, float p) {
  for (u64 which = 0; which < 5; ++which)
    if (p == priority_of(id, which) && !is_fresh(p)) return true;
  return false;
}

inline void publish_first(PriorityTree &t, u64 from, u64 to) {
  std::vector<float> p;
  for (u64 id = from; id < to; ++id) p.push_back(priority_of(id, 0));
  t.publish(from, p.data(), 1, to - from);
}
// As a transaction will do it. `only_redo`: finish what a killed one left, no more.
inline void tree_writer(PriorityTree &t, u64 life, bool only_redo = false) {
  Rng rng{life};
  publish_first(t, board->tree_first, board->tree_cursor);  // T6 of the last commit, again
  for (;;) {
    u64 from = board->tree_cursor, n = rng.below(50) ? 1 + rng.below(g.capacity / 4 + 1) : 1 + rng.below(3 * g.capacity);
    bool sealed = board->tree_reserve != from;
    if (!sealed && (only_redo || stopped())) return;
    if (!sealed) store(board->tree_reserve, from + n, release);
    u64 to = board->tree_reserve;
    t.evict(from, to - from);
    store(board->tree_first, from, release);
    store(board->tree_cursor, to, release);
    publish_first(t, from, to);
    if (!rng.below(4)) usleep(useconds_t(rng.below(500)));
  }
}
inline void updater(PriorityTree &t, u64 life) {
  Rng rng{life};
  u64 ids[300];
  float p[300];
  while (!stopped()) {
    u64 cursor = load(board->tree_cursor, acquire), n = 1 + rng.below(300);
    if (!cursor) { usleep(100); continue; }
    for (u64 j = 0; j < n; ++j) {  // some already overwritten
      ids[j] = cursor - 1 - std::min(cursor - 1, rng.below(g.capacity + g.capacity / 8 + 1));
      p[j] = priority_of(ids[j], 1 + rng.below(4));
    }
    u64 applied = t.set(ids, p, n);
    CHECK(applied <= n, "set applied %lu of %lu", applied, n);
    count(board->updates, applied), count(board->stale, n - applied);
    t.get(ids, n, p);
    for (u64 j = 0; j < n; ++j)
      CHECK(std::isnan(p[j]) || is_fresh(p[j]) || may_have(ids[j], p[j]), "id %lu has a priority, %g, that nobody gave it", ids[j], double(p[j]));
  }
}
inline void drawer(const PriorityTree &t, u64 life) {
  Rng rng{life};
  u64 ids[64];
  double u[64];
  float p[64];
  while (!stopped()) {
    u64 n = 1 + rng.below(64), around = load(board->tree_cursor, acquire);
    for (u64 j = 0; j < n; ++j) u[j] = double(rng.next() >> 11) * 0x1p-53;
    u64 got = t.draw(around, u, n, ids, p), cursor = load(board->tree_cursor, acquire);
    for (u64 j = 0; j < n; ++j)
      if (ids[j] != PriorityTree::kNowhere)
      CHECK(p[j] > 0 && ids[j] < cursor && may_have(ids[j], p[j]), "drew id %lu (cursor %lu) with %g", ids[j], cursor, double(p[j]));
    count(board->drawn, got);
    CHECK(t.sum() >= 0 && std::isfinite(t.sum()) && t.min() >= 0, "sum %g min %g", t.sum(), double(t.min()));
  }
}

inline void tree_at_rest(const PriorityTree &t) {
  constexpr u64 kDraws = 4096;
  u64 hi = board->tree_cursor, lo = hi - std::min(hi, g.capacity), n = hi - lo;
  std::vector<u64> ids(n), drawn(kDraws), hits(n);
  std::vector<float> p(n), with(kDraws);
  std::vector<double> u(kDraws);
  double sum = 0, root = t.sum();
  float least = 0;
  CHECK(t.check() == 0, "%lu nodes differ from their children at rest", t.check());
  for (u64 j = 0; j < n; ++j) ids[j] = lo + j;
  t.get(ids.data(), n, p.data());
  for (u64 j = 0; j < n; ++j) {
    CHECK(may_have(ids[j], p[j]), "id %lu has %g at rest", ids[j], double(p[j]));
    sum += double(p[j]);
    if (p[j] > 0 && (least == 0 || p[j] < least)) least = p[j];
  }
  CHECK(std::abs(sum - root) <= 1e-9 * sum, "root %.17g, leaves %.17g", root, sum);
  CHECK(least == t.min(), "root's min %g, leaves' %g", double(t.min()), double(least));
  for (u64 j = 0; j < kDraws; ++j) u[j] = (double(j) + 0.5) / kDraws;
  u64 got = t.draw(hi, u.data(), kDraws, drawn.data(), with.data());
  CHECK(got == (root > 0 ? kDraws : 0), "%lu draws at rest", got);
  for (u64 j = 0; j < got; ++j) CHECK(drawn[j] >= lo && drawn[j] < hi, "drew id %lu at rest", drawn[j]), ++hits[drawn[j] - lo];
  for (u64 j = 0; j < n && got; ++j)
    CHECK(std::abs(double(hits[j]) - kDraws * double(p[j]) / root) < 1.01, "%g of %g was drawn %lu times", double(p[j]), root, hits[j]);
}
// One row at a time, nobody else about.
inline void rules(PriorityTree &t) {
  const u64 n = g.capacity;
  const float zero = 0, one = 1, two = 2;
  u64 id = 2 * n, old = n, got;
  float p;
  double u = 0.999;
  auto has = [&](u64 of) { return t.get(&of, 1, &p), p; };
  t.evict(old, 1), t.publish(old, &one, 0, 1);
  t.evict(id, 1);
  CHECK(is_fresh(has(id)) && std::isnan(has(old)) && t.sum() == 0 && t.draw(id, &u, 1, &got, &p) == 0, "an evicted row is still there");
  CHECK(t.set(&old, &two, 1) == 0 && is_fresh(has(id)), "a stale priority reached the row that came after");
  CHECK(t.set(&id, &zero, 1) == 1, "a fresh row takes no priority");
  t.publish(id, &one, 0, 1);
  CHECK(has(id) == 0 && !is_fresh(p) && t.sum() == 0 && t.min() == 0, "publish replaced a user's 0 by %g", double(p));
  CHECK(t.set(&id, &two, 1) == 1 && t.sum() == 2 && t.min() == 2, "set: sum %g min %g", t.sum(), double(t.min()));
  t.publish(id, &one, 0, 1);
  CHECK(has(id) == 2, "publish replaced a user's priority by %g", double(p));
  CHECK(t.draw(id + 1, &u, 1, &got, &p) == 1 && got == id && p == 2, "drew id %lu with %g", got, double(p));
  u64 far = ((5ull << 32) + 3) * n;  // generations have 32 bits in the leaf
  t.evict(far, 1), t.publish(far, &one, 0, 1);
  CHECK(t.draw(far + 1, &u, 1, &got, &p) == 1 && got == far, "drew id %lu instead of %lu", got, far);
  t.evict(far, 3 * n + 1), t.publish(far, &one, 0, 3 * n + 1);
  CHECK(has(far + 3 * n) == 1 && std::isnan(has(far + 2 * n)) && t.sum() == double(n), "of more rows than slots the last stay: sum %g", t.sum());
  t.format();
}
// What a lost refresh leaves stale the next one heals: so look after every burst of a few changes to a small tree.
inline void bursts() {
  const u64 n = 1 + g.capacity % 70;
  std::vector<u8> memory(PriorityTree::bytes(n) + 128);
  PriorityTree t(memory.data() + (128 - reinterpret_cast<u64>(memory.data()) % 128), n);
  u64 looks = 0;
  std::barrier rest(3, [&]() noexcept { CHECK(t.check() == 0, "%lu stale nodes after a burst", t.check()), count(looks); });
  auto change = [&](u64 life, auto step) {
    for (Rng rng{life}; !stopped(); rest.arrive_and_wait())
      for (u64 k = rng.below(3); k < 3; ++k) step(rng);
    rest.arrive_and_drop();
  };
  auto set = [&](Rng &rng) {
    u64 id = rng.below(n);
    float p = float(rng.below(3));  // few values, so that one returns while another updater looks
    t.set(&id, &p, 1);
  };
  auto renew = [&](Rng &rng) {
    u64 first = rng.below(n), k = 1 + rng.below(3);
    float p = 1;
    t.evict(first, std::min(k, n - first)), t.publish(first, &p, 0, std::min(k, n - first));
  };
  Body updates = [&](u64 life) { change(life, set); }, renews = [&](u64 life) { change(life, renew); };
  run({updates, updates, renews}, [&] { return load(looks, relaxed); });
}
inline void priorities() {
  u64 bytes = PriorityTree::bytes(g.capacity);
  auto *memory = static_cast<u8 *>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  PriorityTree t(memory, g.capacity);
  if (g.seed & 1) std::memset(memory, 0xa5, bytes), t.format();
  rules(t);
  std::vector<Body> bodies = {[&](u64 life) { tree_writer(t, life); }};
  for (int i = 0; i < 3; ++i) bodies.push_back([&](u64 life) { updater(t, life); });
  for (int i = 0; i < 2; ++i) bodies.push_back([&](u64 life) { drawer(t, life); });
  run(bodies, [] { return load(board->tree_cursor, relaxed) + load(board->updates, relaxed); });
  if (processes) {
    tree_writer(t, g.seed, true);
    t.scrub();
    CHECK(t.scrub() == 0, "a second scrub at rest changes nodes");
  }
  tree_at_rest(t);
  if (!processes) bursts();
  munmap(memory, bytes);
}
