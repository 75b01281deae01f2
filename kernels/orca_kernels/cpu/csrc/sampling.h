// One token for each row of logits: penalties, filters, a draw. orca_kernels/sampling.py is the specification, and
// chooses the same token: weights are whole numbers, so that no sum depends on its order, and until they are rounded
// both compute the same steps, products and sums rounded apart.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "memory.h"
#include "team.h"
#include "vector.h"

namespace orca {

// What does not change from token to token of a sequence.
struct SamplingSettings {
  double top_p;        // 1: off
  uint64_t seed;
  int64_t ends_from;   // stop tokens are forbidden at positions before this one
  float scale;         // log2(e) / temperature
  float margin;        // how far from the best logit min_p lets others be: at most 0
  float repetition, presence, frequency;
  int32_t top_k;       // 0: off
  int32_t greedy, penalized;
};

// One sequence: its settings, its stop tokens, and the tokens that penalties are for.
struct SamplingRow {
  SamplingSettings settings;
  std::vector<int32_t> stop;
  std::vector<int32_t> ids;    // distinct tokens of prompt and output
  std::vector<float> counts;   // how often each is in the output

  void rewrite(float* logits, int64_t position) const {
    // In double the products are exact, so that it is all the same whether the compiler fuses them with the sums.
    const double repetition = settings.repetition, presence = settings.presence, frequency = settings.frequency;
    for (size_t i = 0; i < ids.size(); ++i) {
      const double value = logits[ids[i]], count = counts[i];
      logits[ids[i]] = (float)((value > 0 ? value / repetition : value * repetition) - (frequency * count + (count > 0 ? presence : 0.0)));
    }
    if (position >= settings.ends_from) return;
    for (int32_t id : stop) logits[id] = -INFINITY;
  }

  void count(int32_t token) {
    const __m512i wanted = _mm512_set1_epi32(token);
    for (size_t i = 0; i < ids.size(); i += kLanes) {
      const __mmask16 mask = first_lanes((int)std::min<size_t>(kLanes, ids.size() - i));
      const __mmask16 found = _mm512_mask_cmpeq_epi32_mask(mask, _mm512_maskz_loadu_epi32(mask, ids.data() + i), wanted);
      if (!found) continue;
      ++counts[i + __builtin_ctz(found)];
      return;
    }
    ids.push_back(token);
    counts.push_back(1.0f);
  }
};

// 53 bits of noise for the token at `position`: two rounds of the splitmix64 finalizer.
inline uint64_t sampling_noise(uint64_t seed, int64_t position) {
  uint64_t x = seed;
  for (uint64_t increment : {UINT64_C(0x9E3779B97F4A7C15), (uint64_t)(position + 1) * UINT64_C(0xD1342543DE82EF95)}) {
    x += increment;
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    x ^= x >> 31;
  }
  return x >> 11;
}

// Products and sums that no compiler contracts to one rounding.
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
inline Vec times(Vec a, Vec b) { return _mm512_mul_round_ps(a, b, kNearest); }
inline Vec plus(Vec a, Vec b) { return _mm512_add_round_ps(a, b, kNearest); }

// 2^30 e^((logits - best) / temperature), rounded: 0 from a distance of 31 powers of two on.
inline __m512i sampling_weights(Vec logits, Vec best, Vec scale) {
  const Vec x = _mm512_max_ps(times(_mm512_sub_ps(logits, best), scale), splat(-40.0f));
  const Vec whole = _mm512_roundscale_ps(x, kNearest);
  const Vec f = _mm512_sub_ps(x, whole);
  Vec y = splat(1.54035304e-4f);
  for (float c : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) y = plus(times(y, f), splat(c));
  return _mm512_cvtps_epi32(_mm512_scalef_ps(y, plus(whole, splat(30.0f))));
}

// Chooses for one row after another; the memory is reused.
class Sampler {
 public:
  // The token, or -1 if the logits are not finite. Changes the logits, and counts the token in `row`.
  int sample(float* logits, int count, SamplingRow& row, int64_t position) {
    row.rewrite(logits, position);
    if (!find_best(logits, count)) return -1;
    const int token = row.settings.greedy ? first_best(logits, count) : draw(logits, count, row.settings, position);
    if (row.settings.penalized) row.count(token);
    return token;
  }

 private:
  static constexpr int kPart = 64;

  // The largest logit of every part and of all; false if that is not finite or any is NaN.
  bool find_best(const float* logits, int count) {
    parts_ = (count + kPart - 1) / kPart;
    maxima_.reserve(parts_);
    best_ = -INFINITY;
    __mmask16 nan = 0;
    for (int part = 0; part < parts_; ++part) {
      Vec most = splat(-INFINITY);
      const int last = std::min(count, (part + 1) * kPart);
      for (int i = part * kPart; i < last; i += kLanes) {
        const Vec x = _mm512_mask_loadu_ps(splat(-INFINITY), first_lanes(last - i), logits + i);
        nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, x);
      }
      maxima_.get()[part] = _mm512_reduce_max_ps(most);
      best_ = std::max(best_, maxima_.get()[part]);
    }
    return !nan && std::isfinite(best_);
  }

  int first_best(const float* logits, int count) {
    const int part = (int)(std::find(maxima_.get(), maxima_.get() + parts_, best_) - maxima_.get());
    return (int)(std::find(logits + part * kPart, logits + count, best_) - logits);
  }

  int draw(const float* logits, int count, const SamplingSettings& s, int64_t position) {
    collect(logits, count, std::max({best_ + s.margin, top_k_bound(s.top_k), best_ - 33.0f / s.scale}), s.scale);
    if (s.top_k > 0 && s.top_k < found_) keep_top_k(logits, s.top_k);
    const int32_t least = s.top_p < 1.0 ? nucleus(s.top_p) : 1;
    const auto noise = static_cast<unsigned __int128>(sampling_noise(s.seed, position));
    auto left = (uint64_t)(noise * sum(weights_.get(), found_, least) >> 53);
    int i = 0;
    for (uint64_t next; (next = sum(weights_.get() + i, std::min(kLanes, found_ - i), least)) <= left; i += kLanes) left -= next;
    for (;; ++i) {
      const int32_t weight = weights_.get()[i];
      if (weight < least) continue;
      if (left < (uint64_t)weight) return ids_.get()[i];
      left -= weight;
    }
  }

  // A logit that the k-th best cannot be below: the k-th best of the maxima of disjoint parts.
  float top_k_bound(int k) {
    if (k <= 0 || k > parts_) return -INFINITY;
    values_.assign(maxima_.get(), maxima_.get() + parts_);
    std::nth_element(values_.begin(), values_.begin() + k - 1, values_.end(), std::greater<>());
    return values_[k - 1];
  }

  // Ids, ascending, and weights of the tokens with a logit of at least `least` and some weight.
  void collect(const float* logits, int count, float least, float scale) {
    ids_.reserve(count + kLanes);
    weights_.reserve(count + kLanes);
    found_ = 0;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int part = 0; part < parts_; ++part) {
      if (maxima_.get()[part] < least) continue;
      const int last = std::min(count, (part + 1) * kPart);
      for (int i = part * kPart; i < last; i += kLanes) {
        const Vec x = _mm512_mask_loadu_ps(splat(-INFINITY), first_lanes(last - i), logits + i);
        const __mmask16 enough = _mm512_cmp_ps_mask(x, splat(least), _CMP_GE_OQ);
        if (!enough) continue;
        const __m512i weights = sampling_weights(x, splat(best_), splat(scale));
        const __mmask16 mask = _mm512_mask_test_epi32_mask(enough, weights, weights);
        // To registers first: some CPUs compress to memory in a hundred cycles.
        _mm512_storeu_si512(ids_.get() + found_, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(i))));
        _mm512_storeu_si512(weights_.get() + found_, _mm512_maskz_compress_epi32(mask, weights));
        found_ += __builtin_popcount(mask);
      }
    }
  }

  // By logits: at a high temperature different ones have the same weight. Ties with the last one stay.
  void keep_top_k(const float* logits, int k) {
    values_.resize(found_);
    for (int i = 0; i < found_; ++i) values_[i] = logits[ids_.get()[i]];
    std::nth_element(values_.begin(), values_.begin() + k - 1, values_.end(), std::greater<>());
    int kept = 0;
    for (int i = 0; i < found_; ++i) {
      if (logits[ids_.get()[i]] < values_[k - 1]) continue;
      ids_.get()[kept] = ids_.get()[i];
      weights_.get()[kept++] = weights_.get()[i];
    }
    found_ = kept;
  }

  // The least weight in the smallest set of the heaviest tokens that has `top_p` of the mass: the largest weight for
  // which those of at least it have that much, bit by bit.
  int32_t nucleus(double top_p) {
    const uint64_t total = sum(weights_.get(), found_, 1);
    const auto limit = (uint64_t)std::ceil(top_p * (double)total);
    // Those of at most this weight together weigh no more than may be left out, so they are.
    const auto light = (int32_t)((total - limit) / found_);
    heavy_.reserve(found_ + kLanes);
    int32_t* heavy = heavy_.get();
    int open = select(weights_.get(), found_, light + 1, INT32_MAX, heavy);
    uint64_t above = 0;  // weight of those that have been found to be in the set
    int32_t least = 0;
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
      const int32_t trial = least | bit;
      const uint64_t more = sum(heavy, open, trial);
      const bool enough = above + more >= limit;
      if (enough) {
        least = trial;
      } else {
        above += more;
      }
      open = enough ? select(heavy, open, trial, INT32_MAX, heavy) : select(heavy, open, 0, trial, heavy);
    }
    return least;
  }

  // Those in [low, high) to `to`, which may be `weights`; how many.
  static int select(const int32_t* weights, int count, int32_t low, int32_t high, int32_t* to) {
    int found = 0;
    for (int i = 0; i < count; i += kLanes) {
      const __m512i w = _mm512_maskz_loadu_epi32(first_lanes(count - i), weights + i);
      __mmask16 mask = _mm512_mask_cmpge_epi32_mask(first_lanes(count - i), w, _mm512_set1_epi32(low));
      mask = _mm512_mask_cmplt_epi32_mask(mask, w, _mm512_set1_epi32(high));
      _mm512_storeu_si512(to + found, _mm512_maskz_compress_epi32(mask, w));
      found += __builtin_popcount(mask);
    }
    return found;
  }

  // Of the weights of at least `least`.
  static uint64_t sum(const int32_t* weights, int count, int32_t least) {
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < count; i += kLanes) {
      __m512i w = _mm512_maskz_loadu_epi32(first_lanes(count - i), weights + i);
      w = _mm512_maskz_mov_epi32(_mm512_cmpge_epi32_mask(w, _mm512_set1_epi32(least)), w);
      // Two weights of 31 bits fit in an unsigned half, which is then added to 64 bits.
      const __m512i pairs = _mm512_add_epi32(w, _mm512_srli_epi64(w, 32));
      total = _mm512_add_epi64(total, _mm512_and_si512(pairs, _mm512_set1_epi64(0xFFFFFFFF)));
    }
    return (uint64_t)_mm512_reduce_add_epi64(total);
  }

  int parts_ = 0, found_ = 0;
  float best_ = 0.0f;
  Memory<float> maxima_;
  Memory<int32_t> ids_, weights_, heavy_;
  std::vector<float> values_;
};

// A token, or -1, for each of `rows` rows of logits [rows, vocabulary], which change. `team` may be null.
inline void sample_rows(Team* team, float* logits, int vocabulary, int rows, SamplingRow* const* states, const int64_t* positions,
                        int32_t* tokens) {
  std::atomic<int> next{0};
  const auto work = [&](int) {
    static thread_local Sampler sampler;
    for (int row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;)
      tokens[row] = sampler.sample(logits + (size_t)row * vocabulary, vocabulary, *states[row], positions[row]);
  };
  if (team && rows > 1) {
    team->run(work);
  } else {
    work(0);
  }
}

}  // namespace orca
