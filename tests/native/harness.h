// What every part of the driver stands on: the headers under test, the words its actors share, and the actors themselves, which
// are threads (so that TSan sees them) or forked processes (of which one is killed every few milliseconds).
#pragma once
#if defined(__SANITIZE_THREAD__)
// TSan does not know that handing over a file lock orders memory: the headers' calls come here.
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
// A claim copies one number of its own, drained ring out of a commit block that a writer may be filling again with that number.
extern "C" const char *__tsan_default_suppressions() { return "race:shmbuf::Registry::claim_slot\n"; }
#endif
#ifdef SHMBUF_FAILPOINTS
// Every labelled step of the headers may yield, sleep or, in a process that is to die, be the last: what lies between two stores
// hardly ever meets anybody else otherwise.
#include "failpoint.h"
#undef FAILPOINT
#define FAILPOINT(name) ::pause_or_die()
inline void pause_or_die();
#endif
#include "handle.h"
#include "priority_tree.h"
#undef fcntl
#include <cmath>
#include <cstdarg>
#include <functional>
#include <sys/wait.h>
#include <thread>

using namespace shmbuf;

constexpr u32 kMaxRings = 16;
struct Geometry { u64 seed, capacity, row_bytes, ring_bytes, collectors; };
struct Audit { u64 next[kMaxRings]; };  // per ring: the number of the row that must come next
struct Board {                          // shared by all actors of a round
  u32 stop;
  u64 audited;                          // the commit_seq that was audited last
  Audit audit[2];                       // selected like the commit block: an auditor may be killed too
  u64 acked[kMaxRings], clears, skips, rows, checked, swept, deaths;
  u64 tree_first, tree_cursor, tree_reserve, updates, stale, drawn;
};
inline Board *board;
inline Geometry g;
inline bool processes;
inline u64 round_ns = 300'000'000;
inline u64 life_steps;                  // dies at one in so many labelled steps; 0: never

[[noreturn]] inline void fail(const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  std::fprintf(stderr, "VIOLATION: %s\n  again: --seed %lu --rounds 1 --capacity %lu --row-bytes %lu --ring-bytes %lu"
               " --collectors %lu%s\n", text, g.seed, g.capacity, g.row_bytes, g.ring_bytes, g.collectors, processes ? " --processes" : "");
  _exit(1);
}
#define CHECK(condition, ...) ((condition) ? void() : fail(__VA_ARGS__))
inline bool stopped() { return load(board->stop, acquire) != 0; }
inline void count(u64 &what, u64 n = 1) { fetch_add(what, n, relaxed); }

#ifdef SHMBUF_FAILPOINTS
inline void pause_or_die() {
  thread_local Rng rng{mix64(now_ns() ^ reinterpret_cast<u64>(&rng))};
  u64 dice = rng.below(2048);
  if (dice < 24) sched_yield();
  else if (dice < 27) usleep(useconds_t(rng.below(50)));
  if (life_steps && rng.below(life_steps) == 0) kill(getpid(), SIGKILL);
}
#endif
using Body = std::function<void(u64 life)>;  // life: another number each time it is started

// Every body for one round. progress() must keep changing.
inline void run(const std::vector<Body> &bodies, const std::function<u64()> &progress) {
  store(board->stop, 0u, release);
  signal(SIGALRM, [](int) { fail("hangs: an actor does not come back"); });
  alarm(30);
  u64 end = now_ns() + round_ns, moved = now_ns(), seen = progress(), life = g.seed;
  auto watch = [&] {
    if (u64 p = progress(); p != seen) seen = p, moved = now_ns();
    CHECK(now_ns() - moved < 20'000'000'000, "nothing has moved for 20 s (%lu)", seen);
  };
  if (!processes) {
    std::vector<std::thread> threads;
    for (auto &body : bodies) threads.emplace_back(body, life++);
    while (now_ns() < end) usleep(10'000), watch();
    store(board->stop, 1u, release);
    for (auto &t : threads) t.join();
    return;
  }
  std::vector<pid_t> pids(bodies.size());
  auto start = [&](u64 i) {
    pids[i] = fork();
    CHECK(pids[i] >= 0, "fork: %s", std::strerror(errno));
    if (pids[i] == 0) prctl(PR_SET_PDEATHSIG, SIGKILL), alarm(30), life_steps = 64ull << life % 12, bodies[i](life), _exit(0);
    ++life;
  };
  auto died = [&](u64 i, int options) {
    int status;
    if (waitpid(pids[i], &status, options) != pids[i]) return false;
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    CHECK(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "actor %lu ended with status %#x", i, status);
    board->deaths += killed;
    return true;
  };
  for (u64 i = 0; i < bodies.size(); ++i) start(i);
  for (Rng rng{g.seed}; now_ns() < end; watch()) {
    usleep(useconds_t(rng.below(4'000)));
    if (rng.below(4) == 0) kill(pids[rng.below(pids.size())], SIGKILL);
    for (u64 i = 0; i < bodies.size(); ++i)
      if (died(i, WNOHANG)) start(i);
  }
  store(board->stop, 1u, release);
  for (u64 i = 0; i < bodies.size(); ++i) died(i, 0);
}
