// SPSC byte ring, one per collector. Positions are byte counts that never wrap; bytes are copied in at most two pieces, so
// there is no padding record and no wrap branch in the claim. One commit point: `tail` is stored after the bytes, so a
// collector killed at any instruction leaves either nothing or a whole record.
//
//     reserve: room? (own tail, cached head)  →  fill: header, rows  →  publish: tail.store(release)   [pairs with planner P1]
//     head_pub is stored by the writer after its commit                                                [pairs with R1]
#pragma once
#include "failpoint.h"
#include "layout.h"

namespace shmbuf {

struct Column {  // one column of one record being put, or of one batch being read
  u64 offset, bytes;      // inside the row
  const u8 *data;         // the caller's first row
  i64 stride;             // from one of the caller's rows to the next
};

struct Extras {           // what may come with rows: one value for each row of the put
  const u64 *streams = nullptr;
  const float *leaves = nullptr;
  bool loaded = false;    // of a checkpoint: past the limiter, and streams may lack their beginnings
  u32 flags() const { return (streams ? u32(kStreams) : 0u) | (leaves ? u32(kLeaves) : 0u) | (loaded ? u32(kLoaded) : 0u); }
};

inline void ring_write(u8 *ring, u64 size, u64 at, const void *from, u64 n) {
  u64 o = at & (size - 1), first = n < size - o ? n : size - o;
  copy_bytes(ring + o, from, first);
  if (n > first) copy_bytes(ring, static_cast<const u8 *>(from) + first, n - first);
}
inline Record &record_at(u8 *ring, u64 size, u64 at) { return *reinterpret_cast<Record *>(ring + (at & (size - 1) & ~(kRecordAlign - 1))); }  // a damaged position is no multiple

// A record that this build of the layout could have written; anything else means damaged memory. `room`: bytes up to the tail.
// on_device: its collector has a device ring.
inline bool well_formed(const Record &r, u64 room, u64 ring_bytes, u64 row_bytes, bool on_device = false) {
  if (r.bytes > room || r.bytes < sizeof(Record) || r.bytes > ring_bytes / 2) return false;
  if (r.kind == kClear) return r.bytes == clear_bytes(r.flags);
  if (r.kind == kEdit)  // edits.h looks at the rest
    return spans_of(r.flags) >= 1 && spans_of(r.flags) <= kMaxSpans && version_known(r.flags >> kVersionShift) && r.n_rows >= 1 &&
           r.n_rows <= ring_bytes / 8 && r.bytes > sizeof(Record) + spans_of(r.flags) * 8 + r.n_rows * 8;
  return r.kind == kRows && r.n_rows >= 1 && r.n_rows <= ring_bytes / row_bytes && !(r.flags & ~(kStreams | kLeaves | kLoaded | (on_device ? kDevice : 0u))) &&
         r.bytes == record_bytes(r.n_rows, row_bytes, r.flags);
}

// The collector's end. Private positions; one thread at a time (collecting.h catches a second one).
class Producer {
 public:
  void open(Slot &slot, u8 *ring, u64 ring_bytes, u64 row_bytes) {
    slot_ = &slot, ring_ = ring, size_ = ring_bytes, row_bytes_ = row_bytes;
    tail_ = load(slot.tail, relaxed);        // own word
    head_ = load(slot.head_pub, acquire);    // R1
  }
  bool is_open() const { return slot_ != nullptr; }
  Slot &slot() const { return *slot_; }
  u64 tail() const { return tail_; }
  u64 size() const { return size_; }
  u64 max_rows_per_record(u32 flags) const { return (size_ / 2 - sizeof(Record)) / row_share(row_bytes_, flags); }

  bool has_room(u64 need) {                  // reads the writer's line only when the cached head is not enough
    if (tail_ + need - head_ <= size_) return true;
    head_ = load(slot_->head_pub, acquire);  // R1: what lies below head has been copied out and committed
    return tail_ + need - head_ <= size_;
  }

  // Rows [from, from + n) of the columns become one record. Call only after has_room(record_bytes(n, …)).
  u64 publish_rows(const Column *columns, u32 n_columns, const Extras &extras, u64 from, u64 n) {
    return publish_record(extras, 0, from, n, [&](u64 at) { copy_columns(columns, n_columns, from, n, at); });
  }
  // The same of rows that fill(position of the first) copies to the device ring: all of it, before it returns.
  template <class Fill> u64 publish_device(const Extras &extras, u64 from, u64 n, Fill fill) {
    return publish_record(extras, kDevice, from, n, [&](u64 at) {
      store(slot_->device_since, now_ns(), release);  // whoever sweeps after a kill in here waits for what may still land
      fill(at);
      store(slot_->device_since, u64(0), release);
    });
  }
  struct Restart { u64 first_id = 0, write_count = 0, unused[2] = {}; };
  u64 publish_clear(u32 flags, const Restart &restart) {
    const u64 bytes = clear_bytes(flags);
    write_header({bytes, kClear, flags, 0, kPending});
    if (flags & kRestart) ring_write(ring_, size_, tail_ + sizeof(Record), &restart, sizeof restart);
    store(slot_->clear_to, tail_ + bytes, relaxed);
    return publish(bytes);
  }
  u64 max_rows_per_edit(u64 spans, u64 width) const {
    const u64 fixed = sizeof(Record) + spans * sizeof(Span) + kRecordAlign;
    return fixed > size_ / 2 ? 0 : (size_ / 2 - fixed) / (8 + width);
  }
  // New bytes of the rows ids[from, from + n): the columns' offsets and bytes are the spans. Call only after has_room(edit_bytes(…)).
  u64 publish_edit(const Column *columns, u32 n_columns, u32 version, u64 width, const u64 *ids, u64 from, u64 n) {
    const u64 bytes = edit_bytes(n, n_columns, width);
    write_header({bytes, kEdit, n_columns | version << kVersionShift, n, kPending});
    u64 at = tail_ + sizeof(Record);
    for (u32 c = 0; c < n_columns; ++c, at += sizeof(Span)) {
      const Span s{u32(columns[c].offset), u32(columns[c].bytes)};
      ring_write(ring_, size_, at, &s, sizeof s);
    }
    ring_write(ring_, size_, at, ids + from, n * 8);
    at += n * 8;
    for (u64 j = from; j < from + n; ++j)
      for (u32 c = 0; c < n_columns; ++c) ring_write(ring_, size_, at, source(columns[c], j), columns[c].bytes), at += columns[c].bytes;
    FAILPOINT(ring_copied);
    store(slot_->clear_to, tail_ + bytes, relaxed);  // neither it nor what comes before it waits for the limiter
    return publish(bytes);
  }
  // drop_oldest: the first record boundary that leaves room for `need`, passing ROWS only; the present head if there is none.
  u64 skip_target(u64 need) {
    u64 at = load(slot_->head_pub, acquire);
    while (at != tail_ && tail_ + need - at > size_) {
      const Record &r = record_at(ring_, size_, at);
      if (r.kind != kRows || r.bytes < sizeof(Record) || r.bytes > tail_ - at) break;  // own bytes, unless damaged
      at += r.bytes;
    }
    return at;
  }
  const u8 *ring() const { return ring_; }
  u64 result(u64 at) const { return load(record_at(ring_, size_, at).result, relaxed); }  // after head_pub has passed it (R1)

 private:
  template <class Fill> u64 publish_record(const Extras &extras, u32 more_flags, u64 from, u64 n, Fill fill) {
    const u64 bytes = record_bytes(n, row_bytes_, extras.flags());
    FAILPOINT(ring_reserved);
    write_header({bytes, kRows, extras.flags() | more_flags, n, kPending});
    u64 at = tail_ + sizeof(Record);
    FAILPOINT(ring_half_record);
    fill(at);
    at += n * row_bytes_;
    if (extras.streams) ring_write(ring_, size_, at, extras.streams + from, n * 8), at += n * 8;
    if (extras.leaves) ring_write(ring_, size_, at, extras.leaves + from, n * 4);
    FAILPOINT(ring_copied);
    if (extras.loaded) store(slot_->clear_to, tail_ + bytes, relaxed);
    bump(slot_->put_rows, n);                // before tail: a kill in between counts rows that were never put, not the reverse
    return publish(bytes);
  }
  void copy_columns(const Column *columns, u32 n_columns, u64 from, u64 n, u64 at) const {
    const u64 o = at & (size_ - 1);
    if (o + n * row_bytes_ <= size_) {
      for (u32 c = 0; c < n_columns; ++c) scatter(ring_ + o + columns[c].offset, columns[c], from, n);
      return;
    }
    for (u64 j = 0; j < n; ++j)
      for (u32 c = 0; c < n_columns; ++c)
        ring_write(ring_, size_, at + j * row_bytes_ + columns[c].offset, source(columns[c], from + j), columns[c].bytes);
  }
  static const u8 *source(const Column &c, u64 j) { return c.data + i64(j) * c.stride; }
  void scatter(u8 *to, const Column &c, u64 from, u64 n) const {
    const u8 *s = source(c, from);
    for (u64 j = 0; j < n; ++j, to += row_bytes_, s += c.stride) copy_bytes(to, s, c.bytes);
  }
  void write_header(const Record &r) {
    Record &w = record_at(ring_, size_, tail_);
    w.bytes = r.bytes, w.kind = r.kind, w.flags = r.flags, w.n_rows = r.n_rows;
    store(w.result, r.result, relaxed);
  }
  u64 publish(u64 bytes) {
    store(slot_->tail, tail_ + bytes, release);  // THE commit of this record. Pairs with P1 in transaction.h (models/ring.c)
    tail_ += bytes;
    FAILPOINT(ring_published);
    return tail_;
  }
  Slot *slot_ = nullptr;
  u8 *ring_ = nullptr;
  u64 size_ = 0, row_bytes_ = 0, tail_ = 0, head_ = 0;
};

}  // namespace shmbuf
