// A layer's keys and values in the paged cache, and how they are read into the tiles that products are made of.
#pragma once

#include "program.h"

namespace nereid {

enum CacheFormat : int32_t { SAME = 0, CACHE_INT8 = 1, CACHE_FP8_E4M3 = 2 };

// k, v: a layer's first block, [kv_head, slot, head_dim] of the model's dtype, or of bytes; block_stride: elements from
// one block to the next.  k_scale, v_scale: its first block's [kv_head, slot], one for each token and head, or null:
// float32, or of int8 a scale's bfloat16 in the upper half of 4 bytes, and an offset's in the lower; scale_stride:
// elements from one block to the next.  group: of block tables and slot mappings.
struct Cache {
  char* k;
  char* v;
  float* k_scale;
  float* v_scale;
  int64_t kv_heads, head_dim, block_size, block_stride, scale_stride;
  int32_t group;
  CacheFormat format;
};

// float8 e4m3 as the bits of float32: the exponent's bias is 7, and there are no infinities.
inline Floats from_e4m3(Ints code) {
  Bits rest = (Bits)code & 0x7f;
  Floats normal = (Floats)((rest << 20) + (120u << 23));
  Floats small = __builtin_convertvector((Ints)rest, Floats) * 0.001953125f;  // steps of 2^-9
  Floats magnitude = rest < 8 ? small : normal;
  magnitude = rest == 0x7f ? splat(NAN) : magnitude;
  return (Floats)((Bits)magnitude | ((Bits)code & 0x80) << 24);
}

// Where a slot of a head begins: elements from the layer's first block on.
inline int64_t element(const Cache& cache, int64_t block, int64_t head, int64_t place) {
  return block * cache.block_stride + (head * cache.block_size + place) * cache.head_dim;
}

// The scale of the slot that begins there: floats from the layer's first on.
inline int64_t scale_of(const Cache& cache, int64_t at) {
  return at / cache.block_stride * cache.scale_stride + at % cache.block_stride / cache.head_dim;
}

// What a slot's codes are multiplied by, and what is added to that.
struct Scaling {
  float factor = 1.0f, offset = 0.0f;
};

inline Scaling scaling_of(const Cache& cache, float scale) {
  if (cache.format != CACHE_INT8) return {scale, 0.0f};
  uint32_t both;
  std::memcpy(&both, &scale, 4);
  return {to_float(bf16{uint16_t(both >> 16)}), to_float(bf16{uint16_t(both)})};
}

// A slot's quantised key or value as numbers: head_dim of them.  scale: as the cache holds it; 1: there is none.
template <class T>
inline void dequantise(const Cache& cache, const char* codes, float scale, T* to) {
  Scaling scaling = scaling_of(cache, scale);
  for (int64_t i = 0; i < cache.head_dim; i += LANES) {
    UBytes some{};
    if (i + LANES <= cache.head_dim) some = load_as<UBytes>(codes + i);
    else std::memcpy(&some, codes + i, cache.head_dim - i);
    Floats numbers = cache.format == CACHE_INT8 ? __builtin_convertvector(widen((Bytes)some), Floats)
                                                : from_e4m3(widen(some));
    store_within(to, i, cache.head_dim, numbers * scaling.factor + scaling.offset);
  }
}

}  // namespace nereid
