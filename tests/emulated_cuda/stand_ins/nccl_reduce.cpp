// Reductions over the ranks' bytes, in the type of the elements; halves are added in float, as NCCL's kernels do.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "nccl.h"

enum Reduction { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  BFloat16(float value = 0) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    bits = std::isnan(value) ? 0x7FC0 : (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
  }
};

template <typename T, typename Wide>
static std::string reduce(const std::vector<std::string>& ranks, int operation, size_t from, size_t count) {
  std::string out(count * sizeof(T), 0);
  for (size_t i = 0; i < count; i++) {
    Wide value = (Wide)((const T*)ranks[0].data())[from + i];
    for (size_t rank = 1; rank < ranks.size(); rank++) {
      Wide other = (Wide)((const T*)ranks[rank].data())[from + i];
      value = operation == PRODUCT   ? value * other
              : operation == MAXIMUM ? std::max(value, other)
              : operation == MINIMUM ? std::min(value, other)
                                     : value + other;
    }
    ((T*)&out[0])[i] = (T)(operation == AVERAGE ? value / (Wide)ranks.size() : value);
  }
  return out;
}

// ncclDataType_t: int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 and two of 8 bits
size_t size_of(int type) {
  constexpr size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return SIZES[type];
}

std::string reduced(const std::vector<std::string>& ranks, int type, int operation, size_t from, size_t count) {
  if (ranks.size() == 1) return ranks[0].substr(from * size_of(type), count * size_of(type));
  switch (type) {
    case 0: return reduce<int8_t, int8_t>(ranks, operation, from, count);
    case 1: return reduce<uint8_t, uint8_t>(ranks, operation, from, count);
    case 2: return reduce<int32_t, int32_t>(ranks, operation, from, count);
    case 3: return reduce<uint32_t, uint32_t>(ranks, operation, from, count);
    case 4: return reduce<int64_t, int64_t>(ranks, operation, from, count);
    case 5: return reduce<uint64_t, uint64_t>(ranks, operation, from, count);
    case 6: return reduce<_Float16, float>(ranks, operation, from, count);
    case 7: return reduce<float, float>(ranks, operation, from, count);
    case 8: return reduce<double, double>(ranks, operation, from, count);
    case 9: return reduce<BFloat16, float>(ranks, operation, from, count);
  }
  fprintf(stderr, "emulated CUDA: NCCL reduces no elements of type %d here\n", type);
  abort();
}
