// Birth of a segment's bytes and the checks of a stranger's. One file for life: it is published small (configuration only)
// and grown in place by the first put, so every lock byte and every attached handle stays on the same inode.
//
//   format  (nameless file) header, control, tables → Python links the name                 nobody sees half of it
//   build   BUILD byte → posix_fallocate → schema, Built → state.store(kReady, release)     killed half-way: done again
#pragma once
#include "links.h"
#include "priority_tree.h"
#include "registry.h"
#include <array>
#include <stdexcept>
#include <sys/mman.h>

namespace shmbuf {

struct FormatError : std::runtime_error { using std::runtime_error::runtime_error; };
struct MapError : std::runtime_error { using std::runtime_error::runtime_error; };

inline u32 crc32(const void *data, u64 n, u32 crc = 0) {
  static constexpr auto table = [] {
    std::array<u32, 256> t{};
    for (u32 i = 0; i < 256; ++i) {
      u32 c = i;
      for (int k = 0; k < 8; ++k) c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  crc = ~crc;
  for (auto *p = static_cast<const u8 *>(data); n; --n, ++p) crc = table[(crc ^ *p) & 0xff] ^ (crc >> 8);
  return ~crc;
}

struct ConfigLayout {
  u64 control, config, members, slots, blocks, block_bytes, bytes;
  ConfigLayout(u32 max_collectors, u32 max_members, u64 config_bytes) {
    control = kPage;
    config = control + 4 * kPage;  // then journal, pins and edits
    members = align_up(config + config_bytes, kPage);
    slots = members + u64(max_members) * sizeof(Member);
    blocks = align_up(slots + u64(max_collectors) * sizeof(Slot), kPage);
    block_bytes = align_up(sizeof(CommitBlock) + u64(max_collectors) * sizeof(BlockSlot), 128);
    bytes = align_up(blocks + 2 * block_bytes, kPage);
  }
};
// ring_bytes 0: 4 MiB, or the power of two that holds eight rows, up to 64 MiB, but never less than two rows.
inline u64 choose_ring_bytes(u64 asked, u64 row_bytes) {
  u64 least = 2 * record_bytes(1, row_bytes, kStreams | kLeaves), bytes = 4096;
  u64 wish = asked ? asked : (8 * row_bytes > (4u << 20) ? (8 * row_bytes < (64u << 20) ? 8 * row_bytes : 64u << 20) : 4u << 20);
  if (wish < least) wish = least;
  while (bytes < wish) bytes *= 2;
  return bytes;
}
// A sixteenth of the ring for the table of streams: 16,384 of them beside 4 MiB.
// Half as many are promised to stay open at once.
constexpr u64 choose_stream_entries(u64 ring_bytes) { return std::max<u64>(ring_bytes / 16 / sizeof(Stream), 256); }
constexpr u64 stride_of(u64 ring_bytes, u64 stream_entries) { return align_up(ring_bytes + stream_entries * sizeof(Stream), kPage); }
struct BuildLayout {
  u64 schema, rows, tree, links, rings, ring_bytes, ring_stride, stream_entries, file;
  BuildLayout(const Header &h, u64 schema_bytes, u64 row_bytes, bool trajectories, bool device = false) {
    ring_bytes = choose_ring_bytes(h.ring_bytes_asked, row_bytes);
    stream_entries = trajectories ? choose_stream_entries(ring_bytes) : 0;
    ring_stride = stride_of(ring_bytes, stream_entries);
    schema = h.config_bytes;
    rows = align_up(schema + schema_bytes, kPage);
    tree = align_up(rows + (device ? 0 : h.capacity * row_bytes), kPage);
    links = align_up(tree + PriorityTree::bytes(h.capacity), kPage);
    rings = align_up(links + (trajectories ? Links::bytes(h.capacity) : 0), kPage);
    file = rings + u64(h.max_collectors) * ring_stride;
  }
};

// Of a device's allocation: the rows, then so many rings.
inline constexpr u64 kMaxDeviceRows = 0xffffffffull;  // kernels count rows in 32 bits
constexpr u64 device_rings_at(u64 capacity, u64 row_bytes) { return align_up(capacity * row_bytes, kPage); }
constexpr u64 device_bytes(u64 capacity, u64 row_bytes, u32 rings, u64 ring_bytes) { return device_rings_at(capacity, row_bytes) + rings * ring_bytes; }
inline bool has_place(const Home &home, const Header &h, u64 row_bytes, u64 ring_bytes) {  // for all that is to lie there
  if (home.kind == kHost) return true;
  return home.kind < kHomeKinds && h.capacity <= kMaxDeviceRows && home.rings <= h.max_collectors && home.bytes < 1ull << 62 &&
         home.bytes >= device_bytes(h.capacity, row_bytes, home.rings, ring_bytes);
}

inline u32 header_crc(const u8 *map) {
  Header h;
  std::memcpy(static_cast<void *>(&h), map, sizeof h);
  h.header_crc = 0;
  h.magic = 0;  // stored last, so not part of it
  std::memset(static_cast<void *>(&h.built), 0, sizeof h.built);
  return crc32(map + h.config_offset, h.config_bytes_used, crc32(&h, sizeof h));
}
inline u32 built_crc(Built b, const u8 *schema) {
  b.crc = 0;
  return crc32(schema, b.schema_bytes, crc32(&b, sizeof b));
}

// Write a configuration segment into a mapping of ConfigLayout.bytes zero bytes. Fields not derived here are in `h`.
inline void format(u8 *map, Header h, const u8 *config, u64 config_bytes) {
  ConfigLayout at(h.max_collectors, h.max_members, config_bytes);
  h.magic = 0, h.version_major = kVersionMajor, h.version_minor = kVersionMinor, h.header_crc = 0;
  h.control_offset = at.control, h.config_offset = at.config, h.config_bytes_used = config_bytes, h.members_offset = at.members;
  h.slots_offset = at.slots, h.blocks_offset = at.blocks, h.block_bytes = at.block_bytes, h.config_bytes = at.bytes;
  std::memcpy(map, static_cast<void *>(&h), sizeof h);
  std::memcpy(map + at.config, config, config_bytes);
  auto &w = *reinterpret_cast<Header *>(map);
  w.header_crc = header_crc(map);
  store(w.magic, kMagic, release);
}

// Everything a mapped header claims, checked against itself and the file before anything else is believed.
inline void check_header(const u8 *map, u64 mapped) {
  auto bad = [](const std::string &what) { throw FormatError(what); };
  if (mapped < 2 * kPage) bad("the file has " + std::to_string(mapped) + " bytes, less than a header");
  const Header &h = *reinterpret_cast<const Header *>(map);
  if (load(h.magic, acquire) != kMagic) bad("magic: this is not a shmbuf segment");
  if (h.version_major != kVersionMajor)
    bad("version: the segment has layout " + std::to_string(h.version_major) + ", this shmbuf reads " + std::to_string(kVersionMajor));
  if (!h.capacity || h.capacity > (1ull << 48)) bad("capacity: " + std::to_string(h.capacity));
  if (h.ring_bytes_asked > kMaxRingBytes) bad("ring_bytes_asked: " + std::to_string(h.ring_bytes_asked));
  if (!h.max_collectors || h.max_collectors > 65535) bad("max_collectors: " + std::to_string(h.max_collectors));
  if (!h.max_members || h.max_members > 65535) bad("max_members: " + std::to_string(h.max_members));
  if (h.config_bytes_used > mapped) bad("config_bytes_used: " + std::to_string(h.config_bytes_used));
  ConfigLayout at(h.max_collectors, h.max_members, h.config_bytes_used);
  if (h.control_offset != at.control || h.config_offset != at.config || h.members_offset != at.members || h.slots_offset != at.slots ||
      h.blocks_offset != at.blocks || h.block_bytes != at.block_bytes || h.config_bytes != at.bytes)
    bad("offsets: the header's regions are not where its own sizes put them");
  if (mapped < at.bytes) bad("the file has " + std::to_string(mapped) + " bytes, its header needs " + std::to_string(at.bytes));
  if (h.header_crc != header_crc(map)) bad("header_crc: the header is damaged");
}
inline void check_built(const Header &h, const u8 *file, u64 file_bytes) {
  auto bad = [](const std::string &what) { throw FormatError(what); };
  const Built &b = h.built;
  if (!b.row_bytes || b.row_bytes % 8 || b.row_bytes > kMaxRowBytes) bad("row_bytes: " + std::to_string(b.row_bytes));
  if (b.ring_bytes & (b.ring_bytes - 1) || b.ring_bytes < 2 * record_bytes(1, b.row_bytes, kStreams | kLeaves) || b.ring_bytes > kMaxRingBytes)
    bad("ring_bytes: " + std::to_string(b.ring_bytes));
  if (b.schema_bytes > file_bytes || h.capacity > (1ull << 62) / b.row_bytes) bad("schema_bytes or capacity: larger than the file");
  if (!has_place(b.home, h, b.row_bytes, b.ring_bytes))
    bad("device memory: kind " + std::to_string(b.home.kind) + ", " + std::to_string(b.home.bytes) + " bytes, " + std::to_string(b.home.rings) + " rings");
  BuildLayout at(h, b.schema_bytes, b.row_bytes, b.stream_entries != 0, b.home.kind != kHost);
  if (b.schema_offset != at.schema || b.rows_offset != at.rows || b.tree_offset != at.tree || b.links_offset != at.links ||
      b.rings_offset != at.rings || b.file_bytes != at.file || b.ring_bytes != at.ring_bytes || b.stream_entries != at.stream_entries)
    bad("offsets: the built regions are not where their sizes put them");
  for (const Field &f : {b.ends[0], b.ends[1], b.ends[2], b.ends[3], b.trajectory})
    if (u64(f.offset) + f.bytes > b.row_bytes) bad("ends, trajectory: outside the row");
  if (file_bytes != b.file_bytes)
    bad("the file has " + std::to_string(file_bytes) + " bytes, its header says " + std::to_string(b.file_bytes));
  if (b.crc != built_crc(b, file + b.schema_offset)) bad("crc: the schema is damaged");
}

inline void describe(Segment &s, u8 *file) {  // where the built regions of a checked file lie in this process
  const Header &h = s.header();
  const Built &b = h.built;
  s.capacity = h.capacity, s.row_bytes = b.row_bytes, s.ring_bytes = b.ring_bytes;
  s.ring_stride = stride_of(b.ring_bytes, b.stream_entries);
  s.rows = b.home.kind == kHost ? file + b.rows_offset : nullptr, s.tree = file + b.tree_offset, s.links = b.stream_entries ? file + b.links_offset : nullptr;
  s.rings = file + b.rings_offset;
}

inline u64 file_size(int fd) {
  struct stat st;
  if (fstat(fd, &st)) throw std::runtime_error(std::string("fstat: ") + std::strerror(errno));
  return u64(st.st_size);
}
inline u8 *map_file(int fd, u64 bytes, bool readonly) {
  void *p = mmap(nullptr, bytes, readonly ? PROT_READ : PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) throw MapError("mmap of " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  return static_cast<u8 *>(p);
}

// The rows of a built segment, mapped once more for reading, so that a view of them outlives the handle: of the same description,
// which carries no lock.
inline u8 *map_rows(const Segment &s, u64 &bytes) {
  bytes = s.capacity * s.row_bytes;
  const u64 pages = align_up(bytes, kPage);
  void *p = mremap(s.rows, 0, pages, MREMAP_MAYMOVE);
  if (p == MAP_FAILED) throw MapError("mapping " + std::to_string(bytes) + " bytes of rows once more: " + std::strerror(errno));
  if (mprotect(p, pages, PROT_READ)) {
    const int e = errno;
    munmap(p, pages);
    throw MapError(std::string("mprotect: ") + std::strerror(e));
  }
  return static_cast<u8 *>(p);
}

// The memory of a schema, reserved and described; call with the BUILD byte held and state still kConfig. 0 or an errno, and
// then the file is as small as before.
struct RowShape {
  u64 row_bytes;
  u32 n_columns;
  bool trajectories;  // keep links; `ends` and `trajectory` as in Built
  Field ends[4], trajectory;
  Home home = {};  // kind kHost: in the segment
};
inline int build(int fd, Segment &s, const u8 *schema, u64 schema_bytes, const RowShape &row) {
  Header &h = s.header();
  BuildLayout at(h, schema_bytes, row.row_bytes, row.trajectories, row.home.kind != kHost);
  if (!has_place(row.home, h, row.row_bytes, at.ring_bytes)) return EINVAL;
  FAILPOINT(build_locked);
  if (ftruncate(fd, i64(h.config_bytes))) return errno;  // what a builder killed half-way left behind
  int e = reserve_range(fd, h.config_bytes, at.rings - h.config_bytes);
  if (!e && ftruncate(fd, i64(at.file))) e = errno;  // rings stay sparse
  if (!e) {  // what this process cannot map, it must not publish
    void *whole = mmap(nullptr, at.file, PROT_READ, MAP_SHARED, fd, 0);
    if (whole == MAP_FAILED) e = errno;
    else munmap(whole, at.file);
  }
  if (!e) FAILPOINT(build_grown);
  for (u64 done = 0; !e && done < schema_bytes;) {  // pwrite: this mapping ends at config_bytes
    ssize_t n = pwrite(fd, schema + done, schema_bytes - done, i64(at.schema + done));
    if (n > 0) done += u64(n);
    else e = n < 0 ? errno : EIO;
  }
  if (e) {
    if (ftruncate(fd, i64(h.config_bytes))) return errno;
    return e;
  }
  Built b{};
  b.row_bytes = row.row_bytes, b.ring_bytes = at.ring_bytes, b.schema_offset = at.schema, b.schema_bytes = schema_bytes;
  b.rows_offset = at.rows, b.tree_offset = at.tree, b.links_offset = at.links, b.rings_offset = at.rings, b.file_bytes = at.file;
  b.stream_entries = at.stream_entries, b.n_columns = row.n_columns, b.trajectory = row.trajectory, b.home = row.home;
  std::copy(row.ends, row.ends + 4, b.ends);
  b.crc = built_crc(b, schema);
  std::memcpy(static_cast<void *>(&h.built), &b, sizeof b);
  FAILPOINT(build_described);
  store(s.control().state, u32(kReady), release);  // pairs with refresh() in handle.h
  FAILPOINT(build_ready);
  fence(seq_cst);
  wake_if_armed(s.control().ready_wait);
  return 0;
}

}  // namespace shmbuf
