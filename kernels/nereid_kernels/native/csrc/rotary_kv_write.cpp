// From a layer's projection to its turned queries and to the paged KV cache: rotary embedding (Su et al. 2021, equation
// 34, in the order of GPT-NeoX), and keys and values stored in their slots, quantised where the cache is.
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

template <class T>
void store_quantised(const Cache& cache, const T* row, char* to, float* scale) {
  float limit = cache.format == CACHE_INT8 ? 127.0f : 448.0f, most = 0.0f, factor = 1.0f;
  if (scale) {
    for (int64_t i = 0; i < cache.head_dim; i++) {
      float magnitude = std::fabs(to_float(row[i]));
      most = magnitude > most ? magnitude : most;  // a NaN counts for nothing
    }
    most = most < 3.4028235e38f ? most : 3.4028235e38f;
    factor = most / limit;
    factor = factor > 1.1754944e-38f ? factor : 1.1754944e-38f;
    *scale = factor;
  }
  for (int64_t i = 0; i < cache.head_dim; i++) {
    float x = to_float(row[i]) / factor;
    x = x > limit ? limit : x < -limit ? -limit : x;
    if (cache.format == CACHE_INT8) to[i] = char(int8_t(x == x ? std::nearbyint(x) : 0.0f));
    else to[i] = char(to_e4m3(x));
  }
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
    if (cache.format == SAME) std::memcpy(to, from, cache.head_dim * sizeof(T));
    else store_quantised(cache, from, to, scale ? scale + block * cache.scale_stride + at : nullptr);
  }
}

}  // namespace
}  // namespace nereid

extern "C" void nereid_rotary_kv_write(const void* arguments, const nereid::Step& step, const nereid::Team& team) {
  using namespace nereid;
  const auto& a = *static_cast<const RotaryKVWriteArguments*>(arguments);
  Range tokens = team.share(step.num_tokens);
  for (int64_t token = tokens.begin; token < tokens.end; token++)
    a.dtype == FLOAT32 ? write_token<float>(a, step, token) : write_token<bf16>(a, step, token);
}
