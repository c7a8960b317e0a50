// links.h and slices.h beside a plain model in ordinary memory: `make trajectories-run` and the other targets of the Makefile.
//
//   rounds      random streams over some tables, ends, wraps, CLEARs, transactions of up to three times the capacity; with -steps the
//               writer is killed at labelled steps and the transaction done again. After each: every row's predecessor, follower,
//               ancestors, first live row, end; every end, counted, listed and drawn. In the middle of one: what readers still see
//   draws       χ² of ends and slices against what the model says may be drawn, by chance and by the exact scan
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
struct ModelRow {
  u64 id = kNoRow, pred = kNoRow, succ = kNoRow, trajectory = 0;
  u32 step = 0;
  bool ended = false, head_missing = false;
};
struct ModelStream { u64 last; bool ended; };
struct NewRow { u64 table, stream; bool ended; };
using Lists = std::map<u64, std::vector<u64>>;  // trajectory → its live rows

struct World {
  Rng rng;
  u64 capacity, tables, streams, entries, end_odds;
  std::vector<u64> words;
  std::vector<Stream> table;
  std::vector<ModelRow> rows;
  std::map<std::pair<u64, u64>, ModelStream> stream;
  std::vector<u64> incarnation;
  u64 cursor = 0, base = 0, trajectories = 0, cuts = 0, adopted = 0, redone = 0;

  static Geometry_(u64);
};
