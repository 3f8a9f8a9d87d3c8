// One processor's vectors in a few words: loads, stores, conversions, products of bfloat16 pairs, exp.
//
// Written with the compiler's vector types, so that one source serves AVX-512, AVX2 and NEON; what one of them has an
// instruction of its own for stands behind its macro here, and nowhere else.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nereid {

// LANES: floats of a register.  VECTORS x ROWS: registers that hold the sums of a product's tile; the others hold what
// is multiplied.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4, ROWS = 6;
#elif defined(__AVX2__)
constexpr int LANES = 8, VECTORS = 2, ROWS = 5;
#else
constexpr int LANES = 4, VECTORS = 4, ROWS = 5;
#endif
constexpr int TILE = VECTORS * LANES;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t UBytes __attribute__((vector_size(LANES)));

struct bf16 {
  uint16_t bits;
};

// Whether vectors multiply pairs of bfloat16. A processor with tile registers has such an instruction too, but one takes
// it as long as four of float32.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define NEREID_MULTIPLIES_PAIRS
#endif

// What a number of either type is multiplied as by vectors: without products of pairs, it is widened before.
#if defined(NEREID_MULTIPLIES_PAIRS)
template <class T>
using Operand = T;
#else
template <class T>
using Operand = float;
#endif

// Has a line of memory fetched into the nearest cache, or the second one. Written so that the compiler keeps it: it takes
// a function that does nothing else than __builtin_prefetch for one that does nothing.
inline void fetch_line(const void* from) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(from)));
#else
  __builtin_prefetch(from);
#endif
}
inline void fetch_line_to_second(const void* from) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(from)));
#else
  __builtin_prefetch(from, 0, 2);
#endif
}

template <class V, class P>
inline V load_as(const P* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Each element in 32 bits. One instruction, which the compiler does not find by itself.
#if defined(__AVX512F__)
inline Ints widen(Bytes x) { return (Ints)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)x); }
inline Ints widen(UBytes x) { return (Ints)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)x); }
inline Bits widen(Halves x) { return (Bits)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x); }
#elif defined(__AVX2__)
inline Ints widen(Bytes x) { return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x)); }
inline Ints widen(UBytes x) { return (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)x)); }
inline Bits widen(Halves x) { return (Bits)_mm256_cvtepu16_epi32((__m128i)x); }
#else
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
inline Ints widen(Bytes x) { return __builtin_convertvector(__builtin_convertvector(x, Shorts), Ints); }
inline Ints widen(UBytes x) { return __builtin_convertvector(__builtin_convertvector(x, Halves), Ints); }
inline Bits widen(Halves x) { return __builtin_convertvector(x, Bits); }
#endif

inline Floats splat(float x) { return x - Floats{}; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounded to the nearest, ties to even; a NaN stays one.
inline Halves to_halves(Floats x) {
  Bits bits = (Bits)x;
  Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  Bits quiet = bits | 0x00400000;
  Bits is_nan = (Bits)(x != x);
  return __builtin_convertvector(((rounded & ~is_nan) | (quiet & is_nan)) >> 16, Halves);
}

inline Floats load(const float* from) { return load_as<Floats>(from); }
inline Floats load(const bf16* from) {
  return (Floats)(widen(load_as<Halves>(from)) << 16);
}
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(bf16* to, Floats x) {
#if defined(__AVX512BF16__)
  __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
#else
  Halves halves = to_halves(x);
#endif
  std::memcpy(to, &halves, 2 * LANES);
}

// The first `count` of a register's elements; the others are 0, and nothing behind them is touched.
template <class T>
inline Floats load_some(const T* from, int count) {
  T some[LANES] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load(some);
}
template <class T>
inline void store_some(T* to, Floats x, int count) {
  T some[LANES];
  store(some, x);
  std::memcpy(to, some, count * sizeof(T));
}

// A register's place in a row of `width` columns: what lies behind it is 0, and is not touched.
template <class T>
inline Floats load_within(const T* row, int64_t column, int64_t width) {
  if (column + LANES <= width) return load(row + column);
  return column < width ? load_some(row + column, int(width - column)) : Floats{};
}
template <class T>
inline void store_within(T* row, int64_t column, int64_t width, Floats x) {
  if (column + LANES <= width) store(row + column, x);
  else if (column < width) store_some(row + column, x, int(width - column));
}

// Inputs 2i and 2i + 1, for the lanes of one register.
struct Pair {
  Floats even, odd;
};

// Of bfloat16 pairs.
inline Pair split(Bits pairs) { return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)}; }

inline void store_one(float* to, float x) { *to = x; }
inline void store_one(bf16* to, float x) { store_some(to, splat(x), 1); }

// sum + w[2i] * x[0] + w[2i + 1] * x[1] in each lane i, for bfloat16 pairs w and x.
inline Floats add_pair_products(Floats sum, Bits w, uint32_t x) {
#if defined(NEREID_MULTIPLIES_PAIRS)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(x)));
#else
  float even = to_float(bf16{uint16_t(x)}), odd = to_float(bf16{uint16_t(x >> 16)});
  sum += (Floats)(w << 16) * even;
  return sum + (Floats)(w & 0xffff0000u) * odd;
#endif
}

// The same where x has a pair for each lane.
inline Floats add_pair_products(Floats sum, Bits w, Bits x) {
#if defined(NEREID_MULTIPLIES_PAIRS)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
  sum += (Floats)(w << 16) * (Floats)(x << 16);
  return sum + (Floats)(w & 0xffff0000u) * (Floats)(x & 0xffff0000u);
#endif
}

// To the nearest whole number, ties to even; for numbers that 32 bits hold.
inline Ints nearest(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__x86_64__)
  return (Ints)_mm_cvtps_epi32((__m128)x);
#else
  return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

// The lower halves of whole numbers.
inline void store_shorts(int16_t* to, Ints x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x));
#else
  for (int i = 0; i < LANES; i++) to[i] = int16_t(x[i]);
#endif
}

// sum + w[2i] * x[0] + w[2i + 1] * x[1] in each lane i, for pairs w and x of whole numbers of 16 bits.
inline Ints add_whole_products(Ints sum, Bits w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(int(x)));
#elif defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(int(x)));
#elif defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(int(x)));
#elif defined(__x86_64__)
  return sum + (Ints)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(int(x)));
#else
  sum += ((Ints)(w << 16) >> 16) * int32_t(int16_t(x));
  return sum + ((Ints)w >> 16) * int32_t(int16_t(x >> 16));
#endif
}

inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

// The lanes from HALF on, in the first places.
template <int HALF>
inline Floats moved_down(Floats x) {
  Ints order{};
  for (int i = 0; i < LANES; i++) order[i] = (i + HALF) % LANES;
  return __builtin_shuffle(x, order);
}

// Pairs of halves, then of quarters, and so on: the order is fixed.
template <int HALF = LANES / 2>
inline float sum_of(Floats x) {
  x += moved_down<HALF>(x);
  if constexpr (HALF > 1) return sum_of<HALF / 2>(x);
  else return x[0];
}

template <int HALF = LANES / 2>
inline float max_of(Floats x) {
  x = larger(x, moved_down<HALF>(x));
  if constexpr (HALF > 1) return max_of<HALF / 2>(x);
  else return x[0];
}

inline Floats clamped(Floats x, float low, float high) {
  x = splat(low) > x ? splat(low) : x;  // a NaN stays one
  return splat(high) < x ? splat(high) : x;
}

// 2^x for x of at most 127; 0 far below, NaN of NaN. Of 2 to the whole number nearest to x and a polynomial (minimax of
// the relative error) of the rest: DEGREE 4 errs by 3e-6, which rounding to bfloat16 swallows, 6 by float32's rounding.
template <int DEGREE>
inline Floats exp2_of(Floats x) {
  static_assert(DEGREE == 4 || DEGREE == 6);
#if defined(__AVX512F__)
  Floats inside = splat(-300.0f) > x ? splat(-300.0f) : x;
  Floats whole = (Floats)_mm512_maskz_roundscale_ps(0xffff, (__m512)inside, 0);
#else
  const Floats low = splat(-126.0f);
  Floats inside = low > x ? low : x;
  Floats shifted = inside + splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the whole number
  Floats whole = shifted - splat(12582912.0f);
#endif
  Floats rest = inside - whole, p;
  if constexpr (DEGREE == 4) {
    p = rest * 9.5701004299e-3f + splat(5.5917860239e-2f);
    p = p * rest + splat(2.4024744865e-1f);
    p = p * rest + splat(6.9312181475e-1f);
    p = p * rest + splat(9.9999926143e-1f);
  } else {
    p = rest * 1.5345810362e-4f + splat(1.3399931210e-3f);
    p = p * rest + splat(9.6184889632e-3f);
    p = p * rest + splat(5.5503287770e-2f);
    p = p * rest + splat(2.4022646891e-1f);
    p = p * rest + splat(6.9314720574e-1f);
    p = p * rest + splat(1.0f);
  }
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)whole);
#else
  Floats power = (Floats)((Bits)((Ints)shifted << 23) + 0x3f800000u);
  return x < low ? Floats{} : p * power;
#endif
}

constexpr float LOG2_E = 1.44269504f;

// exp(x) for x of at most 88; 0 far below, NaN of NaN.
inline Floats exp_within(Floats x) { return exp2_of<6>(x * LOG2_E); }

// The same of any x; infinity far above.
inline Floats exp_of(Floats x) {
  const Floats high = splat(88.0f);
  Floats value = exp_within(x > high ? high : x);
  return x > high ? splat(INFINITY) : value;
}

// x / y for y of 1 to 2^127, within a unit in the last place.
inline Floats quotient(Floats x, Floats y) {
#if defined(__AVX512F__)
  Floats reciprocal = (Floats)_mm512_maskz_rcp14_ps(0xffff, (__m512)y);
  return x * (reciprocal * (splat(2.0f) - y * reciprocal));
#else
  return x / y;
#endif
}

// Whether any lane of x is above y.
inline bool any_above(Floats x, Floats y) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)y, _CMP_GT_OQ));
#else
  Ints above = x > y;
  return above[0] | above[1] | above[2] | above[3];
#endif
}

// The order of lanes that one stage of `transpose` takes from two registers: of its first result, or its second.
template <int STEP, bool SECOND>
inline Ints stage_order() {
  Ints order{};
  for (int i = 0; i < LANES; i++) order[i] = (i & STEP) ? LANES + i - (SECOND ? 0 : STEP) : i + (SECOND ? STEP : 0);
  return order;
}

template <int STEP>
inline void transpose_stage(Bits* block) {
  const Ints first = stage_order<STEP, false>(), second = stage_order<STEP, true>();
  for (int i = 0; i < LANES; i++) {
    if (i & STEP) continue;
    Bits a = block[i], b = block[i + STEP];
    block[i] = __builtin_shuffle(a, b, first);
    block[i + STEP] = __builtin_shuffle(a, b, second);
  }
}

// LANES registers, in place.
inline void transpose(Bits* block) {
  transpose_stage<1>(block);
  transpose_stage<2>(block);
  if (LANES > 4) transpose_stage<(LANES > 4 ? 4 : 1)>(block);
  if (LANES > 8) transpose_stage<(LANES > 8 ? 8 : 1)>(block);
}

}  // namespace nereid
