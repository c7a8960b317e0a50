// The CUDA driver, as far as the core needs it: taken from libcuda.so.1 when somebody maps device rows, never before, with
// declarations of our own. Whatever it refuses becomes a DeviceError that has the driver's name for it.
//
// The caller's current context is his: ours is pushed around every use and popped before anything else runs. Streams are our own and
// non-blocking; what the caller's stream still has to do first, or afterwards, is ordered by events (Lane::after, and by waiting).
// A CUDA graph that some thread captures meanwhile is his as well: nothing here becomes part of it, so none of our calls may break it
// (Current: capture mode relaxed).
#pragma once
#include "layout.h"
#include <dlfcn.h>
#include <mutex>
#include <stdexcept>
#include <string>

namespace shmbuf {

struct DeviceError : std::runtime_error {
  bool unmapped = false;  // nothing failed: the rows are not mapped here
  int code = 0;           // the driver's, if it is his
  explicit DeviceError(const std::string &text, bool not_mapped = false) : std::runtime_error(text), unmapped(not_mapped) {}
  DeviceError(const std::string &text, int driver_code) : std::runtime_error(text), code(driver_code) {}
};

namespace cuda {

using Result = int;
using Address = u64;
using Context = void *;
using Stream = void *;
using Event = void *;
using Module = void *;
using Function = void *;

// name here, in the library, and what it takes
#define SHMBUF_CUDA_CALLS(X)                                                                                             \
  X(push, "cuCtxPushCurrent_v2", (Context))                                                                              \
  X(pop, "cuCtxPopCurrent_v2", (Context *))                                                                              \
  X(stream_create, "cuStreamCreate", (Stream *, unsigned))                                                               \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                                                      \
  X(stream_synchronize, "cuStreamSynchronize", (Stream))                                                                 \
  X(stream_wait_event, "cuStreamWaitEvent", (Stream, Event, unsigned))                                                   \
  X(stream_is_capturing, "cuStreamIsCapturing", (Stream, unsigned *))                                                    \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (unsigned *))                                            \
  X(event_create, "cuEventCreate", (Event *, unsigned))                                                                  \
  X(event_record, "cuEventRecord", (Event, Stream))                                                                      \
  X(event_synchronize, "cuEventSynchronize", (Event))                                                                    \
  X(event_destroy, "cuEventDestroy_v2", (Event))                                                                         \
  X(host_to_device, "cuMemcpyHtoDAsync_v2", (Address, const void *, std::size_t, Stream))                                \
  X(device_to_device, "cuMemcpyDtoDAsync_v2", (Address, Address, std::size_t, Stream))                                   \
  X(allocate, "cuMemAlloc_v2", (Address *, std::size_t))                                                                 \
  X(free, "cuMemFree_v2", (Address))                                                                                     \
  X(host_allocate, "cuMemHostAlloc", (void **, std::size_t, unsigned))                                                   \
  X(host_free, "cuMemFreeHost", (void *))                                                                                \
  X(host_register, "cuMemHostRegister_v2", (void *, std::size_t, unsigned))                                              \
  X(host_unregister, "cuMemHostUnregister", (void *))                                                                    \
  X(module_load, "cuModuleLoadData", (Module *, const void *))                                                           \
  X(function, "cuModuleGetFunction", (Function *, Module, const char *))                                                 \
  X(launch, "cuLaunchKernel", (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void **, void **)) \
  X(error_name, "cuGetErrorName", (Result, const char **))                                                               \
  X(error_text, "cuGetErrorString", (Result, const char **))
inline constexpr unsigned kNonBlocking = 1, kNoTiming = 2, kPortable = 1, kRelaxed = 2;
inline constexpr Result kCaptureImplicit = 906;  // of the legacy stream, while one that waits for it is captured
// Whether this process's context is of no more use: what failed for any other reason may well work the next time.
constexpr bool is_final(Result r) {
  return r == 4 || r == 201 || r == 214 || r == 220 || r == 700 || r == 702 || r == 709 || r == 710 || (r >= 714 && r <= 719);
}

struct Driver {
#define X(name, symbol, takes) Result(*name) takes = nullptr;
  SHMBUF_CUDA_CALLS(X)
#undef X
  pid_t loaded_by = 0;  // CUDA does not survive a fork

  static const Driver &get() {
    static std::mutex guard;
    std::lock_guard<std::mutex> lock(guard);
    if (!slot()) slot() = load_library();
    return *slot();
  }
  static bool forked() { return slot() && slot()->loaded_by != getpid(); }
  void check(Result r, const char *what) const {
    if (r) throw DeviceError(std::string(what) + ": " + describe(r), r);
  }
  std::string describe(Result r) const {
    const char *name = nullptr, *text = nullptr;
    if (error_name(r, &name) || !name) return "CUDA error " + std::to_string(r);
    return std::string(name) + (error_text(r, &text) || !text ? "" : std::string(" (") + text + ")");
  }

 private:
  static const Driver *&slot() { static const Driver *d = nullptr; return d; }
  static const Driver *load_library() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) throw DeviceError(std::string("libcuda.so.1: ") + dlerror());
    auto *d = new Driver;
#define X(name, symbol, takes)                                                                     \
  if (d->name = reinterpret_cast<decltype(d->name)>(dlsym(library, symbol)); !d->name) {           \
    delete d;                                                                                      \
    throw DeviceError("libcuda.so.1 has no " symbol ": a driver older than CUDA 11.0?");           \
  }
    SHMBUF_CUDA_CALLS(X)
#undef X
    d->loaded_by = getpid();
    return d;
  }
};

class Current {  // the context, as long as this lives; the thread's own one, and its capture mode, are back afterwards
 public:
  Current(const Driver &driver, Context context) : driver_(driver) {
    driver.check(driver.push(context), "cuCtxPushCurrent");
    if (const Result r = driver.exchange_capture_mode(&mode_)) {
      Context ours;
      driver.pop(&ours);
      driver.check(r, "cuThreadExchangeStreamCaptureMode");
    }
  }
  ~Current() {
    Context ours;
    driver_.exchange_capture_mode(&mode_);
    driver_.pop(&ours);
  }
  Current(const Current &) = delete;

 private:
  const Driver &driver_;
  unsigned mode_ = kRelaxed;
};

// What one thread works with at a time: a stream, an event, and staging memory that grows. Made, used and ended under Current.
class Lane {
 public:
  explicit Lane(const Driver &driver) : d(driver) {
    d.check(d.stream_create(&stream, kNonBlocking), "cuStreamCreate");
    if (const Result r = d.event_create(&event_, kNoTiming)) {
      d.stream_destroy(stream);
      d.check(r, "cuEventCreate");
    }
  }
  ~Lane() {
    if (quiet()) drop_host(), drop_device();  // else they may still be in use, or the driver is gone before us: they are left to it
    d.event_destroy(event_), d.stream_destroy(stream);
  }
  Lane(const Lane &) = delete;

  u8 *host(u64 bytes) {  // pinned, and known to kernels under the same address
    if (bytes > host_bytes_) {
      const u64 n = std::bit_ceil(std::max<u64>(bytes, 64 << 10));
      drop_host();
      void *p = nullptr;
      d.check(d.host_allocate(&p, n, kPortable), "cuMemHostAlloc");
      host_ = static_cast<u8 *>(p), host_bytes_ = n;
    }
    return host_;
  }
  Address device(u64 bytes) {
    if (bytes > device_bytes_) {
      const u64 n = std::bit_ceil(std::max<u64>(bytes, 64 << 10));
      drop_device();
      d.check(d.allocate(&device_, n), "cuMemAlloc");
      device_bytes_ = n;
    }
    return device_;
  }
  // What follows here waits for what is in `others` now. A captured stream has nothing in it, and ours would become part of the graph.
  void after(Stream others) {
    unsigned capturing = 0;
    const Result r = d.stream_is_capturing(others, &capturing);
    if (capturing || r == kCaptureImplicit)
      throw DeviceError("the stream is in a CUDA graph capture, which records work and does none: sample (or put) before it, and let the graph read what that filled");
    d.check(r, "cuStreamIsCapturing");
    d.check(d.event_record(event_, others), "cuEventRecord");
    d.check(d.stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
  }
  void wait() {  // for all that was given to it
    d.check(d.event_record(event_, stream), "cuEventRecord");
    d.check(d.event_synchronize(event_), "cuEventSynchronize");
  }
  bool quiet() { return d.stream_synchronize(stream) == 0; }  // nothing that was given to it is under way any more
  void shrink(u64 most) {
    if (host_bytes_ > most) drop_host();
    if (device_bytes_ > most) drop_device();
  }

  const Driver &d;
  Stream stream = nullptr;

 private:
  void drop_host() {
    if (host_) d.host_free(host_);
    host_ = nullptr, host_bytes_ = 0;
  }
  void drop_device() {
    if (device_) d.free(device_);
    device_ = 0, device_bytes_ = 0;
  }
  Event event_ = nullptr;
  u8 *host_ = nullptr;
  Address device_ = 0;
  u64 host_bytes_ = 0, device_bytes_ = 0;
};

}  // namespace cuda
}  // namespace shmbuf
