// Everything that touches shared memory atomically or sleeps on it: the only file that names a memory order's
// implementation. Words are naturally aligned u32/u64 reached through std::atomic_ref; a futex is the raw shared one,
// because std::atomic::wait uses FUTEX_PRIVATE and would never wake another process.
#pragma once
#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace shmbuf {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

inline constexpr auto relaxed = std::memory_order_relaxed;
inline constexpr auto acquire = std::memory_order_acquire;
inline constexpr auto release = std::memory_order_release;
inline constexpr auto seq_cst = std::memory_order_seq_cst;

static_assert(std::atomic_ref<u64>::is_always_lock_free && std::atomic_ref<u32>::is_always_lock_free,
              "words shared between processes must be lock-free");

// A read-only handle maps the segment PROT_READ, so loads must not need a mutable object: const_cast is confined here.
template <class T> T load(const T &word, std::memory_order order) {
  return std::atomic_ref<T>(const_cast<T &>(word)).load(order);
}
template <class T> void store(T &word, T value, std::memory_order order) { std::atomic_ref<T>(word).store(value, order); }
template <class T> T exchange(T &word, T value, std::memory_order order) {
  return std::atomic_ref<T>(word).exchange(value, order);
}
template <class T> T fetch_add(T &word, T value, std::memory_order order) {
  return std::atomic_ref<T>(word).fetch_add(value, order);
}
template <class T> bool compare_exchange(T &word, T &expected, T desired, std::memory_order order) {
  return std::atomic_ref<T>(word).compare_exchange_strong(expected, desired, order, relaxed);
}
// Two words changed together: cmpxchg16b, casp or ldxp/stxp. Not std::atomic_ref: of 16 bytes it calls libatomic, whose locks
// another process does not see. Each half may be loaded alone; seq_cst.
#if !defined(__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16) && !defined(__aarch64__)
#error "a 16-byte compare-and-swap is needed: build with -mcx16"
#endif
struct alignas(16) Pair { u64 low, high; };
static_assert(std::endian::native == std::endian::little);
inline bool compare_exchange(Pair &word, Pair expected, Pair desired) {
  using u128 = unsigned __int128;
  return __sync_bool_compare_and_swap(reinterpret_cast<u128 *>(&word), std::bit_cast<u128>(expected), std::bit_cast<u128>(desired));
}
// A counter with one mutating process: no read-modify-write needed, readers in other processes see whole values.
template <class T> void bump(T &word, T by) { store<T>(word, load(word, relaxed) + by, relaxed); }
inline void fence(std::memory_order order) {
#if defined(__SANITIZE_THREAD__)
  // TSan does not model fences; a read-modify-write of one shared word is the closest ordering it understands.
  static std::atomic<u64> tsan_fence{0};
  tsan_fence.fetch_add(1, seq_cst);
  (void)order;
#else
  std::atomic_thread_fence(order);
#endif
}

// ---- row bytes -------------------------------------------------------------------------------------------------
// Rows may be overwritten while a reader copies them; the reserve counter rejects such a copy afterwards (gather.h).
// Formally each byte would have to be a relaxed atomic (Boehm, "Can seqlocks get along…"; P1478). TSan builds do that;
// others copy plainly between fences, which no compiler reorders across and which keeps memcpy's speed.
#if defined(__SANITIZE_THREAD__)
inline void copy_bytes(void *to, const void *from, u64 n) {
  auto *d = static_cast<u8 *>(to);
  auto *s = static_cast<const u8 *>(from);
  for (; n && ((reinterpret_cast<u64>(d) | reinterpret_cast<u64>(s)) & 7); --n) store(*d++, load(*s++, relaxed), relaxed);
  for (; n >= 8; n -= 8, d += 8, s += 8)
    store(*reinterpret_cast<u64 *>(d), load(*reinterpret_cast<const u64 *>(s), relaxed), relaxed);
  for (; n; --n) store(*d++, load(*s++, relaxed), relaxed);
}
#else
template <int N> inline void copy_fixed(u8 *d, const u8 *s) { __builtin_memcpy(d, s, N); }
inline void copy_bytes(void *to, const void *from, u64 n) {  // most columns are short: a call to memcpy costs more than they do
  auto *d = static_cast<u8 *>(to);
  auto *s = static_cast<const u8 *>(from);
  if (n > 256) {
    std::memcpy(d, s, n);
  } else if (n >= 16) {
    for (u64 i = 0; i + 16 < n; i += 16) copy_fixed<16>(d + i, s + i);
    copy_fixed<16>(d + n - 16, s + n - 16);
  } else if (n >= 8) {
    copy_fixed<8>(d, s);
    copy_fixed<8>(d + n - 8, s + n - 8);
  } else if (n >= 4) {
    copy_fixed<4>(d, s);
    copy_fixed<4>(d + n - 4, s + n - 4);
  } else {
    for (u64 i = 0; i < n; ++i) d[i] = s[i];
  }
}
#endif

// ---- time and sleep --------------------------------------------------------------------------------------------
inline u64 now_ns() {  // CLOCK_MONOTONIC: deadlines must not jump with NTP
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return u64(t.tv_sec) * 1'000'000'000ull + u64(t.tv_nsec);
}
inline constexpr u64 kForever = ~0ull;
inline constexpr u64 kSlice = 20'000'000;  // the longest sleep of anyone: bounds the harm of a wake-up lost to a killed waker

// Sleep while word == expected, until the monotonic deadline or one slice, whichever is sooner.
inline void futex_wait(u32 &word, u32 expected, u64 deadline = kForever, u64 slice = kSlice) {
  u64 until = now_ns() + slice;
  if (deadline < until) until = deadline;
  timespec t{time_t(until / 1'000'000'000ull), long(until % 1'000'000'000ull)};
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &t, nullptr, FUTEX_BITSET_MATCH_ANY);
}
inline void futex_wake_all(u32 &word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
struct SignalsBlocked {  // around the start of a thread: it inherits the mask, so signals stay the interpreter's
  sigset_t old;
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &old, nullptr); }
};

// A wait word: bit 0 = somebody sleeps, the rest counts wakes. Sleeper: v = arm(); look again; futex_wait(word, v). Waker: store the
// condition; fence(seq_cst); wake_if_armed() (tests/models/sleep.c). A wake changes the word, so it also reaches who armed before it
// and has not slept yet, though another armed after it (limiter.pml -DONEBIT loses that one). Bits, not counts of sleepers: a
// killed one leaves a bit that costs one spurious wake.
inline u32 arm(u32 &word) {
  const u32 armed = std::atomic_ref<u32>(word).fetch_or(1, relaxed) | 1;
  fence(seq_cst);
  return armed;
}
inline void wake_if_armed(u32 &word) {
  if (u32 seen = load(word, relaxed); seen & 1 && compare_exchange(word, seen, seen + 1, relaxed)) futex_wake_all(word);
}
inline void wake_always(u32 &word) { fetch_add(word, 2u, seq_cst), futex_wake_all(word); }  // for what is not looked at again

}  // namespace shmbuf
