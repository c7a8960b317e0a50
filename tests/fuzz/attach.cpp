// libFuzzer: any bytes as a segment, attached through the real headers and used in every way there is. Rows may be garbage, calls may
// fail; nothing may be read or written outside the mapping, no byte of the header may change, nothing may go on for ever.
//
//   input   u8 flags: 1, 2 right checksums for the header, for Built; 4 read-only; 8 invisible
//           u8 seed, u16 pages of the file, u8 n, n steps of a program (0: all of them, in order)
//           runs: u16 first word, u8 words, the words (segments.py encodes real ones)
//
// The mapping lies between guard pages; time is virtual, so waits cost nothing, and who spins without looking at the clock is caught
// by -timeout.
#include <linux/memfd.h>
#include <map>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static thread_local unsigned long fuzz_ns = 1'000'000'000'000;
static int fuzz_clock(clockid_t, timespec *t) {
  fuzz_ns += 2'000'000;  // a patience of a second is a few dozen looks
  t->tv_sec = time_t(fuzz_ns / 1'000'000'000), t->tv_nsec = long(fuzz_ns % 1'000'000'000);
  return 0;
}
static long fuzz_sleep(unsigned long ns) { return fuzz_ns += ns, 0; }
template <class... Any> long fuzz_syscall(Any...) { return fuzz_sleep(20'000'000); }  // the only one there is: futex, a slice
constexpr unsigned long kGuard = 1 << 16;
static void *guarded_mmap(void *, size_t n, int protection, int flags, int fd, off_t at) {
  const size_t whole = (n + 4095) / 4096 * 4096;
  auto *all = static_cast<unsigned char *>(::mmap(nullptr, whole + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return all == MAP_FAILED ? all : ::mmap(all + kGuard, n, protection, flags | MAP_FIXED, fd, at);
}
static int guarded_munmap(void *p, size_t n) { return ::munmap(static_cast<unsigned char *>(p) - kGuard, (n + 4095) / 4096 * 4096 + 2 * kGuard); }
#define clock_gettime fuzz_clock
#define syscall fuzz_syscall
#define usleep(us) fuzz_sleep((us) * 1000ul)
#define mmap guarded_mmap
#define munmap guarded_munmap
#include "handle.h"
#undef clock_gettime
#undef syscall
#undef usleep
#undef mmap
#undef munmap

using namespace shmbuf;

extern "C" size_t LLVMFuzzerMutate(u8 *data, size_t size, size_t max);

namespace {

constexpr u64 kMaxPages = 1024, kMaxN = 64;
#define CHECK(condition) ((condition) ? void() : (std::fprintf(stderr, "VIOLATION: %s, line %d\n", #condition, __LINE__), std::abort()))

// ---- input ---------------------------------------------------------------------------------------------------------------
struct Input {
  u8 flags = 0, seed = 0;
  u64 pages = 0;
  const u8 *program = nullptr;
  u64 steps = 0;
  size_t runs = 0;  // where they begin
  Input(const u8 *p, size_t n) {
    if (n < 5) return;
    flags = p[0], seed = p[1], pages = std::min<u64>(p[2] | p[3] << 8, kMaxPages), steps = std::min<u64>(p[4], n - 5);
    program = p + 5, runs = 5 + steps;
  }
};
template <class Run> void each_run(const u8 *p, size_t n, size_t at, Run run) {  // run(first word, words, where they are)
  while (at + 3 <= n) {
    const u64 first = p[at] | p[at + 1] << 8, words = std::min<u64>(p[at + 2], (n - at - 3) / 8);
    run(first, words, at + 3);
    at += 3 + words * 8;
    if (!words) at = p[at - 1] ? n : at;
  }
}
void reseal(u8 *map, u64 bytes, u8 flags) {
  auto &h = *reinterpret_cast<Header *>(map);
  if (flags & 1 && h.config_offset <= bytes && h.config_bytes_used <= bytes - h.config_offset) h.header_crc = header_crc(map);
  const u64 at = h.built.schema_offset;
  if (flags & 2 && at <= bytes && h.built.schema_bytes <= bytes - at) h.built.crc = built_crc(h.built, map + at);
}

// ---- what is done with a segment -----------------------------------------------------------------------------------------
struct User {
  Handle &h;
  Rng rng;
  u64 n = 0, ids[kMaxN * 8], lens[kMaxN];
  float weights[kMaxN], leaves[kMaxN];
  u8 done[kMaxN];
  std::vector<u8> out;
  std::vector<OutColumn> columns;
  std::vector<Column> in;
  static constexpr auto go_on = [] { return true; };

  User(Handle &handle, u64 seed) : h(handle), rng{mix64(seed)} {
    const u64 row = h.segment().row_bytes, part = row > 3 ? row / 2 : row;
    out.resize(kMaxN * row);
    columns = {{0, part, out.data()}, {part, row - part, out.data() + kMaxN * part}};
    in = {{0, part, out.data(), i64(part)}, {part, row - part, out.data() + kMaxN * part, i64(row - part)}};
  }
  u64 soon() { return now_ns() + rng.below(200'000'000); }
  void some_ids() {  // of rows there are, and others
    const Window w = window(h.segment());
    n = 1 + rng.below(kMaxN);
    for (u64 j = 0; j < n; ++j) ids[j] = rng.below(4) ? w.live_lo + rng.below(w.hi - w.live_lo + 1) : rng.next() >> rng.below(64);
  }
  Sampling<Handle> sampling() { return h.sampling(); }
  bool links() const { return h.segment().links; }
  void look() {
    Segment &s = h.segment();
    const Window w = window(s);
    CHECK(w.live_lo <= w.hi && w.lo <= w.hi && w.hi - w.live_lo <= s.capacity && h.size() <= s.capacity);
    CommitBlock b;
    std::vector<BlockSlot> slots(s.n_slots());
    for (int tries = 0; tries < 3 && !read_block(s, b, slots.data(), s.n_slots()); ++tries) {}
    Writer::runnable(s);
    Limiter(s.control().limiter).why(Writer::inserted(s), rng.next() >> rng.below(64));
    if (!h.readonly()) h.count_drawn(ids, n), Chronicle(s).stale(1, 2);
    if (sampling().keeps_priorities()) sampling().tree().check(), sampling().tree().sum(), first_leaf(s.control().priorities, Formula(s.control().priorities), sampling().tree());
  }
  void draw() {
    n = 1 + rng.below(kMaxN);
    sampling().draw(n, columns.data(), u32(columns.size()), ids, soon(), rng.below(2), go_on);
  }
  void draw_by_priority() {
    n = 1 + rng.below(kMaxN);
    sampling().draw_by_priority(n, {0.4, rng.below(2) == 0, rng.below(2) == 0}, columns.data(), u32(columns.size()), ids, weights, soon(), rng.below(2), go_on);
  }
  void fetch() {
    some_ids();
    std::memset(done, 0, sizeof done);
    sampling().fetch(n, columns.data(), u32(columns.size()), ids, done);
  }
  void slices() {
    if (!links()) return;
    n = 1 + rng.below(kMaxN);
    const u64 length = 1 + rng.below(8);
    auto s = sampling();
    const SliceDraw d = s.choose_slices({length, rng.below(2) == 0, rng.below(2) ? SliceBy::start : SliceBy::trajectory, rng.below(length), rng.below(length), rng.below(2) == 0}, n, ids, lens);
    if (d.status == SliceStatus::ok || d.status == SliceStatus::lapped)
      for (u64 j = 0; j < n; ++j) CHECK(lens[j] <= length);
  }
  void walk() {
    if (!links()) return;
    some_ids();
    u64 out_ids[kMaxN * 8];
    auto s = sampling();  // what slices() gives refers to it
    s.slices().walk(ids, n, 1 + rng.below(8), 1 + rng.below(3), rng.below(2), out_ids, lens);
    for (u64 j = 0; j < n; ++j) CHECK(lens[j] <= 8), s.slices().rows(ids[j]), s.slices().stretch(ids[j], rng.below(9), rng.below(9), out_ids);
  }
  void trajectories() {
    if (!links()) return;
    const Window w = window(h.segment());
    const Links l(h.segment().links, h.segment().capacity);
    u64 ends = 0, rows = 0;
    l.for_each_end(w.lo, w.hi, [&](u64 id) {
      ++ends, l.first_live(id, w.lo);
      for (u64 at = id, k = 0; at != kNoRow && k <= h.segment().capacity; at = l.previous(at, w.lo), ++k) ++rows;
    });
    CHECK(ends <= h.segment().capacity);
    l.ends().check();
  }
  void epochs() {
    const EpochOptions o{rng.next(), rng.below(2) == 0, rng.below(2) == 0, rng.below(2) == 0, u32(1 + rng.below(3)), u32(1 + rng.below(3))};
    n = 1 + rng.below(kMaxN);
    if (h.readonly()) return;
    const Claim c = sampling().claim(h.segment().control().epochs[rng.below(4)].word, n, o);
    CHECK(c.n <= n);
    c.ids(ids);
    Window w = window(h.segment());
    Epoch(h.segment().control().epochs[0].word).unseen(w.lo, w.hi);
    sampling().share_epoch(u32(rng.below(4)), rng.next());
  }
  void limit() {
    if (sampling().acquire_samples(1 + rng.below(kMaxN), soon(), rng.below(2), go_on) == Status::ok) sampling().refund_samples(3);
    if (!h.readonly() && rng.below(4) == 0) sampling().set_limiter({u32(rng.below(3)), u32(rng.below(3)), rng.below(9), -9, 9, 0, 0});
  }
  void set_priorities() {
    some_ids();
    double p[kMaxN];
    for (u64 j = 0; j < n; ++j) p[j] = double(rng.below(100));
    u64 bad = 0;
    sampling().set_priorities(ids, p, n, done, bad);
  }
  void get_priorities() {
    if (!sampling().keeps_priorities()) return;
    some_ids();
    double p[kMaxN];
    sampling().get_priorities(ids, n, p);
    if (!h.readonly()) sampling().scrub();
  }
  void keep_priorities() { sampling().keep_priorities(0.5, 0.25, rng.below(2), soon(), go_on); }
  void put() {
    n = 1 + rng.below(kMaxN);
    std::shared_ptr<TicketState> ticket;
    for (u64 j = 0; j < n; ++j) ids[j] = rng.below(5), leaves[j] = float(j);
    const Extras extras{rng.below(2) && links() ? ids : nullptr, rng.below(2) ? leaves : nullptr};
    const Status s = h.put(in.data(), u32(in.size()), extras, n, Full(rng.below(4)), soon(), rng.below(2), rng.below(4) != 0, ticket, go_on);
    if (s == Status::ok && rng.below(2)) h.try_wait(*ticket, 1 << 20), h.wait(*ticket, soon(), go_on);
  }
  void clear() {
    std::shared_ptr<TicketState> ticket;
    if (h.clear(u32(rng.below(2)), {}, soon(), ticket, go_on) == Status::ok) h.wait(*ticket, soon(), go_on);
  }
  void audit() { CHECK(h.audit(0).findings.size() < 1000); }
  void help() {
    if (!h.readonly()) h.help();
  }
  void sweep() {
    if (!h.readonly()) h.sweep();
  }
  void mend() {
    for (int k = 0; k < 3; ++k) h.mend(), fuzz_sleep(400'000'000);
  }
  void wait_rows() { h.wait_rows(1 + rng.below(3), soon(), go_on); }
};
constexpr void (User::*kSteps[])() = {
    &User::look, &User::audit, &User::draw, &User::fetch, &User::slices, &User::walk, &User::trajectories, &User::draw_by_priority, &User::get_priorities, &User::epochs,
    &User::limit, &User::help, &User::look, &User::put, &User::set_priorities, &User::keep_priorities, &User::put, &User::help, &User::draw, &User::draw_by_priority,
    &User::slices, &User::trajectories, &User::clear, &User::put, &User::mend, &User::sweep, &User::wait_rows, &User::audit};

void build(Handle &h) {
  if (h.segment().control().state != kConfig || h.readonly() || h.segment().header().capacity > 1 << 14 || h.segment().header().ring_bytes_asked > 1 << 14) return;
  if (h.segment().header().max_collectors > 64 || !h.try_lock_build()) return;
  const u8 schema[] = "a schema";
  h.build(schema, sizeof schema, {24, 1, true, {{16, 1}}, {0, 8}});
  h.unlock_build();
}

void use(int fd, const Input &in) {
  const int lock_fd = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC);
  CHECK(lock_fd >= 0);
  try {
    Handle h(dup(fd), lock_fd, (in.flags & 4 ? u32(Handle::kReadonly) : 0u) | (in.flags & 8 ? u32(Handle::kNoPresence) : 0u));
    h.seed(in.seed);
    build(h);
    Segment &s = h.segment();
    std::vector<u8> before(s.map, s.map + kPage);  // config, too
    before.insert(before.end(), s.map + s.header().config_offset, s.map + s.header().config_offset + s.header().config_bytes_used);
    if (h.ready()) {
      User user(h, in.seed);
      if (in.steps)
        for (u64 k = 0; k < in.steps; ++k) (user.*kSteps[in.program[k] % std::size(kSteps)])();
      else
        for (auto step : kSteps) (user.*step)();
    } else {
      h.size();
      h.wait_rows(1, now_ns() + 30'000'000, [] { return true; });
    }
    CHECK(!std::memcmp(before.data(), s.map, kPage) && !std::memcmp(before.data() + kPage, s.map + s.header().config_offset, s.header().config_bytes_used));
  } catch (const FormatError &) {
  } catch (const DeviceError &e) {
    CHECK(e.unmapped);  // damage says that the rows are on a device
  } catch (const std::runtime_error &e) {
    CHECK(std::strncmp(e.what(), "mmap of", 7) == 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8 *p, size_t n) {
  const Input in(p, n);
  if (!in.pages) return -1;
  const u64 bytes = in.pages * kPage;
  static int fd = memfd_create("segment", MFD_CLOEXEC);
  CHECK(fd >= 0 && !ftruncate(fd, 0) && !ftruncate(fd, i64(bytes)));  // all zero again
  auto *map = static_cast<u8 *>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  CHECK(map != MAP_FAILED);
  each_run(p, n, in.runs, [&](u64 first, u64 words, size_t at) {
    if (first * 8 < bytes) std::memcpy(map + first * 8, p + at, std::min(words, bytes / 8 - first) * 8);
  });
  reseal(map, bytes, in.flags);
  ::munmap(map, bytes);
  use(fd, in);
  return 0;
}

// Half of the time: another value for one or two words that are there, of the kinds that hurt.
extern "C" size_t LLVMFuzzerCustomMutator(u8 *p, size_t n, size_t max, unsigned seed) {
  Rng rng{mix64(seed)};
  const Input in(p, n);
  if (!in.pages || rng.below(4) == 0) return LLVMFuzzerMutate(p, n, max);
  std::vector<size_t> words;  // where their bytes are: tables before rows, so that each page counts alike
  std::map<u64, std::vector<size_t>> by_page;
  each_run(p, n, in.runs, [&](u64 first, u64 k, size_t at) {
    for (u64 j = 0; j < k; ++j) by_page[(first + j) / 512].push_back(at + j * 8);
  });
  if (by_page.empty()) return LLVMFuzzerMutate(p, n, max);
  if (rng.below(4)) p[0] = u8((p[0] & ~3u) | 3u);
  if (rng.below(8) == 0) p[1] = u8(rng.next());
  for (u64 k = 1 + rng.below(3); k--;) {
    auto page = by_page.begin();
    std::advance(page, i64(rng.below(by_page.size())));
    u8 *at = p + page->second[rng.below(page->second.size())];
    u64 word;
    std::memcpy(&word, at, 8);
    const u64 one = 1ull << rng.below(64), steps[] = {1, 8, 16, 31, 32, 64, 512, 4096};
    const u64 values[] = {0, ~0ull, one, one - 1, ~one, word ^ one, word + steps[rng.below(8)], word - steps[rng.below(8)], word + rng.below(256), word & 0xffffffff, rng.next(),
                          std::bit_cast<u64>(std::numeric_limits<double>::infinity()), std::bit_cast<u64>(1e300), 0x7fc000007f800000ull, word << 32 | word >> 32};
    word = values[rng.below(std::size(values))];
    if (n + 11 <= max && rng.below(3) == 0) {  // a word that was 0
      const u64 index = page->first * 512 + rng.below(512);
      p[n] = u8(index), p[n + 1] = u8(index >> 8), p[n + 2] = 1, at = p + n + 3, n += 11;
      if (rng.below(2)) word = rng.below(64);
    }
    std::memcpy(at, &word, 8);
  }
  return n;
}
