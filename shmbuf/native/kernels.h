// The two kernels: rows, one after another or by their slots, to packed columns and back. PTX, made here as text and compiled by the
// driver for whatever device there is (sm_70 and later), so nothing of CUDA is needed to build this.
//
//   for each column c, row j < n, chunk k < c.chunks (of w = 1 << c.shift bytes: the widest that everything is aligned to)
//     row    base + ((slots ? slots[j] * row_bytes : at + j * row_bytes) + c.offset + k * w & mask)      mask: a ring goes round
//     other  c.address + (places ? places[j] : j) * c.stride + k * w
//   shmbuf_gather: row → other; shmbuf_scatter: other → row
//
// A thread moves four chunks, a block's stride apart, all loads before the first store: neighbours in a warp have neighbouring chunks of
// a row, and then of the next one, so both sides are coalesced however small a column is. A block belongs to one column (first_block).
#pragma once
#include "device.h"
#include <map>

namespace shmbuf {

struct KernelColumn {
  u64 address;
  u32 offset, chunks, shift, stride, first_block, spare;
};
struct KernelMove {  // the one parameter of both
  static constexpr u32 kColumns = 64;
  u64 base, at, mask, slots, places, row_bytes;
  u32 n, n_columns;
  KernelColumn column[kColumns];
};
static_assert(sizeof(KernelColumn) == 32 && offsetof(KernelMove, column) == 56 && sizeof(KernelMove) == 2104);

inline constexpr u32 kKernelThreads = 256, kKernelChunks = 4;  // a block's threads; of each thread

class KernelText {
 public:
  static std::string make() { return std::string(".version 7.0\n.target sm_70\n.address_size 64\n") + KernelText("shmbuf_gather", true).text_ + KernelText("shmbuf_scatter", false).text_; }

 private:
  struct Width { u32 shift; const char *type, *registers; };
  static constexpr Width kWidths[] = {{4, "v2.b64", "{%wA, %wB}"}, {3, "b64", "%wA"}, {2, "b32", "%vA"}, {1, "b16", "%hA"}, {0, "b8", "%hA"}};

  KernelText(const std::string &name, bool gather) {
    text_ = ".visible .entry " + name + "(.param .align 8 .b8 m[2104])\n.maxntid 256, 1, 1\n{\n"
            "  .reg .pred %p<4>, %in<4>, %slots, %places;\n  .reg .b16 %h<4>;\n  .reg .b32 %r<12>, %v<4>, %n, %columns, %block, %offset, %chunks, %shift, %stride, %first, %total;\n"
            "  .reg .b64 %d<8>, %from<4>, %to<4>, %w<8>, %base, %at, %mask, %slot, %place, %bytes, %address, %off, %step;\n"
            "  ld.param.u64 %base, [m];\n  ld.param.u64 %at, [m+8];\n  ld.param.u64 %mask, [m+16];\n  ld.param.u64 %slot, [m+24];\n  ld.param.u64 %place, [m+32];\n"
            "  ld.param.u64 %bytes, [m+40];\n  ld.param.u32 %n, [m+48];\n  ld.param.u32 %columns, [m+52];\n  setp.ne.u64 %slots, %slot, 0;\n  setp.ne.u64 %places, %place, 0;\n"
            "  mov.u32 %block, %ctaid.x;\n  mov.u64 %d0, m;\n  add.u64 %d0, %d0, 56;\n  mov.u32 %r0, 1;\n"
            "find:  // the last column whose first block is not after this one\n"
            "  setp.ge.u32 %p0, %r0, %columns;\n  @%p0 bra found;\n  ld.param.u32 %r1, [%d0+56];\n  setp.gt.u32 %p0, %r1, %block;\n  @%p0 bra found;\n"
            "  add.u64 %d0, %d0, 32;\n  add.u32 %r0, %r0, 1;\n  bra find;\n"
            "found:\n"
            "  ld.param.u64 %address, [%d0];\n  ld.param.u32 %offset, [%d0+8];\n  ld.param.u32 %chunks, [%d0+12];\n  ld.param.u32 %shift, [%d0+16];\n"
            "  ld.param.u32 %stride, [%d0+20];\n  ld.param.u32 %r1, [%d0+24];\n  sub.u32 %r1, %block, %r1;\n  shl.b32 %r1, %r1, 10;\n  mov.u32 %r2, %tid.x;\n"
            "  add.u32 %first, %r1, %r2;\n  mul.lo.u32 %total, %n, %chunks;\n  cvt.u64.u32 %off, %offset;\n";
    for (u32 i = 0; i < kKernelChunks; ++i) place(std::to_string(i), i * kKernelThreads, gather);
    for (const Width &w : kWidths) {
      const std::string here = "w" + std::to_string(w.shift);
      if (w.shift) text_ += "  setp.ne.u32 %p0, %shift, " + std::to_string(w.shift) + ";\n  @%p0 bra not" + here + ";\n";
      for (u32 i = 0; i < kKernelChunks; ++i) text_ += "  @%in" + std::to_string(i) + " ld.global." + w.type + " " + registers(w, i) + ", [%from" + std::to_string(i) + "];\n";
      for (u32 i = 0; i < kKernelChunks; ++i) text_ += "  @%in" + std::to_string(i) + " st.global." + w.type + " [%to" + std::to_string(i) + "], " + registers(w, i) + ";\n";
      text_ += "  ret;\n";
      if (w.shift) text_ += "not" + here + ":\n";
    }
    text_ += "}\n";
  }
  void place(const std::string &i, u32 ahead, bool gather) {  // both addresses of chunk i of this thread, and whether there is one
    const std::string out = "out" + i, row = (gather ? "%from" : "%to") + i, other = (gather ? "%to" : "%from") + i;
    text_ += "  add.u32 %r3, %first, " + std::to_string(ahead) + ";\n  setp.lt.u32 %in" + i + ", %r3, %total;\n  @!%in" + i + " bra " + out + ";\n"
             "  div.u32 %r4, %r3, %chunks;\n  mul.lo.u32 %r5, %r4, %chunks;\n  sub.u32 %r5, %r3, %r5;\n"  // row, chunk in it
             "  cvt.u64.u32 %step, %r5;\n  shl.b64 %step, %step, %shift;\n"
             "  cvt.u64.u32 %d1, %r4;\n  mul.lo.u64 %d2, %d1, %bytes;\n  add.u64 %d2, %d2, %at;\n"
             "  shl.b64 %d3, %d1, 2;\n"
             "  @!%slots bra at" + i + ";\n  add.u64 %d4, %slot, %d3;\n  ld.global.u32 %r6, [%d4];\n  cvt.u64.u32 %d5, %r6;\n  mul.lo.u64 %d2, %d5, %bytes;\nat" + i + ":\n"
             "  @!%places bra in" + i + ";\n  add.u64 %d4, %place, %d3;\n  ld.global.u32 %r4, [%d4];\nin" + i + ":\n"
             "  add.u64 %d2, %d2, %off;\n  add.u64 %d2, %d2, %step;\n  and.b64 %d2, %d2, %mask;\n  add.u64 " + row + ", %base, %d2;\n"
             "  mul.wide.u32 %d6, %r4, %stride;\n  add.u64 %d6, %d6, %address;\n  add.u64 " + other + ", %d6, %step;\n" + out + ":\n";
  }
  static std::string registers(const Width &w, u32 i) {
    std::string out = w.registers;
    for (auto [letter, number] : {std::pair{'A', w.shift == 4 ? 2 * i : i}, std::pair{'B', 2 * i + 1}})
      if (const auto at = out.find(letter); at != std::string::npos) out.replace(at, 1, std::to_string(number));
    return out;
  }
  std::string text_;
};

// A column of the packed side: inside the row, and where its first value lies, from which to the next it is `stride`.
struct Packed { u64 offset, bytes, address, stride; };

class Kernels {  // of one context, for as long as the process lives
 public:
  static const Kernels &of(const cuda::Driver &driver, cuda::Context context) {  // under Current
    static std::mutex guard;
    static auto &all = *new std::map<cuda::Context, Kernels>;  // never destroyed: the driver may end before static objects do
    std::lock_guard<std::mutex> lock(guard);
    auto [at, made] = all.try_emplace(context, driver);
    return at->second;
  }
  explicit Kernels(const cuda::Driver &driver) : d_(driver) {
    const std::string text = KernelText::make();
    cuda::Module module = nullptr;
    d_.check(d_.module_load(&module, text.c_str()), "cuModuleLoadData");
    d_.check(d_.function(&gather_, module, "shmbuf_gather"), "cuModuleGetFunction");
    d_.check(d_.function(&scatter_, module, "shmbuf_scatter"), "cuModuleGetFunction");
  }
  Kernels(const Kernels &) = delete;

  struct Rows { u64 base, at, mask, slots, places, row_bytes; };
  void gather(cuda::Stream stream, const Rows &rows, u64 n, const Packed *columns, u64 n_columns) const { run(gather_, stream, rows, n, columns, n_columns); }
  void scatter(cuda::Stream stream, const Rows &rows, u64 n, const Packed *columns, u64 n_columns) const { run(scatter_, stream, rows, n, columns, n_columns); }

 private:
  void run(cuda::Function f, cuda::Stream stream, Rows rows, u64 n, const Packed *columns, u64 n_columns) const {
    for (u64 c = 0; c < n_columns; c += KernelMove::kColumns) {
      KernelMove m{};
      const u32 k = u32(std::min<u64>(KernelMove::kColumns, n_columns - c));
      u64 most = 1;  // chunks of a row in one column
      for (u32 i = 0; i < k; ++i) {
        const Packed &p = columns[c + i];
        const u64 all = rows.base | rows.at | rows.row_bytes | p.offset | p.bytes | p.address | p.stride | 16;
        const u32 shift = u32(std::countr_zero(all));
        m.column[i] = {p.address, u32(p.offset), u32(p.bytes >> shift), shift, u32(p.stride), 0, 0};
        most = std::max(most, p.bytes >> shift);
      }
      const u64 at_once = std::max<u64>(1, (1ull << 31) / most);  // chunks are counted in 32 bits
      for (u64 from = 0; from < n; from += at_once) {
        const u64 rows_now = std::min(at_once, n - from);
        m.base = rows.base, m.mask = rows.mask, m.row_bytes = rows.row_bytes, m.n = u32(rows_now), m.n_columns = k;
        m.at = rows.at + from * rows.row_bytes, m.slots = rows.slots ? rows.slots + from * 4 : 0, m.places = rows.places ? rows.places + from * 4 : 0;
        u64 blocks = 0;
        for (u32 i = 0; i < k; ++i) {
          KernelColumn &at = m.column[i];
          at.address = columns[c + i].address + (rows.places ? 0 : from * columns[c + i].stride);
          at.first_block = u32(blocks);
          blocks += (rows_now * at.chunks + kKernelThreads * kKernelChunks - 1) / (kKernelThreads * kKernelChunks);
        }
        void *arguments[] = {&m};
        if (blocks) d_.check(d_.launch(f, u32(blocks), 1, 1, kKernelThreads, 1, 1, 0, stream, arguments, nullptr), "cuLaunchKernel");
      }
    }
  }
  const cuda::Driver &d_;
  cuda::Function gather_ = nullptr, scatter_ = nullptr;
};

}  // namespace shmbuf
