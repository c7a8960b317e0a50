// Rows in: from arrays and tensors to the ring.
#pragma once
#include "bindings.h"

namespace shmbuf {
namespace {

// Addresses of what comes with n rows, 0: nothing. Priorities are float64, as the user knows them. loaded: see Extras.
struct With { u64 streams = 0, priorities = 0; bool loaded = false; };

// put(extras) puts; what comes with the rows is made ready before, and an interrupt judged after.
template <class Put> Ticket put_with(const H &h, u64 n, const With &with, Put put) {
  Ticket t{h, nullptr, Status::ok};
  Extras extras{reinterpret_cast<const u64 *>(with.streams), nullptr, with.loaded};
  std::vector<float> leaves;
  if (with.priorities && load(h->segment().control().priorities.formula.low, acquire)) {  // nobody draws by priority: nobody wants them
    leaves.resize(n);
    u64 bad;
    if (h->sampling().leaves_of(reinterpret_cast<const double *>(with.priorities), n, leaves.data(), bad) != Status::ok)
      throw BadPriority{bad};
    extras.leaves = leaves.data();
  }
  t.status = put(extras, t.state);
  if (t.status == Status::interrupted) {
    if (t.rows() == 0 || !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) throw nb::python_error();
    PyErr_Clear();  // rows are in the ring: Python raises CommitInterrupted with this ticket
  }
  return t;
}
Ticket put_columns(const H &h, const std::vector<Column> &columns, u64 n, u32 full, double timeout, bool wake, const With &with) {
  return put_with(h, n, with, [&](const Extras &extras, std::shared_ptr<TicketState> &state) {
    // A small put that finds room keeps the GIL: beside a busy Python thread, getting it back takes a switch interval (5 ms).
    Patience patience{h};
    auto put = [&](bool may_wait) {
      return h->put(columns.data(), u32(columns.size()), extras, n, Full(full), deadline_in(timeout), wake, may_wait, state, [&] { return patience(); });
    };
    Status s = h->fits_at_once(n, kHoldGil) ? put(false) : Status::would_wait;
    if (s == Status::would_wait) {
      nb::gil_scoped_release r;
      s = put(true);
    }
    return s;
  });
}
// n rows of packed columns in device memory; after: the stream that makes them. streams, priorities: on the host.
Ticket put_device(const H &h, const DeviceColumns &columns, u64 n, u32 full, double timeout, bool wake, u64 streams, u64 priorities, bool loaded, u64 after) {
  Handle::Use use(*h);
  const std::vector<Packed> packed = on_device<Packed>(h, columns);
  return put_with(h, n, {streams, priorities, loaded}, [&](const Extras &extras, std::shared_ptr<TicketState> &state) {
    Patience patience{h};
    nb::gil_scoped_release r;
    return h->put_device(packed.data(), packed.size(), stream_of(after), extras, n, Full(full), deadline_in(timeout), wake, state, [&] { return patience(); });
  });
}
// Where each column's rows lie, as long as the leaves and the buffers are kept. False: some leaf needs the slow path.
bool take_leaves(const Columns &columns, PyObject *const *leaves, i64 n, int lead, bool tensors, std::vector<Column> &c, Buffers &buffers) {
  c.resize(columns.leaves.size());
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
      return false;
    }
  }
  return true;
}
// nullopt: some leaf needs the slow path.
std::optional<Ticket> put_objects(const H &h, const Columns &columns, PyObject *const *leaves, i64 n, u32 full, double timeout, bool wake, bool tensors, const With &with) {
  int lead = n >= 0;
  std::vector<Column> c;
  Buffers buffers;
  if (!take_leaves(columns, leaves, n, lead, tensors, c, buffers)) return std::nullopt;
  return put_columns(h, c, lead ? u64(n) : 1, full, timeout, wake, with);
}
std::optional<Ticket> put_leaves(const H &h, const Columns &columns, nb::list leaves, i64 n, u32 full, double timeout, bool wake, bool tensors,
                                 u64 streams, u64 priorities, bool loaded) {
  Handle::Use use(*h);
  if (leaves.size() != columns.leaves.size()) return std::nullopt;
  return put_objects(h, columns, PySequence_Fast_ITEMS(leaves.ptr()), n, full, timeout, wake, tensors, {streams, priorities, loaded});
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

Ticket edit_columns(const H &h, const std::vector<Column> &columns, u32 version, const u64 *ids, u64 n, double timeout, bool wake) {
  Ticket t{h, nullptr, Status::ok};
  if (columns.empty() || !n) return t;
  const u64 end = load(h->segment().control().cursor, acquire);
  if (std::any_of(ids, ids + n, [&](u64 id) { return id >= end; })) return t.status = Status::unknown_row, t;
  u64 width = 0;
  for (const Column &c : columns) width += c.bytes;
  const u64 deadline = deadline_in(timeout);
  Patience patience{h};
  auto edit = [&](bool may_wait) {
    return h->edit(columns.data(), u32(columns.size()), version, ids, n, deadline, wake, may_wait, t.state, [&] { return patience(); });
  };
  t.status = h->edits_at_once(n, columns.size(), width, kHoldGil) ? edit(false) : Status::would_wait;  // as put_columns
  if (t.status == Status::would_wait) {
    nb::gil_scoped_release r;
    t.status = edit(true);
  }
  if (t.status == Status::interrupted) {
    if (t.rows() == 0 || !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) throw nb::python_error();
    PyErr_Clear();  // as put_columns
  }
  return t;
}
// ids: u64[n]. spans: (offset, bytes) inside the row; addresses: of packed new values, one for each span.
Ticket edit(const H &h, const std::vector<std::pair<u64, u64>> &spans, const std::vector<u64> &addresses, u64 ids, u64 n, double timeout, bool wake, u32 version) {
  Handle::Use use(*h);
  if (!version_known(version)) throw nb::value_error("no such kind of version");
  std::vector<Column> columns;
  for (size_t i = 0; i < spans.size(); ++i)
    if (spans[i].second) columns.push_back({spans[i].first, spans[i].second, reinterpret_cast<const u8 *>(addresses.at(i)), i64(spans[i].second)});
  return edit_columns(h, columns, version, reinterpret_cast<const u64 *>(ids), n, timeout, wake);
}
// Slots, negative ones from the end, as ids of the rows that lie there now. False: one is out of range.
bool ids_at(const Segment &s, const i64 *slots, u64 n, u64 *ids) {
  const Window w = window(s);
  const u64 size = w.hi - w.live_lo, last = w.hi - 1, last_slot = last % s.capacity;
  for (u64 j = 0; j < n; ++j) {
    const u64 slot = u64(slots[j]) + (slots[j] < 0 ? size : 0);
    if (slot >= size) return false;
    ids[j] = last - (last_slot - slot) - (slot > last_slot ? s.capacity : 0);
  }
  return true;
}
// leaves: of each column its new values and, last, int64[n]: which rows, by slot or by id. nullopt: look closer.
std::optional<Ticket> edit_leaves(const H &h, const Columns &columns, nb::list leaves, i64 n, bool tensors, bool by_slot, double timeout, bool wake) {
  Handle::Use use(*h);
  if (n <= 0 || !h->ready() || leaves.size() != columns.leaves.size()) return std::nullopt;
  std::vector<Column> c;
  Buffers buffers;
  if (!take_leaves(columns, PySequence_Fast_ITEMS(leaves.ptr()), n, 1, tensors, c, buffers)) return std::nullopt;
  const Column rows = c.back();
  c.pop_back();
  if (std::any_of(c.begin(), c.end(), [](const Column &of) { return !of.bytes; })) return std::nullopt;
  if (rows.bytes != sizeof(u64) || rows.stride != sizeof(u64) || reinterpret_cast<u64>(rows.data) % alignof(u64)) return std::nullopt;
  auto *ids = reinterpret_cast<const u64 *>(rows.data);
  std::vector<u64> found;
  if (by_slot) {
    found.resize(u64(n));
    if (!ids_at(h->segment(), reinterpret_cast<const i64 *>(rows.data), u64(n), found.data())) return std::nullopt;
    ids = found.data();
  }
  Ticket t = edit_columns(h, c, kNoVersion, ids, u64(n), timeout, wake);
  if (t.status == Status::unknown_row || t.status == Status::never) return std::nullopt;
  return t;
}
// restart: (first id, write_count) of a checkpoint that is to be loaded.
Ticket clear(const H &h, bool keep_write_count, double timeout, std::optional<std::pair<u64, u64>> restart) {
  Handle::Use use(*h);
  Ticket t{h, nullptr, Status::ok};
  u64 deadline = deadline_in(timeout);
  {
    nb::gil_scoped_release r;
    Patience patience{h};
    Producer::Restart at;
    if (restart) std::tie(at.first_id, at.write_count) = *restart;
    t.status = h->clear((keep_write_count ? u32(kKeepWriteCount) : 0u) | (restart ? u32(kRestart) : 0u), at, deadline, t.state, [&] { return patience(); });
  }
  if (t.status == Status::interrupted) throw nb::python_error();
  return t;
}

}  // namespace
}  // namespace shmbuf
