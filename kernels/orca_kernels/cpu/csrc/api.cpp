// The C interface that Python binds with ctypes. Handles are opaque; pointers must stay valid as long as their program.
#include "program.h"
#include "sampling.h"

using namespace orca;

namespace {

// A weight as Python describes it; see PackedLinear.
struct Weight {
  const void* panels;
  const float* bias;
  const float* scales;
  const float* offsets;
  int32_t columns, packed_columns, inputs, zmm, epilogue;
  int32_t bits, group;  // of compressed weights, else 0
  bool is_quantized() const { return scales && !bits; }
};

template <class T>
PackedLinear<T> packed(const Weight& w) {
  PackedLinear<T> p = {static_cast<const T*>(w.panels), w.bias, w.scales, w.columns, w.packed_columns, w.inputs, w.zmm,
                       static_cast<Epilogue>(w.epilogue)};
  if (w.bits) p.compressed = {static_cast<const uint8_t*>(w.panels), w.scales, w.offsets, w.bits, w.group};
  return p;
}

template <class T, class In>
void add_linear(Program<T>& program, const Weight& w, int source, int target) {
  auto op = std::make_unique<Linear<T, In>>();
  op->weight = packed<In>(w);
  op->source = static_cast<Buffer>(source);
  op->target = static_cast<Buffer>(target);
  program.add(std::move(op));
}

}  // namespace

// One set of functions per element type.
#define ORCA_PROGRAM(T, NAME)                                                                                              \
  extern "C" void* NAME##_new(const Dimensions* dims, int layers, void* team) {                                            \
    return new Program<T>(*dims, layers, static_cast<Team*>(team));                                                        \
  }                                                                                                                        \
  extern "C" void NAME##_free(void* program) { delete static_cast<Program<T>*>(program); }                                 \
  extern "C" void NAME##_embed(void* program, const void* table, const Weight* head, const void* positions) {               \
    auto op = std::make_unique<Embed<T>>();                                                                                \
    op->table = static_cast<const T*>(table);                                                                              \
    op->positions = static_cast<const T*>(positions);                                                                      \
    if (head && head->is_quantized()) op->quantized_head = std::make_unique<PackedLinear<quantized>>(packed<quantized>(*head));    \
    if (head && !head->is_quantized()) op->head = std::make_unique<PackedLinear<T>>(packed<T>(*head));                             \
    static_cast<Program<T>*>(program)->add(std::move(op));                                                                 \
  }                                                                                                                        \
  extern "C" void NAME##_norm(void* program, const float* weight, const float* bias, float eps) {                          \
    auto op = std::make_unique<Norm<T>>();                                                                                 \
    op->weight = weight, op->bias = bias, op->eps = eps;                                                                   \
    static_cast<Program<T>*>(program)->add(std::move(op));                                                                 \
  }                                                                                                                        \
  extern "C" void NAME##_linear(void* program, const Weight* w, int source, int target) {                                  \
    auto* p = static_cast<Program<T>*>(program);                                                                           \
    if (w->is_quantized()) add_linear<T, quantized>(*p, *w, source, target);                                                       \
    else add_linear<T, T>(*p, *w, source, target);                                                                         \
  }                                                                                                                        \
  extern "C" void NAME##_quantize(void* program, int source) {                                                             \
    auto op = std::make_unique<Quantize<T>>();                                                                             \
    op->source = static_cast<Buffer>(source);                                                                              \
    static_cast<Program<T>*>(program)->state.quantizes = true;                                                             \
    static_cast<Program<T>*>(program)->add(std::move(op));                                                                 \
  }                                                                                                                        \
  extern "C" void NAME##_rope_and_write(void* program, int layer, const float* cos_sin) {                                  \
    auto* p = static_cast<Program<T>*>(program);                                                                           \
    auto op = std::make_unique<RopeAndWrite<T>>();                                                                         \
    op->cos_sin = cos_sin, op->kv = &p->kv[layer];                                                                         \
    p->add(std::move(op));                                                                                                 \
  }                                                                                                                        \
  extern "C" void NAME##_attention(void* program, int layer, float scale) {                                                \
    auto* p = static_cast<Program<T>*>(program);                                                                           \
    auto op = std::make_unique<Attention<T>>();                                                                            \
    op->kv = &p->kv[layer], op->scale_log2 = scale * kLog2e;                                                               \
    p->add(std::move(op));                                                                                                 \
  }                                                                                                                        \
  extern "C" void NAME##_select(void* program) { static_cast<Program<T>*>(program)->select(); }                            \
  extern "C" void NAME##_bind_kv(void* program, int layer, const KVLayer* kv) {                                            \
    static_cast<Program<T>*>(program)->kv[layer] = *kv;                                                                    \
  }                                                                                                                        \
  extern "C" void NAME##_seconds(void* program, double* seconds) {                                                         \
    const auto& spent = static_cast<Program<T>*>(program)->seconds;                                                        \
    std::copy(spent.begin(), spent.end(), seconds);                                                                        \
  }                                                                                                                        \
  extern "C" void NAME##_run(void* program, const Batch* batch) { static_cast<Program<T>*>(program)->run(*batch); }        \
  extern "C" void NAME##_pack(const void* source, int outputs, int inputs, int packed_columns, int zmm, int swiglu,        \
                              void* panels) {                                                                              \
    pack_linear(static_cast<const T*>(source), outputs, inputs, packed_columns, zmm, swiglu != 0, Traits<T>::kUnit,        \
                static_cast<T*>(panels));                                                                                  \
  }

ORCA_PROGRAM(float, orca_float32)
#ifdef __AVX512BF16__
ORCA_PROGRAM(bf16, orca_bfloat16)
#endif

extern "C" void orca_int8_pack(const void* source, int outputs, int inputs, int packed_columns, int zmm, int swiglu, int unit,
                               void* panels) {
  pack_linear(static_cast<const int8_t*>(source), outputs, inputs, packed_columns, zmm, swiglu != 0, unit,
              static_cast<int8_t*>(panels));
}

extern "C" void* orca_team_new(int size) { return new Team(size); }
extern "C" void orca_team_free(void* team) { delete static_cast<Team*>(team); }

extern "C" void* orca_sampling_row_new(const SamplingSettings* settings, const int32_t* stop, int stops, const int32_t* ids,
                                      const float* counts, int distinct) {
  return new SamplingRow{*settings, {stop, stop + stops}, {ids, ids + distinct}, {counts, counts + distinct}};
}
extern "C" void orca_sampling_row_free(void* row) { delete static_cast<SamplingRow*>(row); }
extern "C" void orca_sample(void* team, float* logits, int vocabulary, int rows, SamplingRow* const* states, const int64_t* positions,
                            int32_t* tokens) {
  sample_rows(static_cast<Team*>(team), logits, vocabulary, rows, states, positions, tokens);
}
