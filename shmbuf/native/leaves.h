// The caller's arrays and tensors, looked at through the Python C API and, where torch has it, DLPack's: where each column's bytes
// lie, or "look closer". Duck typing only: no torch header, so no torch version either.
#pragma once
#include "dlpack.h"
#include "ring.h"
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace shmbuf {

namespace nb = nanobind;

struct Leaf {
  u64 offset, bytes;           // in the row
  std::vector<Py_ssize_t> shape;
  std::string formats;         // accepted struct codes, '|' around each ("|f|")
  nb::object dtype;            // torch dtype or None
  u32 node;                    // where it hangs in the nesting, and by what name
  nb::object name;
  bool complex;
  dlpack::Type type{};         // bits 0: not to be told by DLPack
};
struct Node {
  u32 parent;                  // node 0 is the root
  nb::object name;
  Py_ssize_t entries;
};
struct Columns {
  std::vector<Leaf> leaves;
  std::vector<Node> nodes;
  nb::object tensor_type;      // leaves of exactly this type take the fast path: a subclass may not own the memory it shows
  dlpack::Peek peek = nullptr; // of exactly this type
  void add(u64 offset, u64 bytes, std::vector<Py_ssize_t> shape, std::string formats, nb::object dtype, u32 node, nb::object name) {
    bool is_complex = formats.find('Z') != std::string::npos;
    leaves.push_back({offset, bytes, std::move(shape), std::move(formats), std::move(dtype), node, std::move(name), is_complex});
  }
  bool plain_type(PyObject *o) const { return tensor_type.is_valid() && Py_TYPE(o) == reinterpret_cast<PyTypeObject *>(tensor_type.ptr()); }
  // capsule: the type's exchange API; samples: a tensor of each column's dtype. Without it, each tensor is asked through Python.
  void set_exchange(nb::handle capsule, nb::list samples) {
    auto *api = static_cast<const dlpack::Api *>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
    if (!api) throw nb::python_error();
    if (samples.size() != leaves.size()) throw nb::value_error("one sample per column");
    peek = dlpack::peek_of(api);
    for (size_t i = 0; peek && i < leaves.size(); ++i) {
      dlpack::Tensor t{};
      leaves[i].type = plain_type(samples[i].ptr()) && peek(samples[i].ptr(), &t) == 0 ? t.type : dlpack::Type{};
      PyErr_Clear();
    }
  }
  void add_node(u32 parent, nb::object name, Py_ssize_t entries) { nodes.push_back({parent, std::move(name), entries}); }
};

// One attribute or no-argument method of a tensor; the names are interned once.
struct TensorNames {
  PyObject *dtype = PyUnicode_InternFromString("dtype"), *shape = PyUnicode_InternFromString("shape"),
           *is_cpu = PyUnicode_InternFromString("is_cpu"), *data_ptr = PyUnicode_InternFromString("data_ptr"),
           *is_contiguous = PyUnicode_InternFromString("is_contiguous"), *is_neg = PyUnicode_InternFromString("is_neg"),
           *is_conj = PyUnicode_InternFromString("is_conj"), *tensordict = PyUnicode_InternFromString("_tensordict");
};
inline const TensorNames &names() { static TensorNames n; return n; }
inline bool is_true(PyObject *o) {  // takes the reference
  bool yes = o == Py_True;
  Py_XDECREF(o);
  return yes;
}
inline bool call_true(PyObject *t, PyObject *name) { return is_true(PyObject_CallMethodNoArgs(t, name)); }

inline bool has_dtype(PyObject *t, const Leaf &leaf) {
  PyObject *dtype = PyObject_GetAttr(t, names().dtype);
  Py_XDECREF(dtype);  // dtypes are immortal
  return dtype == leaf.dtype.ptr();
}

// Does this leaf need no conversion? Everything else (other dtype, device, stride, subclass with tricks …) is Python's slow
// path, which converts it or says what is wrong. `lead` = 1 if rows are batched, 0 for a single row.
inline bool peeked_column(dlpack::Peek peek, PyObject *t, const Leaf &leaf, Py_ssize_t n, int lead, Column &out) {
  dlpack::Tensor d{};
  if (peek(t, &d) != 0 || !(d.type == leaf.type) || d.device.type != dlpack::kCpu || d.ndim != int(leaf.shape.size()) + lead) return false;
  i64 expect = 1;
  bool contiguous = true, none = false;
  for (int i = d.ndim - 1; i >= 0; --i) {
    if (d.shape[i] != (i < lead ? n : leaf.shape[size_t(i - lead)])) return false;
    contiguous &= d.shape[i] == 1 || !d.strides || d.strides[i] == expect;
    none |= d.shape[i] == 0;
    expect *= d.shape[i];
  }
  if (!contiguous && !none) return false;
  if (!d.data && !none) return false;  // a tensor without memory
  // What DLPack does not tell: torch's integers of less than a byte look like int8 and uint8; conjugation and negation that
  // are only promised. (A bool cannot be negated.)
  if (leaf.type.bits == 8 && leaf.type.code != dlpack::kBool && !has_dtype(t, leaf)) return false;
  if (leaf.type.code != dlpack::kBool && call_true(t, names().is_neg)) return false;
  if (leaf.type.code == dlpack::kComplex && call_true(t, names().is_conj)) return false;
  out = {leaf.offset, leaf.bytes, static_cast<const u8 *>(d.data) + d.byte_offset, i64(leaf.bytes)};
  return true;
}
inline bool asked_column(PyObject *t, const Leaf &leaf, Py_ssize_t n, int lead, Column &out) {
  const auto &k = names();
  if (!has_dtype(t, leaf)) return false;
  PyObject *shape = PyObject_GetAttr(t, k.shape);
  if (!shape || !PyTuple_Check(shape)) {
    Py_XDECREF(shape);
    return false;
  }
  bool fits = PyTuple_GET_SIZE(shape) == Py_ssize_t(leaf.shape.size()) + lead && (!lead || PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, 0)) == n);
  for (size_t i = 0; fits && i < leaf.shape.size(); ++i) fits = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, Py_ssize_t(i) + lead)) == leaf.shape[i];
  Py_DECREF(shape);
  if (!fits || !is_true(PyObject_GetAttr(t, k.is_cpu)) || !call_true(t, k.is_contiguous) || call_true(t, k.is_neg) ||
      (leaf.complex && call_true(t, k.is_conj)))
    return false;
  PyObject *address = PyObject_CallMethodNoArgs(t, k.data_ptr);
  if (!address || (PyLong_AsVoidPtr(address) == nullptr && leaf.bytes && (n || !lead))) {  // a tensor without memory
    Py_XDECREF(address);
    return false;
  }
  out = {leaf.offset, leaf.bytes, static_cast<const u8 *>(PyLong_AsVoidPtr(address)), i64(leaf.bytes)};
  Py_DECREF(address);
  return true;
}
inline bool tensor_column(const Columns &columns, size_t i, PyObject *t, Py_ssize_t n, int lead, Column &out) {
  const Leaf &leaf = columns.leaves[i];
  if (!columns.plain_type(t)) return false;
  return columns.peek && leaf.type.bits ? peeked_column(columns.peek, t, leaf, n, lead, out) : asked_column(t, leaf, n, lead, out);
}
inline bool one_of(const std::string &formats, const char *format) {  // "|l|q|" holds "q"
  size_t n = std::strlen(format);
  for (size_t at = 0; (at = formats.find(format, at)) != std::string::npos; ++at)
    if (n && at && formats[at - 1] == '|' && formats[at + n] == '|') return true;
  return false;
}
inline bool buffer_column(const Py_buffer &b, const Leaf &leaf, Py_ssize_t n, int lead, Column &out) {
  const char *format = b.format ? b.format : "B";
  if (!one_of(leaf.formats, format)) return false;
  if (b.ndim != int(leaf.shape.size()) + lead || (lead && b.shape[0] != n)) return false;
  Py_ssize_t expect = b.itemsize;  // rows may be strided, also backwards; inside a row values lie side by side
  for (int i = b.ndim - 1; i >= lead; --i) {
    if (b.shape[i] != leaf.shape[size_t(i - lead)] || (b.shape[i] != 1 && b.strides[i] != expect)) return false;
    expect *= b.shape[i];
  }
  if (u64(expect) != leaf.bytes) return false;
  out = {leaf.offset, leaf.bytes, static_cast<const u8 *>(b.buf), lead ? i64(b.strides[0]) : 0};
  return true;
}
struct Buffers {  // keeps the exporters' memory in place while it is read
  std::vector<Py_buffer> held;
  ~Buffers() { for (auto &b : held) PyBuffer_Release(&b); }
};

// The leaves of nested dicts of exactly the schema's keys, in column order; of a TensorDict, of the dicts that lie under it
// (reading them is 40 times as fast as items(True, True)). False: another shape of tree, look closer. The references keep the
// leaves in place while the GIL is away.
inline bool find_leaves(const Columns &columns, PyObject *root, bool tensors, std::vector<nb::object> &leaves) {
  std::vector<PyObject *> nodes;
  std::vector<nb::object> kept;
  nodes.reserve(columns.nodes.size()), leaves.reserve(columns.leaves.size()), kept.reserve(columns.nodes.size());
  for (const Node &node : columns.nodes) {
    PyObject *o = nodes.empty() ? root : PyDict_GetItemWithError(nodes[node.parent], node.name.ptr());
    if (o && tensors) {
      kept.push_back(nb::steal(PyObject_GetAttr(o, names().tensordict)));
      o = kept.back().ptr();
    }
    if (!o || !PyDict_CheckExact(o) || PyDict_GET_SIZE(o) != node.entries) {
      PyErr_Clear();
      return false;
    }
    nodes.push_back(o);
  }
  for (const Leaf &leaf : columns.leaves) {
    PyObject *o = PyDict_GetItemWithError(nodes[leaf.node], leaf.name.ptr());
    if (!o) {
      PyErr_Clear();
      return false;
    }
    leaves.push_back(nb::borrow(o));
  }
  return true;
}
}  // namespace shmbuf
