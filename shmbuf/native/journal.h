// What happened, for people: deaths, the pace of writing, the age of what is drawn. Nothing depends on it, so nothing here needs more
// than whole words; an event is believed when its number is there, which is stored last.
//
//   collector died   rows: what still lay in its ring when that was noticed
//   writer died      rows: of the transaction that is finished for it;  ns: from its last sign of life to the take-over
//   process died     any other that was attached
#pragma once
#include "failpoint.h"
#include "layout.h"
#include <algorithm>
#include <bit>

namespace shmbuf {

inline u64 wall_ns() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return u64(t.tv_sec) * 1'000'000'000ull + u64(t.tv_nsec);
}

class Chronicle {
 public:
  explicit Chronicle(const Segment &s) : s_(s), j_(s.journal()) {}

  void died(EventKind kind, u64 key, u32 pid, const char *comm, u64 rows, u64 ns) {
    for (const Event &e : j_.events)
      if (load(e.seq, acquire) && e.kind == kind && e.key == key && e.pid == pid) return;
    const u64 n = fetch_add<u64>(j_.n_events, 1, relaxed);
    Event &e = j_.events[n % Journal::kEvents];
    store(e.seq, u64(0), relaxed);
    fence(release);
    e.key = key, e.at_ns = wall_ns(), e.rows = rows, e.ns = ns, e.kind = kind, e.pid = pid;
    std::memcpy(e.comm, comm, sizeof e.comm);
    FAILPOINT(event_filled);
    fetch_add<u64>(j_.died[kind], 1, relaxed);
    store(e.seq, n + 1, release);
  }
  const char *comm_of(u32 pid) const {  // as it introduced itself
    for (u32 i = 0; i < s_.header().max_members; ++i)
      if (const Member &m = s_.member(i); load(m.word, acquire) && m.owner.pid == pid) return m.owner.comm;
    return "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
  }

  void tick(u64 before, u64 end, u64 ns) {  // the writer, after a transaction
    const u64 n = load(j_.n_marks, relaxed);
    if (n && end - load(j_.marks[(n - 1) % Journal::kMarks].end, relaxed) < std::max<u64>(1, s_.capacity / 32)) return;
    Journal::Mark &m = j_.marks[n % Journal::kMarks];
    store(m.end, n ? end : before, relaxed), store(m.ns, ns, relaxed);
    store(j_.n_marks, n + 1, release);
  }
  // Rows drawn, by their ids; by whom, or null.
  void drawn(const u64 *ids, u64 n, Member *by) {
    const u64 end = load(s_.control().cursor, relaxed);
    std::uint32_t bins[Journal::kAges] = {};
    u64 sum = 0, rows = 0;
    for (u64 j = 0; j < n; ++j) {
      if (std::int64_t(ids[j]) < 0) continue;  // a place that was left out
      ++rows;
      const u64 age = end > ids[j] ? end - 1 - ids[j] : 0;
      sum += age, ++bins[std::min<u64>(u64(std::bit_width(age)), Journal::kAges - 1)];
    }
    fetch_add<u64>(j_.batches, 1, relaxed), fetch_add(j_.rows, rows, relaxed), fetch_add(j_.age_sum, sum, relaxed);
    for (u64 k = 0; k < Journal::kAges; ++k)
      if (bins[k]) fetch_add<u64>(j_.ages[k], bins[k], relaxed);
    if (by) fetch_add<u64>(by->sampled_batches, 1, relaxed), fetch_add(by->sampled_rows, rows, relaxed);
  }
  void stale(u64 sum, u64 rows) { fetch_add(j_.staleness_sum, sum, relaxed), fetch_add(j_.staleness_rows, rows, relaxed); }

 private:
  const Segment &s_;
  Journal &j_;
};

}  // namespace shmbuf
