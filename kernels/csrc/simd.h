// Vectors of floats in the target's register width, and the functions that a decoder needs.
//
// Compiler vector extensions let one source serve AVX-512, AVX2 and NEON. The width must equal the
// target's: 64-byte vectors on AVX2 run at a tenth of the speed.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace meshrl {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef int32_t UnalignedIntVec __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));

using bf16 = uint16_t;  // the upper half of a float

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
inline Vec splat(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b if either is NaN

inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}

inline float largest(Vec v) {
  float most = v[0];
  for (int i = 1; i < kLanes; i++) most = most > v[i] ? most : v[i];
  return most;
}

// Returns 0, 1, 2, ... in the lanes.
inline IntVec lane_index() {
  IntVec index;
  for (int i = 0; i < kLanes; i++) index[i] = i;
  return index;
}

// Returns e**x for x <= 0, to 2 ulp. Results below the smallest normal number are nearly 0; NaN
// stays NaN. Cephes' polynomial after the reduction x = n ln 2 + r (Cody and Waite 1980).
inline Vec exponential(Vec x) {
  x = larger(splat(-87.0f), x);
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
  const Vec n = (x * 1.44269504f + shifter) - shifter;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return p * (Vec)power;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// --- Products of a row of activations with packed storage -------------------------------------
//
// Storage T interleaves kInterleave<T> consecutive inner indices in each lane: one for float, two
// for bf16. `Factor<T>` is such a vector in registers. `Act<T>` is the type of the activations:
// bf16 only if the processor multiplies bf16.

template <class T>
constexpr int kInterleave = std::is_same_v<T, bf16> ? 2 : 1;

#if defined(__AVX512BF16__)
template <class T>
using Act = T;
#else
template <class T>
using Act = float;
#endif

template <class T>
struct Factor;

template <>
struct Factor<float> {
  Vec values;
  void read(const float* p) { values = load(p); }
  Vec add_product(const float* x, Vec total) const { return *x * values + total; }
};

template <>
struct Factor<bf16> {
#if defined(__AVX512BF16__)
  __m512bh values;
  void read(const bf16* p) { values = (__m512bh)_mm512_loadu_si512(p); }
  Vec add_product(const bf16* x, Vec total) const {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (Vec)_mm512_dpbf16_ps((__m512)total, values, (__m512bh)_mm512_set1_epi32(pair));
  }
#else
  Vec first, second;
  void read(const bf16* p) {
    const IntVec pairs = *reinterpret_cast<const UnalignedIntVec*>(p);
    const IntVec low = pairs << 16, high = pairs & static_cast<int32_t>(0xffff0000);
    first = (Vec)low;
    second = (Vec)high;
  }
  Vec add_product(const float* x, Vec total) const {
    return x[1] * second + (x[0] * first + total);
  }
#endif
};

inline void store_act(float* p, Vec v) { store(p, v); }
#if defined(__AVX512BF16__)
inline void store_act(bf16* p, Vec v) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &rounded, sizeof rounded);
}
#endif

}  // namespace meshrl
