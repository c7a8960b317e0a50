// The machine behind standin.cpp: memory, mappings, streams, copies and kernels.
#pragma once
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

using u8 = unsigned char;
using u32 = uint32_t;
using u64 = uint64_t;
using Lock = std::lock_guard<std::recursive_mutex>;

namespace {

enum : int {
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
  MISALIGNED = 716,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908
};
struct Word { int code; const char *name, *text; };
constexpr Word kWords[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {MISALIGNED, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture was not ended in the same thread in which it began"},
};

struct Uuid { u8 bytes[16]; };
struct Location { int type, id; };
struct Properties { int type, handle_types; Location location; void *win32; u8 flags[8]; };
struct Access { Location location; int flags; };
struct IpcHandle { char bytes[64]; };
struct IpcContent { int pid, fd; u64 inode, bytes; Uuid uuid; };
static_assert(sizeof(IpcContent) <= 64);
constexpr u64 kGranularity = 2 << 20;

const char *env(const char *name, const char *otherwise = "") { const char *v = getenv(name); return v && *v ? v : otherwise; }
u64 number(const char *name, u64 otherwise) { const char *v = getenv(name); return v && *v ? strtoull(v, nullptr, 10) : otherwise; }

// ---- the machine -----------------------------------------------------------------------------------------------
struct Context { int device = 0, retained = 0; };
struct Memory { int fd; u64 bytes; int device; int handles, mappings; bool plain, exportable; };
struct Mapping { u64 bytes; std::shared_ptr<Memory> memory; u64 offset; bool accessible, opened; };

// Never destroyed: streams go on while the process ends.
auto &g_mutex = *new std::recursive_mutex;  // of the tables
auto &g_mapped = *new std::shared_mutex;    // held while bytes are copied, and exclusively while mappings change
auto &g_mappings = *new std::map<u64, Mapping>;  // by address
auto &g_reserved = *new std::map<u64, u64>, &g_registered = *new std::map<u64, u64>, &g_pinned = *new std::map<u64, u64>;
auto &g_handles = *new std::map<u64, std::shared_ptr<Memory>>;
auto &g_devices = *new std::vector<Uuid>;
auto &g_contexts = *new std::vector<Context>;
std::atomic<int> g_pid{0}, g_error{0};  // of which process; sticky
u64 g_next_handle = 1;
int g_late = -1;                      // socket of the process that copies for us
thread_local std::vector<Context *> t_stack;

bool parse_uuid(std::string s, Uuid &out) {
  if (s.rfind("GPU-", 0) == 0) s = s.substr(4);
  std::string digits;
  for (char c : s) if (c != '-') digits += c;
  if (digits.size() != 32) return false;
  for (int i = 0; i < 16; ++i) out.bytes[i] = u8(strtoul(digits.substr(size_t(2 * i), 2).c_str(), nullptr, 16));
  return true;
}
std::vector<std::string> split(const std::string &s, char by = ',') {
  std::vector<std::string> out;
  size_t at = 0;
  while (at <= s.size() && !s.empty()) {
    size_t end = std::min(s.find(by, at), s.size());
    out.push_back(s.substr(at, end - at));
    at = end + 1;
  }
  return out;
}
void kill_if(const std::string &call, bool after) {
  static std::map<std::string, u64> counts;
  const auto parts = split(env("STANDIN_KILL"), ':');
  if (parts.empty() || parts[0] != call || (parts.size() > 2) != after) return;
  Lock lock(g_mutex);
  if (++counts[call] >= (parts.size() > 1 ? strtoull(parts[1].c_str(), nullptr, 10) : 1)) raise(SIGKILL);
}
struct Call {  // the door of every call
  std::string name;  // without its version
  int status = OK;
  Call(const char *n, bool needs_context = true) : name(std::string(n).substr(0, std::string(n).find("_v2"))) {
    kill_if(name, false);
    for (const auto &s : split(env("STANDIN_FAIL")))
      if (s.rfind(name + "=", 0) == 0) { status = atoi(s.c_str() + name.size() + 1); return; }
    if (g_pid.load() != getpid()) status = NOT_INITIALIZED;  // also in the child of a fork
    else if (needs_context && t_stack.empty()) status = INVALID_CONTEXT;
    else if (needs_context && g_error.load()) status = g_error.load();
  }
  ~Call() { kill_if(name, true); }
};
#define ENTER(...) Call call_(__func__ __VA_OPT__(, ) __VA_ARGS__); if (call_.status) return call_.status
int current_device() { return t_stack.back()->device; }

// The mapping that holds all of [at, at + bytes).
Mapping *mapping_of(u64 at, u64 bytes, u64 *base = nullptr) {
  auto it = g_mappings.upper_bound(at);
  if (it == g_mappings.begin()) return nullptr;
  --it;
  if (at < it->first || at - it->first + bytes > it->second.bytes || !it->second.accessible) return nullptr;
  if (base) *base = it->first;
  return &it->second;
}
bool is_device(u64 at, u64 bytes) { return bytes == 0 || mapping_of(at, bytes); }

// ---- streams ---------------------------------------------------------------------------------------------------
struct Capture { std::thread::id by; unsigned mode; bool broken; };  // of a CUDA graph
struct Event { std::mutex m; std::condition_variable cv; u64 recorded = 0, done = 0; double at_ms = 0; std::weak_ptr<Capture> capture; };
double now_ms() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return double(t.tv_sec) * 1e3 + double(t.tv_nsec) / 1e6; }

struct Stream {
  std::mutex m;
  std::condition_variable cv, idle_cv;
  std::deque<std::function<void()>> queue;
  bool busy = false, stop = false, alone = false;
  std::shared_ptr<Capture> capture;  // what is given to it becomes part of a graph, and is not done
  std::thread thread;
  Stream() : thread([this] { run(); }) {}
  void run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    std::unique_lock<std::mutex> lock(m);
    while (true) {
      cv.wait(lock, [&] { return stop || !queue.empty(); });
      if (queue.empty()) break;
      auto work = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      work();
      lock.lock();
      busy = false;
      idle_cv.notify_all();
    }
    const bool last = alone;
    lock.unlock();
    if (last) delete this;
  }
  void push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(m);
    if (capture) return;
    queue.push_back(std::move(work));
    cv.notify_one();
  }
  bool idle() { std::lock_guard<std::mutex> lock(m); return queue.empty() && !busy; }
  void wait() { std::unique_lock<std::mutex> lock(m); idle_cv.wait(lock, [&] { return queue.empty() && !busy; }); }
  void end() {  // when its work is done: nobody waits for that
    std::unique_lock<std::mutex> lock(m);
    stop = true, alone = busy || !queue.empty();
    if (alone) thread.detach();
    const bool done = !alone;
    cv.notify_one();
    lock.unlock();
    if (done) thread.join(), delete this;
  }
};
auto &g_streams = *new std::vector<Stream *>;  // the first: the null stream. Leaked at exit, like their threads.
Stream *stream_of(void *handle) {
  Lock lock(g_mutex);
  if (g_streams.empty()) g_streams.push_back(new Stream);
  return u64(handle) <= 2 ? g_streams[0] : static_cast<Stream *>(handle);
}

// ---- captures --------------------------------------------------------------------------------------------------
enum Mode : unsigned { GLOBAL = 0, OF_THREAD = 1, RELAXED = 2 };
auto &g_captures = *new std::map<Stream *, std::shared_ptr<Capture>>;  // by the stream in which they began
thread_local unsigned t_mode = GLOBAL;
// Calls that may wait for a captured stream, or work behind its back, break the captures that are not told to bear it.
int unsafe() {
  Lock lock(g_mutex);
  int status = OK;
  for (auto &[stream, c] : g_captures) {
    const bool mine = c->by == std::this_thread::get_id() && c->mode != RELAXED;
    if (t_mode != RELAXED && (mine || (t_mode == GLOBAL && c->mode == GLOBAL))) c->broken = true, status = CAPTURE_UNSUPPORTED;
  }
  return status;
}
#define SAFE() if (const int status_ = unsafe()) return status_

void dawdle(u64 delay_us) {
  static thread_local std::mt19937_64 random{std::random_device{}()};
  if (delay_us) usleep(useconds_t(random() % (delay_us + 1)));
  if (const char *gate = getenv("STANDIN_GATE"); gate && *gate)
    while (access(gate, F_OK)) usleep(500);
}

// ---- copies by a process of their own --------------------------------------------------------------------------
struct LateCopy { u64 offset, bytes, delay_us; };
int send_late(const LateCopy &c, int fd, const void *bytes) {
  static std::mutex one;
  std::lock_guard<std::mutex> lock(one);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec io{const_cast<LateCopy *>(&c), sizeof c};
  msghdr m{};
  m.msg_iov = &io, m.msg_iovlen = 1, m.msg_control = control, m.msg_controllen = sizeof control;
  cmsghdr *h = CMSG_FIRSTHDR(&m);
  h->cmsg_level = SOL_SOCKET, h->cmsg_type = SCM_RIGHTS, h->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(h), &fd, sizeof fd);
  if (sendmsg(g_late, &m, MSG_NOSIGNAL) != sizeof c) return -1;
  for (u64 sent = 0; sent < c.bytes;) {
    const ssize_t n = send(g_late, static_cast<const char *>(bytes) + sent, c.bytes - sent, MSG_NOSIGNAL);
    if (n <= 0) return -1;
    sent += u64(n);
  }
  char landed;
  return recv(g_late, &landed, 1, MSG_WAITALL) == 1 ? 0 : -1;
}
void start_late() {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) return;
  Dl_info self{};
  dladdr(reinterpret_cast<void *>(&start_late), &self);
  const std::string program = std::string(self.dli_fname).substr(0, std::string(self.dli_fname).rfind('/')) + "/standin-late";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pair[1], 0);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // lives on when its caller's group is killed
  char *argv[] = {const_cast<char *>(program.c_str()), nullptr};
  pid_t pid;
  if (posix_spawn(&pid, program.c_str(), &actions, &attributes, argv, environ)) close(pair[0]); else g_late = pair[0];
  close(pair[1]);
}

void fail_later(int code) { int none = 0; g_error.compare_exchange_strong(none, code); }
void move_bytes(u64 to, u64 from, u64 bytes, bool to_device) {
  if (!bytes) return;
  if (to_device && g_late >= 0) {
    int fd = -1;
    LateCopy c{0, bytes, number("STANDIN_DELAY_US", 200)};
    {
      std::shared_lock<std::shared_mutex> shared(g_mapped);
      u64 base = 0;
      if (Mapping *m = mapping_of(to, bytes, &base)) fd = fcntl(m->memory->fd, F_DUPFD_CLOEXEC, 3), c.offset = m->offset + (to - base);
    }
    if (fd < 0) return fail_later(ILLEGAL_ADDRESS);
    if (send_late(c, fd, reinterpret_cast<void *>(from))) fail_later(ILLEGAL_ADDRESS);
    close(fd);
    return;
  }
  dawdle(number("STANDIN_DELAY_US", 200));
  std::shared_lock<std::shared_mutex> shared(g_mapped);
  if (to_device && !mapping_of(to, bytes)) return fail_later(ILLEGAL_ADDRESS);
  memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
}
int enqueue_copy(u64 to, u64 from, u64 bytes, bool to_device, bool from_device, void *stream) {
  std::shared_lock<std::shared_mutex> shared(g_mapped);
  if (number("STANDIN_TENSORS", 0)) from_device = false, to_device = to_device && is_device(to, bytes);
  if ((to_device && !is_device(to, bytes)) || (from_device && !is_device(from, bytes)) || (bytes && (!to || !from))) return INVALID_VALUE;
  shared.unlock();
  stream_of(stream)->push([=] { move_bytes(to, from, bytes, to_device); });
  return OK;
}
int finish(int status, Stream *s) {
  if (status) return status;
  s->wait();
  return g_error.load();
}

// ---- kernels ---------------------------------------------------------------------------------------------------
// One line each in kKernels: its name, the bytes of each parameter, what it does given a copy of them. They run on the host; addresses are those of
// device or pinned memory, which are the same here.
using Parameters = std::vector<std::vector<u8>>;
template <class T> T parameter(const Parameters &p, size_t i) { T v; memcpy(&v, p[i].data(), sizeof v); return v; }

struct KernelColumn { u64 address; u32 offset, chunks, shift, stride, first_block, spare; };
struct KernelMove {
  u64 base, at, mask, slots, places, row_bytes;
  u32 n, n_columns;
  KernelColumn column[64];
};
// As shmbuf/native/kernels.h says. What a device would not do with a word that is not aligned, is not done here.
void move_rows(const Parameters &p, bool gather) {
  const auto m = parameter<KernelMove>(p, 0);
  for (u32 c = 0; c < m.n_columns; ++c) {
    const KernelColumn &at = m.column[c];
    for (u32 j = 0; j < m.n; ++j) {
      const u64 row = m.slots ? reinterpret_cast<const u32 *>(m.slots)[j] * m.row_bytes : m.at + j * m.row_bytes;
      const u64 place = m.places ? reinterpret_cast<const u32 *>(m.places)[j] : j, width = 1ull << at.shift;
      for (u32 k = 0; k < at.chunks; ++k) {
        const u64 mine = m.base + ((row + at.offset + k * width) & m.mask), other = at.address + place * at.stride + k * width;
        if (mine % width || other % width) return fail_later(MISALIGNED);
        if (!mapping_of(mine, width)) return fail_later(ILLEGAL_ADDRESS);
        memcpy(reinterpret_cast<void *>(gather ? other : mine), reinterpret_cast<void *>(gather ? mine : other), width);
      }
    }
  }
}
void gather(const Parameters &p) { move_rows(p, true); }
void scatter(const Parameters &p) { move_rows(p, false); }
struct Kernel { const char *name; std::vector<size_t> parameters; void (*run)(const Parameters &); };
const Kernel kKernels[] = {
    {"shmbuf_gather", {sizeof(KernelMove)}, gather},
    {"shmbuf_scatter", {sizeof(KernelMove)}, scatter},
};

void release(const std::shared_ptr<Memory> &m) {
  if (!m->handles && !m->mappings && m->fd >= 0) close(m->fd), m->fd = -1;
}
void unmap(std::map<u64, Mapping>::iterator it) {
  std::unique_lock<std::shared_mutex> exclusive(g_mapped);
  const bool reserved = !it->second.memory->plain;
  if (reserved) mmap(reinterpret_cast<void *>(it->first), it->second.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  else munmap(reinterpret_cast<void *>(it->first), it->second.bytes);
  auto memory = it->second.memory;
  g_mappings.erase(it);
  --memory->mappings;
  release(memory);
}
int make_memory(u64 bytes, int device, bool plain, std::shared_ptr<Memory> &out) {
  if (bytes > number("STANDIN_MEMORY", 1ull << 30)) return OUT_OF_MEMORY;
  char name[64] = "standin-cuda-";
  for (int i = 0; i < 16; ++i) snprintf(name + strlen(name), 3, "%02x", g_devices[size_t(device)].bytes[i]);
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(bytes))) return OUT_OF_MEMORY;
  out = std::make_shared<Memory>(Memory{fd, bytes, device, 0, 0, plain, true});
  return OK;
}
// Which of the visible devices a memfd of ours is of: −1 none of them, −2 it is no device memory.
int device_of(int fd) {
  char link[256] = {}, path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  if (readlink(path, link, sizeof link - 1) < 0) return -2;
  const char *at = strstr(link, "memfd:standin-cuda-");
  if (!at) return -2;
  Uuid uuid;
  if (!parse_uuid(std::string(at + strlen("memfd:standin-cuda-")).substr(0, 32), uuid)) return -2;
  for (size_t i = 0; i < g_devices.size(); ++i)
    if (!memcmp(&g_devices[i], &uuid, 16)) return int(i);
  return -1;
}

}  // namespace
