// Who is alive, and who owns which ring. Truth is one lock byte per role (an open-file-description lock): the kernel drops
// it at death, after the dead process's memory is gone, across pid namespaces, and no pid can fool it.
//
//   claim   slot word FREE → lock its byte → FREE still? → fund the ring → describe → word ACTIVE (incarnation + 1)
//   sweep   word not FREE, byte lockable, ring drained → give the ring's memory back → word FREE → unlock
// Whoever changes a word holds its byte, so a claim killed half-way leaves FREE and a sweep killed half-way is repeated.
// The same description never excludes itself: a handle skips its own bytes and serialises its threads by a mutex.
#pragma once
#include "journal.h"
#include <cstdio>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>

namespace shmbuf {

inline bool lock_byte(int fd, i64 at, short type) {
  struct flock l {};
  l.l_type = type, l.l_whence = SEEK_SET, l.l_start = at, l.l_len = 1;
  int r;
  do r = fcntl(fd, F_OFD_SETLK, &l);
  while (r && errno == EINTR);
  return r == 0;
}
// Memory for a range of the file now, as an error, not at first touch, as a SIGBUS. tmpfs undoes an interrupted reservation
// and starts again from nothing, so signals wait, piece by piece. 0 or an errno.
inline int reserve_range(int fd, u64 from, u64 bytes) {
  constexpr u64 kPiece = 64u << 20;
  while (bytes) {
    const u64 n = bytes < kPiece ? bytes : kPiece;
    SignalsBlocked blocked;
    if (int e = posix_fallocate(fd, i64(from), i64(n)); e && e != EINTR) return e;
    else if (!e) from += n, bytes -= n;
  }
  return 0;
}
inline void unlock_byte(int fd, i64 at) { lock_byte(fd, at, F_UNLCK); }
// Held by another description? (Asked through the holder's own description the kernel says no.)
inline bool byte_is_held(int fd, i64 at) {
  struct flock l {};
  l.l_type = F_WRLCK, l.l_whence = SEEK_SET, l.l_start = at, l.l_len = 1;
  return fcntl(fd, F_OFD_GETLK, &l) == 0 && l.l_type != F_UNLCK;
}

// /proc/PID/stat field 22; 0 if there is no such process. The command may hold anything, so count from the last ')'.
inline u64 process_start_ticks(u32 pid) {
  char path[40], text[1024];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  char *p = std::strrchr(text, ')');
  if (!p) return 0;
  ++p;
  for (int field = 2; field < 21 && p; ++field) p = std::strchr(p + 1, ' ');
  return p ? std::strtoull(p + 1, nullptr, 10) : 0;
}
inline Owner describe_self() {
  Owner o{};
  o.pid = u32(getpid()), o.uid = u32(getuid()), o.since_ns = wall_ns();
  o.start_ticks = process_start_ticks(o.pid);
  struct stat st;
  if (stat("/proc/self/ns/pid", &st) == 0) o.pid_namespace = st.st_ino;
  int fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    ssize_t n = read(fd, o.comm, sizeof o.comm - 1);
    close(fd);
    for (ssize_t i = 0; i < n; ++i)
      if (o.comm[i] == '\n') o.comm[i] = 0;
  }
  return o;
}

// What a process had its device do when it was killed goes on until the kernel has closed the driver's files in it; whether that comes
// before or after its locks go is not known. All of them are closed before the last of its threads is gone or a zombie. In another pid
// namespace it cannot be seen: then time must do, as it must where the driver does not come to an end with it.
inline constexpr u64 kDeviceLands = 100'000'000, kDeviceUnseen = 2'000'000'000, kDeviceStuck = 10'000'000'000;
inline bool process_over(u32 pid, u64 start_ticks) {
  if (!pid) return true;
  const u64 now = process_start_ticks(pid);
  if (!now) return kill(pid_t(pid), 0) && errno == ESRCH;  // or /proc hides another user's
  if (now != start_ticks) return true;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%u/task", pid);
  DIR *tasks = opendir(path);
  if (!tasks) return errno == ENOENT;
  bool over = true;
  while (const dirent *task = over ? readdir(tasks) : nullptr) {
    if (task->d_name[0] == '.') continue;
    char text[1024];
    std::snprintf(path, sizeof path, "/proc/%u/task/%.12s/stat", pid, task->d_name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n <= 0) continue;  // gone meanwhile
    text[n] = 0;
    const char *state = std::strrchr(text, ')');
    over = state && std::strchr("ZXx", state[2]);
  }
  closedir(tasks);
  return over;
}
// Of one that is dead, or has given up: its lock byte is free, and held by whoever asks. dead_ns: when that was first found, stored here.
inline bool device_work_over(u64 since_ns, u64 &dead_ns, u32 pid, u64 start_ticks, u64 pid_namespace) {
  if (!since_ns) return true;
  const u64 now = now_ns();
  if (!load(dead_ns, relaxed)) store(dead_ns, now, relaxed);
  const u64 dead = now - load(dead_ns, relaxed);  // of a damaged word: ages
  if (dead > kDeviceStuck) return true;
  struct stat st;
  const bool seen = stat("/proc/self/ns/pid", &st) == 0 && st.st_ino == pid_namespace;
  return dead > kDeviceLands && (seen ? process_over(pid, start_ticks) : dead > kDeviceUnseen);
}

inline bool has_device_ring(const Segment &s, u32 slot) {
  const u32 r = load(s.slot(slot).device_ring, relaxed);
  return r && r <= s.header().built.home.rings && s.header().built.home.kind != kHost;
}

constexpr u64 word_state(u64 word) { return word & 0xff; }
constexpr u64 word_incarnation(u64 word) { return word >> 8; }
constexpr u64 make_word(u64 incarnation, u64 state) { return incarnation << 8 | state; }

class Registry {  // call with the handle's registry mutex held
 public:
  Registry(Segment &s, int lock_fd) : s_(s), fd_(lock_fd) {}

  // A member entry is for people: a full table is no error (-1).
  int claim_member(const Owner &me, u32 roles) {
    u32 n = s_.header().max_members;
    for (int pass = 0; pass < 2; ++pass)  // free entries first: the dead stay visible as long as there is room
      for (u32 i = 0; i < n; ++i) {
        Member &m = s_.member(i);
        u64 word = load(m.word, acquire);
        if ((word_state(word) == kFree) != (pass == 0) || !lock_byte(fd_, lock_member(i), F_WRLCK)) continue;
        word = load(m.word, acquire);
        bury(m, word);
        store(m.word, make_word(word_incarnation(word), kFree), release);
        fence(release);
        m.owner = me;
        store(m.roles, roles, relaxed);
        store(m.slot_plus_1, 0u, relaxed), store(m.waits_for, u32(kNothing), relaxed), store(m.device_error, 0u, relaxed);
        store(m.sampled_batches, u64(0), relaxed), store(m.sampled_rows, u64(0), relaxed);
        store(m.word, make_word(word_incarnation(word) + 1, kActive), release);
        return int(i);
      }
    return -1;
  }
  void release_member(int i) {
    if (i < 0) return;
    Member &m = s_.member(u32(i));
    store(m.word, make_word(word_incarnation(load(m.word, relaxed)), kFree), release);
    unlock_byte(fd_, lock_member(u32(i)));
  }

  enum class Claim { ok, none_free, no_memory };
  Claim claim_slot(const Owner &me, u32 &index) {
    u32 n = s_.header().max_collectors;
    for (u32 i = 0; i < n; ++i) {
      Slot &slot = s_.slot(i);
      if (word_state(load(slot.word, acquire)) != kFree || !lock_byte(fd_, lock_slot(i), F_WRLCK)) continue;
      u64 word = load(slot.word, acquire);
      if (word_state(word) != kFree) {  // claimed and freed while we looked
        unlock_byte(fd_, lock_slot(i));
        continue;
      }
      FAILPOINT(claim_locked);
      if (int e = fund_ring(i)) {
        unlock_byte(fd_, lock_slot(i));
        errno = e;
        return Claim::no_memory;
      }
      FAILPOINT(claim_funded);
      slot.owner = me;
      const CommitBlock &truth = s_.block(load(s_.control().commit_seq, acquire));
      const bool known = i < truth.n_slots;
      store(slot.put_at_claim, load(slot.put_rows, relaxed), relaxed);
      store(slot.stored_at_claim, known ? load(truth.slot[i].stored_rows, relaxed) : 0, relaxed);
      store(slot.skipped_at_claim, known ? load(truth.slot[i].skipped_rows, relaxed) : 0, relaxed);
      store(slot.dropped_at_claim, load(slot.dropped_rows, relaxed), relaxed);
      store(slot.refused_at_claim, load(slot.refused_rows, relaxed), relaxed);
      store(slot.blocked_at_claim, load(slot.blocked_ns, relaxed), relaxed);
      store(slot.skip_to, u64(0), relaxed);
      store(slot.clear_to, u64(0), relaxed), store(slot.orphaned, u64(0), relaxed);
      store(slot.wait, 0u, relaxed);
      Control &c = s_.control();
      for (u32 seen = load(c.n_slots, relaxed); seen < i + 1 && !compare_exchange(c.n_slots, seen, i + 1, seq_cst);) {}
      FAILPOINT(claim_described);
      store(slot.word, make_word(word_incarnation(word) + 1, kActive), release);
      FAILPOINT(claim_active);
      index = i;
      return Claim::ok;
    }
    return Claim::none_free;
  }
  // A device ring for the collector of a slot: the first that no slot names. It stays his until his slot is swept; whoever looks and
  // names holds its byte.
  bool claim_device_ring(u32 slot) {
    for (u32 r = 0; r < s_.header().built.home.rings; ++r) {
      if (device_ring_named(r) || !lock_byte(fd_, lock_device_ring(r), F_WRLCK)) continue;
      FAILPOINT(device_ring_locked);
      const bool named = device_ring_named(r);
      if (!named) store(s_.slot(slot).device_ring, r + 1, release);
      FAILPOINT(device_ring_named);
      unlock_byte(fd_, lock_device_ring(r));
      if (!named) return true;
    }
    return false;
  }
  void close_slot(u32 i) {  // its rows are still to be drained; a sweep frees it
    Slot &slot = s_.slot(i);
    FAILPOINT(slot_closing);
    store(slot.word, make_word(word_incarnation(load(slot.word, relaxed)), kClosed), release);
    unlock_byte(fd_, lock_slot(i));
  }
  bool any_free() const {  // of the rings that have been used
    for (u32 i = 0; i < s_.n_slots(); ++i)
      if (word_state(load(s_.slot(i).word, acquire)) == kFree) return true;
    return false;
  }
  bool any_without_owner(int own_slot) const {  // of the rings that somebody had
    for (u32 i = 0; i < s_.n_slots(); ++i)
      if (int(i) != own_slot && word_state(load(s_.slot(i).word, acquire)) != kFree && !byte_is_held(fd_, lock_slot(i))) return true;
    return false;
  }
  u64 state_of_all() const {  // another number when a ring was claimed, closed or swept
    u64 sum = 0;
    for (u32 i = 0, n = s_.n_slots(); i < n; ++i) sum += load(s_.slot(i).word, acquire) * (2 * i + 1);
    return sum;
  }
  u32 sweep(int own_slot) {
    u32 freed = 0, n = s_.n_slots();
    for (u32 i = 0; i < n; ++i) {
      Slot &slot = s_.slot(i);
      if (int(i) == own_slot || word_state(load(slot.word, acquire)) == kFree) continue;
      if (!drained(slot)) {
        if (word_state(load(slot.word, acquire)) == kActive && !load(slot.orphaned, relaxed) && !byte_is_held(fd_, lock_slot(i))) store(slot.orphaned, waiting_rows(i) + 1, relaxed);
        continue;
      }
      if (!lock_byte(fd_, lock_slot(i), F_WRLCK)) continue;  // its owner lives
      u64 word = load(slot.word, acquire);
      FAILPOINT(sweep_locked);
      if (word_state(word) != kFree && drained(slot) && device_work_over(load(slot.device_since, acquire), slot.device_dead, slot.owner.pid, slot.owner.start_ticks, slot.owner.pid_namespace)) {
        if (word_state(word) == kActive) {
          const u64 rows = load(slot.orphaned, relaxed);
          Chronicle(s_).died(kCollectorDied, word ^ u64(i) << 48, slot.owner.pid, slot.owner.comm, rows ? rows - 1 : 0, 0);
        }
        fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, ring_offset(i), i64(s_.ring_stride));
        store(slot.device_since, u64(0), relaxed), store(slot.device_dead, u64(0), relaxed), store(slot.device_ring, 0u, release);
        store(slot.word, make_word(word_incarnation(word), kFree), release);
        FAILPOINT(sweep_freed);
        ++freed;
      }
      unlock_byte(fd_, lock_slot(i));
    }
    return freed;
  }
  void bury_members(int own) {  // tell of each death once; the entry stays until its room is needed
    for (u32 i = 0; i < s_.header().max_members; ++i) {
      Member &m = s_.member(i);
      if (int(i) == own || word_state(load(m.word, acquire)) == kFree || load(m.roles, relaxed) & kBuried) continue;
      if (!lock_byte(fd_, lock_member(i), F_WRLCK)) continue;
      bury(m, load(m.word, acquire));
      unlock_byte(fd_, lock_member(i));
    }
  }

 private:
  void bury(Member &m, u64 word) {  // with its byte held
    const u32 roles = load(m.roles, relaxed);
    if (word_state(word) == kFree || roles & kBuried) return;
    if (!(roles & kCollector) && !owns_ring(m.owner)) Chronicle(s_).died(kProcessDied, word ^ m.owner.since_ns, m.owner.pid, m.owner.comm, 0, 0);  // a collector's slot tells of it
    store(m.roles, roles | kBuried, relaxed);
  }
  bool owns_ring(const Owner &o) const {  // killed between the claim and the word of it
    for (u32 i = 0, n = s_.n_slots(); i < n; ++i)
      if (const Slot &s = s_.slot(i); word_state(load(s.word, acquire)) == kActive && s.owner.pid == o.pid && s.owner.since_ns == o.since_ns) return true;
    return false;
  }
  u64 waiting_rows(u32 i) const {
    const CommitBlock &truth = s_.block(load(s_.control().commit_seq, acquire));
    const BlockSlot e = i < truth.n_slots ? truth.slot[i] : BlockSlot{};
    const u64 put = load(s_.slot(i).put_rows, relaxed), done = e.stored_rows + e.skipped_rows;
    return put > done ? put - done : 0;
  }
  bool device_ring_named(u32 r) const {
    for (u32 i = 0, n = s_.n_slots(); i < n; ++i)
      if (load(s_.slot(i).device_ring, acquire) == r + 1) return true;
    return false;
  }
  static bool drained(const Slot &slot) { return load(slot.head_pub, acquire) == load(slot.tail, acquire); }
  i64 ring_offset(u32 i) const { return i64(s_.header().built.rings_offset + u64(i) * s_.ring_stride); }
  int fund_ring(u32 i) {
    int e = reserve_range(fd_, u64(ring_offset(i)), s_.ring_stride);
    if (e) fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, ring_offset(i), i64(s_.ring_stride));
    return e;
  }
  Segment &s_;
  int fd_;
};

}  // namespace shmbuf
