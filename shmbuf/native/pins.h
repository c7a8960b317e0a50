// Rows that stay where they are while somebody looks at them in place. The writer writes no id of lo + capacity or above as long as
// the pin of lo lives: it plans around it, and looks again behind T1's fence, where whoever pinned meanwhile either sees the
// raised reserve or is seen (tests/models/pin.pml; -DNOFENCE fails).
//
//   pin      byte → until, owner → word = lo + 1 → fence(seq_cst) → lo + N < reserve? then not        P1, pairs with T1
//   writer   plan no row beyond the pins; T1; fence; a pin in the way? write nothing, the plan stays sealed, give the role back
//   release  word = 0 → unlock → wake
//
// The kernel drops a dead one's byte, and a living pin that has outlasted `until` is revoked: its owner finds that out by valid()
// after it has looked. Who asks for no end, and is stopped, stops writing.
#pragma once
#include "registry.h"

namespace shmbuf {

class Pins {
 public:
  static constexpr u64 kRevoked = ~0ull, kUnlimited = ~0ull;

  // flags: a bit for each byte that a thread of this handle holds or tries, as their common description does not exclude them.
  Pins(const Segment &s, int lock_fd, std::atomic<u32> *flags) : s_(s), t_(s.pins()), fd_(lock_fd), flags_(flags) {}

  // ---- the owner ----
  enum class Got { ok, lapped, none_free };
  Got claim(u64 lo, u64 until, const Owner &me, u32 &index) {
    for (u32 k = 0; k < 2 * PinTable::kPins; ++k) {  // first those that no dead one left behind: their words stay as they are until we store
      const u32 i = k % PinTable::kPins;
      Pin &p = t_.pin[i];
      if ((k < PinTable::kPins && load(p.word, acquire)) || !try_byte(i)) continue;
      FAILPOINT(pin_locked);
      store(p.word, u64(0), seq_cst);  // of a dead one
      p.owner = me;
      store(p.until_ns, until, relaxed), store(p.since_ns, now_ns(), relaxed);
      for (u32 seen = load(t_.used, relaxed); seen < i + 1 && !compare_exchange(t_.used, seen, i + 1, seq_cst);) {}
      store(p.word, lo + 1, release);
      fence(seq_cst);  // P1
      FAILPOINT(pin_stored);
      if (lo + s_.capacity < load(s_.control().reserve, relaxed)) {
        drop(i);
        return Got::lapped;
      }
      FAILPOINT(pin_checked);
      index = i;
      return Got::ok;
    }
    return Got::none_free;
  }
  bool valid(u32 i, u64 lo) const {
    fence(acquire);  // pairs with the fence behind a revocation in room()
    return load(t_.pin[i].word, relaxed) == lo + 1;
  }
  void drop(u32 i) {
    store(t_.pin[i].word, u64(0), seq_cst);
    FAILPOINT(pin_released);
    free_byte(i);
  }

  // The oldest id that a new pin may keep: whoever pins again and again must not keep the writer out for ever.
  u64 least() const {
    const u64 want = load(t_.want, acquire);
    return want > s_.capacity ? want - s_.capacity : 0;
  }

  // ---- the writer ----
  void held_up(u64 want) const {
    if (load(t_.want, relaxed) != want) store(t_.want, want, release);
  }
  // How many rows may be written from `cursor` on. Dead pins are removed, those past their time revoked.
  u64 room(u64 cursor) const {
    u64 rows = kUnlimited;
    bool revoked = false;
    for (u32 i = 0, n = used(); i < n; ++i) {
      u64 word = load(t_.pin[i].word, seq_cst);
      revoked |= word == kRevoked;  // by somebody else: what follows is behind it, too
      if (!word || word == kRevoked) continue;
      if (try_byte(i)) {  // nobody's: its owner died
        store(t_.pin[i].word, u64(0), seq_cst);
        FAILPOINT(pin_swept);
        free_byte(i);
      } else if (now_ns() >= load(t_.pin[i].until_ns, relaxed) && compare_exchange(t_.pin[i].word, word, kRevoked, seq_cst)) {
        FAILPOINT(pin_revoked);
        revoked = true;
      } else {
        rows = std::min(rows, beyond(word - 1, cursor));
      }
    }
    if (revoked) fence(release);  // a reader that saw a byte written from here on sees the revocation, too
    return rows;
  }
  // The same without touching anything; one past its time does not count.
  static u64 hint(const Segment &s, u64 cursor) {
    const Pins pins(s, -1, nullptr);
    u64 rows = kUnlimited;
    for (u32 i = 0, n = pins.used(); i < n; ++i)
      if (u64 word = load(pins.t_.pin[i].word, acquire); word && word != kRevoked && now_ns() < load(pins.t_.pin[i].until_ns, relaxed))
        rows = std::min(rows, pins.beyond(word - 1, cursor));
    return rows;
  }

 private:
  u32 used() const { return std::min(load(t_.used, acquire), PinTable::kPins); }
  bool try_byte(u32 i) const {
    if (!flags_ || fd_ < 0 || flags_->fetch_or(1u << i, acquire) >> i & 1) return false;
    if (lock_byte(fd_, lock_pin(i), F_WRLCK)) return true;
    flags_->fetch_and(~(1u << i), release);
    return false;
  }
  void free_byte(u32 i) const {
    unlock_byte(fd_, lock_pin(i));
    flags_->fetch_and(~(1u << i), release);
  }
  u64 beyond(u64 lo, u64 cursor) const { return lo + s_.capacity > cursor ? lo + s_.capacity - cursor : 0; }
  const Segment &s_;
  PinTable &t_;
  int fd_;
  std::atomic<u32> *flags_;
};

}  // namespace shmbuf
