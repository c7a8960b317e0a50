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
  d["edited_rows"] = b.edited_rows, d["stale_edits"] = b.stale_edits;
  d["clears"] = b.clears, d["malformed_records"] = b.malformed;
  d["put_rows"] = put, d["dropped_rows"] = dropped, d["refused_rows"] = refused, d["blocked_seconds"] = double(blocked) * 1e-9;
  d["transactions"] = load(c.transactions, relaxed), d["takeovers"] = load(c.takeovers, relaxed);
  d["writer_pid"] = load(c.writer_pid, relaxed), d["writer_pid_namespace"] = load(c.writer_pid_namespace, relaxed);
  u64 beat = load(c.last_transaction_ns, relaxed), t = now_ns();
  d["writer_age"] = beat ? double(t > beat ? t - beat : 0) * 1e-9 : -1.0;
  const Journal &j = s.journal();
  d["collectors_died"] = load(j.died[kCollectorDied], relaxed), d["writers_died"] = load(j.died[kWriterDied], relaxed);
  d["processes_died"] = load(j.died[kProcessDied], relaxed);
  d["sampled_batches"] = load(j.batches, relaxed), d["sampled_rows"] = load(j.rows, relaxed);
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
    d["ring_used"] = tail > head ? tail - head : 0, d["ring_bytes"] = s.ring_bytes, d["device_ring"] = has_device_ring(s, i);
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
    const std::pair<Role, const char *> names[] = {{kCreator, "creator"}, {kCollector, "collector"}, {kReader, "reader"}, {kDrainer, "drainer"}, {kStandby, "standby"}, {kSteward, "steward"}};
    for (auto [role, what] : names)
      if (roles & role) r.append(what);
    d["roles"] = r;
    d["member"] = i, d["on_device"] = (roles & kOnDevice) != 0, d["device_error"] = load(m.device_error, relaxed);
    d["slot"] = slot ? nb::cast(slot - 1) : nb::none();
    const u32 waits = load(m.waits_for, relaxed);
    const u64 since = load(m.waiting_since_ns, relaxed), now = now_ns();
    const char *waiting[] = {"", "rows", "schema", "room", "commit", "limiter"};
    const bool asleep = waits && waits < std::size(waiting);
    d["waits_for"] = asleep ? nb::cast(waiting[waits]) : nb::none();
    d["waiting_seconds"] = asleep && now > since ? double(now - since) * 1e-9 : 0.0;
    d["sampled_batches"] = load(m.sampled_batches, relaxed), d["sampled_rows"] = load(m.sampled_rows, relaxed);
    d["alive"] = int(i) == own || byte_is_held(h->lock_fd(), lock_member(i));
    out.append(d);
  }
  return out;
}
nb::list pins(const H &h) {  // what keeps rows where they are now
  Handle::Use use(*h);
  const PinTable &t = h->segment().pins();
  nb::list out;
  const u64 now = now_ns();
  for (u32 i = 0; i < std::min(load(t.used, acquire), PinTable::kPins); ++i) {
    const u64 word = load(t.pin[i].word, acquire), until = load(t.pin[i].until_ns, relaxed), since = load(t.pin[i].since_ns, relaxed);
    if (!word || word == Pins::kRevoked) continue;
    nb::dict d = owner_dict(t.pin[i].owner);
    d["first_id"] = word - 1, d["alive"] = h->role().pin_flags.load(relaxed) >> i & 1 || byte_is_held(h->lock_fd(), lock_pin(i));
    d["held_seconds"] = double(now > since ? now - since : 0) * 1e-9;
    d["seconds_left"] = until == kForever ? nb::none() : nb::object(nb::float_(double(until > now ? until - now : 0) * 1e-9));
    out.append(d);
  }
  return out;
}
nb::dict ages(const H &h) {
  Handle::Use use(*h);
  const Journal &j = h->segment().journal();
  nb::dict d;
  nb::list bins, clock;
  for (u64 k = 0; k < Journal::kAges; ++k) bins.append(load(j.ages[k], relaxed));
  d["sampled"] = bins, d["sum"] = load(j.age_sum, relaxed);
  d["staleness_sum"] = load(j.staleness_sum, relaxed), d["staleness_rows"] = load(j.staleness_rows, relaxed);
  const u64 n = load(j.n_marks, acquire), now = now_ns();
  u64 last = 0;
  for (u64 k = n > Journal::kMarks - 1 ? n - (Journal::kMarks - 1) : 0; k < n; ++k) {  // not the one that may be being written
    const Journal::Mark &m = j.marks[k % Journal::kMarks];
    const u64 end = load(m.end, relaxed), ns = load(m.ns, relaxed);
    if (end < last || ns > now) continue;
    clock.append(nb::make_tuple(last = end, double(now - ns) * 1e-9));
  }
  d["clock"] = clock;
  return d;
}
nb::list events(const H &h) {
  Handle::Use use(*h);
  const Journal &j = h->segment().journal();
  nb::list out;
  const u64 n = load(j.n_events, acquire);
  const char *kinds[] = {"", "collector_died", "writer_died", "process_died"};
  for (u64 k = n > Journal::kEvents ? n - Journal::kEvents : 0; k < n; ++k) {
    const Event &at = j.events[k % Journal::kEvents];
    if (load(at.seq, acquire) != k + 1) continue;
    const Event e = at;
    fence(acquire);
    if (load(at.seq, relaxed) != k + 1 || !e.kind || e.kind >= kEventKinds) continue;
    nb::dict d;
    d["number"] = k, d["kind"] = kinds[e.kind], d["pid"] = e.pid, d["at"] = double(e.at_ns) * 1e-9;
    d["command"] = nb::steal(PyUnicode_DecodeUTF8(e.comm, Py_ssize_t(strnlen(e.comm, sizeof e.comm)), "replace"));
    d["rows"] = e.rows, d["seconds"] = double(e.ns) * 1e-9;
    out.append(d);
  }
  return out;
}
nb::dict audit(const H &h, double patience) {
  Handle::Use use(*h);
  std::optional<Auditor> a;
  {
    nb::gil_scoped_release r;
    a.emplace(h->audit(u64(patience * 1e9)));
  }
  nb::dict d, checked;
  nb::list findings;
  for (auto &f : a->findings) findings.append(f);
  checked["rings"] = a->rings, checked["records"] = a->records, checked["rows"] = a->rows, checked["leaves"] = a->leaves;
  checked["nodes"] = a->nodes, checked["links"] = a->links, checked["trajectories"] = a->trajectories;
  d["quiet"] = a->quiet, d["findings"] = findings, d["checked"] = checked;
  return d;
}

}  // namespace
}  // namespace shmbuf
