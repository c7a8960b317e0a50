// Reverb's samples-per-insert limiter, in integers, across processes. With spi = num / den and all differences multiplied by den:
//
//   diff = (inserted − base_inserts)·num − (sampled − base_sampled)·den
//   n rows may be sampled   while inserted ≥ min_size and diff − n·den ≥ min_diff
//   a row may be inserted   while inserted < min_size or  diff + num ≤ max_diff;  a record may overshoot by its length
//
//   version   {ticket of the set in use · 2 + its block, last ticket}   16 bytes, changed by CAS; zeroed: no limiter
//   set[2]    six words each, {value, ticket that wrote it}             only the set not in use is written
//   sampled   rows sampled so far, by CAS before the draw               who is killed in between has wasted at most his n
//   blocked   1: somebody found rows in a ring that were not admitted
//
// Changing the parameters: take a ticket (from then on no older one can be published), fill the other set by CAS, never over a
// later ticket, publish by CAS. Who is killed half-way leaves the old set; the next one just overtakes him.
//
// Neither side polls. `inserted` is CommitBlock::rows_total, read anew for each call. (tests/models/limiter.pml)
//   L1  writer   plan() and runnable(), when a ring holds rows: admit(), which at 0 sets blocked; fence; looks at sampled again
//   L2  sampler  try_sample() granted; then frees_writer(): fence; looks at blocked; true: WriterRole::hand_over()
//   L3  sampler  arms Control.data_wait; fence; helps and tries once more; sleeps           [pairs with T7 of publish()]
//                The word must count its wake-ups: of one bit, armed anew by another sampler, a third sleeps on (-DONEBIT).
//   changer, refunder: wake_all: data_wait, writer_wait and every Slot.wait, each after a fence
#pragma once
#include "failpoint.h"
#include "memory.h"
#include <limits>

namespace shmbuf {

using i128 = __int128;
inline constexpr u64 kUnlimited = ~0ull;
inline constexpr i64 kNoMinDiff = std::numeric_limits<i64>::min(), kNoMaxDiff = std::numeric_limits<i64>::max();

// 32 bits each for num and den: whatever is in the words, no product below leaves 128 bits.
struct LimiterParams {
  u32 num = 0, den = 0;                        // den 0: no limiter
  u64 min_size = 0;                            // rows ever inserted
  i64 min_diff = kNoMinDiff, max_diff = kNoMaxDiff;  // times den
  u64 base_inserts = 0, base_sampled = 0;      // diff counts from here
  static LimiterParams queue(u32 size) { return {1, 1, 1, 0, size, 0, 0}; }
  static LimiterParams at_least(u64 rows) { return {1, 1, rows, kNoMinDiff, kNoMaxDiff, 0, 0}; }

  i128 diff(u64 inserted, u64 sampled) const {
    return (i128(inserted) - base_inserts) * num - (i128(sampled) - base_sampled) * den;
  }
  bool may_sample(u64 inserted, u64 sampled, u64 n) const {
    return !den || (inserted >= min_size && (min_diff == kNoMinDiff || diff(inserted, sampled) - i128(n) * den >= min_diff));
  }
  u64 allowance(u64 inserted, u64 sampled) const {  // rows that may be inserted now
    if (!den || !num || max_diff == kNoMaxDiff) return kUnlimited;
    i128 room = (max_diff - diff(inserted, sampled)) / i128(num);
    u64 first = inserted < min_size ? min_size - inserted : 0;
    return room <= i128(first) ? first : room >= i128(kUnlimited) ? kUnlimited : u64(room);
  }
  // Writers that nobody disturbs stop no sooner than at diff > max_diff − num. A batch that this is not enough for could wait for
  // ever, so it is refused at once, though a record that overshoots might have let it through.
  bool could_ever(u64 n) const {
    return !den || min_diff == kNoMinDiff || max_diff == kNoMaxDiff || i128(max_diff) - num + 1 - i128(n) * den >= min_diff;
  }
};

enum class LimiterFault : int {
  none = 0,
  ratio,     // num, den ≥ 1
  order,     // min_diff ≤ max_diff
  deadlock,  // max_diff − min_diff ≥ num + batch·den − 1: else there are diffs at which neither side may go on
  narrow,    // max_diff − min_diff ≥ 2·max(den, num·record_rows, batch·den): Reverb's error buffer, for batches
  min_size   // max_diff ≥ num·min_size
};
// `strict`: the last two as well. A queue is checked without: Queue(1) works.
inline LimiterFault check_limiter(const LimiterParams &p, u64 record_rows, u64 batch, bool strict = true) {
  if (!p.num || !p.den) return LimiterFault::ratio;
  if (p.min_diff > p.max_diff) return LimiterFault::order;
  if (!p.could_ever(batch)) return LimiterFault::deadlock;
  if (!strict || p.max_diff == kNoMaxDiff) return LimiterFault::none;
  i128 width = i128(p.max_diff) - p.min_diff, by_record = i128(record_rows) * p.num, by_batch = i128(batch) * p.den, most = p.den;
  if (by_record > most) most = by_record;
  if (by_batch > most) most = by_batch;
  if (p.min_diff != kNoMinDiff && width < 2 * most) return LimiterFault::narrow;
  return i128(p.max_diff) < i128(p.min_size) * p.num ? LimiterFault::min_size : LimiterFault::none;
}

struct LimiterWords {
  static constexpr u32 kWords = 6;
  alignas(128) Pair version;
  Pair set[2][kWords];
  alignas(128) u64 sampled;
  u32 blocked;
};
static_assert(sizeof(LimiterWords) == 384);

struct LimiterState {  // for error texts and stats: one consistent set, the counters as they were about then
  LimiterParams params;
  u64 inserted, sampled, allowance;
  i64 diff;            // times den, saturated
  bool too_few, diff_too_small, writer_waits;  // the sampler of n rows waits for min_size; for min_diff; rows wait for max_diff
};

class Limiter {
 public:
  explicit Limiter(LimiterWords &words) : w_(words) {}

  u64 version() const { return load(w_.version.low, acquire); }
  LimiterParams params() const {
    for (;;) {  // again only when a change was published meanwhile
      u64 v = load(w_.version.low, acquire), word[LimiterWords::kWords];
      for (u32 i = 0; i < LimiterWords::kWords; ++i) word[i] = load(w_.set[v & 1][i].low, relaxed);
      fence(acquire);  // pairs with the CAS of the ticket, before the first word of a set that was in use is written over
      if (load(w_.version.low, relaxed) == v)
        return {u32(word[0]), u32(word[0] >> 32), word[1], i64(word[2]), i64(word[3]), word[4], word[5]};
    }
  }
  // False: overtaken by others all the time. After true the caller wakes everybody.
  bool change(const LimiterParams &p) {
    const u64 word[LimiterWords::kWords] = {p.num | u64(p.den) << 32, p.min_size, u64(p.min_diff), u64(p.max_diff), p.base_inserts, p.base_sampled};
    u64 met = 0;
    for (int tries = 0; tries < 1000; ++tries) {
      Pair was{load(w_.version.low, acquire), load(w_.version.high, acquire)}, mine{was.low, was.high + 1};
      if (was.high != was.low >> 1 && was.high != met) {  // somebody is at it: the dead and the slow will still be there
        met = was.high;
        usleep(50);
        continue;
      }
      if (!compare_exchange(w_.version, was, mine)) continue;
      FAILPOINT(limiter_ticket);
      u64 block = ~mine.low & 1;
      if (!fill(w_.set[block], word, mine.high)) continue;
      FAILPOINT(limiter_filled);
      if (compare_exchange(w_.version, mine, {mine.high << 1 | block, mine.high})) return true;
    }
    return false;
  }

  // ---- sampler ----
  bool try_sample(u64 inserted, u64 n) {
    for (LimiterParams p = params(); p.den; p = params()) {
      u64 s = load(w_.sampled, acquire);
      if (!p.may_sample(inserted, s, n)) return false;
      if (!compare_exchange(w_.sampled, s, s + n, seq_cst)) continue;
      FAILPOINT(limiter_taken);
      return true;
    }
    return true;  // without a limiter nothing is counted, or written
  }
  // After a grant. An older number of rows will do: it only wakes more often.
  bool frees_writer(u64 inserted) {
    fence(seq_cst);  // L2, pairs with L1
    return load(w_.blocked, relaxed) && allowance(inserted) && exchange(w_.blocked, 0u, relaxed);
  }
  void refund(u64 n) {  // the draw raised; if rows were inserted on its account meanwhile, diff is too large by as much
    for (u64 s = load(w_.sampled, acquire); params().den && !compare_exchange(w_.sampled, s, s > n ? s - n : 0, seq_cst);) {}
  }
  bool may_sample(u64 inserted, u64 n) const { return params().may_sample(inserted, load(w_.sampled, acquire), n); }

  // ---- writer ----
  u64 allowance(u64 inserted) const { return params().allowance(inserted, load(w_.sampled, acquire)); }
  // Only while rows wait: how many may be moved. At 0 whoever samples next will see to it that somebody looks again.
  u64 admit(u64 inserted) {
    if (u64 rows = allowance(inserted)) return rows;
    store(w_.blocked, 1u, relaxed);
    fence(seq_cst);  // L1, pairs with L2
    return allowance(inserted);
  }

  LimiterState why(u64 inserted, u64 n) const {
    LimiterState s{params(), inserted, load(w_.sampled, acquire), 0, 0, false, false, load(w_.blocked, relaxed) != 0};
    i128 d = s.params.diff(inserted, s.sampled);
    s.diff = d > kNoMaxDiff ? kNoMaxDiff : d < kNoMinDiff ? kNoMinDiff : i64(d);
    s.allowance = s.params.allowance(inserted, s.sampled);
    s.writer_waits &= s.allowance == 0;
    s.too_few = s.params.den && inserted < s.params.min_size;
    s.diff_too_small = !s.too_few && !s.params.may_sample(inserted, s.sampled, n);
    return s;
  }

 private:
  static bool fill(Pair *set, const u64 *word, u64 ticket) {
    for (u32 i = 0; i < LimiterWords::kWords; ++i)
      for (;;) {
        Pair was{load(set[i].low, acquire), load(set[i].high, acquire)};
        if (was.high > ticket) return false;  // overtaken
        if (compare_exchange(set[i], was, {word[i], ticket})) break;
      }
    return true;
  }
  LimiterWords &w_;
};

}  // namespace shmbuf
