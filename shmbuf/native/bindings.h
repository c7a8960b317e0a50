// What all bindings share: handles, the interpreter's lock, signals, tickets.
#pragma once
#include "handle.h"
#include "leaves.h"
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
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
// The same, and of a wait that lasts a word now and then: long_wait(handle, seconds), after so long, twice as long …
PyObject *long_wait = nullptr;
u64 long_wait_ns = 30'000'000'000;
struct Patience {
  const std::shared_ptr<Handle> &handle;
  u64 began = 0, next = 0;
  bool operator()() {
    nb::gil_scoped_acquire gil;
    const u64 now = now_ns();
    if (!began) began = now, next = long_wait_ns;
    if (long_wait && now - began >= next) {
      next = 2 * (now - began);
      nb::object self = nb::find(handle);
      nb::object done = nb::steal(PyObject_CallFunction(long_wait, "Od", self.ptr(), double(now - began) * 1e-9));
      if (!done.is_valid()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;  // Ctrl-C, exit: ends the wait
        PyErr_WriteUnraisable(long_wait);
      }
    }
    return PyErr_CheckSignals() == 0;
  }
};
struct BadPriority { u64 at; };
using H = std::shared_ptr<Handle>;

nb::bytes bytes_of(const void *p, u64 n) { return nb::bytes(static_cast<const char *>(p), n); }

// ---- device memory: (offset inside the row, bytes, address of packed values) each ------------------------------------------
using DeviceColumns = std::vector<std::tuple<u64, u64, u64>>;
template <class Column> std::vector<Column> on_device(const H &h, const DeviceColumns &columns);
template <> std::vector<Packed> on_device<Packed>(const H &h, const DeviceColumns &columns) {
  std::vector<Packed> out;
  for (auto [offset, bytes, address] : columns) {
    if (offset > h->segment().row_bytes || bytes > h->segment().row_bytes - offset) throw nb::value_error("a column outside the row");
    if (bytes) out.push_back({offset, bytes, address, bytes});
  }
  return out;
}
template <> std::vector<OutColumn> on_device<OutColumn>(const H &h, const DeviceColumns &columns) {
  std::vector<OutColumn> out;
  for (const Packed &p : on_device<Packed>(h, columns)) out.push_back({p.offset, p.bytes, reinterpret_cast<u8 *>(p.address)});
  if (h->ready() && !h->device()) throw DeviceError("the rows of this buffer lie in the segment: gather them to the host");
  return out;
}
cuda::Stream stream_of(u64 handle) { return reinterpret_cast<cuda::Stream>(handle); }

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
      Patience patience{handle};
      s = handle->wait(*state, deadline, [&] { return patience(); });
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
      for (auto &p : state->pieces) {
        if (p.first < kDropped && p.first >> 62) throw FormatError("a record's first id: " + std::to_string(p.first));
        out.append(nb::make_tuple(p.n, p.first >= kDropped ? nb::none() : nb::cast(p.first)));
      }
    return out;
  }
  nb::bytes applied() const {  // of an edit, once it is committed: a byte for each row, as TicketState has it
    return state ? bytes_of(state->applied.data(), state->applied.size()) : nb::bytes("", 0);
  }
  u64 rows() const {
    u64 n = 0;
    if (state)
      for (auto &p : state->pieces) n += p.n;
    return n;
  }
};

}  // namespace
}  // namespace shmbuf
