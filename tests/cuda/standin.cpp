// A libcuda.so.1 for tests on machines without a GPU: the driver calls that shmbuf uses, over host memory. "Device" memory is a memfd
// mapped into the process, so that it is shared, outlives its maker and is lost in the same ways. Copies and kernels run later, on
// their stream's thread. What is strict in the real driver is strict here: calls need a current context, a forked child gets
// NOT_INITIALIZED, nobody opens his own IPC handle, an address that is not mapped is an error. While a stream is captured for a CUDA
// graph, a call of another thread that could wait for it breaks the capture, as long as that thread's capture mode is not relaxed; a
// stream that waits for an event of a captured one is captured with it. (Which calls: all that make or free anything, or wait.)
//
// By environment variables, read at each call unless said otherwise:
//   STANDIN_DEVICES   UUIDs, comma-separated, as nvidia-smi writes them without "GPU-" (at cuInit; default: one)
//   CUDA_VISIBLE_DEVICES  indices or GPU-UUIDs, as with the real driver (at cuInit)
//   STANDIN_MEMORY    bytes of a device (default 1 GiB)
//   STANDIN_DELAY_US  each piece of device work begins a random time up to this later (default 200)
//   STANDIN_GATE      a path: device work waits until this file exists
//   STANDIN_LATE      1: copies are done by a process of their own, so that they land though their caller was killed (at cuInit).
//                     Then STANDIN_LOG, a path, gets a line for each that has landed.
//   STANDIN_VMM=0     cuMemCreate is not supported     STANDIN_FD=0  memory cannot be exported as a descriptor
//   STANDIN_IPC=0     cuIpcOpenMemHandle fails, as between containers
//   STANDIN_TENSORS=1 addresses that are no device memory count as such where they are read, or written by a copy: torch's "device" tensors
//                     are the host's here
//   STANDIN_FAIL      name=code, comma-separated: these calls return the code
//   STANDIN_KILL      name[:n]: the n-th such call of this process kills it, before; name:n:after: when it is done
#include "standin.h"

#define API extern "C" __attribute__((visibility("default")))

// ---- start, devices --------------------------------------------------------------------------------------------
API int cuInit(unsigned) {
  if (const int mine = g_pid.load(); mine && mine != getpid()) return NOT_INITIALIZED;
  Lock lock(g_mutex);
  if (g_pid.load()) return g_devices.empty() ? NO_DEVICE : OK;
  std::vector<Uuid> all;
  for (const auto &s : split(env("STANDIN_DEVICES", "5add1e00-0000-4000-8000-000000000001"))) {
    Uuid u;
    if (parse_uuid(s, u)) all.push_back(u);
  }
  if (const char *visible = getenv("CUDA_VISIBLE_DEVICES")) {
    for (const auto &s : split(visible)) {
      Uuid u;
      char *end = nullptr;
      const long index = strtol(s.c_str(), &end, 10);
      if (s.rfind("GPU-", 0) == 0 && parse_uuid(s, u)) {
        bool known = false;
        for (const Uuid &a : all) known |= !memcmp(&a, &u, 16);
        if (!known) break;
        g_devices.push_back(u);
      } else if (end != s.c_str() && index >= 0 && size_t(index) < all.size()) g_devices.push_back(all[size_t(index)]);
      else break;  // the rest is invisible, as with the real one
    }
  } else g_devices = all;
  g_contexts.resize(g_devices.size());
  for (size_t i = 0; i < g_contexts.size(); ++i) g_contexts[i].device = int(i);
  if (g_devices.empty()) return NO_DEVICE;
  if (number("STANDIN_LATE", 0)) start_late();
  g_pid.store(getpid());
  return OK;
}
API int cuDriverGetVersion(int *v) { return v ? (*v = 13000, OK) : INVALID_VALUE; }
API int cuDeviceGetCount(int *n) { ENTER(false); *n = int(g_devices.size()); return OK; }
API int cuDeviceGet(int *device, int ordinal) {
  ENTER(false);
  return ordinal < 0 || size_t(ordinal) >= g_devices.size() ? INVALID_DEVICE : (*device = ordinal, OK);
}
#define DEVICE(d) if ((d) < 0 || size_t(d) >= g_devices.size()) return INVALID_DEVICE
API int cuDeviceGetName(char *name, int bytes, int d) { ENTER(false); DEVICE(d); snprintf(name, size_t(bytes), "Stand-in device"); return OK; }
API int cuDeviceGetUuid_v2(Uuid *u, int d) { ENTER(false); DEVICE(d); *u = g_devices[size_t(d)]; return OK; }
API int cuDeviceGetUuid(Uuid *u, int d) { return cuDeviceGetUuid_v2(u, d); }
API int cuDeviceTotalMem_v2(size_t *bytes, int d) { ENTER(false); DEVICE(d); *bytes = number("STANDIN_MEMORY", 1ull << 30); return OK; }
API int cuDeviceGetPCIBusId(char *id, int bytes, int d) { ENTER(false); DEVICE(d); snprintf(id, size_t(bytes), "0000:%02x:00.0", d + 1); return OK; }
API int cuDeviceGetAttribute(int *v, int attribute, int d) {
  ENTER(false);
  DEVICE(d);
  const bool vmm = number("STANDIN_VMM", 1);
  switch (attribute) {
    case 1: *v = 1024; break;            // threads of a block
    case 16: *v = 4; break;              // multiprocessors
    case 41: *v = 1; break;              // unified addresses
    case 75: *v = 9; break;              // compute capability
    case 99: *v = 1; break;              // host memory can be registered
    case 102: *v = vmm; break;           // virtual memory management
    case 103: *v = vmm && number("STANDIN_FD", 1); break;  // … exported as a descriptor
    default: *v = 0;
  }
  return OK;
}

// ---- contexts --------------------------------------------------------------------------------------------------
API int cuDevicePrimaryCtxRetain(void **c, int d) { ENTER(false); DEVICE(d); Lock lock(g_mutex); ++g_contexts[size_t(d)].retained; *c = &g_contexts[size_t(d)]; return OK; }
API int cuDevicePrimaryCtxRelease_v2(int d) {
  ENTER(false);
  DEVICE(d);
  Lock lock(g_mutex);
  return g_contexts[size_t(d)].retained ? (--g_contexts[size_t(d)].retained, OK) : INVALID_CONTEXT;
}
API int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { ENTER(false); DEVICE(d); *flags = 0, *active = g_contexts[size_t(d)].retained > 0; return OK; }
API int cuCtxSetCurrent(void *c) {
  ENTER(false);
  if (!t_stack.empty()) t_stack.pop_back();
  if (c) t_stack.push_back(static_cast<Context *>(c));
  return OK;
}
API int cuCtxGetCurrent(void **c) { ENTER(false); *c = t_stack.empty() ? nullptr : t_stack.back(); return OK; }
API int cuCtxPushCurrent_v2(void *c) {
  ENTER(false);
  if (!c || !static_cast<Context *>(c)->retained) return INVALID_CONTEXT;
  t_stack.push_back(static_cast<Context *>(c));
  return OK;
}
API int cuCtxPopCurrent_v2(void **c) {
  ENTER(false);
  if (t_stack.empty()) return INVALID_CONTEXT;
  if (c) *c = t_stack.back();
  t_stack.pop_back();
  return OK;
}
API int cuCtxGetDevice(int *d) { ENTER(); *d = current_device(); return OK; }
API int cuCtxSynchronize() {
  ENTER(); SAFE();
  std::vector<Stream *> all;
  { Lock lock(g_mutex); all = g_streams; }
  for (Stream *s : all) s->wait();
  return g_error.load();
}

// ---- memory that is made, mapped and exported --------------------------------------------------------------------
API int cuMemGetAllocationGranularity(size_t *bytes, const Properties *, int) { ENTER(false); *bytes = kGranularity; return OK; }
API int cuMemCreate(u64 *handle, size_t bytes, const Properties *p, u64 flags) {
  ENTER(false);
  if (!number("STANDIN_VMM", 1)) return NOT_SUPPORTED;
  if (!bytes || bytes % kGranularity || p->type != 1 || p->location.type != 1 || flags) return INVALID_VALUE;
  DEVICE(p->location.id);
  if (p->handle_types == 1 && !number("STANDIN_FD", 1)) return NOT_SUPPORTED;
  Lock lock(g_mutex);
  std::shared_ptr<Memory> m;
  if (const int status = make_memory(bytes, p->location.id, false, m)) return status;
  m->handles = 1, m->exportable = p->handle_types == 1;
  g_handles[*handle = g_next_handle++] = m;
  return OK;
}
API int cuMemRelease(u64 handle) {
  ENTER(false);
  Lock lock(g_mutex);
  auto it = g_handles.find(handle);
  if (it == g_handles.end()) return INVALID_VALUE;
  auto m = it->second;
  g_handles.erase(it);
  --m->handles;
  release(m);
  return OK;
}
API int cuMemAddressReserve(u64 *at, size_t bytes, size_t alignment, u64, u64) {
  ENTER(false);
  if (!bytes || bytes % kGranularity) return INVALID_VALUE;
  const u64 align = std::max<u64>(alignment, kGranularity);
  void *p = mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return OUT_OF_MEMORY;
  const u64 got = u64(p), aligned = (got + align - 1) / align * align;
  if (aligned > got) munmap(p, aligned - got);
  if (got + align > aligned) munmap(reinterpret_cast<void *>(aligned + bytes), got + align - aligned);
  Lock lock(g_mutex);
  g_reserved[*at = aligned] = bytes;
  return OK;
}
API int cuMemAddressFree(u64 at, size_t bytes) {
  ENTER(false);
  Lock lock(g_mutex);
  auto it = g_reserved.find(at);
  if (it == g_reserved.end() || it->second != bytes) return INVALID_VALUE;
  auto m = g_mappings.lower_bound(at);
  if (m != g_mappings.end() && m->first < at + bytes) return INVALID_VALUE;  // still mapped
  munmap(reinterpret_cast<void *>(at), bytes);
  g_reserved.erase(it);
  return OK;
}
API int cuMemMap(u64 at, size_t bytes, size_t offset, u64 handle, u64 flags) {
  ENTER(false);
  Lock lock(g_mutex);
  auto h = g_handles.find(handle);
  auto r = g_reserved.upper_bound(at);
  if (h == g_handles.end() || r == g_reserved.begin() || flags || !bytes || bytes % kGranularity || offset + bytes > h->second->bytes) return INVALID_VALUE;
  --r;
  if (at + bytes > r->first + r->second) return INVALID_VALUE;
  std::unique_lock<std::shared_mutex> exclusive(g_mapped);
  if (mmap(reinterpret_cast<void *>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, h->second->fd, off_t(offset)) == MAP_FAILED) return OUT_OF_MEMORY;
  ++h->second->mappings;
  g_mappings[at] = Mapping{bytes, h->second, offset, false, false};
  return OK;
}
API int cuMemUnmap(u64 at, size_t bytes) {
  ENTER(false);
  Lock lock(g_mutex);
  auto it = g_mappings.find(at);
  if (it == g_mappings.end() || it->second.bytes != bytes || it->second.memory->plain) return INVALID_VALUE;
  unmap(it);
  return OK;
}
API int cuMemSetAccess(u64 at, size_t bytes, const Access *who, size_t n) {
  ENTER(false);
  Lock lock(g_mutex);
  auto it = g_mappings.find(at);
  if (it == g_mappings.end() || it->second.bytes != bytes || !n) return INVALID_VALUE;
  if (who->location.type != 1 || who->location.id != it->second.memory->device) return INVALID_DEVICE;  // no access between devices here
  std::unique_lock<std::shared_mutex> exclusive(g_mapped);
  mprotect(reinterpret_cast<void *>(at), bytes, PROT_READ | (who->flags == 3 ? PROT_WRITE : 0));
  it->second.accessible = true;
  return OK;
}
API int cuMemExportToShareableHandle(void *out, u64 handle, int type, u64) {
  ENTER(false);
  Lock lock(g_mutex);
  auto it = g_handles.find(handle);
  if (it == g_handles.end()) return INVALID_VALUE;
  if (type != 1 || !it->second->exportable) return NOT_SUPPORTED;
  const int fd = fcntl(it->second->fd, F_DUPFD_CLOEXEC, 3);
  if (fd < 0) return OUT_OF_MEMORY;
  *static_cast<int *>(out) = fd;
  return OK;
}
API int cuMemImportFromShareableHandle(u64 *handle, void *os, int type) {
  ENTER(false);
  const int fd = int(u64(os));
  struct stat st;
  if (type != 1 || fstat(fd, &st)) return INVALID_VALUE;
  const int device = device_of(fd);
  if (device < 0) return device == -1 ? INVALID_DEVICE : INVALID_VALUE;
  Lock lock(g_mutex);
  g_handles[*handle = g_next_handle++] = std::make_shared<Memory>(Memory{fcntl(fd, F_DUPFD_CLOEXEC, 3), u64(st.st_size), device, 1, 0, false, true});
  return OK;
}

// ---- memory that dies with its maker -----------------------------------------------------------------------------
API int cuMemAlloc_v2(u64 *at, size_t bytes) {
  ENTER(); SAFE();
  Lock lock(g_mutex);
  std::shared_ptr<Memory> m;
  const u64 all = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  if (!bytes) return INVALID_VALUE;
  if (const int status = make_memory(all, current_device(), true, m)) return status;
  void *p = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
  if (p == MAP_FAILED) return OUT_OF_MEMORY;
  m->mappings = 1;
  std::unique_lock<std::shared_mutex> exclusive(g_mapped);
  g_mappings[*at = u64(p)] = Mapping{all, m, 0, true, false};
  return OK;
}
API int cuMemFree_v2(u64 at) {
  ENTER(); SAFE();
  if (!at) return OK;
  Lock lock(g_mutex);
  auto it = g_mappings.find(at);
  if (it == g_mappings.end() || !it->second.memory->plain || it->second.opened) return INVALID_VALUE;
  unmap(it);
  return OK;
}
API int cuIpcGetMemHandle(IpcHandle *handle, u64 at) {
  ENTER();
  Lock lock(g_mutex);
  Mapping *m = mapping_of(at, 1);
  if (!m || !m->memory->plain || m->opened) return INVALID_VALUE;
  struct stat st{};
  fstat(m->memory->fd, &st);
  const IpcContent c{getpid(), m->memory->fd, st.st_ino, m->bytes, g_devices[size_t(m->memory->device)]};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &c, sizeof c);
  return OK;
}
API int cuIpcOpenMemHandle_v2(u64 *at, IpcHandle handle, unsigned flags) {
  ENTER();
  IpcContent c;
  memcpy(&c, &handle, sizeof c);
  if (flags > 1 || !number("STANDIN_IPC", 1)) return INVALID_VALUE;
  if (c.pid == getpid()) return INVALID_CONTEXT;  // nobody opens his own
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", c.pid, c.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  struct stat st{};
  if (fd < 0) return INVALID_VALUE;
  if (fstat(fd, &st) || st.st_ino != c.inode || device_of(fd) != current_device()) { close(fd); return INVALID_VALUE; }
  void *p = mmap(nullptr, c.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) { close(fd); return OUT_OF_MEMORY; }
  Lock lock(g_mutex);
  std::unique_lock<std::shared_mutex> exclusive(g_mapped);
  g_mappings[*at = u64(p)] = Mapping{c.bytes, std::make_shared<Memory>(Memory{fd, c.bytes, current_device(), 0, 1, true, false}), 0, true, true};
  return OK;
}
API int cuIpcCloseMemHandle(u64 at) {
  ENTER();
  Lock lock(g_mutex);
  auto it = g_mappings.find(at);
  if (it == g_mappings.end() || !it->second.opened) return INVALID_VALUE;
  unmap(it);
  return OK;
}
API int cuMemGetAddressRange_v2(u64 *base, size_t *bytes, u64 at) {
  ENTER();
  Lock lock(g_mutex);
  u64 b = 0;
  Mapping *m = mapping_of(at, 1, &b);
  if (!m) return INVALID_VALUE;
  if (base) *base = b;
  if (bytes) *bytes = m->bytes;
  return OK;
}
API int cuMemGetInfo_v2(size_t *free, size_t *total) {
  ENTER();
  Lock lock(g_mutex);
  u64 used = 0;
  for (auto &[at, m] : g_mappings) used += m.bytes;
  *total = number("STANDIN_MEMORY", 1ull << 30), *free = *total - std::min<u64>(used, *total);
  return OK;
}
API int cuPointerGetAttribute(void *out, int attribute, u64 at) {
  ENTER(false);
  Lock lock(g_mutex);
  u64 base = 0;
  Mapping *m = mapping_of(at, 1, &base);
  switch (attribute) {
    case 1: *static_cast<void **>(out) = m ? &g_contexts[size_t(m->memory->device)] : nullptr; return m ? OK : INVALID_VALUE;
    case 2: *static_cast<u32 *>(out) = 1; return OK;  // HOST: this is what tells that nothing here is a GPU
    case 3: *static_cast<u64 *>(out) = at; return OK;
    case 9: *static_cast<int *>(out) = m ? m->memory->device : 0; return m ? OK : INVALID_VALUE;
    case 11: *static_cast<u64 *>(out) = base; return m ? OK : INVALID_VALUE;
    case 12: *static_cast<size_t *>(out) = m ? m->bytes : 0; return m ? OK : INVALID_VALUE;
    default: return INVALID_VALUE;
  }
}

// ---- host memory -------------------------------------------------------------------------------------------------
API int cuMemHostRegister_v2(void *at, size_t bytes, unsigned) {
  ENTER(); SAFE();
  Lock lock(g_mutex);
  if (!at || !bytes) return INVALID_VALUE;
  auto it = g_registered.upper_bound(u64(at) + bytes - 1);
  if (it != g_registered.begin() && std::prev(it)->first + std::prev(it)->second > u64(at)) return ALREADY_REGISTERED;
  g_registered[u64(at)] = bytes;
  return OK;
}
API int cuMemHostUnregister(void *at) { ENTER(); SAFE(); Lock lock(g_mutex); return g_registered.erase(u64(at)) ? OK : NOT_REGISTERED; }
API int cuMemHostAlloc(void **at, size_t bytes, unsigned) {
  ENTER(); SAFE();
  if (!bytes || posix_memalign(at, 4096, bytes)) return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
  Lock lock(g_mutex);
  g_pinned[u64(*at)] = bytes;
  return OK;
}
API int cuMemFreeHost(void *at) { ENTER(); SAFE(); Lock lock(g_mutex); return g_pinned.erase(u64(at)) ? (free(at), OK) : INVALID_VALUE; }
API int cuMemHostGetDevicePointer_v2(u64 *out, void *at, unsigned) { ENTER(); *out = u64(at); return OK; }

// ---- copies ------------------------------------------------------------------------------------------------------
API int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t n, void *s) { ENTER(); return enqueue_copy(to, u64(from), n, true, false, s); }
API int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t n, void *s) { ENTER(); return enqueue_copy(u64(to), from, n, false, true, s); }
API int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t n, void *s) { ENTER(); return enqueue_copy(to, from, n, true, true, s); }
API int cuMemcpyAsync(u64 to, u64 from, size_t n, void *s) {
  ENTER();
  std::shared_lock<std::shared_mutex> shared(g_mapped);
  const bool to_device = mapping_of(to, n);
  shared.unlock();
  return enqueue_copy(to, from, n, to_device, false, s);
}
API int cuMemcpyHtoD_v2(u64 to, const void *from, size_t n) { ENTER(); return finish(enqueue_copy(to, u64(from), n, true, false, nullptr), stream_of(nullptr)); }
API int cuMemcpyDtoH_v2(void *to, u64 from, size_t n) { ENTER(); return finish(enqueue_copy(u64(to), from, n, false, true, nullptr), stream_of(nullptr)); }
API int cuMemcpyDtoD_v2(u64 to, u64 from, size_t n) { ENTER(); return finish(enqueue_copy(to, from, n, true, true, nullptr), stream_of(nullptr)); }
API int cuMemsetD8Async(u64 at, u8 value, size_t n, void *s) {
  ENTER();
  { std::shared_lock<std::shared_mutex> shared(g_mapped); if (!is_device(at, n)) return INVALID_VALUE; }
  stream_of(s)->push([=] { std::vector<u8> bytes(n, value); move_bytes(at, u64(bytes.data()), n, true); });
  return OK;
}
API int cuMemsetD8_v2(u64 at, u8 value, size_t n) { ENTER(); return finish(cuMemsetD8Async(at, value, n, nullptr), stream_of(nullptr)); }

// ---- streams and events --------------------------------------------------------------------------------------------
API int cuStreamCreate(void **s, unsigned) { ENTER(); SAFE(); stream_of(nullptr); Lock lock(g_mutex); *s = g_streams.emplace_back(new Stream); return OK; }
API int cuStreamCreateWithPriority(void **s, unsigned flags, int) { return cuStreamCreate(s, flags); }
API int cuStreamSynchronize(void *s) { ENTER(); SAFE(); stream_of(s)->wait(); return g_error.load(); }
API int cuStreamQuery(void *s) { ENTER(); SAFE(); return stream_of(s)->idle() ? g_error.load() : NOT_READY; }
API int cuStreamDestroy_v2(void *s) {
  ENTER(); SAFE();
  { Lock lock(g_mutex); if (!std::erase(g_streams, static_cast<Stream *>(s))) return INVALID_HANDLE; }
  static_cast<Stream *>(s)->end();
  return OK;
}
API int cuLaunchHostFunc(void *s, void (*f)(void *), void *data) { ENTER(); stream_of(s)->push([=] { f(data); }); return OK; }
API int cuEventCreate(void **e, unsigned) { ENTER(); SAFE(); *e = new std::shared_ptr<Event>(new Event); return OK; }
API int cuEventDestroy_v2(void *e) { ENTER(); SAFE(); delete static_cast<std::shared_ptr<Event> *>(e); return OK; }
#define EVENT(e) (*static_cast<std::shared_ptr<Event> *>(e))
API int cuEventRecord(void *e, void *s) {
  ENTER();
  std::shared_ptr<Event> event = EVENT(e);
  if (const auto c = stream_of(s)->capture) return std::lock_guard(event->m), event->capture = c, OK;
  u64 turn;
  { std::lock_guard<std::mutex> lock(event->m); turn = ++event->recorded, event->capture.reset(); }
  stream_of(s)->push([event, turn] { std::lock_guard<std::mutex> lock(event->m); event->done = std::max(event->done, turn), event->at_ms = now_ms(); event->cv.notify_all(); });
  return OK;
}
API int cuEventQuery(void *e) { ENTER(); SAFE(); std::lock_guard<std::mutex> lock(EVENT(e)->m); return EVENT(e)->done >= EVENT(e)->recorded ? g_error.load() : NOT_READY; }
API int cuEventSynchronize(void *e) {
  ENTER(); SAFE();
  std::shared_ptr<Event> event = EVENT(e);
  std::unique_lock<std::mutex> lock(event->m);
  if (const auto c = event->capture.lock()) return c->broken = true, CAPTURED_EVENT;
  event->cv.wait(lock, [&, turn = event->recorded] { return event->done >= turn; });
  return g_error.load();
}
API int cuEventElapsedTime_v2(float *ms, void *a, void *b) { ENTER(); *ms = float(EVENT(b)->at_ms - EVENT(a)->at_ms); return OK; }
API int cuEventElapsedTime(float *ms, void *a, void *b) { return cuEventElapsedTime_v2(ms, a, b); }
API int cuStreamWaitEvent(void *s, void *e, unsigned) {
  ENTER();
  std::shared_ptr<Event> event = EVENT(e);
  if (const auto c = event->capture.lock()) return stream_of(s)->capture = c, OK;
  stream_of(s)->push([event, turn = event->recorded] {
    std::unique_lock<std::mutex> lock(event->m);
    event->cv.wait(lock, [&] { return event->done >= turn; });
  });
  return OK;
}

// ---- CUDA graphs: nothing but the capture -------------------------------------------------------------------------
API int cuThreadExchangeStreamCaptureMode(unsigned *mode) { ENTER(false); return *mode > RELAXED ? INVALID_VALUE : (std::swap(t_mode, *mode), OK); }
API int cuStreamBeginCapture_v2(void *s, unsigned mode) {
  ENTER();
  Lock lock(g_mutex);
  Stream *stream = stream_of(s);
  if (u64(s) <= 2 || mode > RELAXED || stream->capture) return INVALID_VALUE;
  g_captures[stream] = stream->capture = std::make_shared<Capture>(Capture{std::this_thread::get_id(), mode, false});
  return OK;
}
API int cuStreamIsCapturing(void *s, unsigned *status) {
  ENTER();
  Lock lock(g_mutex);
  const auto c = stream_of(s)->capture;
  return *status = !c ? 0 : c->broken ? 2 : 1, OK;
}
API int cuStreamEndCapture(void *s, void **graph) {
  ENTER();
  Lock lock(g_mutex);
  const auto at = g_captures.find(stream_of(s));
  if (at == g_captures.end()) return INVALID_VALUE;
  const auto c = at->second;
  if (c->mode != RELAXED && c->by != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  g_captures.erase(at);
  for (Stream *each : g_streams)
    if (each->capture == c) each->capture = nullptr;
  return *graph = c->broken ? nullptr : &g_captures, c->broken ? CAPTURE_INVALIDATED : OK;
}

// ---- kernels -----------------------------------------------------------------------------------------------------
API int cuModuleLoadData(void **m, const void *image) { ENTER(); SAFE(); return image ? (*m = const_cast<void *>(image), OK) : INVALID_VALUE; }
API int cuModuleLoadDataEx(void **m, const void *image, unsigned, void *, void **) { ENTER(); SAFE(); return image ? (*m = const_cast<void *>(image), OK) : INVALID_VALUE; }
API int cuModuleUnload(void *) { ENTER(); SAFE(); return OK; }
API int cuModuleGetFunction(void **f, void *, const char *name) {
  ENTER();
  for (const Kernel &k : kKernels)
    if (!strcmp(k.name, name)) return *f = const_cast<Kernel *>(&k), OK;
  return NOT_FOUND;
}
API int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, void *s, void **parameters, void **extra) {
  ENTER();
  if (!gx || !gy || !gz || !bx || !by || !bz || u64(bx) * by * bz > 1024 || !parameters || extra) return INVALID_VALUE;
  const auto *k = static_cast<const Kernel *>(f);
  Parameters copy;
  for (size_t i = 0; i < k->parameters.size(); ++i) {
    const auto *p = static_cast<const u8 *>(parameters[i]);
    copy.emplace_back(p, p + k->parameters[i]);
  }
  stream_of(s)->push([k, copy] {
    dawdle(number("STANDIN_DELAY_US", 200));
    std::shared_lock<std::shared_mutex> shared(g_mapped);
    k->run(copy);
  });
  return OK;
}

// ---- words and names -----------------------------------------------------------------------------------------------
API int cuGetErrorName(int code, const char **out) {
  for (const Word &w : kWords) if (w.code == code) return *out = w.name, OK;
  return *out = nullptr, INVALID_VALUE;
}
API int cuGetErrorString(int code, const char **out) {
  for (const Word &w : kWords) if (w.code == code) return *out = w.text, OK;
  return *out = nullptr, INVALID_VALUE;
}
API int cuGetProcAddress_v2(const char *symbol, void **out, int, u64, int *status) {
  static void *self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void *>(&cuInit), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  *out = nullptr;
  for (const char *version : {"_v2", ""})  // the newest that there is
    if (!*out) *out = dlsym(self, (std::string(symbol) + version).c_str());
  if (status) *status = *out ? 0 : 1;
  return *out ? OK : NOT_FOUND;
}
API int cuGetProcAddress(const char *symbol, void **out, int version, u64 flags) { return cuGetProcAddress_v2(symbol, out, version, flags, nullptr); }

#ifdef STANDIN_LATE_MAIN
// The process that copies: {offset, bytes, delay} with the memory's descriptor, then the bytes; goes on with what it has when its
// caller is gone.
int main() {
  while (true) {
    LateCopy c;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    iovec io{&c, sizeof c};
    msghdr m{};
    m.msg_iov = &io, m.msg_iovlen = 1, m.msg_control = control, m.msg_controllen = sizeof control;
    if (recvmsg(0, &m, MSG_WAITALL | MSG_CMSG_CLOEXEC) != sizeof c || !CMSG_FIRSTHDR(&m)) return 0;
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    std::vector<char> bytes(c.bytes);
    if (recv(0, bytes.data(), c.bytes, MSG_WAITALL) != ssize_t(c.bytes)) return 0;
    dawdle(c.delay_us);
    for (u64 done = 0; done < c.bytes;) {
      const ssize_t n = pwrite(fd, bytes.data() + done, c.bytes - done, off_t(c.offset + done));
      if (n <= 0) return 1;
      done += u64(n);
    }
    close(fd);
    if (const char *log = getenv("STANDIN_LOG"); log && *log)
      if (const int out = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600); out >= 0) dprintf(out, "%lu %lu\n", (unsigned long)c.offset, (unsigned long)c.bytes), close(out);
    const char landed = 1;
    send(0, &landed, 1, MSG_NOSIGNAL);
  }
}
#endif
