// The Python face of the core: conversions only. Waits and long copies run without the GIL; every slice of a wait looks for
// signals. Statuses come back as small integers; the words and numbers of an error are Python's (errors.py).
#include "bind_looking.h"
#include "bind_putting.h"
#include "bind_sampling.h"
#include "turns.h"

namespace shmbuf {
namespace {

u64 config_bytes(u32 max_collectors, u32 max_members, u64 blob) { return ConfigLayout(max_collectors, max_members, blob).bytes; }

void format_file(int fd, u64 capacity, u32 max_collectors, u32 max_members, u64 ring_bytes, nb::bytes config, u64 instance_id, bool unnamed) {
  Header h{};
  if (unnamed) h.flags |= kUnnamed;
  h.instance_id = instance_id, h.created_ns = wall_ns(), h.capacity = capacity, h.ring_bytes_asked = ring_bytes;
  h.max_collectors = max_collectors, h.max_members = max_members, h.uid = u32(getuid()), h.creator_pid = u32(getpid());
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
  nb::exception<MapError>(m, "MapError");
  static PyObject *gone = PyErr_NewException("shmbuf._native.Gone", PyExc_RuntimeError, nullptr);  // .args[0]: a status; of device memory [1]: why
  static PyObject *bad_priority = PyErr_NewException("shmbuf._native.BadPriority", PyExc_ValueError, nullptr);  // .args[0]: its position
  m.attr("Gone") = nb::borrow(gone), m.attr("BadPriority") = nb::borrow(bad_priority);
  nb::register_exception_translator([](const std::exception_ptr &p, void *) {
    try {
      std::rethrow_exception(p);
    } catch (const Gone &g) {
      PyErr_SetObject(gone, nb::int_(int(g.why)).ptr());
    } catch (const DeviceError &e) {
      PyErr_SetObject(gone, nb::make_tuple(int(e.unmapped ? Status::unmapped : Status::device), e.what()).ptr());
    } catch (const BadPriority &p) {
      PyErr_SetObject(bad_priority, nb::int_(p.at).ptr());
    }
  });
  const char *statuses[] = {"ok", "full", "dropped", "closed", "destroyed", "forked", "concurrent", "none_free", "no_memory",
                            "interrupted", "not_ready", "timeout", "empty", "lapped", "readonly", "would_wait",
                            "no_priority", "other_formula", "bad_priority", "unknown_row", "limited", "never", "too_short", "unmapped", "device", "no_device_ring"};
  static_assert(std::size(statuses) == size_t(Status::no_device_ring) + 1);
  nb::list status_list;
  for (auto *s : statuses) status_list.append(s);
  m.attr("STATUSES") = nb::tuple(status_list);
  m.attr("MAX_ID") = kMaxId, m.attr("HEADLESS") = Links::kHeadless;
  m.attr("READONLY") = int(Handle::kReadonly), m.attr("NO_PRESENCE") = int(Handle::kNoPresence);
  m.attr("FOR_ROWS") = int(kForRows), m.attr("CREATOR") = int(kCreator), m.attr("READER") = int(kReader), m.attr("STEWARD") = int(kSteward);
  m.attr("LOCK_PRESENCE") = kLockPresence, m.attr("LOCK_DESTROY") = kLockDestroy, m.attr("LOCK_WRITER") = kLockWriter, m.attr("LOCK_BUILD") = kLockBuild;
  m.def("config_bytes", &config_bytes, "max_collectors"_a, "max_members"_a, "config_bytes"_a);
  m.def("bookkeeping_bytes", [](u64 capacity, bool trajectories) { return PriorityTree::bytes(capacity) + (trajectories ? Links::bytes(capacity) : 0); },
        "capacity"_a, "trajectories"_a);
  m.def("ring_stride", [](u64 ring_bytes, bool trajectories) { return stride_of(ring_bytes, trajectories ? choose_stream_entries(ring_bytes) : 0); },
        "ring_bytes"_a, "trajectories"_a);
  m.def("check_limiter", [](u32 num, u32 den, u64 min_size, std::optional<i64> min_diff, std::optional<i64> max_diff, u64 record_rows, u64 batch, bool strict) {
    return int(check_limiter({num, den, min_size, min_diff.value_or(kNoMinDiff), max_diff.value_or(kNoMaxDiff), 0, 0}, record_rows, batch, strict));
  }, "num"_a, "den"_a, "min_size"_a, "min_diff"_a.none(), "max_diff"_a.none(), "record_rows"_a, "batch"_a, "strict"_a);
  m.def("device_bytes", &device_bytes, "capacity"_a, "row_bytes"_a, "device_rings"_a, "ring_bytes"_a);
  m.def("device_kernels", &KernelText::make);
  m.def("ring_bytes", &choose_ring_bytes, "asked"_a, "row_bytes"_a);
  m.def("format", &format_file, "fd"_a, "capacity"_a, "max_collectors"_a, "max_members"_a, "ring_bytes"_a, "config"_a, "instance_id"_a, "unnamed"_a);
  m.def("addresses_in", &addresses_in, "columns"_a, "root"_a, "n"_a);
  m.def("set_long_wait", [](nb::object hook, double seconds) { Py_XDECREF(long_wait); long_wait = hook.is_none() ? nullptr : hook.release().ptr(); long_wait_ns = u64(seconds * 1e9); },
        "hook"_a.none(), "seconds"_a = 30.0);
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
      .def("pieces", &Ticket::pieces)
      .def("applied", &Ticket::applied);

  nb::class_<Handle> handle(m, "Handle");
  handle
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
      .def_prop_ro("member", [](const H &h) { return h->member(); })
      .def_prop_ro("has_thread", [](const H &h) { return h->has_thread(); })
      .def_prop_ro("size", [](const H &h) { Reader use(*h); return h->size(); })
      .def_prop_ro("window", [](const H &h) {
        Reader use(*h);
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
        const Home home = ready ? x.built.home : Home{};
        d["device_kind"] = home.kind, d["device_rings"] = home.rings, d["device_bytes"] = home.bytes;
        d["device_uuid"] = bytes_of(home.uuid, sizeof home.uuid);
        return d;
      })
      .def("try_lock_build", [](const H &h) { Handle::Use use(*h); return h->try_lock_build(); })
      .def("unlock_build", [](const H &h) { Handle::Use use(*h); h->unlock_build(); })
      .def("build", [](const H &h, nb::bytes schema, u64 row_bytes, u32 n_columns, bool trajectories, std::vector<std::pair<u32, u32>> ends,
                       std::pair<u32, u32> trajectory, std::optional<std::tuple<u32, nb::bytes, u64, u32>> device) {
        Handle::Use use(*h);
        RowShape row{row_bytes, n_columns, trajectories, {}, {trajectory.first, trajectory.second}};
        if (ends.size() > std::size(row.ends)) throw nb::value_error("too many end columns");
        for (size_t i = 0; i < ends.size(); ++i) row.ends[i] = {ends[i].first, ends[i].second};
        if (device) {  // kind, uuid, bytes, rings
          const auto &[kind, uuid, bytes, rings] = *device;
          if (!kind || uuid.size() != sizeof row.home.uuid) throw nb::value_error("device: (kind, 16 bytes of UUID, bytes, rings)");
          row.home.kind = kind, row.home.bytes = bytes, row.home.rings = rings;
          std::memcpy(row.home.uuid, uuid.c_str(), uuid.size());
        }
        nb::gil_scoped_release r;
        return h->build(reinterpret_cast<const u8 *>(schema.c_str()), schema.size(), row);
      }, "schema"_a, "row_bytes"_a, "n_columns"_a, "trajectories"_a, "ends"_a, "trajectory"_a, "device"_a.none() = nb::none())
      .def("put_leaves", &put_leaves, "columns"_a, "leaves"_a, "n"_a, "full"_a, "timeout"_a, "wake"_a, "tensors"_a, "streams"_a = u64(0), "priorities"_a = u64(0), "loaded"_a = false)
      .def("put_tree", &put_tree, "columns"_a, "root"_a, "n"_a, "full"_a, "timeout"_a, "wake"_a, "tensors"_a, "streams"_a = u64(0), "priorities"_a = u64(0))
      .def("map_rows", [](const H &h, u64 address, u64 bytes, u64 context) { Handle::Use use(*h); nb::gil_scoped_release r; h->map_device(address, bytes, context); },
           "address"_a, "bytes"_a, "context"_a)
      .def("unmap_rows", [](const H &h) { Handle::Use use(*h); nb::gil_scoped_release r; h->unmap_device(); })
      .def_prop_ro("device_rows", [](const H &h) -> nb::object {  // where they are mapped here
        Handle::Use use(*h);
        const u64 at = h->ready() && h->device() ? h->device()->address() : 0;
        return at ? nb::cast(at) : nb::none();
      })
      .def_prop_ro("device_error", [](const H &h) -> nb::object {  // why this handle writes no more
        Handle::Use use(*h);
        const std::string why = h->ready() && h->device() ? h->device()->error() : "";
        return why.empty() ? nb::none() : nb::cast(why);
      })
      .def_prop_ro("device_ring_tries", [](const H &h) { return std::pair{h->ring_tries(), h->ring_naps()}; })
      .def("put_device", &put_device, "columns"_a, "n"_a, "full"_a, "timeout"_a, "wake"_a, "streams"_a = u64(0), "priorities"_a = u64(0), "loaded"_a = false, "after"_a = u64(0))
      .def("edit", &edit, "spans"_a, "addresses"_a, "ids"_a, "n"_a, "timeout"_a, "wake"_a, "version"_a = 0)
      .def("edit_leaves", &edit_leaves, "columns"_a, "leaves"_a, "n"_a, "tensors"_a, "by_slot"_a, "timeout"_a, "wake"_a)
      .def("clear", &clear, "keep_write_count"_a, "timeout"_a, "restart"_a = nb::none())
      .def_prop_ro("runnable", [](const H &h) {  // whether a transaction could move anything now
        Handle::Use use(*h);
        return h->ready() && Writer::runnable(h->segment());
      })
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
      .def("pins", &pins)
      .def("ages", &ages)
      .def("events", &events)
      .def("audit", &audit, "patience"_a = double(Auditor::kStale) * 1e-9)
      .def("count_drawn", [](const H &h, u64 ids, u64 n) { Handle::Use use(*h); if (h->ready()) h->count_drawn(reinterpret_cast<const u64 *>(ids), n); }, "ids"_a, "n"_a)
      .def("count_stale", [](const H &h, u64 sum, u64 rows) { Handle::Use use(*h); if (!h->readonly()) Chronicle(h->segment()).stale(sum, rows); }, "sum"_a, "rows"_a)
      .def("members", [](const H &h) { return members(h, h->member()); })
      .def_prop_ro("linked", [](const H &h) {
        Handle::Use use(*h);
        struct stat st;
        return fstat(h->lock_fd(), &st) == 0 && st.st_nlink != 0;
      })
      .def("unmark_destroying", [](const H &h) { Handle::Use use(*h); h->unmark_destroying(); })
      .def("wait_for", [](const H &h, u32 what) { Handle::Use use(*h); h->wait_for(Waits(what)); }, "what"_a)
      .def("mark_destroying", [](const H &h) { Handle::Use use(*h); h->mark_destroying(); })
      .def("mark_destroyed", [](const H &h) { Handle::Use use(*h); h->mark_destroyed(); })
      .def("close", [](const H &h) { nb::gil_scoped_release r; h->close(); });
  bind_sampling(m, handle);
  bind_turns(m);
}

}  // namespace
}  // namespace shmbuf
