// Rows that are changed where they lie: an EDIT record in its collector's ring names rows and the bytes of them that become others.
// The writer applies it in a transaction of its own, so that whoever dies, it is finished first; readers look at two counters:
//
//   edit_word     odd while an edit is being applied                one load before and one after a copy, while nobody edits
//   stripe[slot]  odd while a row of the stripe may be half new     only where edit_word moved
//
//   E1  writer   edit_word odd; fence; stripes of the rows odd; fence   before the first byte
//   E2           bytes → T4, the commit → stripes even → edit_word even → head_pub     the redo does the same
//   E3  reader   edit_word; copy; fence(acquire); edit_word again: moved or odd → row by row by its stripe, in the same way
//   E4  reader   a stripe that stays odd: the record is whole and in its ring until head_pub passes it, so the row as it will be is
//                its bytes outside the spans and the record's inside: nobody waits for a writer that is stopped, or dead
//
// An edit that is for older versions only is compared by the writer, while it plans: a row that is not older loses its id in the record
// before the plan is sealed, so that every redo, and every reader, passes over it.
//
// tests/models/edit.pml: -DNORAISE, -DNOSTRIPE, -DEVENEARLY, -DHALF and -DMARKLATE each return a row that never was.
#pragma once
#include "ring.h"

namespace shmbuf {

// One EDIT record, where it lies: header {flags: spans}, the spans, the ids, and for each id the bytes of all spans, side by side.
class EditRecord {
 public:
  EditRecord(const u8 *ring, u64 ring_bytes, u64 at, const Record &r)
      : ring_(ring), size_(ring_bytes), spans_at_(at + sizeof(Record)), n_spans(spans_of(r.flags)), n(r.n_rows), bytes_(r.bytes), version_(r.flags >> kVersionShift) {}

  // What a collector could have written; anything else means damaged memory.
  bool sound(u64 row_bytes) {
    width_ = 0;
    for (u32 i = 0; i < n_spans; ++i) {
      const Span s = span(i);
      if (!s.bytes || u64(s.offset) + s.bytes > row_bytes) return false;
      width_ += s.bytes;
    }
    return bytes_ == edit_bytes(n, n_spans, width_) && (!version_ || span(0).bytes == kVersionBytes[version_ & ~u32(kStrictly)]);
  }
  Span span(u32 i) const {
    const u64 w = word(spans_at_ + u64(i) * 8);
    return {u32(w), u32(w >> 32)};
  }
  u64 id(u64 j) const { return word(ids_at() + j * 8); }
  void mark(u64 j, u64 why) { store(*reinterpret_cast<u64 *>(const_cast<u8 *>(ring_) + ((ids_at() + j * 8) & (size_ - 1))), why, relaxed); }
  bool compares() const { return version_ != kNoVersion; }
  // After sound(). Whether row j may be changed, whose bytes of the first span are stored there.
  bool newer(u64 j, const u8 *stored) const {
    const Span s = span(0);
    u8 given[8];
    for (u64 k = 0; k < std::min<u64>(s.bytes, sizeof given); ++k) given[k] = ring_[(bytes_of(j) + k) & (size_ - 1)];
    switch (version_ & ~u32(kStrictly)) {
      case kI8: return beats<std::int8_t>(given, stored);
      case kI16: return beats<std::int16_t>(given, stored);
      case kI32: return beats<std::int32_t>(given, stored);
      case kI64: return beats<std::int64_t>(given, stored);
      case kU8: return beats<std::uint8_t>(given, stored);
      case kU16: return beats<std::uint16_t>(given, stored);
      case kU32: return beats<std::uint32_t>(given, stored);
      case kU64: return beats<std::uint64_t>(given, stored);
      case kF32: return beats<float>(given, stored);
      case kF64: return beats<double>(given, stored);
      default: return true;
    }
  }
  // After sound(). f(offset in the row, position of the new bytes in the ring, how many) for each span of row j.
  template <class F> void each_span(u64 j, F f) const {
    u64 at = bytes_of(j);
    for (u32 i = 0; i < n_spans; ++i) {
      const Span s = span(i);
      f(s.offset, at, s.bytes);
      at += s.bytes;
    }
  }
  u64 bytes_of(u64 j) const { return ids_at() + n * 8 + j * width_; }  // position of its new bytes: all spans, side by side
  void read(void *to, u64 at, u64 bytes) const {
    const u64 o = at & (size_ - 1), first = std::min(bytes, size_ - o);
    copy_bytes(to, ring_ + o, first);
    if (bytes > first) copy_bytes(static_cast<u8 *>(to) + first, ring_, bytes - first);
  }
  static constexpr u64 kStale = ~0ull, kOlder = ~0ull - 1;  // in place of an id: overwritten before the edit; its version is not older

 private:
  template <class T> bool beats(const u8 *given, const u8 *stored) const {
    T a, b;
    std::memcpy(&a, given, sizeof a), std::memcpy(&b, stored, sizeof b);
    return version_ & kStrictly ? a > b : a >= b;
  }
  u64 ids_at() const { return spans_at_ + u64(n_spans) * 8; }
  u64 word(u64 at) const { return load(*reinterpret_cast<const u64 *>(ring_ + (at & (size_ - 1) & ~7ull)), relaxed); }
  const u8 *ring_;
  u64 size_, spans_at_;

 public:
  const u32 n_spans;
  const u64 n;

 private:
  u64 bytes_, width_ = 0;
  u32 version_;
};

inline u32 &stripe_at(const Segment &s, u64 slot) { return s.edits().stripe[slot % EditTable::kStripes]; }
inline u32 &stripe_of(const Segment &s, u64 id) { return stripe_at(s, id % s.capacity); }

// Whether a row that is stored when block `now` is the truth goes by this id.
inline bool is_live(const CommitBlock &now, u64 capacity, u64 id) { return id >= now.base && id < now.cursor && now.cursor - id <= capacity; }

// ---- the writer's side ----
inline void raise_edits(const Segment &s, const CommitBlock &now, EditRecord &e) {  // E1; again after a crash, as it is
  u64 &word = s.control().edit_word;
  if (const u64 w = load(word, relaxed); !(w & 1)) store(word, w + 1, relaxed);
  fence(seq_cst);
  const u64 first = e.span(0).offset;
  for (u64 j = 0; j < e.n; ++j) {
    if (!is_live(now, s.capacity, e.id(j))) continue;
    const u64 slot = e.id(j) % s.capacity;
    u32 &stripe = stripe_at(s, slot);
    if (const u32 v = load(stripe, relaxed); !(v & 1)) store(stripe, v + 1, relaxed);
    __builtin_prefetch(s.rows + slot * s.row_bytes + first, 1);
  }
  fence(seq_cst);  // pairs with E3
}
inline u64 apply_edits(const Segment &s, const CommitBlock &now, EditRecord &e) {
  u64 applied = 0;
  for (u64 j = 0; j < e.n; ++j) {
    const u64 id = e.id(j);
    if (!is_live(now, s.capacity, id)) {
      if (id != EditRecord::kOlder) e.mark(j, EditRecord::kStale);
      continue;
    }
    ++applied;
    u8 *row = s.row(id);
    e.each_span(j, [&](u64 offset, u64 at, u64 bytes) {
#ifdef SHMBUF_FAILPOINTS
      e.read(row + offset, at, bytes / 2);  // die with half a value in place
      FAILPOINT(edit_half);
#endif
      e.read(row + offset, at, bytes);
    });
  }
  return applied;
}
inline void settle_edits(const Segment &s) {  // E2, after the commit
  u64 &word = s.control().edit_word;
  const u64 w = load(word, relaxed);
  if (!(w & 1)) return;
  constexpr u32 kLine = 16;  // stripes of a cache line, which are either left alone or all stored: which ones are odd, nothing could predict
  for (u32 *line = s.edits().stripe; line != std::end(s.edits().stripe); line += kLine) {
    u32 odd = 0;
    for (u32 i = 0; i < kLine; ++i) odd |= load(line[i], relaxed);
    if (odd & 1)
      for (u32 i = 0; i < kLine; ++i) store(line[i], (load(line[i], relaxed) + 1) & ~1u, release);
  }
  FAILPOINT(edit_settled);
  store(word, w + 1, release);
}

}  // namespace shmbuf
