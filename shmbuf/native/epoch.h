// Sampling without replacement, by all readers together, without a stored permutation: the epoch is one word of 16 bytes, and a
// keyed bijection turns its positions into rows.
//
//   low    first id of the epoch's window, 48 bits | number, 16 bits       zeroed: none has begun
//   high   size of the window, 32 bits | position: so many are claimed, 32 bits
//
//   claim  word.cas {first, number, size, position} → position + n, BEFORE anything is copied: two claimers never get the same
//          one, and those of a killed claimer count as seen
//   next   position = size, or the window has been overwritten whole: the same CAS begins the next epoch, over the window of now,
//          and claims from it. So everybody agrees on where it ended, and nobody draws across the end.
//   id     first + permutation(position), key = mix(seed, low): another order each epoch, nothing to store
//
// Consuming: the next window begins where the last one ended, after `repeat` passes over this one; number is the pass. So a row
// is drawn at most `repeat` times, whoever dies; exactly so often if nobody does and it is not overwritten first. Otherwise number
// counts epochs, modulo 2^16. Rows may have been overwritten since the window was taken: the gather finds out, the caller claims more.
// Of ids only the lower 48 bits are kept: the window of now tells the rest, as for the generations of priority_tree.h. A word in
// private memory is an epoch of one's own; saving and restoring the word saves and restores the epoch.
#pragma once
#include "failpoint.h"
#include "gather.h"
#include <optional>

namespace shmbuf {

class Permutation {  // of [0, size), size < 2^32: an alternating Feistel network over the next power of two, walking its cycles
 public:
  Permutation(u64 key, u32 size) : size_(size) {
    u32 bits = size > 1 ? 32 - u32(std::countl_zero(size - 1)) : 0;
    low_bits_ = bits - bits / 2;
    low_ = (1u << low_bits_) - 1, high_ = (1u << bits / 2) - 1;
    rounds_ = bits <= 12 ? kRounds : 4;  // a round over few bits mixes little: with 4, orders of 5 rows are 70 σ uneven, with 12 still 8
    for (u32 r = 0; r < rounds_; ++r) key_[r] = mix64(key += 0x9e3779b97f4a7c15ull);
  }
  u32 operator()(u32 x) const {  // x < size. Fewer than two turns on average
    do {
      u32 l = x & low_, h = x >> low_bits_;
      for (u32 r = 0; r < rounds_; r += 2) {
        h ^= u32(mix64(key_[r] ^ l)) & high_;
        l ^= u32(mix64(key_[r + 1] ^ h)) & low_;
      }
      x = h << low_bits_ | l;
    } while (x >= size_);
    return x;
  }

 private:
  static constexpr u32 kRounds = 16;
  u32 size_, low_bits_, low_, high_, rounds_;
  u64 key_[kRounds];
};

struct EpochOptions {      // the same for all who share a word: they belong to the buffer's settings
  u64 seed = 0;
  bool shuffle = true;     // false: oldest first
  bool drop_last = false;  // what is left of an epoch and less than the n asked for is dropped (and counts as seen)
  bool consume = false;
  u32 repeat = 1;          // with consume: 1 … 2^16
  u32 multiple = 1;        // sizes of windows are rounded down to this: batches of so many are never cut short by the end of one
};

struct Claim {
  u64 n = 0;              // 0: nothing to be had from this window: empty, all consumed, or (drop_last, multiple) smaller than asked for
  bool ran_out = false;   // this claim ended its epoch: exactly one does, unless the window is overwritten first
  u64 first = 0;
  u32 number = 0, size = 0, position = 0;
  u64 name = 0;           // the word's low half: which epoch
  u64 key = 0, skipped = 0;  // consuming: rows overwritten before they were in any window
  bool shuffle = false;
  void ids(u64 *out) const {
    Permutation p(key, size);
    for (u64 j = 0; j < n; ++j) out[j] = first + (shuffle ? p(position + u32(j)) : position + u32(j));
  }
};

class Epoch {
 public:
  explicit Epoch(Pair &word) : word_(word) {}

  // Up to n rows of one epoch; [lo, hi) is what window() says now: live_lo and hi. For a whole batch call it until it returns 0.
  // of: only of this epoch, `name`d so by an earlier claim: nothing, if it is over.
  Claim claim(u64 n, u64 lo, u64 hi, const EpochOptions &o, std::optional<u64> of = {}) {
    for (;;) {
      Pair was{load(word_.low, acquire), load(word_.high, acquire)};
      if (load(word_.low, relaxed) != was.low) continue;  // halves of two epochs; those of two claims fail the CAS
      Claim c = describe(was, lo);
      c.name = was.low;
      if (of && (*of != was.low || c.position >= c.size || c.first + c.size <= lo)) return Claim{.name = *of};
      bool over = c.size == 0 || c.position >= c.size || c.first + c.size <= lo;
      if (over || (o.drop_last && c.size - c.position < n)) begin_next(c, lo, hi, o);
      u64 left = c.size - c.position;
      c.n = n < left ? n : left;
      if (o.drop_last && c.n < n) c.n = 0;
      if (!c.n) {
        if (load(word_.low, acquire) != was.low || load(word_.high, acquire) != was.high) continue;
        return c;
      }
      c.ran_out = left - c.n < (o.drop_last ? n : 1);
      Pair next{(c.first & kIdMask) << 16 | c.number, u64(c.size) << 32 | (c.ran_out ? c.size : c.position + u32(c.n))};
      if (!compare_exchange(word_, was, next)) continue;
      FAILPOINT(epoch_claimed);
      c.name = next.low, c.key = mix64(o.seed ^ mix64(next.low)), c.shuffle = o.shuffle;
      return c;
    }
  }
  // For stats and for whoever waits: where the epoch stands, n = rows that it still holds.
  Claim look(u64 lo) const {
    Pair was{load(word_.low, acquire), load(word_.high, acquire)};
    Claim c = describe(was, lo);
    c.n = c.position < c.size ? c.size - c.position : 0;
    return c;
  }
  // Consuming: rows of [lo, hi) that are in no window yet.
  u64 unseen(u64 lo, u64 hi) const {
    Claim c = look(lo);
    u64 from = c.size && c.first + c.size > lo ? c.first + c.size : lo;
    return hi > from ? hi - from : 0;
  }

 private:
  static constexpr u64 kIdMask = (1ull << 48) - 1;
  static Claim describe(Pair word, u64 near) {
    Claim c;
    c.number = u32(word.low & 0xffff), c.size = u32(word.high >> 32), c.position = u32(word.high);
    c.first = near + u64(i64(((word.low >> 16) - near) << 16) >> 16);  // the id nearest to `near` with these 48 bits
    return c;
  }
  static void begin_next(Claim &c, u64 lo, u64 hi, const EpochOptions &o) {
    u64 end = c.first + c.size;
    if (o.consume && c.size && end > lo && c.number + 1 < o.repeat) {  // once more over the same rows
      ++c.number, c.position = 0;
      return;
    }
    u64 from = o.consume && c.size && end > lo ? end : lo, size = hi > from ? hi - from : 0, most = 0xffffffffull;
    if (size > most) size = most;
    if (o.multiple > 1) size -= size % o.multiple;
    c.skipped = o.consume && c.size && lo > end ? lo - end : 0;
    c.number = o.consume ? 0 : (c.number + 1) & 0xffff;
    c.first = from, c.size = u32(size), c.position = 0;
  }
  Pair &word_;
};

}  // namespace shmbuf
