// Ragged attention over paged K/V, causal, for any mixture of prefill, chunk and decode rows.
//
// K/V of one layer is a pool of pages of 16 tokens. Page of one K/V head:
//   K: [head_dim / unit][16 tokens][unit]      so that one instruction scores 16 tokens
//   V: [16 tokens / unit][head_dim][unit]      so that one instruction adds to 16 dimensions
// head_dim is padded to whole vectors with zeros. Elements are S: T, or int8 with a float32 scale for each token and
// head, in pages too. Integers are multiplied as T; scores and weights take the scales, so that no element has to.
//
// A query token sees its keys in tiles of 64 and its context in chunks of 256, each chunk from scratch and then merged in
// order. Tile and chunk borders are at fixed positions, so a token's result depends neither on the other rows of the
// iteration nor on how its prompt was cut into chunks; and long contexts are shared between threads.
#pragma once

#include <limits>
#include <type_traits>

#include "vector.h"

namespace orca {

constexpr int kPage = 16;
constexpr int kTile = 4 * kPage;
constexpr int kChunk = 256;
constexpr int kQueryRows = 6;    // (token, query head) pairs that share a key tile in registers
constexpr int kMaxHeadDim = 256;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct KVLayer {
  void* keys;
  void* values;
  float* key_scales;    // [page][K/V head][16 tokens]; null: elements are T
  float* value_scales;
};

struct HeadShape {
  int heads, kv_heads, head_dim;
  int padded_dim() const { return round_up(head_dim, kLanes); }
  int group() const { return heads / kv_heads; }
  size_t page_elements() const { return (size_t)padded_dim() * kPage; }
};

// The K/V pages of one sequence: token position to page.
struct PageTable {
  const int32_t* blocks;
  int block_size;  // a multiple of kPage
  size_t page(int position) const {
    return ((size_t)blocks[position / block_size] * block_size + position % block_size) / kPage;
  }
};

// Running softmax of kQueryRows rows: maximum (in log2), sum, and weighted sum of values [row][padded_dim].
struct Partial {
  alignas(64) float maximum[kLanes];
  float sum[kLanes];
  float output[kQueryRows * kMaxHeadDim];

  void clear(int padded_dim) {
    _mm512_store_ps(maximum, splat(kMinusInfinity));
    _mm512_store_ps(sum, _mm512_setzero_ps());
    std::memset(output, 0, sizeof(float) * kQueryRows * padded_dim);
  }
};

// Pages to fetch while something else is computed: pages are too short and too scattered for the hardware to foresee.
struct Ahead {
  int lines_per_page;
  const char* pages[4] = {};
  int count = 0, page = 0, line = 0;
  void step() {
    if (page >= count) return;
    _mm_prefetch(pages[page] + line * 64, _MM_HINT_T0);
    if (++line == lines_per_page) line = 0, ++page;
  }
};

// Consecutive tokens of one K/V head whose pages are looked at together.
template <class S>
struct Tile {
  int first, tokens;  // position of the first; at most kTile
  const S *keys[4], *values[4];
  const float *key_scales[4], *value_scales[4];
  int pages() const { return (tokens + kPage - 1) / kPage; }
};

template <class T, class S, int ROWS, int PAGES>
void score_tile(const T* const* q, const S* const* pages, int units, Ahead& ahead, float* scores) {
  using V = Traits<T>;
  Vec sum[ROWS][PAGES];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PAGES; ++p) sum[r][p] = _mm512_setzero_ps();
  for (int i = 0; i < units; ++i) {
    typename V::Packed k[PAGES];
#pragma GCC unroll 4
    for (int p = 0; p < PAGES; ++p) ahead.step();
#pragma GCC unroll 4
    for (int p = 0; p < PAGES; ++p) k[p] = V::load(pages[p] + (size_t)i * kPage * V::kUnit);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      typename V::Packed a = V::broadcast(q[r] + i * V::kUnit);
#pragma GCC unroll 4
      for (int p = 0; p < PAGES; ++p) sum[r][p] = V::multiply_add(sum[r][p], a, k[p]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PAGES; ++p) _mm512_store_ps(scores + r * kTile + p * kPage, sum[r][p]);
}

// output[r] = output[r] * scale[r] + weights[r] * values, for ZMM vectors of dimensions from `dim` on.
template <class T, class S, int ROWS, int ZMM>
void weigh_tile(const T* weights, const S* const* pages, int tokens, int padded_dim, int dim, const float* scale, Ahead& ahead,
                float* output) {
  using V = Traits<T>;
  Vec sum[ROWS][ZMM];
  for (int r = 0; r < ROWS; ++r)
    for (int z = 0; z < ZMM; ++z)
      sum[r][z] = _mm512_mul_ps(_mm512_load_ps(output + r * padded_dim + dim + z * kLanes), splat(scale[r]));
  const auto add_unit = [&](const T* weight, const S* row, auto load) {
    typename V::Packed v[ZMM];
#pragma GCC unroll 4
    for (int z = 0; z < ZMM; ++z) ahead.step();
#pragma GCC unroll 4
    for (int z = 0; z < ZMM; ++z) v[z] = load(row + z * kLanes * V::kUnit);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      typename V::Packed a = V::broadcast(weight + r * kTile);
#pragma GCC unroll 4
      for (int z = 0; z < ZMM; ++z) sum[r][z] = V::multiply_add(sum[r][z], a, v[z]);
    }
  };
  const size_t step = (size_t)padded_dim * V::kUnit;
  for (int first = 0; first < tokens; first += kPage) {
    const S* row = pages[first / kPage] + (size_t)dim * V::kUnit;
    const T* weight = weights + first;
    const int whole = std::min(kPage, tokens - first) / V::kUnit;
    for (int u = 0; u < whole; ++u, row += step, weight += V::kUnit) add_unit(weight, row, [](const S* p) { return V::load(p); });
    // A slot behind the last token was never written for this sequence and may hold anything, NaN included.
    if (const int rest = std::min(kPage, tokens - first) - whole * V::kUnit)
      add_unit(weight, row, [rest](const S* p) { return V::load_units(p, rest); });
  }
  for (int r = 0; r < ROWS; ++r)
    for (int z = 0; z < ZMM; ++z) _mm512_store_ps(output + r * padded_dim + dim + z * kLanes, sum[r][z]);
}

// Scores of a tile to weights, and the running maximum and sum; `rescale` is what the output so far is to be multiplied
// by. WHOLE: the tile is full and every row sees all of it.
template <class T, class S, int ROWS, bool WHOLE>
void soften_tile(const float* scores, const int* positions, const Tile<S>& tile, float scale_log2, T* weights, float* rescale,
                 Partial& state) {
  constexpr bool scaled = !std::is_same_v<S, T>;
  const int pages = WHOLE ? kTile / kPage : tile.pages();
  const Vec factor = splat(scale_log2);
  const auto mask = [&](int r, int p) { return WHOLE ? (__mmask16)0xFFFF : first_lanes(positions[r] - tile.first + 1 - p * kPage); };
  const auto score = [&](int r, int p) {
    Vec s = _mm512_load_ps(scores + r * kTile + p * kPage);
    if constexpr (scaled) s = _mm512_mul_ps(s, _mm512_loadu_ps(tile.key_scales[p]));
    return s;
  };
  alignas(64) float most[kLanes] = {}, total[kLanes] = {};
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
    Vec best = splat(kMinusInfinity);
    for (int p = 0; p < pages; ++p) best = _mm512_mask_max_ps(best, mask(r, p), best, score(r, p));
    most[r] = _mm512_reduce_max_ps(best);
  }
  const Vec before = _mm512_load_ps(state.maximum), maximum = _mm512_max_ps(before, _mm512_mul_ps(_mm512_load_ps(most), factor));
  // Minus infinity: this row sees nothing yet.
  const __mmask16 sees = _mm512_cmp_ps_mask(maximum, splat(kMinusInfinity), _CMP_NEQ_OQ);
  const Vec decay = _mm512_maskz_mov_ps(sees, exp2(_mm512_sub_ps(before, maximum)));
  _mm512_store_ps(rescale, decay);
  _mm512_store_ps(state.maximum, maximum);
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
    const Vec top = splat(state.maximum[r]);
    Vec sum = _mm512_setzero_ps();
    for (int p = 0; p < pages; ++p) {
      // What is masked may be anything, NaN included.
      Vec w = _mm512_maskz_mov_ps(mask(r, p), exp2_for<T>(_mm512_fmsub_ps(score(r, p), factor, top)));
      sum = _mm512_add_ps(sum, w);
      if constexpr (scaled) w = _mm512_maskz_mul_ps(mask(r, p), w, _mm512_loadu_ps(tile.value_scales[p]));
      Traits<T>::narrow(weights + r * kTile + p * kPage, w, 0xFFFF);
    }
    total[r] = _mm512_reduce_add_ps(sum);
  }
  _mm512_store_ps(state.sum, _mm512_fmadd_ps(_mm512_load_ps(state.sum), decay, _mm512_load_ps(total)));
}

template <class T, class S, int ROWS>
void attend_tile(const T* const* q, const int* positions, const Tile<S>& tile, int padded_dim, float scale_log2, Ahead& values_ahead,
                 Ahead& keys_ahead, Partial& state) {
  using V = Traits<T>;
  alignas(64) float scores[kQueryRows * kTile], rescale[kLanes];
  alignas(64) T weights[kQueryRows * kTile];
  const int units = padded_dim / V::kUnit;
  switch (tile.pages()) {
    case 1: score_tile<T, S, ROWS, 1>(q, tile.keys, units, values_ahead, scores); break;
    case 2: score_tile<T, S, ROWS, 2>(q, tile.keys, units, values_ahead, scores); break;
    case 3: score_tile<T, S, ROWS, 3>(q, tile.keys, units, values_ahead, scores); break;
    default: score_tile<T, S, ROWS, 4>(q, tile.keys, units, values_ahead, scores);
  }
  if (tile.tokens == kTile && positions[0] >= tile.first + kTile - 1) {
    soften_tile<T, S, ROWS, true>(scores, positions, tile, scale_log2, weights, rescale, state);
  } else {
    soften_tile<T, S, ROWS, false>(scores, positions, tile, scale_log2, weights, rescale, state);
  }
  for (int dim = 0; dim < padded_dim; dim += 4 * kLanes) {
    switch (std::min(4, (padded_dim - dim) / kLanes)) {
      case 1: weigh_tile<T, S, ROWS, 1>(weights, tile.values, tile.tokens, padded_dim, dim, rescale, keys_ahead, state.output); break;
      case 2: weigh_tile<T, S, ROWS, 2>(weights, tile.values, tile.tokens, padded_dim, dim, rescale, keys_ahead, state.output); break;
      case 3: weigh_tile<T, S, ROWS, 3>(weights, tile.values, tile.tokens, padded_dim, dim, rescale, keys_ahead, state.output); break;
      default: weigh_tile<T, S, ROWS, 4>(weights, tile.values, tile.tokens, padded_dim, dim, rescale, keys_ahead, state.output);
    }
  }
}

template <class T, class S, int ROWS = kQueryRows>
void attend_tile_rows(int rows, const T* const* q, const int* positions, const Tile<S>& tile, int padded_dim, float scale_log2,
                      Ahead& values_ahead, Ahead& keys_ahead, Partial& state) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return attend_tile<T, S, ROWS>(q, positions, tile, padded_dim, scale_log2, values_ahead, keys_ahead, state);
    attend_tile_rows<T, S, ROWS - 1>(rows, q, positions, tile, padded_dim, scale_log2, values_ahead, keys_ahead, state);
  }
}

// Consecutive (token, query head) pairs of one sequence and K/V head.
template <class T>
struct QueryRows {
  int count;
  const T* q[kQueryRows];
  T* out[kQueryRows];         // [head_dim], of the context
  int positions[kQueryRows];  // ascending
  int keys() const { return positions[count - 1] + 1; }
};

// The partial results of `blocks` of query rows over key positions [first, last) of one K/V head, tile by tile, so that a
// tile stays in the first-level cache for all of them. `cold`: the K/V are likely in no cache, so they are fetched ahead.
template <class T, class S>
void attend_chunk(int blocks, const QueryRows<T>* rows, const KVLayer& kv, const HeadShape& shape, int kv_head, const PageTable& table,
                  int first, int last, float scale_log2, bool cold, Partial* states) {
  const int padded = shape.padded_dim();
  for (int b = 0; b < blocks; ++b) states[b].clear(padded);
  const auto page_of = [&](int position) { return table.page(position) * shape.kv_heads + kv_head; };
  const auto keys_of = [&](size_t page) { return (const S*)kv.keys + page * shape.page_elements(); };
  last = std::min(last, rows[blocks - 1].keys());
  for (int at = first; at < last; at += kTile) {
    Tile<S> tile = {at, std::min(kTile, last - at), {}, {}, {}, {}};
    for (int p = 0; p < tile.pages(); ++p) {
      const size_t page = page_of(at + p * kPage);
      tile.keys[p] = keys_of(page);
      tile.values[p] = (const S*)kv.values + page * shape.page_elements();
      if constexpr (!std::is_same_v<S, T>) {
        tile.key_scales[p] = kv.key_scales + page * kPage;
        tile.value_scales[p] = kv.value_scales + page * kPage;
      }
    }
    const int lines = (int)(shape.page_elements() * sizeof(S) / 64);
    Ahead values_ahead{lines}, keys_ahead{lines};
    if (cold) {
      for (int p = 0; p < tile.pages(); ++p) values_ahead.pages[values_ahead.count++] = (const char*)tile.values[p];
      for (int next = at + kTile; next < last && keys_ahead.count < 4; next += kPage)
        keys_ahead.pages[keys_ahead.count++] = (const char*)keys_of(page_of(next));
    }
    for (int b = 0; b < blocks; ++b) {
      if (rows[b].keys() <= at) continue;
      tile.tokens = std::min(kTile, std::min(last, rows[b].keys()) - at);
      attend_tile_rows<T, S>(rows[b].count, rows[b].q, rows[b].positions, tile, padded, scale_log2, values_ahead, keys_ahead, states[b]);
    }
  }
}

// Adds the partial result of row `r` of `later` to that of row `s` of `state`.
inline void merge(Partial& state, int s, const Partial& later, int r, int padded_dim) {
  if (later.maximum[r] == kMinusInfinity) return;
  const float maximum = std::max(state.maximum[s], later.maximum[r]);
  const float a = exp2_scalar(state.maximum[s] - maximum);
  const float b = exp2_scalar(later.maximum[r] - maximum);
  state.maximum[s] = maximum;
  state.sum[s] = state.sum[s] * a + later.sum[r] * b;
  for (int d = 0; d < padded_dim; d += kLanes) {
    float* at = state.output + s * padded_dim + d;
    Vec kept = _mm512_mul_ps(_mm512_load_ps(at), splat(a));
    _mm512_store_ps(at, _mm512_fmadd_ps(_mm512_load_ps(later.output + r * padded_dim + d), splat(b), kept));
  }
}

template <class T>
void finish(const Partial& state, int r, int head_dim, int padded_dim, T* out) {
  const Vec inverse = splat(1.0f / state.sum[r]);
  for (int d = 0; d < head_dim; d += kLanes)
    Traits<T>::narrow(out + d, _mm512_mul_ps(_mm512_load_ps(state.output + r * padded_dim + d), inverse), first_lanes(head_dim - d));
}

// `count` values as T, padded with zeros to a whole vector.
template <class T>
void narrow_row(const float* from, int count, T* to) {
  for (int d = 0; d < count; d += kLanes)
    Traits<T>::narrow(to + d, _mm512_maskz_loadu_ps(first_lanes(count - d), from + d), 0xFFFF);
}

// `count` values as integers, padded with zeros to a whole vector; their scale.
inline float round_row(const float* from, int count, int8_t* to) {
  Vec most = _mm512_setzero_ps();
  for (int d = 0; d < count; d += kLanes) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(count - d), from + d)));
  const float scale = _mm512_reduce_max_ps(most) / 127.0f;
  const Vec divisor = splat(scale == 0.0f ? 1.0f : scale);
  for (int d = 0; d < count; d += kLanes) {
    const Vec quotient = _mm512_div_ps(_mm512_maskz_loadu_ps(first_lanes(count - d), from + d), divisor);
    _mm_storeu_si128((__m128i*)(to + d), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(quotient)));
  }
  return scale;
}

// K and V of one token and one head into their page.
template <class T, class S>
void write_kv(const KVLayer& kv, const HeadShape& shape, size_t slot, int kv_head, const float* key, const float* value) {
  constexpr int unit = Traits<T>::kUnit;
  const size_t page = slot / kPage * shape.kv_heads + kv_head;
  const int token = slot % kPage, padded = shape.padded_dim();
  S* k = (S*)kv.keys + page * shape.page_elements() + token * unit;
  S* v = (S*)kv.values + page * shape.page_elements() + (size_t)(token / unit) * padded * unit + token % unit;
  alignas(64) S row[kMaxHeadDim];
  const auto convert = [&](const float* from, [[maybe_unused]] float* scales) {
    if constexpr (std::is_same_v<S, T>) {
      narrow_row(from, shape.head_dim, row);
    } else {
      scales[page * kPage + token] = round_row(from, shape.head_dim, row);
    }
  };
  convert(key, kv.key_scales);
  for (int d = 0; d < shape.head_dim; d += unit) std::memcpy(k + (size_t)d * kPage, row + d, sizeof(S) * unit);
  convert(value, kv.value_scales);
  if constexpr (unit == 2 && sizeof(S) == 2) {  // every second element of whole vectors
    const int odd = token % 2;
    for (int d = 0; d < padded; d += kLanes) {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(row + d)));
      _mm512_mask_storeu_epi16(v - odd + d * 2, odd ? 0xAAAAAAAAu : 0x55555555u, odd ? _mm512_slli_epi32(wide, 16) : wide);
    }
  } else {
    for (int d = 0; d < shape.head_dim; ++d) v[(size_t)d * unit] = row[d];
  }
}

}  // namespace orca
