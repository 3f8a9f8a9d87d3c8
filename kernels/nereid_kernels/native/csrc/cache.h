// A layer's keys and values in the paged cache, and how they are read into the tiles that products are made of.
#pragma once

#include "program.h"

namespace nereid {

enum CacheFormat : int32_t { SAME = 0, CACHE_INT8 = 1, CACHE_FP8_E4M3 = 2 };

// k, v: a layer's first block, [kv_head, slot, head_dim] of the model's dtype, or of bytes; block_stride: elements from
// one block to the next.  k_scale, v_scale: its first block's [kv_head, slot] float32, one for each token and head, or
// null; scale_stride: elements from one block to the next.  group: of block tables and slot mappings.
struct Cache {
  char* k;
  char* v;
  float* k_scale;
  float* v_scale;
  int64_t kv_heads, head_dim, block_size, block_stride, scale_stride;
  int32_t group;
  CacheFormat format;
};

inline float from_e4m3(uint8_t code) {
  uint32_t sign = uint32_t(code & 0x80) << 24, rest = code & 0x7f;
  float magnitude;
  if (rest == 0x7f) {
    magnitude = NAN;
  } else if (rest < 8) {
    magnitude = float(rest) * 0.001953125f;  // steps of 2^-9
  } else {
    uint32_t bits = (rest << 20) + (120u << 23);
    std::memcpy(&magnitude, &bits, 4);
  }
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  bits |= sign;
  std::memcpy(&magnitude, &bits, 4);
  return magnitude;
}

// Where a slot of a head begins: elements from the layer's first block on.
inline int64_t element(const Cache& cache, int64_t block, int64_t head, int64_t place) {
  return block * cache.block_stride + (head * cache.block_size + place) * cache.head_dim;
}

// One slot's key or value as rows of T: a pointer into the cache, or a copy in `decoded`.
template <class T>
inline const T* read_row(const Cache& cache, const char* data, const float* scales, int64_t at, T* decoded) {
  if (cache.format == SAME) return reinterpret_cast<const T*>(data) + at;
  float scale = 1.0f;
  if (scales) scale = scales[at / cache.block_stride * cache.scale_stride + at % cache.block_stride / cache.head_dim];
  const char* codes = data + at;
  for (int64_t i = 0; i < cache.head_dim; i++) {
    float value = cache.format == CACHE_INT8 ? float(int8_t(codes[i])) : from_e4m3(uint8_t(codes[i]));
    store_one(decoded + i, value * scale);
  }
  return decoded;
}

}  // namespace nereid
