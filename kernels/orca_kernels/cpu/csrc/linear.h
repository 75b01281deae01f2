// y = x W^T for a few to a few hundred rows: W packed once into panels, each row of x multiplied in the same order
// whatever the number of rows, so that a row's result does not depend on its company.
//
// Packed panel: [K / unit][columns of the panel][unit], columns = 16 * zmm. K is padded to whole units with zeros.
//
// 8-bit products: weights and activations are rounded symmetrically in groups of 64 inputs, with a scale per output and
// group and a scale per token and group. Sums within a group are exact integers: of activations times weights + 128,
// begun with -128 times the sum of the activations.
//
// Compressed weights (8 or 4 bits, activations untouched) are panels of integers in the same order; a task expands its
// panel once and multiplies as ever.
#pragma once

#include <algorithm>
#include <type_traits>

#include "memory.h"
#include "vector.h"

namespace orca {

constexpr int kAccumulators = 24;  // of the 32 registers; the others hold a panel row and a broadcast
constexpr int kMaxRows = 12;
constexpr int kRowChunk = 96;  // rows of one task: their inputs stay in the second-level cache while panels pass by

constexpr int kGroup = 64;       // inputs that share their scales in 8-bit products

enum Epilogue : int {
  kStore = 0,   // float32 y = x W^T + b
  kAdd = 1,     // float32 y += x W^T + b
  kSwiGlu = 2,  // T y = silu(gate) * up; a packed vector holds 8 gate columns and their 8 up columns
  kGeluTanh = 3,
  kGeluErf = 4,
};

inline int groups_of(int inputs) { return (inputs + kGroup - 1) / kGroup; }

// Panels of integers instead of T: 8 bits with a sign, or 4 bits without, two vectors of 16 lanes in 16 bytes. A weight
// is scale * integer, or with 4 bits scale * integer + offset; both [groups of inputs, padded columns * unit].
struct Compressed {
  const uint8_t* panels = nullptr;  // null: not compressed
  const float* scales = nullptr;
  const float* offsets = nullptr;
  int bits = 0, group = 0;
};

template <class T>
struct PackedLinear {
  const T* panels;
  const float* bias;           // [columns packed, padded], or null
  const float* scales;         // for `quantized`, else null: [panels, groups, columns of a panel]
  int columns;                 // logical outputs: of y
  int packed_columns;          // columns in panels: twice the outputs for SwiGLU, padded to whole vectors
  int inputs;
  int zmm;                     // vectors per panel row
  Epilogue epilogue;
  Compressed compressed = {};

  int count() const { return (packed_columns + zmm * kLanes - 1) / (zmm * kLanes); }
  int padded_columns() const { return count() * zmm * kLanes; }
  int units() const { return (inputs + Traits<T>::kUnit - 1) / Traits<T>::kUnit; }
  size_t panel_elements(int vectors) const { return (size_t)units() * Traits<T>::kUnit * vectors * kLanes; }
};

// What a group of quantized activations has in common.
struct GroupScale {
  float scale;
  int32_t correction;  // -128 times the sum of the integers
};

// Rows of activations: `groups` [rows, group_stride] only for `quantized`.
template <class T>
struct Activations {
  const T* data;
  size_t stride;
  const GroupScale* groups;
  size_t group_stride;
  Activations from(int row) const { return {data + row * stride, stride, groups ? groups + row * group_stride : nullptr, group_stride}; }
};

// The rows of x that one call takes; the more, the fewer loads per multiplication. 8-bit products keep two sums each.
template <class T>
constexpr int rows_at_once(int zmm) {
  return std::min(kMaxRows, (std::is_same_v<T, quantized> ? kAccumulators / 2 : kAccumulators) / zmm);
}

// units [first, last) of x times the panel, added to `sum`.
template <class T, int ROWS, int ZMM>
[[gnu::always_inline]] inline void multiply_units(const T* x, size_t stride, const T* panel, int first, int last,
                                                  typename Traits<T>::Sum (&sum)[ROWS][ZMM]) {
  using V = Traits<T>;
  for (int k = first; k < last; ++k) {
    const T* row = panel + (size_t)k * ZMM * kLanes * V::kUnit;
    typename V::Packed w[ZMM];
#pragma GCC unroll 8
    for (int z = 0; z < ZMM; ++z) w[z] = V::load(row + z * kLanes * V::kUnit);
    if (ROWS <= 4)  // with more rows than these the products take longer than the stream
      for (int z = 0; z < ZMM; ++z) _mm_prefetch((const char*)(row + z * kLanes * V::kUnit) + 4096, _MM_HINT_T0);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      typename V::Packed a = V::broadcast(x + r * stride + k * V::kUnit);
#pragma GCC unroll 8
      for (int z = 0; z < ZMM; ++z) sum[r][z] = V::multiply_add(sum[r][z], a, w[z]);
    }
  }
}

// ROWS x (16 * ZMM) sums of one panel, whose first packed column is `column`.
template <class T, int ROWS, int ZMM>
void multiply_tile(const Activations<T>& x, const PackedLinear<T>& w, const T* panel, int column, float* tile) {
  using V = Traits<T>;
  if constexpr (std::is_same_v<T, quantized>) {
    Vec total[ROWS][ZMM];
    for (int r = 0; r < ROWS; ++r)
      for (int z = 0; z < ZMM; ++z) total[r][z] = _mm512_setzero_ps();
    const float* scales = w.scales + (size_t)column * groups_of(w.inputs);
    const int units = w.units(), step = kGroup / V::kUnit;
    for (int group = 0; group * step < units; ++group, scales += w.zmm * kLanes) {
      typename V::Sum sum[ROWS][ZMM];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int z = 0; z < ZMM; ++z) sum[r][z] = _mm512_set1_epi32(x.groups[r * x.group_stride + group].correction);
      multiply_units<T, ROWS, ZMM>(x.data, x.stride, panel, group * step, std::min(units, (group + 1) * step), sum);
#pragma GCC unroll 8
      for (int z = 0; z < ZMM; ++z) {
        const Vec scale = _mm512_loadu_ps(scales + z * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
          total[r][z] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][z]),
                                        _mm512_mul_ps(scale, splat(x.groups[r * x.group_stride + group].scale)), total[r][z]);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int z = 0; z < ZMM; ++z) _mm512_store_ps(tile + (r * ZMM + z) * kLanes, total[r][z]);
  } else {
    typename V::Sum sum[ROWS][ZMM];
    for (int r = 0; r < ROWS; ++r)
      for (int z = 0; z < ZMM; ++z) sum[r][z] = _mm512_setzero_ps();
    multiply_units<T, ROWS, ZMM>(x.data, x.stride, panel, 0, w.units(), sum);
    for (int r = 0; r < ROWS; ++r)
      for (int z = 0; z < ZMM; ++z) _mm512_store_ps(tile + (r * ZMM + z) * kLanes, sum[r][z]);
    (void)column;
  }
}

template <class T>
using TileKernel = void (*)(const Activations<T>&, const PackedLinear<T>&, const T*, int, float*);

template <class T, int ZMM, int ROWS = rows_at_once<T>(ZMM)>
TileKernel<T> tile_kernel_for(int rows) {
  if constexpr (ROWS == 0) {
    return nullptr;
  } else {
    if (rows == ROWS) return multiply_tile<T, ROWS, ZMM>;
    return tile_kernel_for<T, ZMM, ROWS - 1>(rows);
  }
}

template <class T>
TileKernel<T> tile_kernel(int rows, int zmm) {
  switch (zmm) {
    case 1: return tile_kernel_for<T, 1>(rows);
    case 2: return tile_kernel_for<T, 2>(rows);
    case 3: return tile_kernel_for<T, 3>(rows);
    default: return tile_kernel_for<T, 4>(rows);
  }
}

// Panel `p` of a compressed weight as T, in memory of the thread's own that the next call reuses.
template <class T>
const T* expand_panel(const PackedLinear<T>& w, int p, int zmm) {
  static thread_local Memory<T> memory;
  constexpr int unit = Traits<T>::kUnit;
  const Compressed& c = w.compressed;
  const int vectors = zmm * unit;  // of one unit of inputs
  memory.reserve(w.panel_elements(zmm));
  const size_t from = (size_t)p * w.panel_elements(w.zmm);
  const size_t column = (size_t)p * w.zmm * kLanes * unit, stride = (size_t)w.padded_columns() * unit;
  T* out = memory.get();
  for (int k = 0, v = 0; k < w.units(); ++k) {
    const size_t row = (size_t)(k * unit / c.group) * stride + column;
    for (int i = 0; i < vectors; ++i, ++v, out += kLanes) {
      const Vec scale = _mm512_loadu_ps(c.scales + row + i * kLanes);
      Vec offset = _mm512_setzero_ps();
      __m128i bytes;
      if (c.bits == 8) {
        bytes = _mm_loadu_si128((const __m128i*)(c.panels + from) + v);
      } else {
        bytes = _mm_loadu_si128((const __m128i*)(c.panels + from / 2) + v / 2);
        if (v % 2) bytes = _mm_srli_epi16(bytes, 4);
        bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
        offset = _mm512_loadu_ps(c.offsets + row + i * kLanes);
      }
      const Vec value = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
      Traits<T>::narrow(out, _mm512_fmadd_ps(value, scale, offset), 0xFFFF);
    }
  }
  return memory.get();
}

// One task: rows [row0, row1) of x times panel `p`. y_float or y_narrow by epilogue; strides in elements.
template <class T, class Out>
void linear_task(const PackedLinear<T>& w, const Activations<T>& x, float* y_float, Out* y_narrow, size_t y_stride, int row0, int row1,
                 int p) {
  using V = Traits<Out>;
  const int first = p * w.zmm * kLanes;
  const int zmm = std::min(w.zmm, (w.packed_columns - first + kLanes - 1) / kLanes);
  const T* panel;
  if constexpr (std::is_same_v<T, quantized>) {
    panel = w.panels + (size_t)p * w.panel_elements(w.zmm);
  } else {
    panel = w.compressed.panels ? expand_panel(w, p, zmm) : w.panels + (size_t)p * w.panel_elements(w.zmm);
  }
  const int most = rows_at_once<T>(zmm);
  const int blocks = (row1 - row0 + most - 1) / most;
  alignas(64) float tile[kMaxRows * 4 * kLanes];
  for (int b = 0, row = row0; b < blocks; ++b) {
    const int rows = (row1 - row) / (blocks - b);
    if (w.epilogue <= kAdd)  // what is written here was last seen by another core, long ago
      for (int r = 0; r < rows; ++r)
        for (int z = 0; z < zmm; ++z) __builtin_prefetch(y_float + (row + r) * y_stride + first + z * kLanes, 1);
    tile_kernel<T>(rows, zmm)(x.from(row), w, panel, first, tile);
    for (int r = 0; r < rows; ++r) {
      const size_t out = (size_t)(row + r) * y_stride;
      for (int z = 0; z < zmm; ++z) {
        const int packed = first + z * kLanes;
        Vec value = _mm512_load_ps(tile + (r * zmm + z) * kLanes);
        if (w.bias) value = _mm512_add_ps(value, _mm512_loadu_ps(w.bias + packed));
        if (w.epilogue == kSwiGlu) {
          // Two vectors together, gates in one and ups in the other; a last one alone fills half of both.
          Vec next = value;
          if (z + 1 < zmm) {
            next = _mm512_load_ps(tile + (r * zmm + ++z) * kLanes);
            if (w.bias) next = _mm512_add_ps(next, _mm512_loadu_ps(w.bias + first + z * kLanes));
          }
          const Vec gate = _mm512_shuffle_f32x4(value, next, 0x44), up = _mm512_shuffle_f32x4(value, next, 0xEE);
          const int column = packed / 2, past = (first + (z + 1) * kLanes) / 2;
          V::narrow(y_narrow + out + column, _mm512_mul_ps(silu<Out>(gate), up), first_lanes(std::min(past, w.columns) - column));
          continue;
        }
        const __mmask16 mask = first_lanes(w.columns - packed);
        switch (w.epilogue) {
          case kStore: _mm512_mask_storeu_ps(y_float + out + packed, mask, value); break;
          case kAdd: {
            Vec before = _mm512_maskz_loadu_ps(mask, y_float + out + packed);
            _mm512_mask_storeu_ps(y_float + out + packed, mask, _mm512_add_ps(before, value));
            break;
          }
          case kGeluTanh: V::narrow(y_narrow + out + packed, gelu_tanh(value), mask); break;
          default: V::narrow(y_narrow + out + packed, gelu_erf(value), mask);
        }
      }
    }
    row += rows;
  }
}

// Which row of the source weight [outputs, inputs] stands in packed column c; -1 for padding.
inline int source_row(int c, int outputs, bool swiglu) {
  if (!swiglu) return c < outputs ? c : -1;
  constexpr int eight = kLanes / 2;
  const int half = outputs / 2, row = c / kLanes * eight + c % eight;
  if (row >= half) return -1;
  return c % kLanes < eight ? row : half + row;
}

template <class T>
void pack_linear(const T* source, int outputs, int inputs, int packed_columns, int zmm, bool swiglu, int unit, T* panels) {
  const int units = (inputs + unit - 1) / unit;
  for (int p = 0; p * zmm * kLanes < packed_columns; ++p) {
    const int width = std::min(zmm * kLanes, packed_columns - p * zmm * kLanes);
    T* panel = panels + (size_t)p * units * unit * zmm * kLanes;
    for (int c = 0; c < width; ++c) {
      const int row = source_row(p * zmm * kLanes + c, outputs, swiglu);
      for (int k = 0; k < units * unit; ++k)
        panel[((size_t)(k / unit) * width + c) * unit + k % unit] =
            row >= 0 && k < inputs ? source[(size_t)row * inputs + k] : T{};
    }
  }
}

// First unit of logical row `row` of a packed weight without SwiGLU, and the elements from one unit to the next: serves
// embedding look-ups in a tied head.
template <class T>
const T* packed_unit(const PackedLinear<T>& w, int row, int& step) {
  const int full = w.zmm * kLanes, p = row / full, c = row % full;
  const int width = std::min(full, w.packed_columns - p * full);
  step = width * Traits<T>::kUnit;
  return w.panels + (size_t)p * w.panel_elements(w.zmm) + (size_t)c * Traits<T>::kUnit;
}

}  // namespace orca
