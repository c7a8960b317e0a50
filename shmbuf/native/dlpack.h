// The part of DLPack's C exchange ABI, major version 1, through which a tensor tells dtype, device, shape, strides and address in
// one call of some tens of ns. torch has it since 2.10, as the capsule torch.Tensor.__dlpack_c_exchange_api__.
#pragma once
#include <cstdint>

namespace shmbuf::dlpack {

inline constexpr const char *kCapsule = "dlpack_exchange_api";
inline constexpr std::uint32_t kMajor = 1;
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::uint8_t kComplex = 5, kBool = 6;

struct Device { std::int32_t type, id; };
struct Type {
  std::uint8_t code, bits;
  std::uint16_t lanes;
  bool operator==(const Type &) const = default;
};
struct Tensor {  // DLTensor
  void *data;
  Device device;
  std::int32_t ndim;
  Type type;
  std::int64_t *shape, *strides;  // in elements; strides may be null: contiguous
  std::uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48 && sizeof(Type) == 4);
struct Api {  // DLPackExchangeAPI
  std::uint32_t major, minor;
  Api *older;
  void (*allocate)(), (*export_managed)(), (*import_managed)();  // unused: their tensors would not be ordinary ones
  int (*peek)(void *object, Tensor *out);  // borrowed; -1 with a Python exception set; may be null
  void (*current_stream)();
};
using Peek = decltype(Api::peek);

inline Peek peek_of(const Api *api) {  // null: no version that is known here
  while (api && api->major != kMajor) api = api->older;
  return api ? api->peek : nullptr;
}

}  // namespace shmbuf::dlpack
