// Numbers for people.
#pragma once
#include "bindings.h"

namespace shmbuf {
namespace {

// ---- looking -----------------------------------------------------------------------------------------------------------
nb::dict owner_dict(const Owner &o) {
  nb::dict d;
  d["pid"] = o.pid, d["uid"] = o.uid, d["start_ticks"] = o.start_ticks, d["pid_namespace"] = o.pid_namespace;
  d["since"] = double(o.since_ns) * 1e-9;
  d["command"] = nb::steal(PyUnicode_DecodeUTF8(o.comm, Py_ssize_t(strnlen(o.comm, sizeof o.comm)), "replace"));  // cut at 15 bytes
  return d;
}
// The truth, as far as transactions let us read it in one piece; after many tries, as it is (numbers for people).
CommitBlock truth(const Segment &s) {
  CommitBlock b{};
  for (int tries = 0; tries < 1000 && !read_block(s, b, nullptr, 0); ++tries) {}
  return b;
}
BlockSlot truth_of(const Segment &s, u32 slot) {
  for (int tries = 0;; ++tries) {
    u64 seq = load(s.control().commit_seq, acquire);
    const CommitBlock &b = s.block(seq);
    BlockSlot out = slot < b.n_slots ? b.slot[slot] : BlockSlot{};
    fence(acquire);
    if (load(s.control().commit_seq, relaxed) == seq || tries == 1000) return out;
  }
}
nb::dict counters(const H &h) {
  Handle::Use use(*h);
  const Segment &s = h->segment();
  const Control &c = s.control();
  nb::dict d;
  CommitBlock b = truth(s);
  u64 dropped = 0, refused = 0, put = 0, blocked = 0, used = 0, fullest = 0;
  u32 n = s.n_slots();
  for (u32 i = 0; i < n; ++i) {
    const Slot &slot = s.slot(i);
    put += load(slot.put_rows, relaxed), dropped += load(slot.dropped_rows, relaxed);
    refused += load(slot.refused_rows, relaxed), blocked += load(slot.blocked_ns, relaxed);
    u64 head = load(slot.head_pub, acquire), tail = load(slot.tail, acquire), in_ring = tail > head ? tail - head : 0;
    used += in_ring, fullest = std::max(fullest, in_ring);
  }
  d["ring_used_bytes"] = used, d["ring_fill"] = s.ring_bytes ? double(fullest) / double(s.ring_bytes) : 0.0;
  d["streams_cut"] = load(c.streams_cut, relaxed);
  Window w = h->ready() ? window(s) : Window{0, 0, 0};
  d["size"] = w.hi - w.live_lo, d["first_id"] = w.live_lo, d["end_id"] = w.hi, d["reserve"] = load(c.reserve, relaxed);
  d["rows_total"] = b.rows_total, d["write_count"] = b.write_count, d["skipped_rows"] = b.skipped_total;
  d["clears"] = b.clears, d["malformed_records"] = b.malformed;
  d["put_rows"] = put, d["dropped_rows"] = dropped, d["refused_rows"] = refused, d["blocked_seconds"] = double(blocked) * 1e-9;
  d["transactions"] = load(c.transactions, relaxed), d["takeovers"] = load(c.takeovers, relaxed);
  d["writer_pid"] = load(c.writer_pid, relaxed);
  u64 beat = load(c.last_transaction_ns, relaxed), t = now_ns();
  d["writer_age"] = beat ? double(t > beat ? t - beat : 0) * 1e-9 : -1.0;
  d["writer_active"] = h->role().held_here() || (h->lock_fd() >= 0 && byte_is_held(h->lock_fd(), kLockWriter));
  return d;
}
nb::list collectors(const H &h) {
  Handle::Use use(*h);
  const Segment &s = h->segment();
  nb::list out;
  if (!h->ready()) return out;
  u32 n = s.n_slots();
  for (u32 i = 0; i < n; ++i) {
    const Slot &slot = s.slot(i);
    u64 word = load(slot.word, acquire);
    Owner owner = slot.owner;
    // What it started from before what it has by now: neither can come out negative.
    u64 put = load(slot.put_at_claim, relaxed), stored = load(slot.stored_at_claim, relaxed), skipped = load(slot.skipped_at_claim, relaxed);
    u64 dropped = load(slot.dropped_at_claim, relaxed), refused = load(slot.refused_at_claim, relaxed), blocked = load(slot.blocked_at_claim, relaxed);
    fence(acquire);
    BlockSlot now = truth_of(s, i);
    put = load(slot.put_rows, relaxed) - put, stored = now.stored_rows - stored, skipped = now.skipped_rows - skipped;
    dropped = load(slot.dropped_rows, relaxed) - dropped, refused = load(slot.refused_rows, relaxed) - refused;
    blocked = load(slot.blocked_ns, relaxed) - blocked;
    fence(acquire);
    if (load(slot.word, relaxed) != word || word_state(word) == kFree) continue;  // changing hands: not half an entry
    nb::dict d = owner_dict(owner);
    u64 head = load(slot.head_pub, acquire), tail = load(slot.tail, acquire);
    d["slot"] = i, d["incarnation"] = word_incarnation(word);
    d["state"] = word_state(word) == kClosed ? "closed" : int(i) == h->slot() || byte_is_held(h->lock_fd(), lock_slot(i)) ? "alive" : "dead";
    d["ring_used"] = tail > head ? tail - head : 0, d["ring_bytes"] = s.ring_bytes;
    d["put_rows"] = put, d["stored_rows"] = stored, d["skipped_rows"] = skipped, d["dropped_rows"] = dropped;
    d["refused_rows"] = refused, d["blocked_seconds"] = double(blocked) * 1e-9;
    out.append(d);
  }
  return out;
}
nb::list members(const H &h, int own) {
  Handle::Use use(*h);
  const Segment &s = h->segment();
  nb::list out;
  for (u32 i = 0; i < s.header().max_members; ++i) {
    const Member &m = s.member(i);
    u64 word = load(m.word, acquire);
    if (word_state(word) == kFree) continue;
    Owner owner = m.owner;
    u32 roles = load(m.roles, relaxed), slot = load(m.slot_plus_1, relaxed);
    fence(acquire);
    if (load(m.word, relaxed) != word) continue;
    nb::dict d = owner_dict(owner);
    nb::list r;
    const char *names[] = {"creator", "collector", "reader", "drainer", "standby"};
    for (int k = 0; k < 5; ++k)
      if (roles & (1u << k)) r.append(names[k]);
    d["roles"] = r;
    d["slot"] = slot ? nb::cast(slot - 1) : nb::none();
    d["alive"] = int(i) == own || byte_is_held(h->lock_fd(), lock_member(i));
    out.append(d);
  }
  return out;
}

}  // namespace
}  // namespace shmbuf
