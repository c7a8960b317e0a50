// Rows out: draws, priorities, slices, epochs, the limiter.
#pragma once
#include "bindings.h"

namespace shmbuf {
namespace {

// A Use by whoever goes by the cursor: no id comes near 2^62 but by damage, and Python's integers of 64 bits end at 2^63.
struct Reader : Handle::Use {
  explicit Reader(Handle &h) : Use(h) {
    if (!h.ready()) return;
    if (const u64 cursor = load(h.segment().control().cursor, relaxed); cursor >> 62) throw FormatError("cursor: " + std::to_string(cursor));
  }
};
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
  Status s = h->ready() && !h->device() && n * h->segment().row_bytes <= kHoldGil ? draw(false) : Status::would_wait;
  if (s == Status::would_wait) {
    nb::gil_scoped_release r;
    s = draw(true);
  }
  auto *id = reinterpret_cast<const u64 *>(ids);
  if (s == Status::ok) h->count_drawn(id, n);
  if (s == Status::ok && slots) {
    auto *slot = reinterpret_cast<u64 *>(slots);
    const SlotOf slot_of(h->segment());
    for (u64 j = 0; j < n; ++j) slot[j] = slot_of(id[j]);
  }
  if (s == Status::interrupted) throw nb::python_error();
  return int(s);
}
int draw(const H &h, const Columns &columns, const std::vector<u64> &addresses, u64 n, u64 ids, u64 slots, double timeout) {
  Reader use(*h);
  auto out = out_columns(columns, addresses);
  u64 deadline = deadline_in(timeout);
  Patience patience{h};
  return draw_into(h, n, ids, slots, [&](bool may_wait) {
    return h->sampling().draw(n, out.data(), u32(out.size()), reinterpret_cast<u64 *>(ids), deadline, may_wait, [&] { return patience(); });
  });
}
int draw_by_priority(const H &h, const Columns &columns, const std::vector<u64> &addresses, u64 n, u64 ids, u64 slots, u64 weights, double beta,
                     bool stratified, bool by_batch, double timeout) {
  Reader use(*h);
  auto out = out_columns(columns, addresses);
  u64 deadline = deadline_in(timeout);
  Patience patience{h};
  return draw_into(h, n, ids, slots, [&](bool may_wait) {
    return h->sampling().draw_by_priority(n, {beta, stratified, by_batch}, out.data(), u32(out.size()), reinterpret_cast<u64 *>(ids),
                                          reinterpret_cast<float *>(weights), deadline, may_wait, [&] { return patience(); });
  });
}
// The same with outputs on the device; ids, slots, weights and done stay on the host.
int draw_device(const H &h, const DeviceColumns &columns, u64 n, u64 ids, u64 slots, double timeout, u64 after) {
  Reader use(*h);
  auto out = on_device<OutColumn>(h, columns);
  u64 deadline = deadline_in(timeout);
  Patience patience{h};
  return draw_into(h, n, ids, slots, [&](bool may_wait) {
    return h->sampling().draw(n, out.data(), u32(out.size()), reinterpret_cast<u64 *>(ids), deadline, may_wait, [&] { return patience(); }, {true, stream_of(after)});
  });
}
int draw_by_priority_device(const H &h, const DeviceColumns &columns, u64 n, u64 ids, u64 slots, u64 weights, double beta, bool stratified, bool by_batch,
                            double timeout, u64 after) {
  Reader use(*h);
  auto out = on_device<OutColumn>(h, columns);
  u64 deadline = deadline_in(timeout);
  Patience patience{h};
  return draw_into(h, n, ids, slots, [&](bool may_wait) {
    return h->sampling().draw_by_priority(n, {beta, stratified, by_batch}, out.data(), u32(out.size()), reinterpret_cast<u64 *>(ids),
                                          reinterpret_cast<float *>(weights), deadline, may_wait, [&] { return patience(); }, {true, stream_of(after)});
  });
}
u64 gather_device(const H &h, const DeviceColumns &columns, u64 n, u64 ids, u64 done, u64 after) {
  Reader use(*h);
  if (!h->ready()) return 0;
  auto out = on_device<OutColumn>(h, columns);
  nb::gil_scoped_release r;
  return h->sampling().fetch(n, out.data(), u32(out.size()), reinterpret_cast<const u64 *>(ids), reinterpret_cast<u8 *>(done), {true, stream_of(after)});
}
u64 fetch(const H &h, const Columns &columns, const std::vector<u64> &addresses, u64 n, u64 ids, u64 done) {
  Reader use(*h);
  if (!h->ready()) return 0;
  auto out = out_columns(columns, addresses);
  Ungil gil(h->device() || n * h->segment().row_bytes > kHoldGil);
  return h->sampling().fetch(n, out.data(), u32(out.size()), reinterpret_cast<const u64 *>(ids), reinterpret_cast<u8 *>(done));
}
// Who only chooses and copies must hear of it, too.
void require_there(const H &h) {
  if (h->destroyed()) throw Gone{Status::destroyed};
}
// (status, position of what is wrong); ids are u64[n], p float32 or float64[n], applied u8[n].
nb::tuple set_priorities(const H &h, u64 ids, u64 p, u64 n, u32 itemsize, u64 applied) {
  Reader use(*h);
  auto *id = reinterpret_cast<const u64 *>(ids);
  auto *ok = reinterpret_cast<u8 *>(applied);
  u64 bad = 0;
  Status s;
  {
    Ungil gil(n > 4096);
    s = itemsize == 4 ? h->sampling().set_priorities(id, reinterpret_cast<const float *>(p), n, ok, bad)
                      : h->sampling().set_priorities(id, reinterpret_cast<const double *>(p), n, ok, bad);
  }
  return nb::make_tuple(int(s), bad);
}
bool get_priorities(const H &h, u64 ids, u64 n, u64 out) {
  Reader use(*h);
  if (!h->sampling().keeps_priorities()) return false;
  Ungil gil(n > 4096);
  h->sampling().get_priorities(reinterpret_cast<const u64 *>(ids), n, reinterpret_cast<double *>(out));
  return true;
}
int keep_priorities(const H &h, double alpha, double eps, bool live_maximum, double timeout) {
  Reader use(*h);
  u64 deadline = deadline_in(timeout);
  Status s;
  {
    nb::gil_scoped_release r;
    Patience patience{h};
    s = h->sampling().keep_priorities(alpha, eps, live_maximum, deadline, [&] { return patience(); });
  }
  if (s == Status::interrupted) throw nb::python_error();
  return int(s);
}
// None: nobody has asked for priorities.
nb::object priorities(const H &h) {
  Reader use(*h);
  const Priorities &w = h->segment().control().priorities;
  if (!load(w.formula.low, acquire)) return nb::none();
  const Formula f(w);
  nb::dict d;
  d["alpha"] = f.alpha, d["eps"] = f.eps, d["max_priority_within_buffer"] = f.live_maximum;
  auto sampling = h->sampling();
  const bool ready = sampling.keeps_priorities();  // else there is no tree: nothing has a priority yet
  d["ready"] = ready;
  d["sum"] = ready ? sampling.tree().sum() : 0.0, d["min"] = ready ? sampling.tree().min() : 0.0f;
  d["new_row"] = f.priority(ready ? first_leaf(w, f, sampling.tree()) : float(f.leaf(1.0)));
  d["applied"] = load(w.applied, relaxed), d["stale"] = load(w.stale, relaxed), d["scrubs"] = load(w.scrubs, relaxed);
  return d;
}

// ---- the limiter, and choosing without copying ---------------------------------------------------------------------------
int acquire_samples(const H &h, u64 n, double timeout) {
  Reader use(*h);
  Status s = h->sampling().acquire_samples(n, 0, false, no_signal);
  if (s == Status::would_wait) {
    u64 deadline = deadline_in(timeout);
    nb::gil_scoped_release r;
    Patience patience{h};
    s = h->sampling().acquire_samples(n, deadline, true, [&] { return patience(); });
  }
  if (s == Status::interrupted) throw nb::python_error();
  return int(s);
}
bool set_limiter(const H &h, u32 num, u32 den, u64 min_size, std::optional<i64> min_diff, std::optional<i64> max_diff, bool anew) {
  Reader use(*h);
  require_there(h);
  Ungil gil(true);
  LimiterParams p{num, den, min_size, min_diff.value_or(kNoMinDiff), max_diff.value_or(kNoMaxDiff), 0, 0};
  const LimiterState now = Limiter(h->segment().control().limiter).why(h->ready() ? Writer::inserted(h->segment()) : 0, 0);
  // Another ratio, or the first: nothing that came before counts.
  const bool same = !anew && now.params.den == den && now.params.num == num;
  p.base_inserts = same ? now.params.base_inserts : now.inserted, p.base_sampled = same ? now.params.base_sampled : now.sampled;
  return h->sampling().set_limiter(p);
}
nb::object limiter(const H &h, u64 n) {  // for a sampler of n rows; None: there is none
  Reader use(*h);
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
  Reader use(*h);
  require_there(h);
  return h->ready() ? h->sampling().choose(n, reinterpret_cast<u64 *>(ids)) : 0;
}
u64 choose_by_priority(const H &h, u64 n, bool stratified, u64 ids, u64 leaves) {
  Reader use(*h);
  require_there(h);
  if (!h->sampling().keeps_priorities()) return 0;
  return h->sampling().choose_by_priority(n, stratified, reinterpret_cast<u64 *>(ids), reinterpret_cast<float *>(leaves));
}
void weigh(const H &h, u64 leaves, u64 n, double beta, bool by_batch) {  // leaves become weights
  Reader use(*h);
  if (n) h->sampling().weigh(reinterpret_cast<float *>(leaves), n, {beta, false, by_batch});
}
// ids u64[n × length], lens u64[n]. (status, longest live trajectory)
nb::tuple choose_slices(const H &h, u64 n, u64 length, bool strict, bool by_start, u64 left, u64 right, u64 ids, u64 lens) {
  Reader use(*h);
  if (!h->ready()) return nb::make_tuple(int(Status::empty), 0);
  if (!h->segment().links) return nb::make_tuple(int(Status::not_ready), 0);
  auto draw = [&](bool scan) {
    Ungil gil(scan || n * length > 4096);
    return h->sampling().choose_slices({length, strict, by_start ? SliceBy::start : SliceBy::trajectory, left, right, scan}, n,
                                       reinterpret_cast<u64 *>(ids), reinterpret_cast<u64 *>(lens));
  };
  SliceDraw out = draw(false);
  if (out.status == SliceStatus::rare) out = draw(true);
  Status s = out.status == SliceStatus::ok ? Status::ok : out.status == SliceStatus::lapped ? Status::lapped : Status::too_short;
  return nb::make_tuple(int(s), out.longest);
}
bool keeps_links(const H &h) { return h->ready() && h->segment().links; }
bool walk(const H &h, u64 anchors, u64 n, u64 steps, u64 dilation, bool backward, u64 ids, u64 lens) {
  Reader use(*h);
  require_there(h);
  if (!keeps_links(h)) return false;
  Ungil gil(n * steps > 4096);
  h->sampling().slices().walk(reinterpret_cast<const u64 *>(anchors), n, steps, dilation, backward, reinterpret_cast<u64 *>(ids),
                              reinterpret_cast<u64 *>(lens));
  return true;
}
u64 trajectory_rows(const H &h, u64 end) {
  Reader use(*h);
  return keeps_links(h) ? h->sampling().slices().rows(end) : 0;
}
bool stretch(const H &h, u64 end, u64 back, u64 length, u64 ids) {
  Reader use(*h);
  require_there(h);
  return keeps_links(h) && h->sampling().slices().stretch(end, back, length, reinterpret_cast<u64 *>(ids));
}
struct PrivateEpoch { Pair word{}; };  // of one reader; (low, high) saves it
// Positions of the epoch as ids, at most n: (how many, whether they end the epoch, how many are left in it, its name).
nb::tuple claim(const H &h, PrivateEpoch *own, u32 which, u64 n, u64 seed, bool shuffle, bool drop_last, bool consume, u32 repeat, u64 ids,
                std::optional<u64> of) {
  Reader use(*h);
  require_there(h);
  if (!h->ready()) return nb::make_tuple(0, false, 0, 0);
  if (which >= std::size(h->segment().control().epochs)) throw nb::index_error("epoch");
  const EpochOptions o{seed, shuffle, drop_last, consume, repeat, 1};
  Claim c;
  {
    Ungil gil(n > 4096);
    c = h->sampling().claim(own ? own->word : h->segment().control().epochs[which].word, n, o, of);
    c.ids(reinterpret_cast<u64 *>(ids));
  }
  const u64 left = c.ran_out ? 0 : c.size - c.position - c.n;
  return nb::make_tuple(c.n, c.ran_out, left, c.name);
}
// Of all live trajectories: last rows, first live rows, how many rows, flags (1: its beginning is gone, 2: it has ended).
nb::tuple trajectories(const H &h) {
  Reader use(*h);
  require_there(h);
  std::vector<u64> end, first, rows, flags;
  if (keeps_links(h)) {
    Ungil gil(true);
    const Window w = window(h->segment());
    const Links links(h->segment().links, h->segment().capacity, &h->segment().control().reserve);
    links.for_each_end(w.lo, w.hi, [&](u64 id) {
      const u64 from = links.first_live(id, w.lo);
      if (from == kNoRow) return;
      const bool head_missing = links.step(from) || links.flags(from) & Link::kHeadMissing;
      end.push_back(id), first.push_back(from), rows.push_back(u64(links.step(id)) - links.step(from) + 1);
      flags.push_back(u64(head_missing) | u64((links.flags(id) & Link::kEnd) != 0) << 1);
    });
  }
  return nb::make_tuple(end, first, rows, flags);
}
// ids of the trajectory that ends with `end`, oldest first.
std::vector<u64> trajectory(const H &h, u64 end) {
  Reader use(*h);
  std::vector<u64> out;
  if (!keeps_links(h)) return out;
  Ungil gil(true);
  const Window w = window(h->segment());
  Links links(h->segment().links, h->segment().capacity);
  for (u64 id = end >= w.lo && end < w.hi ? end : kNoRow; id != kNoRow && out.size() <= h->segment().capacity; id = links.previous(id, w.lo)) out.push_back(id);
  std::reverse(out.begin(), out.end());
  return out;
}

template <class As, class Vector> nb::object as_array(Vector &&v) {
  using Kept = std::remove_reference_t<Vector>;
  auto *kept = new Kept(std::move(v));
  nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<Kept *>(p); });
  return nb::cast(nb::ndarray<nb::numpy, As, nb::ndim<1>>(reinterpret_cast<As *>(kept->data()), {kept->size()}, owner));
}
// All live trajectories by their first rows: ids int64[m] one after another, offsets int64[n + 1], flags uint8[n].
nb::tuple list_trajectories(const H &h) {
  Reader use(*h);
  require_there(h);
  Links::Listing l;
  if (h->ready() && h->segment().links) {
    Ungil gil(true);
    const Window w = window(h->segment());
    l = Links(h->segment().links, h->segment().capacity, &h->segment().control().reserve).list(w.lo, w.hi);
    fence(acquire);  // before the next look at `reserve`, as G2
  }
  if (l.offset.empty()) l.offset.push_back(0);
  return nb::make_tuple(as_array<i64>(std::move(l.ids)), as_array<i64>(std::move(l.offset)), as_array<u8>(std::move(l.flags)));
}

// A pin from the moment it is made: whoever is interrupted anywhere lets it go with the last reference.
struct PinHold {
  H handle;
  u32 index;
  u64 first_id, end_id;
  std::vector<u32> stripes;
  std::atomic<bool> held{true};
  PinHold(H h, u32 i, u64 lo, u64 hi) : handle(std::move(h)), index(i), first_id(lo), end_id(hi), stripes(handle->edit_stripes()) {}
  ~PinHold() { release(); }
  void release() {
    if (!held.exchange(false)) return;
    try {
      Handle::Use use(*handle);
      handle->unpin(index);
    } catch (const Gone &) {  // closed: gone with it
    }
  }
  bool keeps() const {  // its rows are still stored, edited or not
    if (!held) return false;
    try {
      Handle::Use use(*handle);
      return handle->pin_valid(index, first_id);
    } catch (const Gone &) {
      return false;
    }
  }
  bool valid() const {
    if (!keeps()) return false;
    try {
      Handle::Use use(*handle);
      return handle->unedited(stripes, first_id, end_id);
    } catch (const Gone &) {
      return false;
    }
  }
};
// (status, first id, one past the last, the pin or None)
nb::tuple pin(const H &h, u64 first_id, double seconds) {
  Reader use(*h);
  u64 lo = 0, hi = 0;
  u32 index = 0;
  const Status s = h->pin(first_id, deadline_in(seconds), lo, hi, index);
  if (s != Status::ok) return nb::make_tuple(int(s), lo, hi, nb::none());
  return nb::make_tuple(int(s), lo, hi, std::make_shared<PinHold>(h, index, lo, hi));
}
// All rows, slot after slot, as bytes that nobody may write; unmapped when the last array over them goes.
nb::object view_rows(const H &h) {
  Reader use(*h);
  if (h->device()) throw DeviceError("the rows of this buffer lie in device memory: device_rows says where");
  u64 bytes = 0;
  u8 *at = shmbuf::map_rows(h->segment(), bytes);
  struct Mapping { u8 *at; u64 bytes; };
  nb::capsule owner(new Mapping{at, align_up(bytes, kPage)}, [](void *p) noexcept {
    auto *m = static_cast<Mapping *>(p);
    munmap(m->at, m->bytes);
    delete m;
  });
  return nb::cast(nb::ndarray<nb::numpy, const u8, nb::ndim<1>>(at, {bytes}, owner));
}

int wait_rows(const H &h, u64 rows, double timeout) {
  Reader use(*h);
  u64 deadline = deadline_in(timeout);
  Status s;
  {
    nb::gil_scoped_release r;
    Patience patience{h};
    s = h->wait_rows(rows, deadline, [&] { return patience(); });
  }
  if (s == Status::interrupted) throw nb::python_error();
  return int(s);
}

void bind_sampling(nb::module_ &m, nb::class_<Handle> &handle) {
  nb::class_<PrivateEpoch>(m, "PrivateEpoch")
      .def(nb::init<>())
      .def_prop_rw("state", [](const PrivateEpoch &e) { return std::make_pair(e.word.low, e.word.high); },
                   [](PrivateEpoch &e, std::pair<u64, u64> s) { e.word = {s.first, s.second}; });

  nb::class_<PinHold>(m, "PinHold")
      .def("release", &PinHold::release)
      .def_prop_ro("held", [](const PinHold &p) { return p.held.load(); })
      .def_prop_ro("keeps", &PinHold::keeps)
      .def_prop_ro("valid", &PinHold::valid);

  handle.def("draw", &draw, "columns"_a, "addresses"_a, "n"_a, "ids"_a, "slots"_a, "timeout"_a)
      .def("draw_by_priority", &draw_by_priority, "columns"_a, "addresses"_a, "n"_a, "ids"_a, "slots"_a, "weights"_a, "beta"_a, "stratified"_a,
           "by_batch"_a, "timeout"_a)
      .def("keep_priorities", &keep_priorities, "alpha"_a, "eps"_a, "live_maximum"_a, "timeout"_a)
      .def("set_priorities", &set_priorities, "ids"_a, "p"_a, "n"_a, "itemsize"_a, "applied"_a)
      .def("get_priorities", &get_priorities, "ids"_a, "n"_a, "out"_a)
      .def_prop_ro("priorities", &priorities)
      .def_prop_ro("wants_priorities", [](const H &h) { Handle::Use use(*h); return load(h->segment().control().priorities.formula.low, acquire) != 0; })
      .def("scrub", [](const H &h) { Handle::Use use(*h); Ungil gil(true); return h->sampling().keeps_priorities() ? h->sampling().scrub() : 0; })
      .def("check_tree", [](const H &h) { Handle::Use use(*h); Ungil gil(true); return h->sampling().keeps_priorities() ? h->sampling().tree().check() : 0; })
      .def("acquire_samples", &acquire_samples, "n"_a, "timeout"_a)
      .def("refund_samples", [](const H &h, u64 n) { Handle::Use use(*h); h->sampling().refund_samples(n); }, "n"_a)
      .def("set_limiter", &set_limiter, "num"_a, "den"_a, "min_size"_a, "min_diff"_a.none(), "max_diff"_a.none(), "anew"_a = false)
      .def("limiter", &limiter, "n"_a)
      .def("choose", &choose, "n"_a, "ids"_a)
      .def("choose_by_priority", &choose_by_priority, "n"_a, "stratified"_a, "ids"_a, "leaves"_a)
      .def("weigh", &weigh, "leaves"_a, "n"_a, "beta"_a, "by_batch"_a)
      .def("choose_slices", &choose_slices, "n"_a, "length"_a, "strict"_a, "by_start"_a, "left"_a, "right"_a, "ids"_a, "lens"_a)
      .def("walk", &walk, "anchors"_a, "n"_a, "steps"_a, "dilation"_a, "backward"_a, "ids"_a, "lens"_a)
      .def("trajectory_rows", &trajectory_rows, "end"_a)
      .def("stretch", &stretch, "end"_a, "back"_a, "length"_a, "ids"_a)
      .def("share_epoch", [](const H &h, u32 which, u64 options) {
        Reader use(*h);
        if (which >= std::size(h->segment().control().epochs)) throw nb::index_error("epoch");
        return h->sampling().share_epoch(which, options);
      }, "which"_a, "options"_a)
      .def("raise_new_row", [](const H &h, double priority) { return int(h->sampling().raise_new_row(priority)); }, "priority"_a)
      .def("epoch_word", [](const H &h, u32 which, std::optional<std::pair<u64, u64>> set) {  // of a checkpoint
        Reader use(*h);
        if (set && h->readonly()) throw nb::type_error("a read-only handle sets nothing");
        if (which >= std::size(h->segment().control().epochs)) throw nb::index_error("epoch");
        Pair &word = h->segment().control().epochs[which].word;
        for (;;) {
          Pair was{load(word.low, acquire), load(word.high, acquire)};
          if (load(word.low, relaxed) != was.low) continue;
          if (!set || compare_exchange(word, was, Pair{set->first, set->second})) return std::make_pair(was.low, was.high);
        }
      }, "which"_a, "set"_a.none() = nb::none())
      .def("claim", &claim, "own"_a.none(), "which"_a, "n"_a, "seed"_a, "shuffle"_a, "drop_last"_a, "consume"_a, "repeat"_a, "ids"_a, "of"_a.none() = nb::none())
      .def("trajectories", &trajectories)
      .def("trajectory", &trajectory, "end"_a)
      .def("list_trajectories", &list_trajectories)
      .def("fetch", &fetch, "columns"_a, "addresses"_a, "n"_a, "ids"_a, "done"_a)
      .def("draw_device", &draw_device, "columns"_a, "n"_a, "ids"_a, "slots"_a, "timeout"_a, "after"_a = u64(0))
      .def("draw_by_priority_device", &draw_by_priority_device, "columns"_a, "n"_a, "ids"_a, "slots"_a, "weights"_a, "beta"_a, "stratified"_a, "by_batch"_a,
           "timeout"_a, "after"_a = u64(0))
      .def("gather_device", &gather_device, "columns"_a, "n"_a, "ids"_a, "done"_a, "after"_a = u64(0))
      .def("pin", &pin, "first_id"_a, "seconds"_a)
      .def("view_rows", &view_rows)
      .def("wait_rows", &wait_rows, "rows"_a, "timeout"_a);
}

}  // namespace
}  // namespace shmbuf
