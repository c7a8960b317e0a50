// Context managers of Python's that signals cannot tear: CPython looks for signals after a call and at the start of its own functions,
// and here are none between a lock and the block that releases it. What is written in Python has such places: Ctrl-C there
// leaves a lock held until the traceback dies, which may be never.
#pragma once
#include "bindings.h"

namespace shmbuf {
namespace {

[[noreturn]] void raise(const nb::object &made) {
  PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(made.ptr())), made.ptr());
  throw nb::python_error();
}

// Threads, one after the other.
class Alone {
 public:
  Alone(nb::object lock, double seconds, nb::object refused) : lock_(std::move(lock)), seconds_(seconds), refused_(std::move(refused)) {}
  void enter() {
    within_ = nb::cast<bool>(lock_.attr("_is_owned")());
    if (!within_ && !nb::cast<bool>(lock_.attr("acquire")("timeout"_a = seconds_))) raise(refused_());
  }
  void exit() {
    if (!within_) lock_.attr("release")();
  }

 private:
  nb::object lock_;
  double seconds_;
  nb::object refused_;
  bool within_ = false;  // what holds it already
};

// Never inside of itself.
class Once {
 public:
  Once(nb::object refused) : refused_(std::move(refused)) {}
  void enter() {
    if (inside_) raise(refused_());
    inside_ = true;
  }
  void exit() { inside_ = false; }

 private:
  nb::object refused_;
  bool inside_ = false;
};

void bind_turns(nb::module_ &m) {
  nb::class_<Alone>(m, "Alone")
      .def(nb::init<nb::object, double, nb::object>(), "lock"_a, "seconds"_a, "refused"_a)
      .def("__enter__", &Alone::enter)
      .def("__exit__", [](Alone &a, nb::args) { a.exit(); });
  nb::class_<Once>(m, "Once")
      .def(nb::init<nb::object>(), "refused"_a)
      .def("__enter__", &Once::enter)
      .def("__exit__", [](Once &o, nb::args) { o.exit(); });
}

}  // namespace
}  // namespace shmbuf
