// Decoder (Llama, Mistral, Qwen, SmolLM3, Mixtral) with a paged KV cache. One call computes a step
// of the whole batch, in one thread.
//
// Every token is a row, so prefill, chunked prefill and decode share one code path. Weights are
// packed once per version. The caller owns the state of all slots as arrays and passes their
// addresses; a call appends the sampled tokens.
#include <chrono>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "gemm.h"
#include "sampling.h"
#include "tensor_reader.h"

namespace meshrl {

constexpr int8_t kRunning = 0, kStop = 1, kLength = 2;  // FinishReason in common/api/engine.py

extern "C" {

struct Shape {
  int64_t vocab, hidden, layers, heads, kv_heads, head_width, rotary_width, ffn, positions;
  int64_t experts, experts_per_token, expert_ffn, normalise_routing;  // sparse layers
  int64_t shared_ffn;  // width of the shared expert; 0: none
  float norm_epsilon, attention_scale;
};

// State of all slots, as in common/generation/batch/slots.py. An array is [slots], [slots, length],
// [slots, table_width], [slots, stop_width] or [slots, bias_width].
struct Slots {
  int64_t* tokens;
  float* logprobs;
  float* raw_logprobs;  // at temperature 1 without filtering, for slots with wants_raw_logprobs
  int32_t* versions;
  int64_t* num_tokens;           // prompt tokens and sampled tokens
  int64_t* num_computed_tokens;  // leading tokens that are in the cache
  const int64_t* max_tokens;
  const int64_t* stop_ids;  // padded with -1
  const int32_t* table;
  const uint64_t* rng_key;
  const float *temperature, *top_p, *min_p;
  const int64_t* top_k;
  const bool* wants_raw_logprobs;
  const bool* is_adjusted;  // false: the next six arrays do not count
  const float *repetition_penalty, *presence_penalty;
  const int64_t* output_start;
  const int64_t* stop_start;  // known tokens before a stop id is possible
  const int64_t* biased_ids;  // padded with -1
  const float* biases;
  int8_t* finish_reason;
  int16_t* experts;  // [slots, length, sparse layers, experts_per_token]: experts of the row that
                     // predicted a sampled token; null: not recorded
  const int32_t* adapter_index;     // adapter of a slot's tokens; 0: none
  const int32_t* adapter_versions;  // [adapters] weight version of each adapter index
  int64_t length, table_width, stop_width, bias_width;
};

}  // extern "C"

// Parts of the weights, in the order of WEIGHT_PARTS in common/generation/backends/native.py.
enum Part {
  kEmbedding,
  kUnembedding,
  kFinalNorm,
  kAttentionNorm,
  kQkv,
  kQkvBias,
  kQueryNorm,
  kKeyNorm,
  kOutput,
  kOutputBias,
  kMlpNorm,
  kGateUp,
  kDown,
  kRouter,
  kExpertsGateUp,
  kExpertsDown,
  kSharedGate,
  kSharedGateUp,
  kSharedDown,
};

// Properties of a layer that differ between layers of one model.
struct LayerKind {
  int64_t sparse;   // 1: mixture of experts
  int64_t rotated;  // 1: rotary embedding
  int64_t window;   // attention window in tokens, itself included; 0: unlimited
};

// Row of a step: one token of one slot.
struct Row {
  int64_t token, position, slot;
};

template <class T>
class Decoder {
 public:
  // `kinds` [layers], `absent` [absent_count].
  Decoder(const Shape& shape, const float* rope, const LayerKind* kinds, const Absent* absent,
          int64_t absent_count)
      : shape_(shape),
        query_features_(shape.heads * shape.head_width),
        key_features_(shape.kv_heads * shape.head_width),
        padded_hidden_(rounded_up(shape.hidden, 16)),
        block_elements_(kBlock * key_features_),
        layers_(shape.layers),
        rope_(rope, rope + shape.positions * 2 * shape.rotary_width),
        sampler_(std::vector<Absent>(absent, absent + absent_count)),
        routes_(shape.experts, shape.experts_per_token, shape.normalise_routing != 0) {
    for (int64_t i = 0; i < shape.layers; i++) {
      Layer& layer = layers_[i];
      layer.qkv.shape(query_features_ + 2 * key_features_, shape.hidden);
      layer.output.shape(shape.hidden, query_features_);
      layer.kind = kinds[i];
      if (kinds[i].sparse) {
        shape_mixture(layer.mixture);
        experts_per_row_ += shape.experts_per_token;
      } else {
        layer.gate_up.shape(2 * rounded_up(shape.ffn, 16), shape.hidden);
        layer.down.shape(shape.hidden, shape.ffn);
      }
    }
    unembedding_.shape(shape.vocab, shape.hidden);
  }

  // Allocates weights and a cache of `blocks` blocks. Returns false if memory runs out.
  bool wake(int64_t blocks) {
    const std::vector<Matrix<T>*> all = matrices();
    int64_t elements = 0;
    for (const Matrix<T>* matrix : all) elements += matrix->elements();
    if (!weights_.resize(elements)) return false;
    T* at = weights_.data();
    for (Matrix<T>* matrix : all) {
      matrix->set_storage(at);
      at += matrix->elements();
    }
    for (Layer& layer : layers_)
      if (!layer.keys.resize(blocks * block_elements_) ||
          !layer.values.resize(blocks * block_elements_))
        return false;
    return true;
  }

  void sleep() {
    for (Layer& layer : layers_) layer.keys.release(), layer.values.release();
    weights_.release();
    std::vector<float>().swap(embedding_);
    row_capacity_ = 0;
    gate_up_start_capacity_ = 0;
    for (Buffer<float>* b : {&residual_, &heads_, &logits_, &attention_output_, &router_logits_,
                             &expert_outputs_, &gate_up_start_})
      b->release();
    for (Buffer<Act<T>>* b : {&normed_, &attention_act_, &ffn_, &gathered_}) b->release();
  }

  void load_part(Part part, int64_t layer_index, TensorReader& reader) {
    const Shape& s = shape_;
    Layer& layer = layers_[layer_index];
    Mixture<T>& mixture = layer.mixture;
    switch (part) {
      case kEmbedding: return load_rows(reader, s.vocab, s.hidden, embedding_);
      case kUnembedding: return pack(unembedding_, reader, s.vocab, s.hidden);
      case kFinalNorm: return load_padded(reader, s.hidden, final_norm_);
      case kAttentionNorm: return load_padded(reader, s.hidden, layer.attention_norm);
      case kQkv: return pack(layer.qkv, reader, query_features_ + 2 * key_features_, s.hidden);
      case kQkvBias:
        return load_padded(reader, query_features_ + 2 * key_features_, layer.qkv_bias);
      case kQueryNorm: return load_padded(reader, s.rotary_width, layer.query_norm);
      case kKeyNorm: return load_padded(reader, s.rotary_width, layer.key_norm);
      case kOutput: return pack(layer.output, reader, s.hidden, query_features_);
      case kOutputBias: return load_padded(reader, s.hidden, layer.output_bias);
      case kMlpNorm: return load_padded(reader, s.hidden, layer.mlp_norm);
      case kGateUp:
        return pack_gate_up(layer.gate_up, row_reader(reader, s.hidden), s.ffn, s.hidden);
      case kDown: return pack(layer.down, reader, s.hidden, s.ffn);
      case kRouter: return pack(mixture.router, reader, s.experts, s.hidden);
      case kExpertsGateUp:
        for (int64_t e = 0; e < s.experts; e++)
          pack_gate_up(mixture.gate_up[e], row_reader(reader, s.hidden, e * 2 * s.expert_ffn),
                       s.expert_ffn, s.hidden);
        return;
      case kExpertsDown:
        for (int64_t e = 0; e < s.experts; e++)
          pack(mixture.down[e], reader, s.hidden, s.expert_ffn, e * s.hidden);
        return;
      case kSharedGate: return pack(mixture.shared_gate, reader, 1, s.hidden);
      case kSharedGateUp:
        return pack_gate_up(mixture.shared_gate_up, row_reader(reader, s.hidden), s.shared_ffn,
                            s.hidden);
      case kSharedDown: return pack(mixture.shared_down, reader, s.hidden, s.shared_ffn);
    }
  }

  // Reads back a part, with the precision of its storage.
  void read_part(Part part, int64_t layer_index, float* into) const {
    const Shape& s = shape_;
    const Layer& layer = layers_[layer_index];
    const Mixture<T>& mixture = layer.mixture;
    const auto row = [&](const std::vector<float>& values, int64_t n) {
      std::copy_n(values.begin(), n, into);
    };
    const auto plain = [](int64_t r) { return r; };
    const auto gate_up = [&](const Matrix<T>& matrix, int64_t ffn, float* at) {
      matrix.unpack(at, matrix.outputs, s.hidden, alternate_panels(ffn));
    };
    switch (part) {
      case kEmbedding: return row(embedding_, s.vocab * s.hidden);
      case kUnembedding: return unembedding_.unpack(into, s.vocab, s.hidden, plain);
      case kFinalNorm: return row(final_norm_, s.hidden);
      case kAttentionNorm: return row(layer.attention_norm, s.hidden);
      case kQkv:
        return layer.qkv.unpack(into, query_features_ + 2 * key_features_, s.hidden, plain);
      case kQkvBias: return row(layer.qkv_bias, query_features_ + 2 * key_features_);
      case kQueryNorm: return row(layer.query_norm, s.rotary_width);
      case kKeyNorm: return row(layer.key_norm, s.rotary_width);
      case kOutput: return layer.output.unpack(into, s.hidden, query_features_, plain);
      case kOutputBias: return row(layer.output_bias, s.hidden);
      case kMlpNorm: return row(layer.mlp_norm, s.hidden);
      case kGateUp: return gate_up(layer.gate_up, s.ffn, into);
      case kDown: return layer.down.unpack(into, s.hidden, s.ffn, plain);
      case kRouter: return mixture.router.unpack(into, s.experts, s.hidden, plain);
      case kExpertsGateUp:
        for (int64_t e = 0; e < s.experts; e++)
          gate_up(mixture.gate_up[e], s.expert_ffn, into + e * 2 * s.expert_ffn * s.hidden);
        return;
      case kExpertsDown:
        for (int64_t e = 0; e < s.experts; e++)
          mixture.down[e].unpack(into + e * s.hidden * s.expert_ffn, s.hidden, s.expert_ffn, plain);
        return;
      case kSharedGate: return mixture.shared_gate.unpack(into, 1, s.hidden, plain);
      case kSharedGateUp: return gate_up(mixture.shared_gate_up, s.shared_ffn, into);
      case kSharedDown: return mixture.shared_down.unpack(into, s.hidden, s.shared_ffn, plain);
    }
  }

  // Allocates a pending adapter; `ranks` [layers, kTargets], 0 for no delta. Returns false if
  // memory runs out.
  bool begin_adapter(const int64_t* ranks) {
    adapters_.begin(shape_.layers);
    for (int64_t i = 0; i < shape_.layers; i++) {
      const Layer& layer = layers_[i];
      for (int64_t target = 0; target < kTargets; target++) {
        const int64_t rank = ranks[i * kTargets + target];
        if (rank == 0) continue;
        const Matrix<T>& matrix = get_target_matrix(layer, static_cast<Target>(target));
        LowRankDelta<T>& change = adapters_.pending().delta(i, target);
        change.a.shape(rank, matrix.inputs);
        change.b.shape(matrix.outputs, rank);
      }
    }
    return adapters_.pending().allocate();
  }

  // Packs one delta of the pending adapter: `a` [rank, inputs], `b` [outputs, rank].
  void set_adapter(int64_t layer, Target target, int64_t rank, const float* a, const float* b) {
    const Shape& s = shape_;
    LowRankDelta<T>& change = adapters_.pending().delta(layer, target);
    const int64_t inputs[] = {s.hidden, query_features_, s.hidden, s.ffn};
    const int64_t outputs[] = {query_features_ + 2 * key_features_, s.hidden, 0, s.hidden};
    change.a.pack(a, rank, inputs[target]);
    if (target == kToGateUp)
      pack_gate_up(change.b, [=](int64_t r) { return b + r * rank; }, s.ffn, rank);
    else
      change.b.pack(b, outputs[target], rank);
  }

  void commit_adapter(int64_t index) { adapters_.commit(index); }
  void drop_adapter(int64_t index) { adapters_.drop(index); }

  int64_t run(const Slots& slots, const int64_t* slot, const int64_t* count, int64_t n,
              int64_t steps, double budget_s) {
    const auto start_time = std::chrono::steady_clock::now();
    int64_t sampled = 0;
    slot_order_.resize(n);
    std::iota(slot_order_.begin(), slot_order_.end(), 0);
    std::stable_sort(slot_order_.begin(), slot_order_.end(), [&](int64_t a, int64_t b) {
      return slots.adapter_index[slot[a]] < slots.adapter_index[slot[b]];
    });
    for (int64_t step = 0; step < steps; step++) {
      batch_.clear(), sample_rows_.clear();
      for (const int64_t i : slot_order_) {
        const int64_t at = slot[i], first = slots.num_computed_tokens[at];
        for (int64_t p = first; p < first + count[i]; p++)
          batch_.push_back({slots.tokens[at * slots.length + p], p, at});
        slots.num_computed_tokens[at] += count[i];
        if (slots.num_computed_tokens[at] == slots.num_tokens[at])
          sample_rows_.push_back(static_cast<int64_t>(batch_.size()) - 1);
      }
      if (!forward(slots)) return -1;
      compute_logits(sample_rows_);
      bool any_finished = false;
      for (size_t i = 0; i < sample_rows_.size(); i++)
        any_finished |= sample_next_token(slots, sample_rows_[i], i);
      sampled += sample_rows_.size();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_time;
      if (any_finished || elapsed.count() >= budget_s) break;
    }
    return sampled;
  }

  // Computes log-probabilities, at temperature 1, of the `count` tokens after the computed ones.
  // Returns false if memory runs out.
  bool score(const Slots& slots, int64_t slot, int64_t count, float* out) {
    batch_.clear(), sample_rows_.clear();
    const int64_t first = slots.num_computed_tokens[slot];
    const int64_t* tokens = slots.tokens + slot * slots.length;
    for (int64_t i = 0; i < count; i++) {
      batch_.push_back({tokens[first + i], first + i, slot});
      sample_rows_.push_back(i);
    }
    if (!forward(slots)) return false;
    compute_logits(sample_rows_);
    for (int64_t i = 0; i < count; i++)
      out[i] = sampler_.compute_raw_logprob(logits(i), shape_.vocab, tokens[first + i + 1]);
    slots.num_computed_tokens[slot] += count;
    return true;
  }

  void copy_block(int64_t from, int64_t to) {
    for (Layer& layer : layers_) {
      memcpy(layer.keys.data() + to * block_elements_, layer.keys.data() + from * block_elements_,
             block_elements_ * sizeof(T));
      memcpy(layer.values.data() + to * block_elements_,
             layer.values.data() + from * block_elements_, block_elements_ * sizeof(T));
    }
  }

  // Frees the memory of the cache; its content is zero afterwards.
  void discard_cache() {
    for (Layer& layer : layers_) layer.keys.discard(), layer.values.discard();
  }

  // Weights that take the most memory: the matrices (0) and the embedding (1).
  std::pair<char*, int64_t> weights_memory(int index) {
    if (index == 0) return {reinterpret_cast<char*>(weights_.data()), weights_.bytes()};
    return {reinterpret_cast<char*>(embedding_.data()), embedding_.size() * sizeof(float)};
  }

  // Copies the blocks layer by layer, in the given order: all keys, then all values.
  void read_blocks(const int32_t* blocks, int64_t n, char* out) const {
    for (const Layer& layer : layers_)
      for (const T* part : {layer.keys.data(), layer.values.data()})
        for (int64_t i = 0; i < n; i++, out += block_elements_ * sizeof(T))
          memcpy(out, part + blocks[i] * block_elements_, block_elements_ * sizeof(T));
  }

  void write_blocks(const int32_t* blocks, int64_t n, const char* in) {
    for (Layer& layer : layers_)
      for (T* part : {layer.keys.data(), layer.values.data()})
        for (int64_t i = 0; i < n; i++, in += block_elements_ * sizeof(T))
          memcpy(part + blocks[i] * block_elements_, in, block_elements_ * sizeof(T));
  }

 private:
  struct Layer {
    LayerKind kind;
    std::vector<float> attention_norm, mlp_norm, query_norm, key_norm, qkv_bias, output_bias;
    Matrix<T> qkv, output, gate_up, down;
    Mixture<T> mixture;      // replaces gate_up and down in sparse layers
    Buffer<T> keys, values;  // [blocks, kv_heads, 16 * head_width]
  };

  // All matrices in the order of their use in a step, for prefetching across their ends.
  std::vector<Matrix<T>*> matrices() {
    std::vector<Matrix<T>*> all;
    for (Layer& layer : layers_) {
      for (Matrix<T>* matrix :
           {&layer.qkv, &layer.output, &layer.gate_up, &layer.down, &layer.mixture.router,
            &layer.mixture.shared_gate, &layer.mixture.shared_gate_up, &layer.mixture.shared_down})
        all.push_back(matrix);
      for (size_t e = 0; e < layer.mixture.down.size(); e++)
        for (Matrix<T>* matrix : {&layer.mixture.gate_up[e], &layer.mixture.down[e]})
          all.push_back(matrix);
    }
    all.push_back(&unembedding_);
    return all;
  }

  void shape_mixture(Mixture<T>& mixture) {
    mixture.router.shape(shape_.experts, shape_.hidden);
    mixture.gate_up.resize(shape_.experts), mixture.down.resize(shape_.experts);
    for (Matrix<T>& matrix : mixture.gate_up)
      matrix.shape(2 * rounded_up(shape_.expert_ffn, 16), shape_.hidden);
    for (Matrix<T>& matrix : mixture.down) matrix.shape(shape_.hidden, shape_.expert_ffn);
    if (shape_.shared_ffn == 0) return;
    mixture.shared_gate.shape(1, shape_.hidden);
    mixture.shared_gate_up.shape(2 * rounded_up(shape_.shared_ffn, 16), shape_.hidden);
    mixture.shared_down.shape(shape_.hidden, shape_.shared_ffn);
  }

  static void load_padded(TensorReader& reader, int64_t n, std::vector<float>& into) {
    into.assign(rounded_up(n, 16), 0.0f);
    const float* values = reader.read(0, n);
    std::copy(values, values + n, into.begin());
  }
  static void load_rows(TensorReader& reader, int64_t rows, int64_t columns,
                        std::vector<float>& into) {
    into.resize(rows * columns);
    for (int64_t r = 0; r < rows; r++)
      std::copy_n(reader.read(r * columns, columns), columns, into.begin() + r * columns);
  }

  // Returns a function that reads a row of a matrix by its number, counted from row `first`.
  static auto row_reader(TensorReader& reader, int64_t columns, int64_t first = 0) {
    return [&reader, columns, first](int64_t r) {
      return reader.read((first + r) * columns, columns);
    };
  }
  static void pack(Matrix<T>& into, TensorReader& reader, int64_t count, int64_t columns,
                   int64_t first = 0) {
    into.pack_rows(row_reader(reader, columns, first), count, columns, [](int64_t r) { return r; });
  }

  const Matrix<T>& get_target_matrix(const Layer& layer, Target target) const {
    const Matrix<T>* of[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
    return *of[target];
  }

  // Interleaves panels of gate and up, so that SwiGLU multiplies them in registers.
  template <class Values>
  static void pack_gate_up(Matrix<T>& into, Values&& values, int64_t ffn, int64_t columns) {
    into.pack_rows(values, into.outputs, columns, alternate_panels(ffn));
  }
  static auto alternate_panels(int64_t ffn) {
    return [ffn](int64_t r) {
      const int64_t panel = r / kLanes, feature = panel / 2 * kLanes + r % kLanes;
      return feature >= ffn ? -1 : feature + (panel % 2) * ffn;
    };
  }

  bool reserve(int64_t rows) {
    if (rows <= row_capacity_) return true;
    row_capacity_ = 0;  // stays 0 if an allocation fails
    rows = rounded_up(rows, 64);
    const int64_t ffn =
        rounded_up(std::max({shape_.ffn, shape_.expert_ffn, shape_.shared_ffn}), 16);
    const int64_t qkv = rounded_up(query_features_ + 2 * key_features_, 16);
    if (!residual_.resize(rows * padded_hidden_) || !heads_.resize(rows * qkv) ||
        !attention_output_.resize(rows * query_features_) ||
        !normed_.resize(rows * padded_hidden_) || !attention_act_.resize(rows * query_features_) ||
        !ffn_.resize(rows * ffn) || !logits_.resize(rows * rounded_up(shape_.vocab, 16)))
      return false;
    const int64_t expert_width = experts_per_row_ ? padded_hidden_ : 0;
    if (!router_logits_.resize(rows * rounded_up(shape_.experts, 16)) ||
        !expert_outputs_.resize(rows * expert_width) || !gathered_.resize(rows * expert_width))
      return false;
    row_capacity_ = rows;
    return true;
  }

  float* logits(int64_t row) { return logits_.data() + row * rounded_up(shape_.vocab, 16); }

  // Computes RMSNorm of a row of `padded_hidden_` features.
  void norm(const float* x, const std::vector<float>& weight, Act<T>* y) const {
    Vec squares{};
    for (int64_t i = 0; i < padded_hidden_; i += kLanes) squares += load(x + i) * load(x + i);
    const Vec scale = splat(1.0f / std::sqrt(sum(squares) / shape_.hidden + shape_.norm_epsilon));
    for (int64_t i = 0; i < padded_hidden_; i += kLanes)
      store_act(y + i, load(x + i) * scale * load(weight.data() + i));
  }

  void norm_head(float* x, const std::vector<float>& weight) const {
    const int64_t width = shape_.rotary_width;
    float squares = 0;
    for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / width + shape_.norm_epsilon);
    for (int64_t i = 0; i < width; i++) x[i] *= scale * weight[i];
  }

  // Applies rotary embedding to a head's halves. The first half of the table's sines is negated.
  void rotate(float* x, int64_t position) const {
    const int64_t width = shape_.rotary_width, half = width / 2;
    const float* cosine = rope_.data() + position * 2 * width;
    const float* sine = cosine + width;
    for (int64_t i = 0; i < half; i++) {
      const float a = x[i], b = x[half + i];
      x[i] = a * cosine[i] + b * sine[i];
      x[half + i] = b * cosine[half + i] + a * sine[half + i];
    }
  }

  // Computes the hidden states of all rows of batch_ into residual_, and writes their keys and
  // values to the cache. Returns false if memory runs out.
  bool forward(const Slots& slots) {
    const int64_t n = batch_.size();
    if (!reserve(n)) return false;
    if (!adapters_.assign_rows(n, [&](int64_t r) { return slots.adapter_index[batch_[r].slot]; }))
      return false;
    for (int64_t r = 0; r < n; r++) {
      float* row = residual_.data() + r * padded_hidden_;
      memcpy(row, embedding_.data() + batch_[r].token * shape_.hidden,
             shape_.hidden * sizeof(float));
      std::fill(row + shape_.hidden, row + padded_hidden_, 0.0f);
    }
    expert_ids_.resize(n * experts_per_row_);
    int64_t expert_offset = 0;  // entries of earlier layers in a row of expert_ids_
    for (int64_t l = 0; l < shape_.layers; l++) {
      Layer& layer = layers_[l];
      for (int64_t r = 0; r < n; r++)
        norm(residual_.data() + r * padded_hidden_, layer.attention_norm,
             normed_.data() + r * padded_hidden_);
      multiply(normed_.data(), n, layer.qkv, bias(layer.qkv_bias), false, heads_.data());
      adapters_.add(l, kToQkv, normed_.data(), heads_.data());
      for (int64_t r = 0; r < n; r++) write_cache(slots, layer, r);
      for (int64_t r = 0; r < n;) r += attend_rows(slots, layer, r);
      multiply(attention_act_.data(), n, layer.output, bias(layer.output_bias), true,
               residual_.data());
      adapters_.add(l, kToOutput, attention_act_.data(), residual_.data());
      for (int64_t r = 0; r < n; r++)
        norm(residual_.data() + r * padded_hidden_, layer.mlp_norm,
             normed_.data() + r * padded_hidden_);
      if (layer.mixture.empty()) {
        if (!adapters_.has_delta(l, kToGateUp)) {
          multiply_swiglu(normed_.data(), n, layer.gate_up, ffn_.data());
        } else {
          if (!compute_gate_up_start(l, n)) return false;
          multiply_swiglu(normed_.data(), n, layer.gate_up, ffn_.data(), gate_up_start_.data());
        }
        multiply(ffn_.data(), n, layer.down, nullptr, true, residual_.data());
        adapters_.add(l, kToDown, ffn_.data(), residual_.data());
      } else {
        add_experts(layer.mixture, n, expert_offset);
        expert_offset += shape_.experts_per_token;
      }
    }
    return true;
  }

  // Computes the adapters' deltas of gate and up for the n rows of normed_ into gate_up_start_.
  // They are the product's initial sums, because the product leaves the registers only after its
  // nonlinearity. Returns false if memory runs out.
  bool compute_gate_up_start(int64_t layer, int64_t n) {
    const int64_t elements = n * layers_[layer].gate_up.outputs;
    if (elements > gate_up_start_capacity_) {
      gate_up_start_capacity_ = 0;
      if (!gate_up_start_.resize(elements)) return false;
      gate_up_start_capacity_ = elements;
    } else {
      std::fill_n(gate_up_start_.data(), elements, 0.0f);
    }
    adapters_.add(layer, kToGateUp, normed_.data(), gate_up_start_.data());
    return true;
  }

  // Adds the experts' outputs for the n rows of normed_ to the residual. Records their ids in
  // expert_ids_, from entry `expert_offset` of each row on.
  void add_experts(const Mixture<T>& mixture, int64_t n, int64_t expert_offset) {
    if (shape_.shared_ffn != 0) add_shared_expert(mixture, n);
    multiply(normed_.data(), n, mixture.router, nullptr, false, router_logits_.data());
    routes_.choose(router_logits_.data(), n, mixture.router.outputs);
    for (int64_t r = 0; r < n; r++)
      std::copy_n(routes_.experts(r), shape_.experts_per_token,
                  &expert_ids_[r * experts_per_row_ + expert_offset]);
    for (int64_t e = 0; e < shape_.experts; e++) {
      const int64_t count = routes_.count(e);
      const int64_t* rows = routes_.rows(e);
      if (count == 0) continue;
      for (int64_t i = 0; i < count; i++)
        std::copy_n(normed_.data() + rows[i] * padded_hidden_, padded_hidden_,
                    gathered_.data() + i * padded_hidden_);
      multiply_swiglu(gathered_.data(), count, mixture.gate_up[e], ffn_.data());
      multiply(ffn_.data(), count, mixture.down[e], nullptr, false, expert_outputs_.data());
      for (int64_t i = 0; i < count; i++) {
        const Vec share = splat(routes_.shares(e)[i]);
        float* row = residual_.data() + rows[i] * padded_hidden_;
        for (int64_t d = 0; d < padded_hidden_; d += kLanes)
          store(row + d,
                load(row + d) + share * load(expert_outputs_.data() + i * padded_hidden_ + d));
      }
    }
  }

  // Adds the shared expert's output for the n rows of normed_, times its sigmoid gate.
  void add_shared_expert(const Mixture<T>& mixture, int64_t n) {
    multiply(normed_.data(), n, mixture.shared_gate, nullptr, false, router_logits_.data());
    multiply_swiglu(normed_.data(), n, mixture.shared_gate_up, ffn_.data());
    multiply(ffn_.data(), n, mixture.shared_down, nullptr, false, expert_outputs_.data());
    for (int64_t r = 0; r < n; r++) {
      const float gate = router_logits_.data()[r * mixture.shared_gate.outputs];
      const Vec gate_value = splat(1.0f / (1.0f + std::exp(-gate)));
      float* row = residual_.data() + r * padded_hidden_;
      for (int64_t d = 0; d < padded_hidden_; d += kLanes)
        store(row + d,
              load(row + d) + gate_value * load(expert_outputs_.data() + r * padded_hidden_ + d));
    }
  }

  static const float* bias(const std::vector<float>& values) {
    return values.empty() ? nullptr : values.data();
  }

  // Normalizes and rotates a row's queries and keys, and writes its keys and values to the cache.
  void write_cache(const Slots& slots, Layer& layer, int64_t r) {
    const Row& row = batch_[r];
    const int64_t width = shape_.head_width, qk = shape_.heads + shape_.kv_heads;
    float* heads = heads_.data() + r * layer.qkv.outputs;
    for (int64_t h = 0; h < qk; h++) {
      float* head = heads + h * width;
      if (!layer.query_norm.empty())
        norm_head(head, h < shape_.heads ? layer.query_norm : layer.key_norm);
      if (layer.kind.rotated) rotate(head, row.position);
    }
    for (int64_t i = 0; i < query_features_; i++) heads[i] *= shape_.attention_scale;
    const int at = row.position % kBlock;
    const int64_t block = slots.table[row.slot * slots.table_width + row.position / kBlock];
    for (int64_t h = 0; h < shape_.kv_heads; h++) {
      T* values = layer.values.data() + block * block_elements_ + h * kBlock * width;
      // Stale values of a reused block may be NaN, and 0 * NaN is NaN.
      if (at == 0) memset(values, 0, kBlock * width * sizeof(T));
      write_token(layer.keys.data() + block * block_elements_ + h * kBlock * width, values, at,
                  static_cast<int>(width), heads + query_features_ + h * width,
                  heads + query_features_ + key_features_ + h * width);
    }
  }

  // Computes attention of row r and of the following rows of its slot; returns the number of rows.
  int64_t attend_rows(const Slots& slots, const Layer& layer, int64_t r) {
    const int64_t width = shape_.head_width, shared = shape_.heads / shape_.kv_heads;
    int64_t rows = 1;
    while ((rows + 1) * shared <= kMaxQueries && is_same_slot(r + rows, r)) rows++;
    const int64_t all = rows * shared;  // queries of a key-value head
    for (int64_t first = 0; first < all; first += kMaxQueries) {
      const int64_t count = std::min<int64_t>(all - first, kMaxQueries);
      int64_t lanes = count;  // rounded up to a kernel's size; copies of the last query fill it
      while (!has_count_kernel(lanes)) lanes++;
      packed_queries_.resize(shape_.kv_heads * lanes * width), padding_output_.resize(width);
      targets_.resize(shape_.kv_heads * lanes), visible_.resize(lanes);
      for (int64_t i = 0; i < shape_.kv_heads * lanes; i++) {
        const int64_t lane = i % lanes, query = first + std::min(lane, count - 1);
        const int64_t row = r + query / shared, head = i / lanes * shared + query % shared;
        const float* from = heads_.data() + row * layer.qkv.outputs + head * width;
        for (int64_t d = 0; d < width; d += kLanes)
          store_act(packed_queries_.data() + i * width + d, load(from + d));
        visible_[lane] = static_cast<int32_t>(batch_[row].position + 1);
        targets_[i] = lane < count ? attention_output_.data() + row * query_features_ + head * width
                                   : padding_output_.data();
      }
      const Context<T> context = {layer.keys.data(), layer.values.data(),
                                  slots.table + batch_[r].slot * slots.table_width, block_elements_,
                                  static_cast<int>(shape_.kv_heads)};
      attend_any<T>(width, lanes, packed_queries_.data(), context, visible_.data(),
                    layer.kind.window, targets_.data(), scratch_);
    }
    for (int64_t i = r * query_features_; i < (r + rows) * query_features_; i += kLanes)
      store_act(attention_act_.data() + i, load(attention_output_.data() + i));
    return rows;
  }

  bool is_same_slot(int64_t row, int64_t other) const {
    return row < static_cast<int64_t>(batch_.size()) && batch_[row].slot == batch_[other].slot;
  }

  // Computes the logits of the listed rows.
  void compute_logits(const std::vector<int64_t>& rows) {
    for (size_t i = 0; i < rows.size(); i++)
      norm(residual_.data() + rows[i] * padded_hidden_, final_norm_,
           normed_.data() + i * padded_hidden_);
    if (!rows.empty())
      multiply(normed_.data(), rows.size(), unembedding_, nullptr, false, logits_.data());
  }

  // Samples the token after batch row `r` from logits row i. Returns true if the request finishes.
  bool sample_next_token(const Slots& s, int64_t r, int64_t i) {
    const int64_t slot = batch_[r].slot;
    const int64_t at = s.num_tokens[slot], offset = slot * s.length + at;
    const Sampling sampling = {s.temperature[slot], s.top_p[slot], s.min_p[slot], s.top_k[slot]};
    float* row = logits(i);
    const int64_t* stop_ids = s.stop_ids + slot * s.stop_width;
    if (s.wants_raw_logprobs[slot]) raw_logits_.assign(row, row + rounded_up(shape_.vocab, 16));
    if (s.is_adjusted[slot])
      sampler_.adjust(row, shape_.vocab,
                      {s.biased_ids + slot * s.bias_width, s.biases + slot * s.bias_width,
                       s.bias_width, s.repetition_penalty[slot], s.presence_penalty[slot],
                       s.tokens + slot * s.length, at, s.output_start[slot], stop_ids,
                       at < s.stop_start[slot] ? s.stop_width : 0});
    const SampledToken sampled =
        sampler_.sample(row, shape_.vocab, sampling, uniform(s.rng_key[slot], at));
    s.tokens[offset] = sampled.token;
    s.logprobs[offset] = sampled.logprob;
    if (s.wants_raw_logprobs[slot])
      s.raw_logprobs[offset] =
          sampler_.compute_raw_logprob(raw_logits_.data(), shape_.vocab, sampled.token);
    s.versions[offset] = s.adapter_versions[s.adapter_index[slot]];
    if (s.experts != nullptr)
      std::copy_n(expert_ids_.begin() + r * experts_per_row_, experts_per_row_,
                  s.experts + offset * experts_per_row_);
    s.num_tokens[slot] = at + 1;
    const bool stopped =
        std::find(stop_ids, stop_ids + s.stop_width, sampled.token) != stop_ids + s.stop_width;
    s.finish_reason[slot] = stopped ? kStop : at + 1 >= s.max_tokens[slot] ? kLength : kRunning;
    return s.finish_reason[slot] != kRunning;
  }

  const Shape shape_;
  const int64_t query_features_;  // features of all query heads
  const int64_t key_features_;    // features of all key-value heads
  const int64_t padded_hidden_;   // hidden size, rounded up to 16
  const int64_t block_elements_;  // elements of a block over all key-value heads
  std::vector<Layer> layers_;
  std::vector<float> rope_;  // [positions, 2, rotary_width]
  std::vector<float> embedding_, final_norm_;
  Matrix<T> unembedding_;
  Buffer<T> weights_;  // storage of all matrices
  Sampler sampler_;
  Routes routes_;
  Adapters<T> adapters_;
  int64_t experts_per_row_ = 0;  // experts of a row, over all layers

  // State of the current step.
  std::vector<Row> batch_;
  std::vector<int64_t> slot_order_;     // slots of one adapter are contiguous
  std::vector<int64_t> sample_rows_;    // rows whose next token is sampled
  int64_t row_capacity_ = 0;            // capacity of the buffers, in rows
  int64_t gate_up_start_capacity_ = 0;  // capacity of gate_up_start_, in elements
  Buffer<float> residual_, heads_, logits_, attention_output_, router_logits_, expert_outputs_,
      gate_up_start_;
  Buffer<Act<T>> normed_, attention_act_, ffn_, gathered_;
  std::vector<int16_t> expert_ids_;  // [rows, experts_per_row_]
  std::vector<Act<T>> packed_queries_;
  std::vector<int32_t> visible_;
  std::vector<float*> targets_;
  std::vector<float> padding_output_;  // outputs of padding lanes
  Scratch<T> scratch_;
  std::vector<float> raw_logits_;
};

// Returns the result of `body`, or `failed` if memory runs out.
template <class Result, class Body>
Result catch_bad_alloc(Result failed, Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return failed;
  }
}

}  // namespace meshrl

// Storage type of weights and cache: float or bf16. A library has one type, because each takes
// about 10 s to compile.
#ifndef MESHRL_STORAGE
#define MESHRL_STORAGE float
#endif

using namespace meshrl;
using Model = Decoder<MESHRL_STORAGE>;

extern "C" {

// Returns nullptr if memory runs out.
void* decoder_new(const Shape* shape, const float* rope, const LayerKind* kinds,
                  const Absent* absent, int64_t absent_count) {
  return catch_bad_alloc<void*>(
      nullptr, [&] { return new Model(*shape, rope, kinds, absent, absent_count); });
}
void decoder_delete(void* d) { delete static_cast<Model*>(d); }

// Functions with an int result return 0 for success and -1 if memory runs out.
int decoder_wake(void* d, int64_t blocks) {
  return catch_bad_alloc(-1, [&] { return static_cast<Model*>(d)->wake(blocks) ? 0 : -1; });
}
int decoder_load(void* d, int part, int64_t layer, const TensorPiece* pieces, int64_t count) {
  return catch_bad_alloc(-1, [&] {
    TensorReader reader(pieces, count);
    static_cast<Model*>(d)->load_part(static_cast<Part>(part), layer, reader);
    return 0;
  });
}
// Starts a pending adapter with `ranks` [layers, kTargets]. It takes effect at its commit.
int decoder_adapter_begin(void* d, const int64_t* ranks) {
  return catch_bad_alloc(-1, [&] { return static_cast<Model*>(d)->begin_adapter(ranks) ? 0 : -1; });
}
void decoder_adapter_set(void* d, int64_t layer, int target, int64_t rank, const float* a,
                         const float* b) {
  static_cast<Model*>(d)->set_adapter(layer, static_cast<Target>(target), rank, a, b);
}
int decoder_adapter_commit(void* d, int64_t index) {
  return catch_bad_alloc(-1, [&] {
    static_cast<Model*>(d)->commit_adapter(index);
    return 0;
  });
}
void decoder_adapter_drop(void* d, int64_t index) { static_cast<Model*>(d)->drop_adapter(index); }
int decoder_score(void* d, const Slots* slots, int64_t slot, int64_t count, float* out) {
  return catch_bad_alloc(
      -1, [&] { return static_cast<Model*>(d)->score(*slots, slot, count, out) ? 0 : -1; });
}
void decoder_sleep(void* d) { static_cast<Model*>(d)->sleep(); }
void decoder_copy_block(void* d, int64_t from, int64_t to) {
  static_cast<Model*>(d)->copy_block(from, to);
}
void decoder_read(void* d, int part, int64_t layer, float* values) {
  static_cast<const Model*>(d)->read_part(static_cast<Part>(part), layer, values);
}
void decoder_discard_cache(void* d) { static_cast<Model*>(d)->discard_cache(); }
// Sets the address of weights, see `weights_memory`, and returns their bytes.
int64_t decoder_weights_memory(void* d, int index, void** address) {
  const auto [data, bytes] = static_cast<Model*>(d)->weights_memory(index);
  *address = data;
  return bytes;
}
int64_t decoder_item_bytes() { return sizeof(MESHRL_STORAGE); }
void decoder_read_blocks(void* d, const int32_t* blocks, int64_t n, char* out) {
  static_cast<const Model*>(d)->read_blocks(blocks, n, out);
}
void decoder_write_blocks(void* d, const int32_t* blocks, int64_t n, const char* in) {
  static_cast<Model*>(d)->write_blocks(blocks, n, in);
}

// Computes count[i] tokens of slot[i], for n slots, and samples a token for each slot whose tokens
// are then all computed. Repeats up to `steps` times, until a request finishes or `budget_s`
// seconds have passed. More than one step requires counts of 1. Returns the number of sampled
// tokens, or -1 if memory runs out.
int64_t decoder_run(void* d, const Slots* slots, const int64_t* slot, const int64_t* count,
                    int64_t n, int64_t steps, double budget_s) {
  return catch_bad_alloc<int64_t>(
      -1, [&] { return static_cast<Model*>(d)->run(*slots, slot, count, n, steps, budget_s); });
}

}  // extern "C"
