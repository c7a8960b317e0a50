// Where rows lie, and who moves their bytes: HostMover in this file's memory, DeviceMover in a device's. One transaction and one gather
// use either, through the same few calls, each of which is complete when settle() has returned:
//
//   writer   begin → copy, edit → settle                          ring (or device ring) → rows; with the commit after it
//   planner  each_field                                          what versions are compared with
//   reader   gather.h: copies, then looks whether they were good
//
// Device rows and device rings are one allocation. A collector's device ring has the same byte offsets as its ring in the segment, which
// keeps the headers, streams, priorities and the fields that links are made from. Its bytes are all there (waited for, not only
// ordered) before `tail` is stored, and the rows before `commit_seq` is: so no event is shared between processes, and none can be lost
// with one.
//
// A successor runs a sealed plan again, and its copies write the same bytes to the same slots. What a dead one had under way may land
// once more; before anything else is done with these slots, or with the ring that it reads, whoever comes waits until that is over
// (registry.h: device_work_over).
#pragma once
#include "edits.h"
#include "kernels.h"
#include "registry.h"
#include "segment.h"
#include <memory>
#include <optional>
#include <unordered_set>

namespace shmbuf {

// The rows of one buffer in device memory, as this handle has them mapped, or not.
class DeviceRows {
 public:
  explicit DeviceRows(const Segment &s) : s_(s) {}
  ~DeviceRows() { unmap(); }
  DeviceRows(const DeviceRows &) = delete;

  // Of the allocation; the context is the caller's, and outlives the mapping. told: where others see why nothing can be written, or null.
  void map(u64 address, u64 bytes, u64 context, u32 *told) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (state_.load(relaxed) & kMapped) throw DeviceError("the rows are mapped already: unmap_rows() first");
    const Built &b = s_.header().built;
    const u64 need = device_bytes(s_.capacity, s_.row_bytes, b.home.rings, s_.ring_bytes);
    if (!address || address % 256 || bytes < need)
      throw DeviceError("mapping of " + std::to_string(bytes) + " bytes at " + std::to_string(address) + ": the rows and " + std::to_string(b.home.rings) + " device rings take " + std::to_string(need));
    if (cuda::Driver::forked()) throw DeviceError(forked_text());
    driver_ = &cuda::Driver::get();
    context_ = reinterpret_cast<cuda::Context>(context);
    cuda::Current current(*driver_, context_);
    kernels_ = &Kernels::of(*driver_, context_);
    writers_ = std::make_unique<cuda::Lane>(*driver_);
    writers_->host(std::clamp(s_.row_bytes + 512, kStaged, kKept)), writers_->device(kStaged / 2);
    address_ = address, error_.clear(), broken_.store(false, relaxed), retry_at_.store(0, relaxed), patience_ = 0, told_ = told;
    registered_.assign(s_.header().max_collectors, 0);
    state_.fetch_or(kMapped, release);
  }
  void unmap() {  // when nobody uses them any more; the memory itself is the caller's
    u32 was = state_.fetch_and(~kMapped, acquire);
    if (!(was & kMapped)) return;
    while (state_.load(acquire)) usleep(200);
    std::lock_guard<std::mutex> guard(mutex_);
    std::optional<cuda::Current> current;
    try {
      current.emplace(*driver_, context_);
      writers_.reset(), lanes_.clear();
      for (u32 i = 0; i < registered_.size(); ++i)
        if (registered_[i] & kPinned) driver_->host_unregister(s_.ring(i));
    } catch (const DeviceError &) {  // the context is gone, and all of these with it
      (void)writers_.release();
      for (auto &lane : lanes_) (void)lane.release();
    }
    lanes_.clear(), registered_.clear();
    if (told_) store(*told_, 0u, relaxed);
    address_ = 0;
  }
  void after_fork() {  // async-signal-safe: nothing of the driver's may be touched in the child
    state_.store(0, relaxed);
    new (&mutex_) std::mutex;
    new (&lanes_) std::vector<std::unique_ptr<cuda::Lane>>;  // leaked
    (void)writers_.release();
  }
  bool mapped() const { return state_.load(acquire) & kMapped; }
  u64 address() const { return mapped() ? address_ : 0; }
  // Whether this handle may write now. After an error it does not for a while, and never again if its context is of no more use: the
  // plan stays sealed for others, who may have a device that works.
  bool writes() const {
    if (!mapped() || broken_.load(relaxed)) return false;
    const u64 at = retry_at_.load(relaxed);
    return !at || now_ns() >= at;
  }
  void failed(const DeviceError &e) {
    std::lock_guard<std::mutex> guard(mutex_);
    error_ = e.what();
    if (told_) store(*told_, u32(e.code ? e.code : kUnknown), relaxed);
    if (cuda::is_final(e.code)) {
      error_ += ": this process's context is of no more use, begin it anew";
      return broken_.store(true, relaxed);
    }
    patience_ = std::clamp<u64>(2 * patience_, kSoon, kLate);
    retry_at_.store(now_ns() + patience_, relaxed);
  }
  void worked() {
    if (!retry_at_.load(relaxed)) return;
    std::lock_guard<std::mutex> guard(mutex_);
    error_.clear(), patience_ = 0, retry_at_.store(0, relaxed);
    if (told_) store(*told_, 0u, relaxed);
  }
  // Whether rows have been edited since this handle looked last: then who gathers had better look at each row's stripe from the start.
  bool edits_moved(u64 word) { return edits_seen_.exchange(word, relaxed) != word; }
  // How often device work was begun here of which nobody knows whether it is over: the words that tell of it stay as they are.
  u64 unsettled() const { return unsettled_.load(acquire); }
  std::string error() {
    std::lock_guard<std::mutex> guard(mutex_);
    return error_;
  }

  bool begin_use() {  // unmap() waits for end_use()
    if (state_.fetch_add(1, acquire) & kMapped) return true;
    end_use();
    return false;
  }
  void end_use() { state_.fetch_sub(1, release); }
  std::string why_not() const {
    if (cuda::Driver::forked()) return forked_text();
    return "the rows lie in device memory, which this handle does not map: it can put from the host, and nothing else";
  }

 private:
  friend class DeviceMover;
  static constexpr u32 kMapped = 1u << 31;
  static constexpr u64 kPinned = 1;
  static constexpr u64 kStaged = 8u << 20;  // bytes that go through pinned memory at a time
  static constexpr u64 kKept = 64u << 20, kLanes = 4;  // staging of a lane, and lanes, that are kept for the next one
  static constexpr int kUnknown = 999;
  static constexpr u64 kSoon = 10'000'000, kLate = 1'000'000'000;  // from an error to the next try
  static std::string forked_text() {
    return "the rows lie in device memory, and CUDA does not survive fork(): this process was forked by one that had used the device. Start it with "
           "multiprocessing's \"spawn\" (or \"forkserver\", before CUDA is used)";
  }
  // Read by DMA where it lies. A swept ring gets other memory, so it is registered anew for each incarnation; where that is not to be had
  // the driver copies by itself.
  void pin_ring(u32 i) {
    const u64 now = word_incarnation(load(s_.slot(i).word, acquire)) << 2 | 2;  // not FREE while it holds records
    if ((registered_[i] & ~kPinned) == now) return;
    if (registered_[i] & kPinned) driver_->host_unregister(s_.ring(i));
    registered_[i] = now | (driver_->host_register(s_.ring(i), s_.ring_bytes, 0) == 0 ? kPinned : 0);
  }
  // Under Current. The writer's is kept for him: he needs no memory of the device later, when there may be none.
  std::unique_ptr<cuda::Lane> take_lane(bool writers) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (writers && writers_) return std::move(writers_);
      if (!writers && !lanes_.empty()) {
        auto lane = std::move(lanes_.back());
        lanes_.pop_back();
        return lane;
      }
    }
    return std::make_unique<cuda::Lane>(*driver_);
  }
  void give_lane(std::unique_ptr<cuda::Lane> lane, bool writers) {
    if (!lane->quiet()) {  // the end of our knowledge of it: never used again
      unsettled_.fetch_add(1, release);
      return;
    }
    if (!writers) lane->shrink(kKept);
    std::lock_guard<std::mutex> guard(mutex_);
    if (writers) writers_ = std::move(lane);
    else if (lanes_.size() < kLanes) lanes_.push_back(std::move(lane));
  }

  const Segment &s_;
  std::atomic<u32> state_{0};  // mapped | how many use it
  std::atomic<bool> broken_{false};
  std::atomic<u64> retry_at_{0}, unsettled_{0}, edits_seen_{0};
  u64 patience_ = 0;
  u32 *told_ = nullptr;
  const cuda::Driver *driver_ = nullptr;
  cuda::Context context_ = nullptr;
  const Kernels *kernels_ = nullptr;
  u64 address_ = 0;
  std::vector<u64> registered_;  // by ring, of the role's holder: incarnation << 2 | 2 | pinned
  std::mutex mutex_;
  std::vector<std::unique_ptr<cuda::Lane>> lanes_;  // that nobody works with now
  std::unique_ptr<cuda::Lane> writers_;             // the same, of the role's holder
  std::string error_;
};

struct HostMover {
  const Segment &s;
  explicit HostMover(const Segment &segment) : s(segment) {}
  using Ring = const u8 *;
  Ring ring(u32 i, bool) const { return s.ring(i); }
  void begin(const Owner &) {}
  void copy(u64 to, Ring from, u64 o, u64 n) { copy_bytes(s.rows + to, from + o, n); }
  void settle() {}
  void each_field(u64 n, const u64 *ids, u64 offset, u64, auto use) {
    for (u64 j = 0; j < n; ++j) use(j, s.row(ids[j]) + offset);
  }
  u64 edit(const CommitBlock &now, EditRecord &e) { return apply_edits(s, now, e); }
};

class DeviceMover {
 public:
  static constexpr u64 kStaged = DeviceRows::kStaged;
  static constexpr u64 kShort = 48u << 10;

  explicit DeviceMover(DeviceRows &rows, bool writers = false) : d_(rows), s_(rows.s_), writers_(writers) {
    if (!d_.begin_use()) throw DeviceError(d_.why_not(), true);
    try {
      current_.emplace(*d_.driver_, d_.context_);
      lane_ = d_.take_lane(writers_);
    } catch (...) {
      current_.reset();
      d_.end_use();
      throw;
    }
  }
  ~DeviceMover() {
    d_.give_lane(std::move(lane_), writers_);
    current_.reset();
    d_.end_use();
  }
  DeviceMover(const DeviceMover &) = delete;
  cuda::Lane &lane() { return *lane_; }
  const Kernels &kernels() const { return *d_.kernels_; }

  // ---- the writer ----
  struct Ring {
    u32 index;
    u64 device;  // 0: the bytes are in the segment
  };
  Ring ring(u32 i, bool on_device) const {
    return {i, on_device ? device_ring(std::min(load(s_.slot(i).device_ring, relaxed), s_.header().built.home.rings) - 1) : 0};
  }
  void begin(const Owner &me) {
    DeviceWork &w = s_.control().device_work;
    store(w.dead_ns, u64(0), relaxed);
    w.pid = me.pid, w.start_ticks = me.start_ticks, w.pid_namespace = me.pid_namespace;
    store(w.since_ns, now_ns(), release);
  }
  // What is short is collected first: rows of many small records follow each other in storage, and a copy of the driver's costs as much as
  // some 50 KB do here.
  void copy(u64 to, Ring from, u64 o, u64 n) {
    if (from.device) {
      send();
      check(d().device_to_device(d_.address_ + to, from.device + o, n, lane_->stream), "cuMemcpyDtoDAsync");
    } else if (n > kShort) {
      send();
      d_.pin_ring(from.index);
      check(d().host_to_device(d_.address_ + to, s_.ring(from.index) + o, n, lane_->stream), "cuMemcpyHtoDAsync");
    } else {
      if (short_ && to != short_to_ + short_) send();
      if (sent_ + short_ + n > kStaged) {
        send();
        lane_->wait();  // before these bytes are used again
        sent_ = 0;
      }
      if (!short_) short_to_ = to;
      copy_bytes(lane_->host(kStaged) + sent_ + short_, s_.ring(from.index) + o, n);
      short_ += n;
    }
  }
  void settle() {
    send();
    FAILPOINT(device_copy_begun);
    lane_->wait();
    sent_ = 0;
    FAILPOINT(device_copied);
    store(s_.control().device_work.since_ns, u64(0), release);
    d_.worked();
  }

  // ---- edits ----
  static u64 rows_staged(u64 bytes) { return std::max<u64>(1, (kStaged - 256) / (bytes + 8)); }  // that many bytes of each, and its slot
  // use(j, where the stored bytes are) for each row, a part at a time.
  void each_field(u64 n, const u64 *ids, u64 offset, u64 bytes, auto use) {
    const u64 part = rows_staged(bytes);
    for (u64 from = 0; from < n; from += part) {
      const u64 k = std::min(part, n - from);
      u8 *out = stage_slots(k, k * bytes, [&](u64 j) { return ids[from + j]; });
      const Packed p{offset, bytes, reinterpret_cast<u64>(out), bytes};
      kernels().gather(lane_->stream, rows(), k, &p, 1);
      lane_->wait();
      for (u64 j = 0; j < k; ++j) use(from + j, out + j * bytes);
    }
  }
  // As apply_edits. Of a row that a record names twice the last bytes stay; a kernel has no order, so it gets these alone.
  u64 edit(const CommitBlock &now, EditRecord &e) {
    std::vector<u32> which;
    std::unordered_set<u64> seen;
    u64 applied = 0;
    for (u64 j = e.n; j--;) {
      const u64 id = e.id(j);
      if (is_live(now, s_.capacity, id)) {
        ++applied;
        if (seen.insert(id).second) which.push_back(u32(j));
      } else if (id != EditRecord::kOlder) {
        e.mark(j, EditRecord::kStale);
      }
    }
    std::vector<Packed> spans;
    u64 width = 0;
    for (u32 i = 0; i < e.n_spans; ++i) {
      const Span s = e.span(i);
      spans.push_back({s.offset, s.bytes, width, 0}), width += s.bytes;
    }
#ifdef SHMBUF_FAILPOINTS
    std::vector<Packed> halves = spans;
    for (Packed &p : halves) p.bytes /= 2;
    put_edit(e, which, halves, width);  // die with half a value in place
    lane_->wait();
    FAILPOINT(edit_half);
#endif
    put_edit(e, which, spans, width);
    return applied;
  }

  // ---- a collector ----
  // Packed device columns to its device ring, from position `at` on; and from there the fields that links are made from to its ring.
  void fill_ring(u32 slot, u32 ring, u64 at, u64 n, const Packed *columns, u64 n_columns, cuda::Stream after) {
    Kernels::Rows rows{device_ring(ring), at & (s_.ring_bytes - 1), s_.ring_bytes - 1, 0, 0, s_.row_bytes};
    lane_->after(after);
    kernels().scatter(lane_->stream, rows, n, columns, n_columns);
    FAILPOINT(device_put_begun);
    std::vector<Packed> fields;
    u64 width = 0;
    const Built &b = s_.header().built;
    for (const Field &f : {b.ends[0], b.ends[1], b.ends[2], b.ends[3], b.trajectory})
      if (f.bytes) fields.push_back({f.offset, f.bytes, 0, f.bytes}), width += f.bytes + 16;
    const u64 part = std::max<u64>(1, kStaged / std::max<u64>(width, 1));
    for (u64 from = 0; from < n && !fields.empty(); from += part, rows.at += part * s_.row_bytes, at += part * s_.row_bytes) {
      const u64 k = std::min(part, n - from);
      u8 *to = lane_->host(k * width);
      for (Packed &f : fields) f.address = reinterpret_cast<u64>(to), to += align_up(k * f.bytes, 16);
      kernels().gather(lane_->stream, rows, k, fields.data(), fields.size());
      lane_->wait();
      for (const Packed &f : fields)
        for (u64 j = 0; j < k; ++j) ring_write(s_.ring(slot), s_.ring_bytes, at + j * s_.row_bytes + f.offset, reinterpret_cast<const u8 *>(f.address) + j * f.bytes, f.bytes);
    }
    if (fields.empty()) lane_->wait();
    FAILPOINT(device_put_copied);
  }

  // ---- a reader ----
  Kernels::Rows rows() const { return {d_.address_, 0, ~0ull, slots_, places_, s_.row_bytes}; }
  u64 device_ring(u32 r) const { return d_.address_ + device_rings_at(s_.capacity, s_.row_bytes) + r * s_.ring_bytes; }
  // Slots of n rows on their way to the device; returns `bytes` of pinned memory besides them.
  u8 *stage_slots(u64 n, u64 bytes, auto id) { return stage(n, bytes, id, [](u64) { return 0u; }, false); }
  u8 *stage(u64 n, u64 bytes, auto id, auto place, bool with_places) {
    const u64 words = align_up(n * 4, 256), all = with_places ? 2 * words : words;
    u8 *host = lane_->host(all + bytes);
    auto *slot = reinterpret_cast<u32 *>(host), *at = reinterpret_cast<u32 *>(host + words);
    const SlotOf slot_of(s_);
    for (u64 j = 0; j < n; ++j) slot[j] = u32(slot_of(id(j)));
    staged_ = slot;
    if (with_places)
      for (u64 j = 0; j < n; ++j) at[j] = place(j);
    slots_ = lane_->device(all), places_ = with_places ? slots_ + words : 0;
    check(d().host_to_device(slots_, host, all, lane_->stream), "cuMemcpyHtoDAsync");
    return host + all;
  }
  u32 staged(u64 j) const { return staged_[j]; }  // the slots of the last stage()
  void check(cuda::Result r, const char *what) const { d_.driver_->check(r, what); }
  const cuda::Driver &d() const { return *d_.driver_; }

 private:
  void send() {
    if (!short_) return;
    check(d().host_to_device(d_.address_ + short_to_, lane_->host(kStaged) + sent_, short_, lane_->stream), "cuMemcpyHtoDAsync");
    sent_ += short_, short_ = 0;
  }
  void put_edit(EditRecord &e, const std::vector<u32> &which, const std::vector<Packed> &spans, u64 width) {
    const u64 part = rows_staged(width);
    std::vector<Packed> columns = spans;
    for (u64 from = 0; from < which.size(); from += part) {
      const u64 k = std::min(part, u64(which.size()) - from);
      if (from) lane_->wait();  // the last part may still be read
      u8 *bytes = stage_slots(k, k * width, [&](u64 j) { return e.id(which[from + j]); });
      for (u64 j = 0; j < k; ++j) e.read(bytes + j * width, e.bytes_of(which[from + j]), width);
      for (size_t i = 0; i < spans.size(); ++i) columns[i].address = reinterpret_cast<u64>(bytes) + spans[i].address, columns[i].stride = width;
      kernels().scatter(lane_->stream, rows(), k, columns.data(), columns.size());
    }
  }

  DeviceRows &d_;
  const Segment &s_;
  const bool writers_;
  std::optional<cuda::Current> current_;
  std::unique_ptr<cuda::Lane> lane_;
  u64 slots_ = 0, places_ = 0;  // of what was staged last
  const u32 *staged_ = nullptr;
  u64 sent_ = 0, short_ = 0, short_to_ = 0;  // bytes of pinned memory under way; collected behind them; where to
};

}  // namespace shmbuf
