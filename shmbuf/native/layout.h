// The bytes of a segment: the single description of them. Numbers are little-endian, offsets count from the file's start,
// nothing points. Every group of words with one mutator has its own 128 bytes (two lines: the prefetcher pulls pairs).
//
//   0        Header      4 KiB   immutable once the name exists, but for Built, immutable once Control.state == kReady
//   4 KiB    Control     4 KiB   hot words: commit_seq, reserve, cursor, wait words …
//   8 KiB    Journal     4 KiB   who died, how fast rows come, how old those drawn are: for people, nothing depends on it
//   12 KiB   PinTable    4 KiB   rows that must stay where they are
//   16 KiB   EditTable   4 KiB   which rows are being changed where they lie
//   20 KiB   config blob         msgpack: how to rebuild the handle (class, batch size, sampler …)
//   …        Member[max_members] who is attached, for people to read
//   …        Slot[max_collectors] one ring's words and its owner
//   …        CommitBlock[2]      the plan and the truth, selected by commit_seq & 1
//   ---- config_bytes: the file ends here until a schema is known; `build` grows it in place ----
//   …        schema blob         msgpack
//   …        rows                capacity × row_bytes, a row's columns side by side (one page walk and few lines a row); nothing, if
//                                they lie in device memory (Home), behind which, there, come device rings
//   …        tree                priorities, about 11.5 bytes a row (priority_tree.h)
//   …        links               streams and trajectories, about 24 bytes a row, if the buffer keeps them (links.h)
//   …        rings               max_collectors × (ring_bytes + a table of streams), sparse: memory comes with a claim
#pragma once
#include "limiter.h"
#include "memory.h"

namespace shmbuf {

inline constexpr u64 kMagic = 0x0a0d4655424d4853ull;  // "SHMBUF\r\n"
inline constexpr u32 kVersionMajor = 6, kVersionMinor = 0;
inline constexpr u64 kPage = 4096;
inline constexpr u64 kMaxId = (1ull << 61) - (1ull << 40);  // of a checkpoint's first row; links keep 61 bits, and this leaves room to go on
inline constexpr u64 kMaxRowBytes = 1ull << 30, kMaxRingBytes = 1ull << 34;

constexpr u64 align_up(u64 n, u64 to) { return (n + to - 1) / to * to; }

// ---- lock bytes: open-file-description locks far beyond the end of the file -------------------------------------
inline constexpr i64 kLockBase = i64(1) << 62;
inline constexpr i64 kLockPresence = kLockBase, kLockWriter = kLockBase + 1, kLockBuild = kLockBase + 2, kLockDestroy = kLockBase + 3;
constexpr i64 lock_slot(u32 i) { return kLockBase + 0x10000 + i; }
constexpr i64 lock_member(u32 i) { return kLockBase + 0x20000 + i; }
constexpr i64 lock_pin(u32 i) { return kLockBase + 0x30000 + i; }
constexpr i64 lock_device_ring(u32 i) { return kLockBase + 0x40000 + i; }

// ---- header ----------------------------------------------------------------------------------------------------
enum Flags : u32 { kUnnamed = 1 };
enum State : u32 { kConfig = 0, kReady = 1 };
enum Destroyed : u32 { kDestroyed = 1, kDestroying = 2 };

struct Field { u32 offset, bytes; };  // inside the row; no bytes: there is none
enum HomeKind : u32 { kHost = 0, kDeviceVmm = 1, kDeviceIpc = 2, kHomeKinds = 3 };
struct Home {                     // of the rows. All 0: this file. Else one allocation of a device: the rows, then `rings` device rings
  u32 kind, rings;
  u64 bytes;                      // of the allocation
  u8 uuid[16];                    // of the device: its index is another one in every process
};
struct Built {                    // known with the schema; guarded by its own checksum, published by Control.state
  u64 row_bytes, ring_bytes;      // row stride (multiple of 8); power of two
  u64 schema_offset, schema_bytes, rows_offset, tree_offset, links_offset, rings_offset, file_bytes;
  u64 stream_entries;             // of each collector's table of streams, a power of two; 0: no trajectories are kept
  Field ends[4], trajectory;      // a row with a non-zero byte in one of `ends` is its trajectory's last; the trajectory's id
  Home home;
  u32 n_columns, crc;             // crc over the fields above and the schema blob
};
struct Header {
  u64 magic;
  u32 version_major, version_minor;
  u32 flags, header_crc;          // crc over the header with this field 0 and Built zeroed, then the config blob
  u64 instance_id;                // random: a re-attach checks that the name still means this buffer
  u64 created_ns;                 // wall clock, for people
  u64 capacity, ring_bytes_asked; // rows; 0 = chosen with the schema
  u32 max_collectors, max_members;
  u32 uid, creator_pid;
  u64 control_offset, config_offset, config_bytes_used, members_offset, slots_offset, blocks_offset, block_bytes, config_bytes;
  alignas(512) Built built;
};
static_assert(offsetof(Header, built) == 512 && sizeof(Header) == 1024);

// ---- priorities: what the tree's leaves mean -------------------------------------------------------------------
struct Priorities {
  alignas(128) Pair formula;      // {−alpha, eps} as float64, eps negative: new rows at the live maximum; 0: none are kept
  u32 ready;                      // the tree covers all rows; stored by the writer once it has made it so         writer
  u32 highest;                    // float32: the largest leaf set since the last CLEAR, 0: none                   anyone, by CAS
  alignas(128) u64 begun, ended;  // updates: more begun than ended for a while = one died between leaf and root   anyone
  u64 healed, scrubbed_ns;        // deaths of that kind that a scrub has mended; when one began last              scrubber, by CAS
  u64 applied, stale, scrubs;     // rows                                                                          anyone
};

// Who may have copies or kernels under way that nobody has waited for yet: whoever is killed leaves it there (registry.h).
struct DeviceWork {
  u64 since_ns;                   // CLOCK_MONOTONIC; 0: none. Stored after the rest
  u64 dead_ns;                    // when it was first found that its owner is there no more; 0: it was not
  u64 pid_namespace, start_ticks;
  u32 pid, spare;
};

struct alignas(128) SharedEpoch {
  Pair word;                      // epoch.h
  u64 options;                    // hash of the options of all who share it, by CAS; 0: nobody yet
};

// ---- hot words -------------------------------------------------------------------------------------------------
struct Control {
  alignas(128) u64 commit_seq;    // THE commit: selects the block that is the truth        writer
  u64 plan_seq;                   // commit_seq + 1 while a sealed plan waits to be run     writer
  u64 done_seq;                   // redo after commit is complete up to here               writer
  alignas(128) u64 reserve;       // ids below it may be being written; never goes back     writer
  alignas(128) u64 base;          // first live id; stored before cursor                    writer
  u64 cursor;                     // ids below it are committed                             writer
  alignas(128) u64 edit_word;     // odd while an edit is being applied (edits.h)             writer
  alignas(128) u32 state;         // State                                                  builder
  u32 ready_wait;                 // futex: waits for the schema                            waiters, builder
  u32 destroyed;                  // bits of Destroyed; every put and every wait looks       destroyer
  u32 builder_pid;                // who reserves the rows, or did: for people
  u32 n_slots;                    // slots [0, n_slots) have been claimed at least once     collectors, by CAS
  alignas(128) u32 writer_wait;   // futex: the drain thread sleeps
  alignas(128) u32 data_wait;     // futex: somebody waits for rows
  alignas(128) u32 writer_pid;    // who last signed for the writer role (who has just taken it has not yet): for people
  u64 writer_pid_namespace;
  u64 writer_since_ns;            // when it was taken; 0: given back. Whoever takes it and finds another number buries the dead
  u64 takeovers, transactions, last_transaction_ns;
  u64 streams_cut;                // trajectories ended because a collector's table of streams was full
  Priorities priorities;
  LimiterWords limiter;
  SharedEpoch epochs[4];          // one for each kind of sampling without replacement that readers share
  alignas(128) DeviceWork device_work;  // the writer's own, on the rows                         writer
};
static_assert(sizeof(Control) <= kPage);

// ---- what happened ---------------------------------------------------------------------------------------------
enum EventKind : u32 { kCollectorDied = 1, kWriterDied = 2, kProcessDied = 3, kEventKinds = 4 };
struct Event {
  u64 seq;                        // its number + 1, stored last; 0 while it is being written
  u64 key;                        // of this death: one that is noticed again, because who noticed it was killed, is told once
  u64 at_ns;                      // wall clock
  u64 rows, ns;                   // journal.h
  u32 kind, pid;
  char comm[16];
};
static_assert(sizeof(Event) == 64);
struct Journal {
  static constexpr u64 kEvents = 32, kMarks = 64, kAges = 64;
  alignas(128) u64 n_events;                                     // anyone
  u64 died[kEventKinds];
  Event events[kEvents];
  struct Mark { u64 end, ns; };                                  // the cursor, CLOCK_MONOTONIC
  alignas(128) u64 n_marks;                                      // one every 32nd of the capacity: two capacities are remembered   writer
  Mark marks[kMarks];
  alignas(128) u64 batches;                                      // drawn, by all processes                                           anyone
  u64 rows, age_sum, staleness_sum, staleness_rows;
  u64 ages[kAges];                                               // rows drawn, by the bit length of their age: how many rows were stored after it
};
static_assert(sizeof(Journal) <= kPage);

// ---- who is attached -------------------------------------------------------------------------------------------
struct Owner {                    // recorded for people to read, never trusted: liveness is the lock byte
  u32 pid, uid;
  u64 start_ticks;                // /proc/PID/stat field 22
  u64 pid_namespace;              // inode
  u64 since_ns;                   // wall clock
  char comm[16];
};
struct alignas(128) Pin {
  u64 word;                       // lo + 1: ids from lo on stay; 0: none; ~0: revoked        holder of the byte; revoked by CAS
  u64 until_ns, since_ns;         // CLOCK_MONOTONIC
  Owner owner;
};
struct PinTable {
  static constexpr u32 kPins = 16;
  alignas(128) u32 used;          // pins [0, used) have been used at least once
  u64 want;                       // the cursor of what pins hold up: new ones leave it the room; 0: nothing        writer
  Pin pin[kPins];
};
static_assert(sizeof(PinTable) <= kPage);
struct EditTable {                // by slot: odd while a row of the stripe may be half new     writer
  static constexpr u32 kStripes = 1024;
  alignas(128) u32 stripe[kStripes];
};
static_assert(sizeof(EditTable) == kPage);
enum Role : u32 { kCreator = 1, kCollector = 2, kReader = 4, kDrainer = 8, kStandby = 16, kOnDevice = 32, kSteward = 64, kBuried = 1u << 31 };
enum Waits : u32 { kNothing = 0, kForRows, kForSchema, kForRoom, kForCommit, kForLimiter };
// word = incarnation << 8 | SlotState. Whoever changes it holds the lock byte.
enum SlotState : u64 { kFree = 0, kActive = 1, kClosed = 2 };
struct Member {
  u64 word;
  u32 roles, slot_plus_1;
  Owner owner;
  alignas(128) u64 sampled_batches;
  u64 sampled_rows, waiting_since_ns;
  u32 waits_for;                  // Waits; of threads of one handle the last that went to sleep
  u32 device_error;               // the driver's number for why it cannot write to the device now; 0: it can
};
static_assert(sizeof(Member) == 256);

struct Slot {
  alignas(128) u64 tail;          // the commit point of the ring: bytes before it are whole records      collector
  u64 skip_to;                    // drop_oldest asks the writer to drop ROWS before this position         collector
  u64 clear_to;                   // the end of its last CLEAR: the limiter does not hold up what is before collector
  u64 put_rows, dropped_rows, refused_rows, blocked_ns;  // cumulative over all incarnations              collector
  u64 device_since;               // as DeviceWork: on its device ring                                     collector
  u32 device_ring;                // which is its own, + 1; 0: none                                        collector, sweeper
  alignas(128) u64 head_pub;      // ≤ the committed head; the collector may reuse bytes below it          writer
  alignas(128) u32 wait;          // futex: the collector waits for room or for its commit
  alignas(128) u64 word;          // incarnation << 8 | SlotState                                          lock holder
  u64 put_at_claim, stored_at_claim, skipped_at_claim, dropped_at_claim, refused_at_claim, blocked_at_claim;  // what this incarnation started from
  u64 orphaned;                   // rows in the ring when its owner's death was noticed, + 1; 0: it was not                 sweeper
  u64 device_dead;                // as DeviceWork.dead_ns                                                                   sweeper
  Owner owner;
};
static_assert(sizeof(Slot) == 512);

// ---- plan and truth --------------------------------------------------------------------------------------------
enum PlanKind : u32 { kPlanRows = 1, kPlanClear = 2, kPlanEdit = 3 };
struct BlockSlot {
  u64 head;                       // everything before it has been consumed
  u64 rows_end;                   // of this transaction: records from skip_to to here are stored; then, up to head, damage
  u64 skip_to;                    // of this transaction: ROWS from the old head to here are dropped
  u64 stored_rows, skipped_rows;  // cumulative
};
struct CommitBlock {
  u64 seq;
  u64 cursor, base;
  u64 rows_total, write_count;    // rows ever stored; since the last emptying that reset it
  u64 skipped_total, clears, malformed;
  u32 kind, start, n_slots, next_start;  // rings are taken in the order start, start + 1, … (mod n_slots)
  u64 edited_rows, stale_edits;   // rows changed where they lay; whose row had been overwritten before
  u8 pad_[128 - 64 - 16 - 16];
  BlockSlot slot[];               // max_collectors
};
static_assert(sizeof(CommitBlock) == 128);

// ---- ring record -----------------------------------------------------------------------------------------------
enum RecordKind : u32 { kRows = 1, kClear = 2, kEdit = 3 };
enum RecordFlags : u32 {
  kKeepWriteCount = 1,            // CLEAR: empty(empty_write_count=False)
  kRestart = 8,                   // CLEAR: followed by {first id, write_count, 0, 0}: a checkpoint is to be loaded
  kStreams = 2, kLeaves = 4,      // ROWS: after the rows, a u64 each (its stream); then a float each (its priority's leaf)
  kLoaded = 16,                   // ROWS of a checkpoint: kHeadless in a stream's word says that rows before its first are missing
  kDevice = 32,                   // ROWS whose bytes lie in the device ring, at the same positions: here are only the fields that Built names
};
struct Record {                   // followed by n_rows × row_bytes (an EDIT: see edits.h); a multiple of 32 bytes, so a header never straddles the end
  u64 bytes;                      // of the whole record
  u32 kind, flags;
  u64 n_rows;
  u64 result;                     // stored by the writer before the commit: first id, or kDropped
};
inline constexpr u64 kRecordAlign = 32;
static_assert(sizeof(Record) == kRecordAlign);
inline constexpr u64 kPending = ~0ull, kDropped = ~0ull - 1;

constexpr u64 row_share(u64 row_bytes, u32 flags) { return row_bytes + (flags & kStreams ? 8 : 0) + (flags & kLeaves ? 4 : 0); }
constexpr u64 record_bytes(u64 n_rows, u64 row_bytes, u32 flags) {
  return align_up(sizeof(Record) + n_rows * row_share(row_bytes, flags), kRecordAlign);
}

struct Span { u32 offset, bytes; };  // inside the row
inline constexpr u32 kMaxSpans = 4096;
// flags of an EDIT: how many spans it has | what is asked of a row before it is changed: of the first span, whose type is named, the
// new value is to be ≥ the stored one, or, kStrictly, larger. 0: nothing.
enum Versions : u32 { kNoVersion = 0, kI8, kI16, kI32, kI64, kU8, kU16, kU32, kU64, kF32, kF64, kVersionsEnd, kStrictly = 16 };
inline constexpr u32 kSpansMask = 0xffff, kVersionShift = 16;
inline constexpr u32 kVersionBytes[] = {0, 1, 2, 4, 8, 1, 2, 4, 8, 4, 8};
constexpr u32 spans_of(u32 flags) { return flags & kSpansMask; }
constexpr bool version_known(u32 version) { return (version & ~u32(kStrictly)) < kVersionsEnd && version != u32(kStrictly); }
constexpr u64 edit_bytes(u64 n, u64 spans, u64 width) { return align_up(sizeof(Record) + spans * sizeof(Span) + n * (8 + width), kRecordAlign); }
constexpr u64 clear_bytes(u32 flags) { return sizeof(Record) + (flags & kRestart ? kRecordAlign : 0); }

// ---- the mapped segment ----------------------------------------------------------------------------------------
class DeviceRows;                 // mover.h
struct Segment {                  // addresses in this process; built by attach (handle.h), valid while mapped
  u8 *map = nullptr;
  u64 mapped_bytes = 0;
  const Header &header() const { return *reinterpret_cast<const Header *>(map); }
  Header &header() { return *reinterpret_cast<Header *>(map); }
  Control &control() const { return *reinterpret_cast<Control *>(map + header().control_offset); }
  Journal &journal() const { return *reinterpret_cast<Journal *>(map + header().control_offset + kPage); }
  PinTable &pins() const { return *reinterpret_cast<PinTable *>(map + header().control_offset + 2 * kPage); }
  EditTable &edits() const { return *reinterpret_cast<EditTable *>(map + header().control_offset + 3 * kPage); }
  Member &member(u32 i) const { return reinterpret_cast<Member *>(map + header().members_offset)[i]; }
  Slot &slot(u32 i) const { return reinterpret_cast<Slot *>(map + header().slots_offset)[i]; }
  CommitBlock &block(u64 seq) const {
    return *reinterpret_cast<CommitBlock *>(map + header().blocks_offset + (seq & 1) * header().block_bytes);
  }
  // Only after build:
  u64 capacity = 0, row_bytes = 0, ring_bytes = 0, ring_stride = 0;
  u8 *rows = nullptr, *tree = nullptr, *links = nullptr, *rings = nullptr;
  DeviceRows *device = nullptr;   // where rows lie in device memory: `rows` is null then. Whether they are mapped it knows
  // Bounded by what is mapped, whatever a damaged word says.
  u32 n_slots() const {
    u32 n = load(control().n_slots, acquire), most = header().max_collectors;
    return n < most ? n : most;
  }
  u8 *ring(u32 i) const { return rings + u64(i) * ring_stride; }  // then its table of streams
  u8 *row(u64 id) const { return rows + (id % capacity) * row_bytes; }
};
// Where rows lie, of many ids: id % capacity, without a division for those that are stored about now.
class SlotOf {
 public:
  explicit SlotOf(const Segment &s) : n_(s.capacity) {
    const u64 hi = load(s.control().cursor, relaxed);
    base_ = hi > n_ ? (hi - n_) / n_ * n_ : 0;
  }
  u64 operator()(u64 id) const {
    const u64 d = id - base_;
    return d < n_ ? d : d < 2 * n_ ? d - n_ : id % n_;
  }

 private:
  u64 n_, base_;
};

}  // namespace shmbuf
