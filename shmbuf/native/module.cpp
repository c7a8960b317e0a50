// The Python face of the core: conversions only. Waits and long copies run without the GIL; every slice of a wait looks for
// signals. Statuses come back as small integers; the words and numbers of an error are Python's (errors.py).
#include "handle.h"
#include "leaves.h"
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace shmbuf {
namespace {

constexpr u64 kHoldGil = 64 << 10;  // copies up to this many bytes are not worth giving the GIL away

u64 deadline_in(double seconds) {  // negative: for ever
  if (seconds < 0 || seconds > 1e9) return kForever;
  return now_ns() + u64(seconds * 1e9);
}
struct Ungil {  // give the GIL away if `yes`
  PyThreadState *state;
  explicit Ungil(bool yes) : state(yes ? PyEval_SaveThread() : nullptr) {}
  ~Ungil() { if (state) PyEval_RestoreThread(state); }
  Ungil(const Ungil &) = delete;
};
// Between slices of a wait, which runs without the GIL.
bool no_signal() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() == 0;
}
struct BadPriority { u64 at; };

nb::bytes bytes_of(const void *p, u64 n) { return nb::bytes(static_cast<const char *>(p), n); }

// ---- tickets -----------------------------------------------------------------------------------------------------------
struct Ticket {
  std::shared_ptr<Handle> handle;
  std::shared_ptr<TicketState> state;
  Status status = Status::ok;

  int wait(double timeout) {
    if (!state || state->pieces.empty() || state->resolved) return 0;
    Handle::Use use(*handle);
    if (handle->try_wait(*state, kHoldGil)) return 0;
    u64 deadline = deadline_in(timeout);
    Status s;
    {
      nb::gil_scoped_release r;
      s = handle->wait(*state, deadline, no_signal);
    }
    if (s == Status::interrupted) throw nb::python_error();
    return int(s);
  }
  bool done() {
    if (!state || state->pieces.empty() || state->resolved) return true;
    try {
      Handle::Use use(*handle);
      return handle->resolve(*state);
    } catch (const Gone &) {  // closed, or this is a fork child: what became of it is not known here
      return false;
    }
  }
  u64 asked() const { return state ? state->asked : 0; }
  nb::list pieces() const {  // (rows, first id or None) per record
    nb::list out;
    if (state)
      for (auto &p : state->pieces) out.append(nb::make_tuple(p.n, p.first >= kDropped ? nb::none() : nb::cast(p.first)));
    return out;
  }
  u64 rows() const {
    u64 n = 0;
    if (state)
      for (auto &p : state->pieces) n += p.n;
    return n;
  }
};

// ---- the handle --------------------------------------------------------------------------------------------------------
using H = std::shared_ptr<Handle>;

// Addresses of what comes with n rows, 0: nothing. Priorities are float64, as the user knows them.
struct With { u64 streams = 0, priorities = 0; };

Ticket put_columns(const H &h, const std::vector<Column> &columns, u64 n, u32 full, double timeout, bool wake, const With &with) {
  Ticket t{h, nullptr, Status::ok};
  Extras extras{reinterpret_cast<const u64 *>(with.streams), nullptr};
  std::vector<float> leaves;
  if (with.priorities && load(h->segment().control().priorities.formula.low, acquire)) {  // nobody draws by priority: nobody wants them
    leaves.resize(n);
    u64 bad;
    if (h->sampling().leaves_of(reinterpret_cast<const double *>(with.priorities), n, leaves.data(), bad) != Status::ok)
      throw BadPriority{bad};
    extras.leaves = leaves.data();
  }
  // A small put that finds room keeps the GIL: beside a busy Python thread, getting it back takes a switch interval (5 ms).
  auto put = [&](bool may_wait) { return h->put(columns.data(), u32(columns.size()), extras, n, Full(full), deadline_in(timeout), wake, may_wait, t.state, no_signal); };
  t.status = h->fits_at_once(n, kHoldGil) ? put(false) : Status::would_wait;
  if (t.status == Status::would_wait) {
    nb::gil_scoped_release r;
    t.status = put(true);
  }
  if (t.status == Status::interrupted) {
    if (t.rows() == 0 || !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) throw nb::python_error();
    PyErr_Clear();  // rows are in the ring: Python raises CommitInterrupted with this ticket
  }
  return t;
}
// nullopt: some leaf needs the slow path.
std::optional<Ticket> put_objects(const H &h, const Columns &columns, PyObject *const *leaves, i64 n, u32 full, double timeout, bool wake, bool tensors, const With &with) {
  int lead = n >= 0;
  std::vector<Column> c(columns.leaves.size());
  Buffers buffers;
  if (!tensors) buffers.held.reserve(c.size());
  for (size_t i = 0; i < c.size(); ++i) {
    bool ok;
    if (tensors) {
      ok = tensor_column(columns, i, leaves[i], n, lead, c[i]);
    } else {
      Py_buffer b;
      ok = PyObject_GetBuffer(leaves[i], &b, PyBUF_RECORDS_RO) == 0;
      if (ok) {
        buffers.held.push_back(b);
        ok = buffer_column(b, columns.leaves[i], n, lead, c[i]);
      }
    }
    if (!ok) {
      PyErr_Clear();
      return std::nullopt;
    }
  }
  return put_columns(h, c, lead ? u64(n) : 1, full, timeout, wake, with);
}
std::optional<Ticket> put_leaves(const H &h, const Columns &columns, nb::list leaves, i64 n, u32 full, double timeout, bool wake, bool tensors,
                                 u64 streams, u64 priorities) {
  Handle::Use use(*h);
  if (leaves.size() != columns.leaves.size()) return std::nullopt;
  return put_objects(h, columns, PySequence_Fast_ITEMS(leaves.ptr()), n, full, timeout, wake, tensors, {streams, priorities});
}
std::optional<Ticket> put_tree(const H &h, const Columns &columns, nb::handle root, i64 n, u32 full, double timeout, bool wake, bool tensors,
                               u64 streams, u64 priorities) {
  Handle::Use use(*h);
  std::vector<nb::object> owned;
  if (!find_leaves(columns, root.ptr(), tensors, owned)) return std::nullopt;
  std::vector<PyObject *> leaves;
  leaves.reserve(owned.size());
  for (auto &o : owned) leaves.push_back(o.ptr());
  if (n == -2) {  // numpy: as many as the first leaf has
    nb::object shape = nb::steal(PyObject_GetAttr(leaves[0], names().shape));
    if (!shape.is_valid() || !PyTuple_Check(shape.ptr()) || !PyTuple_GET_SIZE(shape.ptr())) {
      PyErr_Clear();
      return std::nullopt;
    }
    n = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape.ptr(), 0));
  }
  if (n == 0) return std::nullopt;
  return put_objects(h, columns, leaves.data(), n, full, timeout, wake, tensors, {streams, priorities});
}
// Where a TensorDict's own [n, *shape] tensors lie, to be written into. nullopt: they are not as they must be.
std::optional<std::vector<u64>> addresses_in(const Columns &columns, nb::handle root, i64 n) {
  std::vector<nb::object> leaves;
  if (!find_leaves(columns, root.ptr(), true, leaves)) return std::nullopt;
  std::vector<u64> out;
  out.reserve(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    Column c;
    if (!tensor_column(columns, i, leaves[i].ptr(), n, 1, c)) {
      PyErr_Clear();
      return std::nullopt;
    }
    out.push_back(reinterpret_cast<u64>(c.data));
  }
  for (size_t i = 0; i < out.size(); ++i)  // two keys must not share memory
    for (size_t j = 0; j < i; ++j)
      if (out[i] < out[j] + u64(n) * columns.leaves[j].bytes && out[j] < out[i] + u64(n) * columns.leaves[i].bytes) return std::nullopt;
  return out;
}

std::vector<OutColumn> out_columns(const Columns &columns, const std::vector<u64> &addresses) {
  if (addresses.size() != columns.leaves.size()) throw nb::value_error("one address per column");
  std::vector<OutColumn> out;
  out.reserve(addresses.size());
  for (size_t i = 0; i < addresses.size(); ++i)
    out.push_back({columns.leaves[i].offset, columns.leaves[i].bytes, reinterpret_cast<u8 *>(addresses[i])});
  return out;
}
// Draw n rows into packed outputs; ids and slots are int64[n], weights float32[n]. Returns a status.
template <class Draw> int draw_into(const H &h, u64 n, u64 ids, u64 slots, Draw draw) {
  Status s = h->ready() && n * h->segment().row_bytes <= kHoldGil ? draw(false) : Status::would_wait;
  if (s == Status::would_wait) {
    nb::gil_scoped_release r;
    s = draw(true);
  }
  if (s == Status::ok && slots) {
    auto *id = reinterpret_cast<const u64 *>(ids);
    auto *slot = reinterpret_cast<u64 *>(slots);
    u64 capacity = h->segment().capacity;
    for (u64 j = 0; j < n; ++j) slot[j] = id[j] % capacity;
  }
  if (s == Status::interrupted) throw nb::python_error();
  return int(s);
}
int draw(const H &h, const Columns &columns, const std::vector<u64> &addresses, u64 n, u64 ids, u64 slots, double timeout) {
  Handle::Use use(*h);
  auto out = out_columns(columns, addresses);
  u64 deadline = deadline_in(timeout);
  return draw_into(h, n, ids, slots, [&](bool may_wait) {
    return h->sampling().draw(n, out.data(), u32(out.size()), reinterpret_cast<u64 *>(ids), deadline, may_wait, no_signal);
  });
}
int draw_by_priority(const H &h, const Columns &columns, const std::vector<u64> &addresses, u64 n, u64 ids, u64 slots, u64 weights, double beta,
                     bool stratified, bool by_batch, double timeout) {
  Handle::Use use(*h);
  auto out = out_columns(columns, addresses);
  u64 deadline = deadline_in(timeout);
  return draw_into(h, n, ids, slots, [&](bool may_wait) {
    return h->sampling().draw_by_priority(n, {beta, stratified, by_batch}, out.data(), u32(out.size()), reinterpret_cast<u64 *>(ids),
                                          reinterpret_cast<float *>(weights), deadline, may_wait, no_signal);
  });
}
u64 fetch(const H &h, const Columns &columns, const std::vector<u64> &addresses, u64 n, u64 ids, u64 done) {
  Handle::Use use(*h);
  if (!h->ready()) return 0;
  auto out = out_columns(columns, addresses);
  Ungil gil(n * h->segment().row_bytes > kHoldGil);
  return h->sampling().fetch(n, out.data(), u32(out.size()), reinterpret_cast<const u64 *>(ids), reinterpret_cast<u8 *>(done));
}
// (status, position of what is wrong); ids are u64[n], p float32 or float64[n], applied u8[n].
nb::tuple set_priorities(const H &h, u64 ids, u64 p, u64 n, u32 itemsize, u64 applied) {
  Handle::Use use(*h);
  auto *id = reinterpret_cast<const u64 *>(ids);
  auto *ok = reinterpret_cast<u8 *>(applied);
  u64 bad = 0;
  Status s = itemsize == 4 ? h->sampling().set_priorities(id, reinterpret_cast<const float *>(p), n, ok, bad)
                           : h->sampling().set_priorities(id, reinterpret_cast<const double *>(p), n, ok, bad);
  return nb::make_tuple(int(s), bad);
}
bool get_priorities(const H &h, u64 ids, u64 n, u64 out) {
  Handle::Use use(*h);
  if (!h->sampling().keeps_priorities()) return false;
  h->sampling().get_priorities(reinterpret_cast<const u64 *>(ids), n, reinterpret_cast<double *>(out));
  return true;
}
int keep_priorities(const H &h, double alpha, double eps, bool live_maximum, double timeout) {
  Handle::Use use(*h);
  u64 deadline = deadline_in(timeout);
  Status s;
  {
    nb::gil_scoped_release r;
    s = h->sampling().keep_priorities(alpha, eps, live_maximum, deadline, no_signal);
  }
  if (s == Status::interrupted) throw nb::python_error();
  return int(s);
}
// None: nobody has asked for priorities.
nb::object priorities(const H &h) {
  Handle::Use use(*h);
  const Priorities &w = h->segment().control().priorities;
  if (!load(w.formula.low, acquire)) return nb::none();
  const Formula f(w);
  nb::dict d;
  d["alpha"] = f.alpha, d["eps"] = f.eps, d["max_priority_within_buffer"] = f.live_maximum;
  d["ready"] = h->sampling().keeps_priorities();
  if (h->sampling().keeps_priorities()) {
    auto sampling = h->sampling();
    d["sum"] = sampling.tree().sum(), d["min"] = sampling.tree().min();
    d["new_row"] = f.priority(first_leaf(w, f, sampling.tree()));
  }
  d["applied"] = load(w.applied, relaxed), d["stale"] = load(w.stale, relaxed), d["scrubs"] = load(w.scrubs, relaxed);
  return d;
}

// ---- the limiter, and choosing without copying ---------------------------------------------------------------------------
int acquire_samples(const H &h, u64 n, double timeout) {
  Handle::Use use(*h);
  Status s = h->sampling().acquire_samples(n, 0, false, no_signal);
  if (s == Status::would_wait) {
    u64 deadline = deadline_in(timeout);
    nb::gil_scoped_release r;
    s = h->sampling().acquire_samples(n, deadline, true, no_signal);
  }
  if (s == Status::interrupted) throw nb::python_error();
  return int(s);
}
bool set_limiter(const H &h, u32 num, u32 den, u64 min_size, std::optional<i64> min_diff, std::optional<i64> max_diff) {
  Handle::Use use(*h);
  LimiterParams p{num, den, min_size, min_diff.value_or(kNoMinDiff), max_diff.value_or(kNoMaxDiff), 0, 0};
  const LimiterState now = Limiter(h->segment().control().limiter).why(h->ready() ? Writer::inserted(h->segment()) : 0, 0);
  // Another ratio, or the first: nothing that came before counts.
  const bool same = now.params.den == den && now.params.num == num;
  p.base_inserts = same ? now.params.base_inserts : now.inserted, p.base_sampled = same ? now.params.base_sampled : now.sampled;
  return h->sampling().set_limiter(p);
}
nb::object limiter(const H &h, u64 n) {  // for a sampler of n rows; None: there is none
  Handle::Use use(*h);
  const LimiterState s = Limiter(h->segment().control().limiter).why(h->ready() ? Writer::inserted(h->segment()) : 0, n);
  if (!s.params.den) return nb::none();
  nb::dict d;
  d["num"] = s.params.num, d["den"] = s.params.den, d["min_size"] = s.params.min_size;
  d["min_diff"] = s.params.min_diff == kNoMinDiff ? nb::none() : nb::object(nb::float_(double(s.params.min_diff) / s.params.den));
  d["max_diff"] = s.params.max_diff == kNoMaxDiff ? nb::none() : nb::object(nb::float_(double(s.params.max_diff) / s.params.den));
  d["inserted"] = s.inserted, d["sampled"] = s.sampled, d["diff"] = double(s.diff) / s.params.den;
  d["allowance"] = s.allowance == kUnlimited ? nb::none() : nb::object(nb::int_(s.allowance));
  d["sampler_waits_for_size"] = s.too_few, d["sampler_waits_for_inserts"] = s.diff_too_small, d["writer_waits_for_samples"] = s.writer_waits;
  return d;
}
// ids u64[n]: how many could be chosen, fewer than n if nothing can be drawn now.
u64 choose(const H &h, u64 n, u64 ids) {
  Handle::Use use(*h);
  return h->ready() ? h->sampling().choose(n, reinterpret_cast<u64 *>(ids)) : 0;
}
u64 choose_by_priority(const H &h, u64 n, bool stratified, u64 ids, u64 leaves) {
  Handle::Use use(*h);
  if (!h->sampling().keeps_priorities()) return 0;
  return h->sampling().choose_by_priority(n, stratified, reinterpret_cast<u64 *>(ids), reinterpret_cast<float *>(leaves));
}
void weigh(const H &h, u64 leaves, u64 n, double beta, bool by_batch) {  // leaves become weights
  Handle::Use use(*h);
  if (n) h->sampling().weigh(reinterpret_cast<float *>(leaves), n, {beta, false, by_batch});
}
// ids u64[n × length], lens u64[n]. (status, longest live trajectory)
nb::tuple choose_slices(const H &h, u64 n, u64 length, bool strict, bool by_start, u64 left, u64 right, u64 ids, u64 lens) {
  Handle::Use use(*h);
  if (!h->ready()) return nb::make_tuple(int(Status::empty), 0);
  if (!h->segment().links) return nb::make_tuple(int(Status::not_ready), 0);
  SliceDraw out;
  {
    Ungil gil(n * length > 4096);
    out = h->sampling().choose_slices({length, strict, by_start ? SliceBy::start : SliceBy::trajectory, left, right}, n, reinterpret_cast<u64 *>(ids),
                                      reinterpret_cast<u64 *>(lens));
  }
  Status s = out.status == SliceStatus::ok ? Status::ok : out.status == SliceStatus::lapped ? Status::lapped : Status::too_short;
  return nb::make_tuple(int(s), out.longest);
}
bool walk_forward(const H &h, u64 anchors, u64 n, u64 steps, u64 dilation, u64 ids, u64 lens) {
  Handle::Use use(*h);
  if (!h->ready() || !h->segment().links) return false;
  h->sampling().walk_forward(reinterpret_cast<const u64 *>(anchors), n, steps, dilation, reinterpret_cast<u64 *>(ids), reinterpret_cast<u64 *>(lens));
  return true;
}
struct PrivateEpoch { Pair word{}; };  // of one reader; (low, high) saves it
// Positions of the epoch as ids, at most n: (how many, whether they end the epoch).
nb::tuple claim(const H &h, PrivateEpoch *own, u32 which, u64 n, u64 seed, bool shuffle, bool drop_last, bool consume, u32 repeat, u64 ids) {
  Handle::Use use(*h);
  if (!h->ready()) return nb::make_tuple(0, false);
  if (which >= std::size(h->segment().control().epochs)) throw nb::index_error("epoch");
  const EpochOptions o{seed, shuffle, drop_last, consume, repeat, 1};
  const Claim c = h->sampling().claim(own ? own->word : h->segment().control().epochs[which].word, n, o);
  c.ids(reinterpret_cast<u64 *>(ids));
  return nb::make_tuple(c.n, c.ran_out);
}
// The ends of all live trajectories, oldest first, and of each the first live row and how many rows lie between: three lists.
nb::tuple trajectories(const H &h) {
  Handle::Use use(*h);
  std::vector<u64> end, first, flags;
  if (h->ready() && h->segment().links) {
    const Window w = window(h->segment());
    Links links(h->segment().links, h->segment().capacity);
    links.for_each_end(w.lo, w.hi, [&](u64 id) {
      const u64 from = links.first_live(id, w.lo);
      if (from == kNoRow) return;
      const bool head_missing = links.step(from) || links.flags(from) & Link::kHeadMissing;
      end.push_back(id), first.push_back(from), flags.push_back(u64(head_missing) | u64((links.flags(id) & Link::kEnd) != 0) << 1);
    });
  }
  return nb::make_tuple(end, first, flags);
}
// ids of the trajectory that ends with `end`, oldest first.
std::vector<u64> trajectory(const H &h, u64 end) {
  Handle::Use use(*h);
  std::vector<u64> out;
  if (!h->ready() || !h->segment().links) return out;
  const Window w = window(h->segment());
  Links links(h->segment().links, h->segment().capacity);
  for (u64 id = end >= w.lo && end < w.hi ? end : kNoRow; id != kNoRow && out.size() <= h->segment().capacity; id = links.previous(id, w.lo)) out.push_back(id);
  std::reverse(out.begin(), out.end());
  return out;
}

int wait_rows(const H &h, u64 rows, double timeout) {
  Handle::Use use(*h);
  u64 deadline = deadline_in(timeout);
  Status s;
  {
    nb::gil_scoped_release r;
    s = h->wait_rows(rows, deadline, no_signal);
  }
  if (s == Status::interrupted) throw nb::python_error();
  return int(s);
}
Ticket clear(const H &h, bool keep_write_count, double timeout) {
  Handle::Use use(*h);
  Ticket t{h, nullptr, Status::ok};
  u64 deadline = deadline_in(timeout);
  {
    nb::gil_scoped_release r;
    t.status = h->clear(keep_write_count ? u32(kKeepWriteCount) : 0u, deadline, t.state, no_signal);
  }
  if (t.status == Status::interrupted) throw nb::python_error();
  return t;
}

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
  u64 dropped = 0, refused = 0, put = 0, blocked = 0;
  u32 n = s.n_slots();
  for (u32 i = 0; i < n; ++i) {
    const Slot &slot = s.slot(i);
    put += load(slot.put_rows, relaxed), dropped += load(slot.dropped_rows, relaxed);
    refused += load(slot.refused_rows, relaxed), blocked += load(slot.blocked_ns, relaxed);
  }
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

u64 config_bytes(u32 max_collectors, u32 max_members, u64 blob) { return ConfigLayout(max_collectors, max_members, blob).bytes; }

void format_file(int fd, u64 capacity, u32 max_collectors, u32 max_members, u64 ring_bytes, nb::bytes config, u64 instance_id, bool unnamed) {
  Header h{};
  if (unnamed) h.flags |= kUnnamed;
  h.instance_id = instance_id, h.created_ns = wall_ns(), h.capacity = capacity, h.ring_bytes_asked = ring_bytes;
  h.max_collectors = max_collectors, h.max_members = max_members, h.uid = u32(getuid()), h.creator_pid = u32(getpid());
  if (FILE *f = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
    char text[40] = {};
    if (std::fgets(text, sizeof text, f))
      for (int i = 0, k = 0; text[i] && k < 32; ++i)
        if (int v = text[i] >= 'a' ? text[i] - 'a' + 10 : text[i] >= '0' && text[i] <= '9' ? text[i] - '0' : -1; v >= 0) h.boot_id[k / 2] |= u8(k % 2 ? v : v << 4), ++k;
    std::fclose(f);
  }
  u64 bytes = config_bytes(max_collectors, max_members, config.size());
  u8 *map = map_file(fd, bytes, false);
  format(map, h, reinterpret_cast<const u8 *>(config.c_str()), config.size());
  munmap(map, bytes);
}
#ifndef SHMBUF_MODULE
#define SHMBUF_MODULE _native
#endif

NB_MODULE(SHMBUF_MODULE, m) {
  nb::set_leak_warnings(false);  // daemon threads and os._exit leave handles behind, which the kernel cleans up
  m.doc() = "The compiled core of shmbuf: segment, rings, transactions, gather.";
  nb::exception<FormatError>(m, "FormatError");
  static PyObject *gone = PyErr_NewException("shmbuf._native.Gone", PyExc_RuntimeError, nullptr);  // .args[0]: a status
  static PyObject *bad_priority = PyErr_NewException("shmbuf._native.BadPriority", PyExc_ValueError, nullptr);  // .args[0]: its position
  m.attr("Gone") = nb::borrow(gone), m.attr("BadPriority") = nb::borrow(bad_priority);
  nb::register_exception_translator([](const std::exception_ptr &p, void *) {
    try {
      std::rethrow_exception(p);
    } catch (const Gone &g) {
      PyErr_SetObject(gone, nb::int_(int(g.why)).ptr());
    } catch (const BadPriority &p) {
      PyErr_SetObject(bad_priority, nb::int_(p.at).ptr());
    }
  });
  const char *statuses[] = {"ok", "full", "dropped", "closed", "destroyed", "forked", "concurrent", "none_free", "no_memory",
                            "interrupted", "not_ready", "timeout", "empty", "lapped", "readonly", "would_wait",
                            "no_priority", "other_formula", "bad_priority", "unknown_row", "limited", "never", "too_short"};
  static_assert(std::size(statuses) == size_t(Status::too_short) + 1);
  nb::list status_list;
  for (auto *s : statuses) status_list.append(s);
  m.attr("STATUSES") = nb::tuple(status_list);
  m.attr("READONLY") = int(Handle::kReadonly), m.attr("NO_PRESENCE") = int(Handle::kNoPresence);
  m.attr("CREATOR") = int(kCreator), m.attr("READER") = int(kReader);
  m.attr("LOCK_PRESENCE") = kLockPresence, m.attr("LOCK_DESTROY") = kLockDestroy;
  m.def("config_bytes", &config_bytes, "max_collectors"_a, "max_members"_a, "config_bytes"_a);
  m.def("bookkeeping_bytes", [](u64 capacity, bool trajectories) { return PriorityTree::bytes(capacity) + (trajectories ? Links::bytes(capacity) : 0); },
        "capacity"_a, "trajectories"_a);
  m.def("ring_stride", [](u64 ring_bytes, bool trajectories) { return stride_of(ring_bytes, trajectories ? choose_stream_entries(ring_bytes) : 0); },
        "ring_bytes"_a, "trajectories"_a);
  m.def("check_limiter", [](u32 num, u32 den, u64 min_size, std::optional<i64> min_diff, std::optional<i64> max_diff, u64 record_rows, u64 batch, bool strict) {
    return int(check_limiter({num, den, min_size, min_diff.value_or(kNoMinDiff), max_diff.value_or(kNoMaxDiff), 0, 0}, record_rows, batch, strict));
  }, "num"_a, "den"_a, "min_size"_a, "min_diff"_a.none(), "max_diff"_a.none(), "record_rows"_a, "batch"_a, "strict"_a);
  m.def("ring_bytes", &choose_ring_bytes, "asked"_a, "row_bytes"_a);
  m.def("format", &format_file, "fd"_a, "capacity"_a, "max_collectors"_a, "max_members"_a, "ring_bytes"_a, "config"_a, "instance_id"_a, "unnamed"_a);
  m.def("addresses_in", &addresses_in, "columns"_a, "root"_a, "n"_a);
  m.def("process_start_ticks", &process_start_ticks, "pid"_a);
  m.def("lock_byte", [](int fd, i64 at, bool exclusive) { return lock_byte(fd, at, exclusive ? F_WRLCK : F_RDLCK); }, "fd"_a, "at"_a, "exclusive"_a);
#ifdef SHMBUF_FAILPOINTS
  nb::list fp;
  for (auto *n : failpoint::kNames) fp.append(n);
  m.attr("FAILPOINTS") = nb::tuple(fp);
  m.def("arm", &failpoint::arm, "spec"_a);
  m.def("hits", [] { return failpoint::armed().seen; });
#endif

  nb::class_<Columns>(m, "Columns")
      .def(nb::init<>())
      .def("add", &Columns::add, "offset"_a, "bytes"_a, "shape"_a, "formats"_a, "dtype"_a.none(), "node"_a = 0, "name"_a = nb::none())
      .def("set_tensor_type", [](Columns &c, nb::object type) { c.tensor_type = std::move(type); }, "type"_a)
      .def("set_exchange", &Columns::set_exchange, "capsule"_a, "samples"_a)
      .def("add_node", &Columns::add_node, "parent"_a, "name"_a, "entries"_a);

  nb::class_<Ticket>(m, "Ticket")
      .def_prop_ro("status", [](const Ticket &t) { return int(t.status); })
      .def_prop_ro("rows", &Ticket::rows)
      .def_prop_ro("asked", &Ticket::asked)
      .def("wait", &Ticket::wait, "timeout"_a)
      .def("done", &Ticket::done)
      .def("pieces", &Ticket::pieces);

  nb::class_<PrivateEpoch>(m, "PrivateEpoch")
      .def(nb::init<>())
      .def_prop_rw("state", [](const PrivateEpoch &e) { return std::make_pair(e.word.low, e.word.high); },
                   [](PrivateEpoch &e, std::pair<u64, u64> s) { e.word = {s.first, s.second}; });

  nb::class_<Handle>(m, "Handle")
      .def("__init__", [](Handle *h, int map_fd, int lock_fd, u32 flags) { new (h) Handle(map_fd, lock_fd, flags); }, "map_fd"_a, "lock_fd"_a, "flags"_a = 0u)
      .def_prop_ro("ready", [](const H &h) { Handle::Use use(*h); return h->ready(); })
      .def_prop_ro("forked", [](const H &h) { return h->forked(); })
      .def_prop_ro("closed", [](const H &h) { return h->closed(); })
      .def_prop_ro("present", [](const H &h) { return h->present(); })
      .def("named", [](const H &h) { Handle::Use use(*h); h->named(); })
      .def_prop_ro("inode", [](const H &h) {
        Handle::Use use(*h);
        struct stat st;
        return fstat(h->lock_fd(), &st) ? u64(0) : u64(st.st_ino);
      })
      .def_prop_ro("builder_pid", [](const H &h) { Handle::Use use(*h); return load(h->segment().control().builder_pid, relaxed); })
      .def_prop_ro("attached", [](const H &h) { Handle::Use use(*h); return byte_is_held(h->lock_fd(), kLockPresence); })
      .def_prop_ro("destroyed", [](const H &h) { Handle::Use use(*h); return h->destroyed(); })
      .def_prop_ro("slot", [](const H &h) { return h->slot(); })
      .def_prop_ro("has_thread", [](const H &h) { return h->has_thread(); })
      .def_prop_ro("size", [](const H &h) { Handle::Use use(*h); return h->size(); })
      .def_prop_ro("window", [](const H &h) {
        Handle::Use use(*h);
        if (!h->ready()) return nb::make_tuple(0, 0, 0);
        Window w = window(h->segment());
        return nb::make_tuple(w.live_lo, w.lo, w.hi);
      })
      .def_prop_ro("config", [](const H &h) {
        Handle::Use use(*h);
        const Segment &s = h->segment();
        return bytes_of(s.map + s.header().config_offset, s.header().config_bytes_used);
      })
      .def_prop_ro("schema", [](const H &h) -> nb::object {
        Handle::Use use(*h);
        if (!h->ready()) return nb::none();
        const Built &b = h->segment().header().built;
        return bytes_of(h->file() + b.schema_offset, b.schema_bytes);
      })
      .def_prop_ro("header", [](const H &h) {
        Handle::Use use(*h);
        const Header &x = h->segment().header();
        nb::dict d;
        d["capacity"] = x.capacity, d["max_collectors"] = x.max_collectors, d["max_members"] = x.max_members;
        d["instance_id"] = x.instance_id, d["uid"] = x.uid, d["creator_pid"] = x.creator_pid, d["created"] = double(x.created_ns) * 1e-9;
        d["unnamed"] = bool(x.flags & kUnnamed), d["config_bytes"] = x.config_bytes;
        bool ready = h->ready();
        d["ready"] = ready, d["row_bytes"] = ready ? x.built.row_bytes : 0, d["ring_bytes"] = ready ? x.built.ring_bytes : x.ring_bytes_asked;
        d["file_bytes"] = ready ? x.built.file_bytes : x.config_bytes, d["rings_offset"] = ready ? x.built.rings_offset : x.config_bytes;
        d["tree_offset"] = ready ? x.built.tree_offset : x.config_bytes;
        return d;
      })
      .def("try_lock_build", [](const H &h) { Handle::Use use(*h); return h->try_lock_build(); })
      .def("unlock_build", [](const H &h) { Handle::Use use(*h); h->unlock_build(); })
      .def("build", [](const H &h, nb::bytes schema, u64 row_bytes, u32 n_columns, bool trajectories, std::vector<std::pair<u32, u32>> ends,
                       std::pair<u32, u32> trajectory) {
        Handle::Use use(*h);
        RowShape row{row_bytes, n_columns, trajectories, {}, {trajectory.first, trajectory.second}};
        if (ends.size() > std::size(row.ends)) throw nb::value_error("too many end columns");
        for (size_t i = 0; i < ends.size(); ++i) row.ends[i] = {ends[i].first, ends[i].second};
        nb::gil_scoped_release r;
        return h->build(reinterpret_cast<const u8 *>(schema.c_str()), schema.size(), row);
      }, "schema"_a, "row_bytes"_a, "n_columns"_a, "trajectories"_a, "ends"_a, "trajectory"_a)
      .def("put_leaves", &put_leaves, "columns"_a, "leaves"_a, "n"_a, "full"_a, "timeout"_a, "wake"_a, "tensors"_a, "streams"_a = u64(0), "priorities"_a = u64(0))
      .def("put_tree", &put_tree, "columns"_a, "root"_a, "n"_a, "full"_a, "timeout"_a, "wake"_a, "tensors"_a, "streams"_a = u64(0), "priorities"_a = u64(0))
      .def("clear", &clear, "keep_write_count"_a, "timeout"_a)
      .def("draw", &draw, "columns"_a, "addresses"_a, "n"_a, "ids"_a, "slots"_a, "timeout"_a)
      .def("draw_by_priority", &draw_by_priority, "columns"_a, "addresses"_a, "n"_a, "ids"_a, "slots"_a, "weights"_a, "beta"_a, "stratified"_a,
           "by_batch"_a, "timeout"_a)
      .def("keep_priorities", &keep_priorities, "alpha"_a, "eps"_a, "live_maximum"_a, "timeout"_a)
      .def("set_priorities", &set_priorities, "ids"_a, "p"_a, "n"_a, "itemsize"_a, "applied"_a)
      .def("get_priorities", &get_priorities, "ids"_a, "n"_a, "out"_a)
      .def_prop_ro("priorities", &priorities)
      .def("scrub", [](const H &h) { Handle::Use use(*h); return h->sampling().keeps_priorities() ? h->sampling().scrub() : 0; })
      .def("check_tree", [](const H &h) { Handle::Use use(*h); return h->sampling().keeps_priorities() ? h->sampling().tree().check() : 0; })
      .def("acquire_samples", &acquire_samples, "n"_a, "timeout"_a)
      .def("refund_samples", [](const H &h, u64 n) { Handle::Use use(*h); h->sampling().refund_samples(n); }, "n"_a)
      .def("set_limiter", &set_limiter, "num"_a, "den"_a, "min_size"_a, "min_diff"_a.none(), "max_diff"_a.none())
      .def("limiter", &limiter, "n"_a)
      .def("choose", &choose, "n"_a, "ids"_a)
      .def("choose_by_priority", &choose_by_priority, "n"_a, "stratified"_a, "ids"_a, "leaves"_a)
      .def("weigh", &weigh, "leaves"_a, "n"_a, "beta"_a, "by_batch"_a)
      .def("choose_slices", &choose_slices, "n"_a, "length"_a, "strict"_a, "by_start"_a, "left"_a, "right"_a, "ids"_a, "lens"_a)
      .def("walk_forward", &walk_forward, "anchors"_a, "n"_a, "steps"_a, "dilation"_a, "ids"_a, "lens"_a)
      .def("share_epoch", [](const H &h, u32 which, u64 options) {
        Handle::Use use(*h);
        if (which >= std::size(h->segment().control().epochs)) throw nb::index_error("epoch");
        return h->sampling().share_epoch(which, options);
      }, "which"_a, "options"_a)
      .def("claim", &claim, "own"_a.none(), "which"_a, "n"_a, "seed"_a, "shuffle"_a, "drop_last"_a, "consume"_a, "repeat"_a, "ids"_a)
      .def("trajectories", &trajectories)
      .def("trajectory", &trajectory, "end"_a)
      .def("fetch", &fetch, "columns"_a, "addresses"_a, "n"_a, "ids"_a, "done"_a)
      .def("wait_rows", &wait_rows, "rows"_a, "timeout"_a)
      .def("seed", [](const H &h, u64 value) { h->seed(value); }, "value"_a)
      .def("help", [](const H &h) {
        Handle::Use use(*h);
        nb::gil_scoped_release r;
        return h->ready() ? int(h->help()) : int(WriterRole::Outcome::idle);
      })
      .def("try_take_role", [](const H &h) { Handle::Use use(*h); return h->ready() && h->role().try_take(); })
      .def("give_back_role", [](const H &h) { Handle::Use use(*h); h->role().give_back(); })
      .def("sweep", [](const H &h) { Handle::Use use(*h); return h->sweep(); })
      .def("start_thread", [](const H &h, bool standby) { Handle::Use use(*h); h->start_thread(standby); }, "standby"_a)
      .def("drain_until", [](const H &h, bool leave_when_alone) {
        Handle::Use use(*h);
        bool raised = false;
        {
          nb::gil_scoped_release r;
          h->drain_until(leave_when_alone, [&] { return !(raised = !no_signal()); });
        }
        if (raised) throw nb::python_error();
      }, "leave_when_alone"_a)
      .def("add_role", [](const H &h, u32 role) { Handle::Use use(*h); h->add_role(role); }, "role"_a)
      .def("counters", &counters)
      .def("collectors", &collectors)
      .def("members", [](const H &h) { return members(h, h->member()); })
      .def("mark_destroyed", [](const H &h) { Handle::Use use(*h); h->mark_destroyed(); })
      .def("close", [](const H &h) { nb::gil_scoped_release r; h->close(); });
}

}  // namespace
}  // namespace shmbuf
