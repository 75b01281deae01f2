// Sixteen-lane vectors and the two element types: float32, and bfloat16 with float32 accumulation.
//
// Traits<T> hides what differs. A "unit" is the run of consecutive elements that one instruction multiplies and sums per
// lane: one float32, or two bfloat16 (VDPBF16PS). Packed operands are laid out in units. Operands kept as int8 become T,
// exactly, when they are loaded; they are never NaN, so `load_units` need not hide any of them.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace orca {

using Vec = __m512;
constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};

inline Vec splat(float value) { return _mm512_set1_ps(value); }
inline __mmask16 first_lanes(int count) { return count >= kLanes ? 0xFFFF : (__mmask16)((1u << (count > 0 ? count : 0)) - 1); }
constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }

// 8 bits of a product: of an activation round(x / scale) with a sign, of a weight 128 + round(w / scale) without.
struct quantized {
  uint8_t bits;
};

template <class T>
struct Traits;

template <>
struct Traits<float> {
  static constexpr int kUnit = 1;
  using Packed = __m512;
  using Sum = Vec;
  static Packed load(const float* p) { return _mm512_loadu_ps(p); }
  // One unit in every lane.
  static Packed broadcast(const float* p) { return _mm512_set1_ps(*p); }
  // As `load`, the elements of each unit from `count` on zero.
  static Packed load_units(const float* p, int count) { return count > 0 ? load(p) : _mm512_setzero_ps(); }
  static Packed load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
  static Packed load_units(const int8_t* p, int) { return load(p); }
  static Vec multiply_add(Vec sum, Packed a, Packed b) { return _mm512_fmadd_ps(a, b, sum); }
  static Vec widen(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
  static void narrow(float* p, Vec value, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, value); }
  static float to_float(float value) { return value; }
};

#ifdef __AVX512BF16__
template <>
struct Traits<bf16> {
  static constexpr int kUnit = 2;
  using Packed = __m512bh;
  using Sum = Vec;
  static Packed load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Packed broadcast(const bf16* p) {
    int32_t unit;
    std::memcpy(&unit, p, sizeof unit);
    return (__m512bh)_mm512_set1_epi32(unit);
  }
  static Packed load_units(const bf16* p, int count) {
    if (count >= 2) return load(p);
    return (__m512bh)_mm512_maskz_loadu_epi16(count == 1 ? 0x55555555u : 0u, p);
  }
  static Packed load(const int8_t* p) { return _mm512_cvtne2ps_pbh(Traits<float>::load(p + kLanes), Traits<float>::load(p)); }
  static Packed load_units(const int8_t* p, int) { return load(p); }
  static Vec multiply_add(Vec sum, Packed a, Packed b) { return _mm512_dpbf16_ps(sum, a, b); }
  static Vec widen(const bf16* p, __mmask16 mask) {
    __m256i half = _mm256_maskz_loadu_epi16(mask, p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void narrow(bf16* p, Vec value, __mmask16 mask) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(value));
  }
  static float to_float(bf16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
};
#endif

#ifdef __AVX512VNNI__
template <>
struct Traits<quantized> {
  static constexpr int kUnit = 4;
  using Packed = __m512i;
  using Sum = __m512i;
  static Packed load(const quantized* p) { return _mm512_loadu_si512(p); }
  static Packed broadcast(const quantized* p) {
    int32_t unit;
    std::memcpy(&unit, p, sizeof unit);
    return _mm512_set1_epi32(unit);
  }
  // Written out because GCC 12 keeps copying the sums of the intrinsic, out of registers and back.
  static Sum multiply_add(Sum sum, Packed activation, Packed weight) {
    asm("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(activation), "v"(weight));
    return sum;
  }
};
#endif

// 2^x, its fraction by the polynomial with these coefficients, from that of the highest power on.
template <size_t N>
Vec exp2_by(Vec x, const float (&coefficients)[N]) {
  const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = _mm512_sub_ps(x, whole);
  Vec y = splat(coefficients[0]);
#pragma GCC unroll 8
  for (size_t i = 1; i < N; ++i) y = _mm512_fmadd_ps(y, f, splat(coefficients[i]));
  return _mm512_scalef_ps(y, whole);
}

// 2^x; 0 below 2^-200, from -inf on. Relative error below 2e-7.
inline Vec exp2(Vec x) {
  static constexpr float kExact[] = {1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f};
  return exp2_by(_mm512_max_ps(x, splat(-200.0f)), kExact);
}

// 2^x as exactly as what becomes a T has to be; for bfloat16, whose own rounding is 2e-3, with a relative error below 2e-4.
template <class T>
Vec exp2_for(Vec x) {
  static constexpr float kCoarse[] = {5.5171663e-2f, 2.4257640e-1f, 6.9326099e-1f, 9.9992807e-1f};
  if constexpr (std::is_same_v<T, float>) return exp2(x);
  return exp2_by(x, kCoarse);
}

inline float exp2_scalar(float x) { return _mm512_cvtss_f32(exp2(splat(x))); }

constexpr float kLog2e = 1.44269504f;

// e^x over the whole range that float32 can hold.
inline Vec exp(Vec x) { return exp2(_mm512_min_ps(_mm512_mul_ps(x, splat(kLog2e)), splat(127.99f))); }

// 1 / (1 + e^-x) as exactly as what becomes a T has to be.
template <class T>
Vec sigmoid(Vec x) {
  const Vec one = splat(1.0f);
  if constexpr (std::is_same_v<T, float>) return _mm512_div_ps(one, _mm512_add_ps(one, exp(_mm512_sub_ps(splat(0.0f), x))));
  return _mm512_rcp14_ps(_mm512_add_ps(one, exp2_for<T>(_mm512_min_ps(_mm512_mul_ps(x, splat(-kLog2e)), splat(126.0f)))));
}

template <class T>
Vec silu(Vec x) {
  return _mm512_mul_ps(x, sigmoid<T>(x));
}

// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 sqrt(2/pi) (...))
inline Vec gelu_tanh(Vec x) {
  Vec cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  Vec inner = _mm512_fmadd_ps(cube, splat(0.044715f), x);
  return _mm512_mul_ps(x, sigmoid<float>(_mm512_mul_ps(inner, splat(1.5957691216f))));
}

inline Vec gelu_erf(Vec x) {
  alignas(64) float lanes[kLanes];
  _mm512_store_ps(lanes, x);
  for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678f));
  return _mm512_load_ps(lanes);
}

}  // namespace orca
