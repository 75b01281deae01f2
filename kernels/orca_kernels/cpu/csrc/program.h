// A decoder as a program: a list of operations over the flat tokens of one iteration, run by a team of threads.
//
// The members claim the tasks of an operation; the next one begins when all its tasks are done.
// The residual stream is float32, what products read is T. From `Select` on only the tokens whose logits are wanted go on.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "team.h"

namespace orca {

// One iteration, as the caller lays it out; see orca_kernels.attention.AttentionMetadata.
struct Batch {
  int32_t tokens, rows, wanted, table_width, block_size;
  const int64_t* token_ids;      // [tokens]
  const int64_t* positions;      // [tokens]
  const int64_t* slots;          // [tokens]
  const int32_t* query_start;    // [rows + 1]
  const int32_t* seq_lens;       // [rows]
  const int32_t* block_table;    // [rows, table_width]
  const int64_t* wanted_tokens;  // [wanted], ascending flat indices
  float* logits;                 // [wanted, vocabulary]
};

struct QueryRow {
  int first;     // flat index of its first query token
  int count;     // query tokens
  int position;  // of the first
  PageTable table;
};

struct AttentionTask {
  int row, kv_head;
  int first, last;     // query tokens of the row
  int chunk;           // the only chunk to look at, or -1 for all
  int partial;         // where its partial results go, or -1 to finish here
};

struct SplitHead {
  int row, kv_head, chunks, partial;
};

constexpr int kQueryBlock = 16;  // query tokens of one prefill task

// Tokens that go through an operation, and the attention work they make.
struct View {
  int tokens = 0;
  std::vector<QueryRow> rows;
  std::vector<AttentionTask> tasks;
  std::vector<SplitHead> splits;
  int partials = 0;

  void plan(const HeadShape& shape) {
    tasks.clear();
    splits.clear();
    partials = 0;
    const int blocks = (shape.group() + kQueryRows - 1) / kQueryRows;
    for (int row = 0; row < (int)rows.size(); ++row) {
      const QueryRow& r = rows[row];
      const int chunks = (r.position + r.count + kChunk - 1) / kChunk;
      for (int head = 0; head < shape.kv_heads; ++head) {
        if (r.count > 1 || chunks == 1) {
          for (int first = (r.count - 1) / kQueryBlock * kQueryBlock; first >= 0; first -= kQueryBlock)  // the longest first
            tasks.push_back({row, head, first, std::min(first + kQueryBlock, r.count), -1, -1});
        } else {
          splits.push_back({row, head, chunks, partials});
          for (int chunk = 0; chunk < chunks; ++chunk, partials += blocks) tasks.push_back({row, head, 0, 1, chunk, partials});
        }
      }
    }
  }
};

struct Dimensions {
  HeadShape shape;
  int hidden, intermediate, vocabulary;
};

enum Buffer : int { kHidden = 0, kQkv = 1, kContext = 2, kMiddle = 3, kResidual = 4, kLogits = 5 };

// Everything an operation reads and writes while it runs.
template <class T>
struct State {
  Dimensions dims;
  Batch batch;
  View views[2];  // all tokens; the wanted ones
  int hidden_stride, qkv_width, query_width, middle_stride, context_stride;
  Memory<float> x[2], qkv;
  Memory<T> h, q[2], context, middle;
  Memory<Partial> partials;
  Memory<quantized> quantized_rows;
  Memory<GroupScale> token_groups;
  int quantized_stride;
  bool quantizes = false;

  explicit State(const Dimensions& d) : dims(d) {
    hidden_stride = round_up(d.hidden, 32);
    qkv_width = (d.shape.heads + 2 * d.shape.kv_heads) * d.shape.head_dim;
    query_width = d.shape.heads * d.shape.padded_dim();
    context_stride = round_up(d.shape.heads * d.shape.head_dim, 32);
    middle_stride = round_up(d.intermediate, 32);
    quantized_stride = round_up(std::max({hidden_stride, context_stride, middle_stride}), 64);
  }

  struct Rows {
    T* data;
    int width, stride;
  };
  // The buffers that products read.
  Rows rows_of(Buffer buffer) {
    if (buffer == kHidden) return {h.get(), dims.hidden, hidden_stride};
    if (buffer == kContext) return {context.get(), dims.shape.heads * dims.shape.head_dim, context_stride};
    return {middle.get(), dims.intermediate, middle_stride};
  }

  void begin(const Batch& b) {
    batch = b;
    View& all = views[0];
    all.tokens = b.tokens;
    all.rows.clear();
    for (int r = 0; r < b.rows; ++r) {
      const int count = b.query_start[r + 1] - b.query_start[r];
      all.rows.push_back({b.query_start[r], count, b.seq_lens[r] - count, {b.block_table + (size_t)r * b.table_width, b.block_size}});
    }
    View& wanted = views[1];
    wanted.tokens = b.wanted;
    wanted.rows.clear();
    for (int i = 0, r = 0; i < b.wanted; ++i) {
      const int token = (int)b.wanted_tokens[i];
      while (token >= b.query_start[r + 1]) ++r;
      wanted.rows.push_back({i, 1, (int)b.positions[token], all.rows[r].table});
    }
    for (View& view : views) view.plan(dims.shape);
    const size_t t = b.tokens, w = std::max(1, b.wanted);
    x[0].reserve(t * hidden_stride);
    x[1].reserve(w * hidden_stride);
    qkv.reserve(t * qkv_width);
    h.reserve(t * hidden_stride);
    q[0].reserve(t * query_width);
    q[1].reserve(w * query_width);
    context.reserve(t * context_stride);
    middle.reserve(t * middle_stride);
    if (quantizes) {
      quantized_rows.reserve(t * quantized_stride);
      token_groups.reserve(t * groups_of(quantized_stride));
    }
    partials.reserve(std::max(views[0].partials, views[1].partials));
  }
};

template <class T>
struct Op {
  int view = 0;
  virtual ~Op() = default;
  virtual int tasks(State<T>& s) = 0;
  virtual void task(State<T>& s, int i) = 0;
  // A second phase after a barrier, for what needs all of the first.
  virtual int more_tasks(State<T>&) { return 0; }
  virtual void more(State<T>&, int) {}
};

constexpr int kTokenBlock = 8;  // tokens of one task of the small operations
inline int token_blocks(int tokens) { return (tokens + kTokenBlock - 1) / kTokenBlock; }

template <class T, class F>
void for_tokens(State<T>& s, int view, int i, F work) {
  const int last = std::min((i + 1) * kTokenBlock, s.views[view].tokens);
  for (int token = i * kTokenBlock; token < last; ++token) work(token);
}

template <class T>
struct Embed : Op<T> {
  const T* table = nullptr;            // [vocabulary, hidden], or null:
  std::unique_ptr<PackedLinear<T>> head;  // the tied head serves, or
  std::unique_ptr<PackedLinear<quantized>> quantized_head;
  const T* positions = nullptr;        // [max positions, hidden] or null
  int tasks(State<T>& s) override { return token_blocks(s.views[0].tokens); }
  void task(State<T>& s, int i) override {
    constexpr int unit = Traits<T>::kUnit;
    const int hidden = s.dims.hidden;
    for_tokens(s, 0, i, [&](int token) {
      float* x = s.x[0].get() + (size_t)token * s.hidden_stride;
      const int id = (int)s.batch.token_ids[token];
      if (table) {
        for (int k = 0; k < hidden; ++k) x[k] = Traits<T>::to_float(table[(size_t)id * hidden + k]);
      } else if (head) {
        int step;
        const T* at = packed_unit(*head, id, step);
        for (int k = 0; k < hidden; ++k) x[k] = Traits<T>::to_float(at[(size_t)(k / unit) * step + k % unit]);
      } else {
        int step;
        const quantized* at = packed_unit(*quantized_head, id, step);
        const int columns = quantized_head->zmm * kLanes;
        const float* scales = quantized_head->scales + (size_t)(id / columns) * groups_of(hidden) * columns + id % columns;
        for (int k = 0; k < hidden; ++k) x[k] = scales[k / kGroup * columns] * (at[(size_t)(k / 4) * step + k % 4].bits - 128);
      }
      if (positions) {
        const T* row = positions + (size_t)s.batch.positions[token] * hidden;
        for (int k = 0; k < hidden; ++k) x[k] += Traits<T>::to_float(row[k]);
      }
    });
  }
};

template <class T>
struct Norm : Op<T> {
  const float* weight;
  const float* bias;  // null: RMSNorm
  float eps;
  int tasks(State<T>& s) override { return token_blocks(s.views[this->view].tokens); }
  void task(State<T>& s, int i) override {
    const int hidden = s.dims.hidden;
    for_tokens(s, this->view, i, [&](int token) {
      const float* x = s.x[this->view].get() + (size_t)token * s.hidden_stride;
      Vec mean = _mm512_setzero_ps();
      if (bias) {
        for (int k = 0; k < hidden; k += kLanes) mean = _mm512_add_ps(mean, _mm512_maskz_loadu_ps(first_lanes(hidden - k), x + k));
        mean = splat(_mm512_reduce_add_ps(mean) / hidden);
      }
      Vec squares = _mm512_setzero_ps();
      for (int k = 0; k < hidden; k += kLanes) {
        const __mmask16 mask = first_lanes(hidden - k);
        const Vec centred = _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, x + k), mean);
        squares = _mm512_fmadd_ps(centred, centred, squares);
      }
      const Vec scale = splat(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / hidden + eps));
      T* h = s.h.get() + (size_t)token * s.hidden_stride;
      for (int k = 0; k < hidden; k += kLanes) {
        const __mmask16 mask = first_lanes(hidden - k);
        Vec y = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + k), mean), scale);
        y = _mm512_mul_ps(y, _mm512_maskz_loadu_ps(mask, weight + k));
        if (bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, bias + k));
        Traits<T>::narrow(h + k, y, mask);
      }
    });
  }
};

// Rows of a buffer as `quantized`, each group of each row with a scale of its own.
template <class T>
struct Quantize : Op<T> {
  Buffer source;
  int tasks(State<T>& s) override { return token_blocks(s.views[this->view].tokens); }
  void task(State<T>& s, int i) override {
    const auto [data, width, stride] = s.rows_of(source);
    for_tokens(s, this->view, i, [&, data = data, width = width, stride = stride](int token) {
      const T* x = data + (size_t)token * stride;
      quantized* q = s.quantized_rows.get() + (size_t)token * s.quantized_stride;
      GroupScale* groups = s.token_groups.get() + (size_t)token * groups_of(s.quantized_stride);
      for (int first = 0; first < width; first += kGroup) {
        Vec part[kGroup / kLanes], most = _mm512_setzero_ps();
        for (int v = 0; v < kGroup / kLanes; ++v) {
          part[v] = Traits<T>::widen(x + first + v * kLanes, first_lanes(width - first - v * kLanes));
          most = _mm512_max_ps(most, _mm512_abs_ps(part[v]));
        }
        const float largest = _mm512_reduce_max_ps(most);
        const Vec inverse = splat(largest > 0.0f ? 127.0f / largest : 0.0f);
        __m512i sum = _mm512_setzero_si512();
        for (int v = 0; v < kGroup / kLanes; ++v) {
          const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part[v], inverse));
          sum = _mm512_add_epi32(sum, whole);
          _mm_storeu_si128((__m128i*)(q + first + v * kLanes), _mm512_cvtepi32_epi8(whole));
        }
        groups[first / kGroup] = {largest / 127.0f, -128 * _mm512_reduce_add_epi32(sum)};
      }
    });
  }
};

// `In` is T, or `quantized` after a Quantize of the same source.
template <class T, class In>
struct Linear : Op<T> {
  PackedLinear<In> weight;
  Buffer source, target;
  int tasks(State<T>& s) override { return chunks(s) * weight.count(); }
  int chunks(State<T>& s) const { return (s.views[this->view].tokens + kRowChunk - 1) / kRowChunk; }
  void task(State<T>& s, int i) override {
    const int tokens = s.views[this->view].tokens, n = chunks(s), chunk = i / weight.count();
    // Whole tiles in every chunk but the last: those with fewer rows take longer for each.
    const int tile = rows_at_once<In>(weight.zmm), tiles = (tokens + tile - 1) / tile;
    const int row0 = tiles * chunk / n * tile, row1 = std::min(tokens, tiles * (chunk + 1) / n * tile);
    float* y = nullptr;
    size_t y_stride = s.middle_stride;
    if (target == kQkv) y = s.qkv.get(), y_stride = s.qkv_width;
    if (target == kResidual) y = s.x[this->view].get(), y_stride = s.hidden_stride;
    if (target == kLogits) y = s.batch.logits, y_stride = s.dims.vocabulary;
    Activations<In> x;
    if constexpr (std::is_same_v<In, quantized>) {
      x = {s.quantized_rows.get(), (size_t)s.quantized_stride, s.token_groups.get(), (size_t)groups_of(s.quantized_stride)};
    } else {
      const auto rows = s.rows_of(source);
      x = {rows.data, (size_t)rows.stride, nullptr, 0};
    }
    linear_task(weight, x, y, s.middle.get(), y_stride, row0, row1, i % weight.count());
  }
};

// Queries rotated into their buffer; keys (rotated) and values into the pages of their slots.
template <class T>
struct RopeAndWrite : Op<T> {
  const float* cos_sin;  // [max positions, head_dim]: cosines then sines of the head_dim / 2 angles, or null
  KVLayer* kv;
  int tasks(State<T>& s) override { return token_blocks(s.views[0].tokens); }
  void task(State<T>& s, int i) override {
    const HeadShape& shape = s.dims.shape;
    const int d = shape.head_dim, padded = shape.padded_dim();
    for_tokens(s, 0, i, [&](int token) {
      float* row = s.qkv.get() + (size_t)token * s.qkv_width;
      if (cos_sin) {
        const float* angles = cos_sin + (size_t)s.batch.positions[token] * d;
        for (int head = 0; head < shape.heads + shape.kv_heads; ++head) rotate(row + head * d, angles, d / 2);
      }
      T* q = s.q[0].get() + (size_t)token * s.query_width;
      for (int head = 0; head < shape.heads; ++head) narrow_row(row + head * d, d, q + head * padded);
      const auto write = kv->key_scales ? write_kv<T, int8_t> : write_kv<T, T>;
      for (int head = 0; head < shape.kv_heads; ++head)
        write(*kv, shape, (size_t)s.batch.slots[token], head, row + (shape.heads + head) * d,
              row + (shape.heads + shape.kv_heads + head) * d);
    });
  }
  static void rotate(float* v, const float* angles, int half) {
    for (int k = 0; k < half; k += kLanes) {
      const __mmask16 mask = first_lanes(half - k);
      const Vec c = _mm512_maskz_loadu_ps(mask, angles + k), n = _mm512_maskz_loadu_ps(mask, angles + half + k);
      const Vec a = _mm512_maskz_loadu_ps(mask, v + k), b = _mm512_maskz_loadu_ps(mask, v + half + k);
      _mm512_mask_storeu_ps(v + k, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, n)));
      _mm512_mask_storeu_ps(v + half + k, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, n)));
    }
  }
};

template <class T>
struct Attention : Op<T> {
  static constexpr int kBlocks = 8;  // of query rows that look at a tile together
  KVLayer* kv;
  float scale_log2;
  int tasks(State<T>& s) override { return (int)s.views[this->view].tasks.size(); }
  void task(State<T>& s, int i) override {
    const auto attend = kv->key_scales ? attend_chunk<T, int8_t> : attend_chunk<T, T>;
    const AttentionTask& t = s.views[this->view].tasks[i];
    const QueryRow& row = s.views[this->view].rows[t.row];
    const HeadShape& shape = s.dims.shape;
    const int group = shape.group(), padded = shape.padded_dim();
    const bool cold = row.count == 1;
    static thread_local Partial states[kBlocks], later[kBlocks];
    for (int pair = t.first * group, partial = t.partial; pair < t.last * group;) {
      QueryRows<T> rows[kBlocks];
      int blocks = 0;
      for (; blocks < kBlocks && pair < t.last * group; pair += kQueryRows, ++blocks) {
        rows[blocks].count = std::min(kQueryRows, t.last * group - pair);
        for (int r = 0; r < rows[blocks].count; ++r) {
          const int token = (pair + r) / group, head = t.kv_head * group + (pair + r) % group;
          rows[blocks].q[r] = s.q[this->view].get() + (size_t)(row.first + token) * s.query_width + head * padded;
          rows[blocks].out[r] = s.context.get() + (size_t)(row.first + token) * s.context_stride + head * shape.head_dim;
          rows[blocks].positions[r] = row.position + token;
        }
      }
      const auto look = [&](int first, Partial* out) {
        attend(blocks, rows, *kv, shape, t.kv_head, row.table, first, first + kChunk, scale_log2, cold, out);
      };
      if (t.chunk >= 0) {
        look(t.chunk * kChunk, s.partials.get() + partial);
        partial += blocks;
        continue;
      }
      look(0, states);
      for (int first = kChunk; first < rows[blocks - 1].keys(); first += kChunk) {
        look(first, later);
        for (int b = 0; b < blocks; ++b)
          for (int r = 0; r < rows[b].count; ++r) merge(states[b], r, later[b], r, padded);
      }
      for (int b = 0; b < blocks; ++b)
        for (int r = 0; r < rows[b].count; ++r) finish(states[b], r, shape.head_dim, padded, rows[b].out[r]);
    }
  }
  int more_tasks(State<T>& s) override { return (int)s.views[this->view].splits.size(); }
  void more(State<T>& s, int i) override {
    const SplitHead& split = s.views[this->view].splits[i];
    const HeadShape& shape = s.dims.shape;
    const int group = shape.group(), blocks = (group + kQueryRows - 1) / kQueryRows;
    T* out = s.context.get() + (size_t)s.views[this->view].rows[split.row].first * s.context_stride;
    for (int g = 0; g < group; ++g) {
      Partial& state = s.partials.get()[split.partial + g / kQueryRows];
      for (int chunk = 1; chunk < split.chunks; ++chunk)
        merge(state, g % kQueryRows, s.partials.get()[split.partial + chunk * blocks + g / kQueryRows], g % kQueryRows, shape.padded_dim());
      finish(state, g % kQueryRows, shape.head_dim, shape.padded_dim(), out + (split.kv_head * group + g) * shape.head_dim);
    }
  }
};

// From here on only the wanted tokens: gathers their residuals and queries.
template <class T>
struct Select : Op<T> {
  int tasks(State<T>& s) override { return token_blocks(s.views[1].tokens); }
  void task(State<T>& s, int i) override {
    for_tokens(s, 1, i, [&](int token) {
      const size_t from = s.batch.wanted_tokens[token];
      std::memcpy(s.x[1].get() + (size_t)token * s.hidden_stride, s.x[0].get() + from * s.hidden_stride, sizeof(float) * s.hidden_stride);
      std::memcpy(s.q[1].get() + (size_t)token * s.query_width, s.q[0].get() + from * s.query_width, sizeof(T) * s.query_width);
    });
  }
};

template <class T>
class Program {
 public:
  Program(const Dimensions& dims, int layers, Team* team) : state(dims), kv(layers), team_(team) {}

  void add(std::unique_ptr<Op<T>> op) {
    op->view = selected_;
    ops_.push_back(std::move(op));
    seconds.push_back(0.0);
  }
  void select() {
    auto op = std::make_unique<Select<T>>();
    selected_ = 1;
    add(std::move(op));
  }

  void run(const Batch& batch) {
    state.begin(batch);
    tasks_.clear();
    for (auto& op : ops_) {
      tasks_.push_back(op->tasks(state));
      tasks_.push_back(op->more_tasks(state));
    }
    stages_.begin(tasks_);
    team_->run([this](int member) {
      auto before = std::chrono::steady_clock::now();
      stages_.walk(
          [&](int stage, int task) {
            Op<T>& op = *ops_[stage / 2];
            stage % 2 ? op.more(state, task) : op.task(state, task);
          },
          [&](int stage) {
            if (member) return;
            const auto now = std::chrono::steady_clock::now();
            seconds[stage / 2] += std::chrono::duration<double>(now - before).count();
            before = now;
          });
    });
  }

  std::vector<double> seconds;  // spent in each operation so far, waiting for others included

  State<T> state;
  std::vector<KVLayer> kv;

 private:
  Team* team_;
  int selected_ = 0;
  std::vector<std::unique_ptr<Op<T>>> ops_;
  std::vector<int> tasks_;  // of two stages for every operation
  Stages stages_;
};

}  // namespace orca
