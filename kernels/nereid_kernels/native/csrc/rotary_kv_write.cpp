// From a layer's projection to its turned queries and to the paged KV cache: rotary embedding (Su et al. 2021, equation
// 34, in the order of GPT-NeoX), and keys and values stored in their slots, quantised where the cache is.
#include <algorithm>

#include "cache.h"

namespace nereid {

// qkv: [tokens, (heads + 2 * kv_heads) * head_dim] of dtype; queries and keys are turned in place.
// cos_sin: [positions, 2, rotary_dim] float32.
struct RotaryKVWriteArguments {
  Cache cache;
  void* qkv;
  const float* cos_sin;
  int64_t heads, rotary_dim;
  Dtype dtype;
};

namespace {

template <class T>
void turn(T* x, const float* cos_sin, int64_t rotary_dim) {
  int64_t half = rotary_dim / 2;
  const float *cos = cos_sin, *sin = cos_sin + rotary_dim;
  for (int64_t i = 0; i < half; i += LANES) {
    Floats low = load_within(x, i, half), high = load_within(x + half, i, half);
    Floats turned_low = low * load_within(cos, i, half) - high * load_within(sin, i, half);
    Floats turned_high = high * load_within(cos + half, i, half) + low * load_within(sin + half, i, half);
    store_within(x, i, half, turned_low);
    store_within(x + half, i, half, turned_high);
  }
}

// The nearest float8 e4m3 (Micikevicius et al. 2022), ties to even, of a number within its range; a NaN stays one.
uint8_t to_e4m3(float x) {
  if (x != x) return 0x7f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint8_t sign = uint8_t(bits >> 24) & 0x80;
  bits &= 0x7fffffffu;
  if (bits < (121u << 23)) {  // below 2^-6 steps are 2^-9: rounded by a sum in which that is the last bit
    float magnitude, base = 16384.0f;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += base;
    std::memcpy(&bits, &magnitude, 4);
    return sign | uint8_t(bits - 0x46800000u);
  }
  bits += 0x7ffffu + ((bits >> 20) & 1);
  return sign | uint8_t((bits >> 20) - (120u << 3));
}

constexpr float LARGEST = 3.4028235e38f, SMALLEST_SCALE = 1.1754944e-38f;
// What larger numbers become in int8: half a step beyond it still lies within bfloat16.
constexpr float LARGEST_WITH_OFFSET = 127.0f * 0x1p121f;

// A NaN stays one.
inline float within(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The offset is the middle of the row's range, and the factor maps what lies farthest from it to 127; the former is
// rounded to bfloat16 first, then the latter, upwards. A NaN counts for nothing.
template <class T>
Scaling range_scaling(const T* row, int64_t width) {
  float low = LARGEST_WITH_OFFSET, high = -LARGEST_WITH_OFFSET;
  for (int64_t i = 0; i < width; i++) {
    float x = within(to_float(row[i]), LARGEST_WITH_OFFSET);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  uint32_t middle = bits_of(low * 0.5f + high * 0.5f + 0.0f);  // a zero without a sign
  float offset = float_of((middle + 0x7fff + ((middle >> 16) & 1)) & 0xffff0000u);
  float factor = std::max(high - offset, offset - low) / 127.0f;
  return {float_of((bits_of(std::max(factor, SMALLEST_SCALE)) + 0xffff) & 0xffff0000u), offset};
}

template <class T>
void store_int8(const T* row, int64_t width, char* to, float* scale) {
  Scaling scaling;
  if (scale) {
    scaling = range_scaling(row, width);
    *scale = float_of(bits_of(scaling.factor) | bits_of(scaling.offset) >> 16);
  }
  for (int64_t i = 0; i < width; i++) {
    float x = (within(to_float(row[i]), LARGEST_WITH_OFFSET) - scaling.offset) / scaling.factor;
    to[i] = char(int8_t(x == x ? std::nearbyint(within(x, 127.0f)) : 0.0f));
  }
}

template <class T>
void store_e4m3(const T* row, int64_t width, char* to, float* scale) {
  float limit = 448.0f, most = 0.0f, factor = 1.0f;
  if (scale) {
    for (int64_t i = 0; i < width; i++) {
      float magnitude = std::fabs(to_float(row[i]));
      most = magnitude > most ? magnitude : most;  // a NaN counts for nothing
    }
    factor = *scale = std::max(std::min(most, LARGEST) / limit, SMALLEST_SCALE);
  }
  for (int64_t i = 0; i < width; i++) to[i] = char(to_e4m3(within(to_float(row[i]) / factor, limit)));
}

template <class T>
void write_token(const RotaryKVWriteArguments& a, const Step& step, int64_t token) {
  const Cache& cache = a.cache;
  const float* cos_sin = a.cos_sin + step.positions[token] * 2 * a.rotary_dim;
  T* row = static_cast<T*>(a.qkv) + token * (a.heads + 2 * cache.kv_heads) * cache.head_dim;
  T* keys = row + a.heads * cache.head_dim;
  for (T* head = row; head < keys + cache.kv_heads * cache.head_dim; head += cache.head_dim)
    turn(head, cos_sin, a.rotary_dim);
  int64_t slot = step.groups[cache.group].slot_mapping[token];
  int64_t block = slot / cache.block_size, place = slot % cache.block_size;
  int64_t size = cache.format == SAME ? int64_t(sizeof(T)) : 1;
  for (int64_t head = 0; head < 2 * cache.kv_heads; head++) {
    bool is_key = head < cache.kv_heads;
    int64_t at = (is_key ? head : head - cache.kv_heads) * cache.block_size + place;
    const T* from = keys + head * cache.head_dim;
    char* to = (is_key ? cache.k : cache.v) + (block * cache.block_stride + at * cache.head_dim) * size;
    float* scale = is_key ? cache.k_scale : cache.v_scale;
    if (scale) scale += block * cache.scale_stride + at;
    if (cache.format == SAME) std::memcpy(to, from, cache.head_dim * sizeof(T));
    else if (cache.format == CACHE_INT8) store_int8(from, cache.head_dim, to, scale);
    else store_e4m3(from, cache.head_dim, to, scale);
  }
}

}  // namespace
}  // namespace nereid

extern "C" void nereid_rotary_kv_write(const void* arguments, const nereid::Step& step, const nereid::Team& team) {
  using namespace nereid;
  const auto& a = *static_cast<const RotaryKVWriteArguments*>(arguments);
  team.for_ranges(step.num_tokens, 4, [&](Range tokens) {
    for (int64_t token = tokens.begin; token < tokens.end; token++)
      a.dtype == FLOAT32 ? write_token<float>(a, step, token) : write_token<bf16>(a, step, token);
  });
}
