// Random numbers and hashes. Each call draws from its own generator, so threads and processes share no state.
#pragma once
#include "memory.h"

namespace shmbuf {

inline u64 mix64(u64 x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
struct Rng {  // splitmix64: one per call, seeded from (handle seed, call number)
  u64 state;
  u64 next() { return mix64(state += 0x9e3779b97f4a7c15ull); }
  double unit() { return double(next() >> 11) * 0x1p-53; }  // [0, 1)
  u64 below(u64 n) { return u64((static_cast<unsigned __int128>(next()) * n) >> 64); }
};

}  // namespace shmbuf
