// A decoder (Llama, Mistral, Qwen, SmolLM3, Mixtral) over a paged cache: one call computes a step of
// a whole batch.
//
// Every token is a row, so that prompts, their later chunks and single decoded tokens share one
// path. Weights are packed once for each version. The caller owns the state of all slots as arrays
// and passes them by address; a call appends what it sampled. One thread.
#include <chrono>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "gemm.h"
#include "given.h"
#include "sampling.h"

namespace meshrl {

constexpr int8_t kRunning = 0, kStop = 1, kLength = 2;  // as common/generation/engine_contract.py

extern "C" {

struct Shape {
  int64_t vocab, hidden, layers, heads, kv_heads, head_width, rotary_width, ffn, positions, blocks;
  int64_t experts, experts_per_token, expert_ffn, normalise_routing;  // of sparse layers
  int64_t shared_ffn;  // of the expert that every token goes to as well; 0: none
  float norm_epsilon, attention_scale;
};

// Arrays of [slots], or [slots, length], [slots, table_width], [slots, stop_width].
struct Slots {
  int64_t* tokens;
  float* logprobs;
  float* unmodified;  // log-probabilities at temperature 1, where asked for
  int32_t* versions;
  int64_t* known;     // tokens that are given or sampled
  int64_t* computed;  // of which so many are in the cache
  const int64_t* limit;
  const int64_t* stops;  // padded with -1
  const int32_t* table;
  const uint64_t* key;
  const float *temperature, *top_p, *min_p;
  const int64_t* top_k;
  const bool* wants_unmodified;
  int8_t* finish;
  int16_t* experts;  // [slots, length, sparse layers, each] that a sampled token's predictor was
                     // sent to; or none
  const int32_t* adapter;  // place of the one that a slot's tokens are computed with; 0: none
  const int32_t* loaded;   // [places] version of what is loaded, by adapter
  int64_t length, table_width, stop_width;
};

}  // extern "C"

// Which tensor `set` is given; as common/generation/backends/native.py names them.
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

// What a layer is, as the caller describes it.
struct LayerKind {
  int64_t sparse;   // a mixture of experts
  int64_t rotated;  // has rotary embedding
  int64_t window;   // tokens that a token sees, itself the last; 0: all before it
};

// A row of a step: one token of one slot.
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
        queries_(shape.heads * shape.head_width),
        keys_(shape.kv_heads * shape.head_width),
        wide_(rounded_up(shape.hidden, 16)),
        block_(kBlock * keys_),
        layers_(shape.layers),
        rope_(rope, rope + shape.positions * 2 * shape.rotary_width),
        sampler_(std::vector<Absent>(absent, absent + absent_count)),
        routes_(shape.experts, shape.experts_per_token, shape.normalise_routing != 0) {
    for (int64_t i = 0; i < shape.layers; i++) {
      Layer& layer = layers_[i];
      layer.qkv.shape(queries_ + 2 * keys_, shape.hidden);
      layer.output.shape(shape.hidden, queries_);
      layer.kind = kinds[i];
      if (kinds[i].sparse) {
        shape_mixture(layer.mixture);
        sent_ += shape.experts_per_token;
      } else {
        layer.gate_up.shape(2 * rounded_up(shape.ffn, 16), shape.hidden);
        layer.down.shape(shape.hidden, shape.ffn);
      }
    }
    unembedding_.shape(shape.vocab, shape.hidden);
  }

  // False: no memory.
  bool wake() {
    const std::vector<Matrix<T>*> all = matrices();
    int64_t elements = 0;
    for (const Matrix<T>* matrix : all) elements += matrix->elements();
    if (!weights_.resize(elements)) return false;
    T* at = weights_.at();
    for (Matrix<T>* matrix : all) {
      matrix->place(at);
      at += matrix->elements();
    }
    for (Layer& layer : layers_)
      if (!layer.keys.resize(shape_.blocks * block_) || !layer.values.resize(shape_.blocks * block_))
        return false;
    return true;
  }

  void sleep() {
    for (Layer& layer : layers_) layer.keys.release(), layer.values.release();
    weights_.release();
    std::vector<float>().swap(embedding_);
    rows_ = 0;
    started_room_ = 0;
    for (Buffer<float>* b :
         {&residual_, &heads_, &logits_, &mixed_, &routed_, &made_, &started_})
      b->release();
    for (Buffer<Act<T>>* b : {&normed_, &attended_, &ffn_, &gathered_}) b->release();
  }

  void set(Part part, int64_t layer_index, Given& given) {
    const Shape& s = shape_;
    Layer& layer = layers_[layer_index];
    Mixture<T>& mixture = layer.mixture;
    switch (part) {
      case kEmbedding: return copied(given, s.vocab, s.hidden, embedding_);
      case kUnembedding: return pack(unembedding_, given, s.vocab, s.hidden);
      case kFinalNorm: return padded(given, s.hidden, final_norm_);
      case kAttentionNorm: return padded(given, s.hidden, layer.attention_norm);
      case kQkv: return pack(layer.qkv, given, queries_ + 2 * keys_, s.hidden);
      case kQkvBias: return padded(given, queries_ + 2 * keys_, layer.qkv_bias);
      case kQueryNorm: return padded(given, s.rotary_width, layer.query_norm);
      case kKeyNorm: return padded(given, s.rotary_width, layer.key_norm);
      case kOutput: return pack(layer.output, given, s.hidden, queries_);
      case kOutputBias: return padded(given, s.hidden, layer.output_bias);
      case kMlpNorm: return padded(given, s.hidden, layer.mlp_norm);
      case kGateUp: return pack_gate_up(layer.gate_up, rows_of(given, s.hidden), s.ffn, s.hidden);
      case kDown: return pack(layer.down, given, s.hidden, s.ffn);
      case kRouter: return pack(mixture.router, given, s.experts, s.hidden);
      case kExpertsGateUp:
        for (int64_t e = 0; e < s.experts; e++)
          pack_gate_up(mixture.gate_up[e], rows_of(given, s.hidden, e * 2 * s.expert_ffn),
                       s.expert_ffn, s.hidden);
        return;
      case kExpertsDown:
        for (int64_t e = 0; e < s.experts; e++)
          pack(mixture.down[e], given, s.hidden, s.expert_ffn, e * s.hidden);
        return;
      case kSharedGate: return pack(mixture.shared_gate, given, 1, s.hidden);
      case kSharedGateUp:
        return pack_gate_up(mixture.shared_gate_up, rows_of(given, s.hidden), s.shared_ffn, s.hidden);
      case kSharedDown: return pack(mixture.shared_down, given, s.hidden, s.shared_ffn);
    }
  }

  // The inverse: the values of a part, as it computes with them.
  void get(Part part, int64_t layer_index, float* into) const {
    const Shape& s = shape_;
    const Layer& layer = layers_[layer_index];
    const Mixture<T>& mixture = layer.mixture;
    const auto row = [&](const std::vector<float>& kept, int64_t n) {
      std::copy_n(kept.begin(), n, into);
    };
    const auto plain = [](int64_t r) { return r; };
    const auto gate_up = [&](const Matrix<T>& matrix, int64_t ffn, float* at) {
      matrix.unpack(at, matrix.outputs, s.hidden, alternating(ffn));
    };
    switch (part) {
      case kEmbedding: return row(embedding_, s.vocab * s.hidden);
      case kUnembedding: return unembedding_.unpack(into, s.vocab, s.hidden, plain);
      case kFinalNorm: return row(final_norm_, s.hidden);
      case kAttentionNorm: return row(layer.attention_norm, s.hidden);
      case kQkv: return layer.qkv.unpack(into, queries_ + 2 * keys_, s.hidden, plain);
      case kQkvBias: return row(layer.qkv_bias, queries_ + 2 * keys_);
      case kQueryNorm: return row(layer.query_norm, s.rotary_width);
      case kKeyNorm: return row(layer.key_norm, s.rotary_width);
      case kOutput: return layer.output.unpack(into, s.hidden, queries_, plain);
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

  // Makes room for an adapter with so many ranks [layers, kTargets] in each change. False: no memory.
  bool begin_adapter(const int64_t* ranks) {
    adapters_.begin(shape_.layers);
    for (int64_t i = 0; i < shape_.layers; i++) {
      const Layer& layer = layers_[i];
      for (int64_t target = 0; target < kTargets; target++) {
        const int64_t rank = ranks[i * kTargets + target];
        if (rank == 0) continue;
        const Matrix<T>& matrix = changed(layer, static_cast<Target>(target));
        LowRank<T>& change = adapters_.coming().of(i, target);
        change.a.shape(rank, matrix.inputs);
        change.b.shape(matrix.outputs, rank);
      }
    }
    return adapters_.coming().place();
  }

  // `a` [rank, inputs] and `b` [outputs, rank] of one change of the adapter that is coming.
  void set_adapter(int64_t layer, Target target, int64_t rank, const float* a, const float* b) {
    const Shape& s = shape_;
    LowRank<T>& change = adapters_.coming().of(layer, target);
    const int64_t inputs[] = {s.hidden, queries_, s.hidden, s.ffn};
    const int64_t outputs[] = {queries_ + 2 * keys_, s.hidden, 0, s.hidden};
    change.a.pack(a, rank, inputs[target]);
    if (target == kToGateUp)
      pack_gate_up(change.b, [=](int64_t r) { return b + r * rank; }, s.ffn, rank);
    else
      change.b.pack(b, outputs[target], rank);
  }

  void commit_adapter(int64_t place) { adapters_.commit(place); }
  void drop_adapter(int64_t place) { adapters_.drop(place); }

  int64_t run(const Slots& slots, const int64_t* slot, const int64_t* count, int64_t n,
              int64_t steps, double budget_s) {
    const auto began = std::chrono::steady_clock::now();
    int64_t sampled = 0;
    order_.resize(n);
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      return slots.adapter[slot[a]] < slots.adapter[slot[b]];
    });
    for (int64_t step = 0; step < steps; step++) {
      batch_.clear(), last_.clear();
      for (const int64_t i : order_) {
        const int64_t at = slot[i], first = slots.computed[at];
        for (int64_t p = first; p < first + count[i]; p++)
          batch_.push_back({slots.tokens[at * slots.length + p], p, at});
        slots.computed[at] += count[i];
        if (slots.computed[at] == slots.known[at])
          last_.push_back(static_cast<int64_t>(batch_.size()) - 1);
      }
      if (!forward(slots)) return -1;
      project(last_);
      bool ended = false;
      for (size_t i = 0; i < last_.size(); i++)
        ended |= append(slots, last_[i], i);
      sampled += last_.size();
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
      if (ended || spent.count() >= budget_s) break;
    }
    return sampled;
  }

  // Log-probabilities, at temperature 1, of the `count` tokens behind those that are computed.
  bool score(const Slots& slots, int64_t slot, int64_t count, float* out) {
    batch_.clear(), last_.clear();
    const int64_t first = slots.computed[slot];
    const int64_t* tokens = slots.tokens + slot * slots.length;
    for (int64_t i = 0; i < count; i++) {
      batch_.push_back({tokens[first + i], first + i, slot});
      last_.push_back(i);
    }
    if (!forward(slots)) return false;
    project(last_);
    for (int64_t i = 0; i < count; i++)
      out[i] = sampler_.unmodified(logits(i), shape_.vocab, tokens[first + i + 1]);
    slots.computed[slot] += count;
    return true;
  }

  void copy_block(int64_t from, int64_t to) {
    for (Layer& layer : layers_) {
      memcpy(layer.keys.at() + to * block_, layer.keys.at() + from * block_, block_ * sizeof(T));
      memcpy(layer.values.at() + to * block_, layer.values.at() + from * block_,
             block_ * sizeof(T));
    }
  }

  // Keys, then values, of the blocks in order, a layer after the other.
  void read_blocks(const int32_t* blocks, int64_t n, char* out) const {
    for (const Layer& layer : layers_)
      for (const T* part : {layer.keys.at(), layer.values.at()})
        for (int64_t i = 0; i < n; i++, out += block_ * sizeof(T))
          memcpy(out, part + blocks[i] * block_, block_ * sizeof(T));
  }

  void write_blocks(const int32_t* blocks, int64_t n, const char* in) {
    for (Layer& layer : layers_)
      for (T* part : {layer.keys.at(), layer.values.at()})
        for (int64_t i = 0; i < n; i++, in += block_ * sizeof(T))
          memcpy(part + blocks[i] * block_, in, block_ * sizeof(T));
  }

 private:
  struct Layer {
    LayerKind kind;
    std::vector<float> attention_norm, mlp_norm, query_norm, key_norm, qkv_bias, output_bias;
    Matrix<T> qkv, output, gate_up, down;
    Mixture<T> mixture;  // in place of gate_up and down
    Buffer<T> keys, values;  // [blocks, kv_heads, 16 * head_width]
  };

  // In the order in which a step uses them.
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

  static void padded(Given& given, int64_t n, std::vector<float>& into) {
    into.assign(rounded_up(n, 16), 0.0f);
    const float* values = given.at(0, n);
    std::copy(values, values + n, into.begin());
  }
  static void copied(Given& given, int64_t rows, int64_t columns, std::vector<float>& into) {
    into.resize(rows * columns);
    for (int64_t r = 0; r < rows; r++)
      std::copy_n(given.at(r * columns, columns), columns, into.begin() + r * columns);
  }

  // Rows of a matrix by their numbers, from row `first` of what is given on.
  static auto rows_of(Given& given, int64_t columns, int64_t first = 0) {
    return [&given, columns, first](int64_t r) { return given.at((first + r) * columns, columns); };
  }
  static void pack(Matrix<T>& into, Given& given, int64_t count, int64_t columns,
                   int64_t first = 0) {
    into.pack_rows(rows_of(given, columns, first), count, columns, [](int64_t r) { return r; });
  }

  const Matrix<T>& changed(const Layer& layer, Target target) const {
    const Matrix<T>* of[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
    return *of[target];
  }

  // Panels of gate and of up alternate, so that their product is taken from registers.
  template <class Values>
  static void pack_gate_up(Matrix<T>& into, Values&& values, int64_t ffn, int64_t columns) {
    into.pack_rows(values, into.outputs, columns, alternating(ffn));
  }
  static auto alternating(int64_t ffn) {
    return [ffn](int64_t r) {
      const int64_t panel = r / kLanes, feature = panel / 2 * kLanes + r % kLanes;
      return feature >= ffn ? -1 : feature + (panel % 2) * ffn;
    };
  }

  bool reserve(int64_t rows) {
    if (rows <= rows_) return true;
    rows_ = 0;  // until all is there
    rows = rounded_up(rows, 64);
    const int64_t ffn = rounded_up(std::max({shape_.ffn, shape_.expert_ffn, shape_.shared_ffn}), 16);
    const int64_t qkv = rounded_up(queries_ + 2 * keys_, 16);
    if (!residual_.resize(rows * wide_) || !heads_.resize(rows * qkv) ||
        !mixed_.resize(rows * queries_) || !normed_.resize(rows * wide_) ||
        !attended_.resize(rows * queries_) || !ffn_.resize(rows * ffn) ||
        !logits_.resize(rows * rounded_up(shape_.vocab, 16)))
      return false;
    const int64_t wide = sent_ ? wide_ : 0;
    if (!routed_.resize(rows * rounded_up(shape_.experts, 16)) || !made_.resize(rows * wide) ||
        !gathered_.resize(rows * wide))
      return false;
    rows_ = rows;
    return true;
  }

  float* logits(int64_t row) { return logits_.at() + row * rounded_up(shape_.vocab, 16); }

  // RMSNorm of one row of `wide_` features.
  void norm(const float* x, const std::vector<float>& weight, Act<T>* y) const {
    Vec squares{};
    for (int64_t i = 0; i < wide_; i += kLanes) squares += load(x + i) * load(x + i);
    const Vec scale =
        splat(1.0f / std::sqrt(sum(squares) / shape_.hidden + shape_.norm_epsilon));
    for (int64_t i = 0; i < wide_; i += kLanes)
      store_act(y + i, load(x + i) * scale * load(weight.data() + i));
  }

  void norm_head(float* x, const std::vector<float>& weight) const {
    const int64_t width = shape_.rotary_width;
    float squares = 0;
    for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / width + shape_.norm_epsilon);
    for (int64_t i = 0; i < width; i++) x[i] *= scale * weight[i];
  }

  // Rotary embedding of halves; the table's sines have their first half negated.
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

  // Hidden states of all rows of batch_, in residual_; their keys and values go into the cache.
  bool forward(const Slots& slots) {
    const int64_t n = batch_.size();
    if (!reserve(n)) return false;
    if (!adapters_.arrange(n, [&](int64_t r) { return slots.adapter[batch_[r].slot]; }))
      return false;
    for (int64_t r = 0; r < n; r++) {
      float* row = residual_.at() + r * wide_;
      memcpy(row, embedding_.data() + batch_[r].token * shape_.hidden,
             shape_.hidden * sizeof(float));
      std::fill(row + shape_.hidden, row + wide_, 0.0f);
    }
    went_.resize(n * sent_);
    int64_t sent = 0;  // places that earlier layers have in a row of went_
    for (int64_t l = 0; l < shape_.layers; l++) {
      Layer& layer = layers_[l];
      for (int64_t r = 0; r < n; r++)
        norm(residual_.at() + r * wide_, layer.attention_norm, normed_.at() + r * wide_);
      multiply(normed_.at(), n, layer.qkv, bias(layer.qkv_bias), false, heads_.at());
      adapters_.add(l, kToQkv, normed_.at(), heads_.at());
      for (int64_t r = 0; r < n; r++) place(slots, layer, r);
      for (int64_t r = 0; r < n;) r += attend_from(slots, layer, r);
      multiply(attended_.at(), n, layer.output, bias(layer.output_bias), true, residual_.at());
      adapters_.add(l, kToOutput, attended_.at(), residual_.at());
      for (int64_t r = 0; r < n; r++)
        norm(residual_.at() + r * wide_, layer.mlp_norm, normed_.at() + r * wide_);
      if (layer.mixture.empty()) {
        if (!adapters_.change(l, kToGateUp)) {
          multiply_swiglu(normed_.at(), n, layer.gate_up, ffn_.at());
        } else {
          if (!start_gate_up(l, n)) return false;
          multiply_swiglu(normed_.at(), n, layer.gate_up, ffn_.at(), started_.at());
        }
        multiply(ffn_.at(), n, layer.down, nullptr, true, residual_.at());
        adapters_.add(l, kToDown, ffn_.at(), residual_.at());
      } else {
        mix(layer.mixture, n, sent);
        sent += shape_.experts_per_token;
      }
    }
    return true;
  }

  // What adapters add to gate and up of the n rows of normed_, in started_: their product begins
  // with it, since it leaves the registers only behind its nonlinearity. False: no memory.
  bool start_gate_up(int64_t layer, int64_t n) {
    const int64_t elements = n * layers_[layer].gate_up.outputs;
    if (elements > started_room_) {
      started_room_ = 0;
      if (!started_.resize(elements)) return false;
      started_room_ = elements;
    } else {
      std::fill_n(started_.at(), elements, 0.0f);
    }
    adapters_.add(layer, kToGateUp, normed_.at(), started_.at());
    return true;
  }

  // Adds what the experts make of the n rows of normed_, and notes in went_, from place `sent` of
  // each row on, which they were.
  void mix(const Mixture<T>& mixture, int64_t n, int64_t sent) {
    if (shape_.shared_ffn != 0) share(mixture, n);
    multiply(normed_.at(), n, mixture.router, nullptr, false, routed_.at());
    routes_.choose(routed_.at(), n, mixture.router.outputs);
    for (int64_t r = 0; r < n; r++)
      std::copy_n(routes_.experts(r), shape_.experts_per_token, &went_[r * sent_ + sent]);
    for (int64_t e = 0; e < shape_.experts; e++) {
      const int64_t count = routes_.count(e);
      const int64_t* rows = routes_.rows(e);
      if (count == 0) continue;
      for (int64_t i = 0; i < count; i++)
        std::copy_n(normed_.at() + rows[i] * wide_, wide_, gathered_.at() + i * wide_);
      multiply_swiglu(gathered_.at(), count, mixture.gate_up[e], ffn_.at());
      multiply(ffn_.at(), count, mixture.down[e], nullptr, false, made_.at());
      for (int64_t i = 0; i < count; i++) {
        const Vec share = splat(routes_.shares(e)[i]);
        float* row = residual_.at() + rows[i] * wide_;
        for (int64_t d = 0; d < wide_; d += kLanes)
          store(row + d, load(row + d) + share * load(made_.at() + i * wide_ + d));
      }
    }
  }

  // Adds what the expert that every row goes to makes of the n rows of normed_, as far as its gate
  // lets it through.
  void share(const Mixture<T>& mixture, int64_t n) {
    multiply(normed_.at(), n, mixture.shared_gate, nullptr, false, routed_.at());
    multiply_swiglu(normed_.at(), n, mixture.shared_gate_up, ffn_.at());
    multiply(ffn_.at(), n, mixture.shared_down, nullptr, false, made_.at());
    for (int64_t r = 0; r < n; r++) {
      const float gate = routed_.at()[r * mixture.shared_gate.outputs];
      const Vec through = splat(1.0f / (1.0f + std::exp(-gate)));
      float* row = residual_.at() + r * wide_;
      for (int64_t d = 0; d < wide_; d += kLanes)
        store(row + d, load(row + d) + through * load(made_.at() + r * wide_ + d));
    }
  }

  static const float* bias(const std::vector<float>& values) {
    return values.empty() ? nullptr : values.data();
  }

  // Norms and rotates a row's queries and keys, and puts its keys and values into the cache.
  void place(const Slots& slots, Layer& layer, int64_t r) {
    const Row& row = batch_[r];
    const int64_t width = shape_.head_width, qk = shape_.heads + shape_.kv_heads;
    float* heads = heads_.at() + r * layer.qkv.outputs;
    for (int64_t h = 0; h < qk; h++) {
      float* head = heads + h * width;
      if (!layer.query_norm.empty())
        norm_head(head, h < shape_.heads ? layer.query_norm : layer.key_norm);
      if (layer.kind.rotated) rotate(head, row.position);
    }
    for (int64_t i = 0; i < queries_; i++) heads[i] *= shape_.attention_scale;
    const int at = row.position % kBlock;
    const int64_t block = slots.table[row.slot * slots.table_width + row.position / kBlock];
    for (int64_t h = 0; h < shape_.kv_heads; h++) {
      T* values = layer.values.at() + block * block_ + h * kBlock * width;
      // What an earlier user left could be no number, and 0 times that is none either.
      if (at == 0) memset(values, 0, kBlock * width * sizeof(T));
      put_token(layer.keys.at() + block * block_ + h * kBlock * width, values, at,
                static_cast<int>(width), heads + queries_ + h * width,
                heads + queries_ + keys_ + h * width);
    }
  }

  // Attention of row r and of the rows behind it that share its context; returns how many.
  int64_t attend_from(const Slots& slots, const Layer& layer, int64_t r) {
    const int64_t width = shape_.head_width, shared = shape_.heads / shape_.kv_heads;
    int64_t rows = 1;
    while ((rows + 1) * shared <= kMostQueries && holds_slot(r + rows, r)) rows++;
    const int64_t all = rows * shared;  // queries of a head
    for (int64_t first = 0; first < all; first += kMostQueries) {
      const int64_t here = std::min<int64_t>(all - first, kMostQueries);
      int64_t lanes = here;  // as many as there is a kernel for; the last query fills them
      while (!is_count(lanes)) lanes++;
      packed_.resize(shape_.kv_heads * lanes * width), spare_.resize(width);
      targets_.resize(shape_.kv_heads * lanes), visible_.resize(lanes);
      for (int64_t i = 0; i < shape_.kv_heads * lanes; i++) {
        const int64_t lane = i % lanes, query = first + std::min(lane, here - 1);
        const int64_t row = r + query / shared, head = i / lanes * shared + query % shared;
        const float* from = heads_.at() + row * layer.qkv.outputs + head * width;
        for (int64_t d = 0; d < width; d += kLanes)
          store_act(packed_.data() + i * width + d, load(from + d));
        visible_[lane] = static_cast<int32_t>(batch_[row].position + 1);
        targets_[i] = lane < here ? mixed_.at() + row * queries_ + head * width : spare_.data();
      }
      const Context<T> context = {layer.keys.at(), layer.values.at(),
                                  slots.table + batch_[r].slot * slots.table_width, block_,
                                  static_cast<int>(shape_.kv_heads)};
      attend_any<T>(width, lanes, packed_.data(), context, visible_.data(),
                    layer.kind.window, targets_.data(), scratch_);
    }
    for (int64_t i = r * queries_; i < (r + rows) * queries_; i += kLanes)
      store_act(attended_.at() + i, load(mixed_.at() + i));
    return rows;
  }

  bool holds_slot(int64_t row, int64_t like) const {
    return row < static_cast<int64_t>(batch_.size()) && batch_[row].slot == batch_[like].slot;
  }

  // Logits of the chosen rows.
  void project(const std::vector<int64_t>& rows) {
    for (size_t i = 0; i < rows.size(); i++)
      norm(residual_.at() + rows[i] * wide_, final_norm_, normed_.at() + i * wide_);
    if (!rows.empty())
      multiply(normed_.at(), rows.size(), unembedding_, nullptr, false, logits_.at());
  }

  // Samples the next token behind batch row `r` from logits row i; true if that ends its request.
  bool append(const Slots& s, int64_t r, int64_t i) {
    const int64_t slot = batch_[r].slot;
    const int64_t at = s.known[slot], place = slot * s.length + at;
    const Sampling how = {s.temperature[slot], s.top_p[slot], s.min_p[slot], s.top_k[slot]};
    float* row = logits(i);
    if (s.wants_unmodified[slot]) copy_.assign(row, row + rounded_up(shape_.vocab, 16));
    const Sampled sampled = sampler_.sample(row, shape_.vocab, how, uniform(s.key[slot], at));
    s.tokens[place] = sampled.token;
    s.logprobs[place] = sampled.logprob;
    if (s.wants_unmodified[slot])
      s.unmodified[place] = sampler_.unmodified(copy_.data(), shape_.vocab, sampled.token);
    s.versions[place] = s.loaded[s.adapter[slot]];
    if (s.experts != nullptr)
      std::copy_n(went_.begin() + r * sent_, sent_, s.experts + place * sent_);
    s.known[slot] = at + 1;
    const int64_t* stops = s.stops + slot * s.stop_width;
    const bool stopped = std::find(stops, stops + s.stop_width, sampled.token) !=
                         stops + s.stop_width;
    s.finish[slot] = stopped ? kStop : at + 1 >= s.limit[slot] ? kLength : kRunning;
    return s.finish[slot] != kRunning;
  }

  const Shape shape_;
  const int64_t queries_, keys_;  // features of all heads
  const int64_t wide_;            // hidden size, rounded up
  const int64_t block_;           // elements of a block, all key-value heads
  std::vector<Layer> layers_;
  std::vector<float> rope_;  // [positions, 2, rotary_width]
  std::vector<float> embedding_, final_norm_;
  Matrix<T> unembedding_;
  Buffer<T> weights_;  // of all matrices
  Sampler sampler_;
  Routes routes_;
  Adapters<T> adapters_;
  int64_t sent_ = 0;  // experts that a row goes to, all layers

  // Of the step that is being computed.
  std::vector<Row> batch_;
  std::vector<int64_t> order_;  // of its slots: those of one adapter side by side
  std::vector<int64_t> last_;   // rows whose next token is to be sampled
  int64_t rows_ = 0;           // that the buffers hold
  int64_t started_room_ = 0;    // elements that started_ holds
  Buffer<float> residual_, heads_, logits_, mixed_, routed_, made_, started_;
  Buffer<Act<T>> normed_, attended_, ffn_, gathered_;
  std::vector<int16_t> went_;  // [rows, sent_]
  std::vector<Act<T>> packed_;
  std::vector<int32_t> visible_;
  std::vector<float*> targets_;
  std::vector<float> spare_;  // what lanes without a query of their own give
  Scratch<T> scratch_;
  std::vector<float> copy_;
};

// Runs `body`; what it answers, or `failed` when memory ran out.
template <class Answer, class Body>
Answer guarded(Answer failed, Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return failed;
  }
}

}  // namespace meshrl

// Of weights and cache: float or bf16. A library holds one of them, since each takes some 10 s to
// compile.
#ifndef MESHRL_STORAGE
#define MESHRL_STORAGE float
#endif

using namespace meshrl;
using Model = Decoder<MESHRL_STORAGE>;

extern "C" {

// nullptr: no memory.
void* decoder_new(const Shape* shape, const float* rope, const LayerKind* kinds,
                  const Absent* absent, int64_t absent_count) {
  return guarded<void*>(nullptr,
                        [&] { return new Model(*shape, rope, kinds, absent, absent_count); });
}
void decoder_delete(void* d) { delete static_cast<Model*>(d); }

// These answer 0 for success and -1 when memory ran out.
int decoder_wake(void* d) {
  return guarded(-1, [&] { return static_cast<Model*>(d)->wake() ? 0 : -1; });
}
int decoder_load(void* d, int part, int64_t layer, const Piece* pieces, int64_t count) {
  return guarded(-1, [&] {
    Given given(pieces, count);
    static_cast<Model*>(d)->set(static_cast<Part>(part), layer, given);
    return 0;
  });
}
// An adapter of `ranks` [layers, kTargets] in each change; it holds once it is committed.
int decoder_adapter_begin(void* d, const int64_t* ranks) {
  return guarded(-1, [&] { return static_cast<Model*>(d)->begin_adapter(ranks) ? 0 : -1; });
}
void decoder_adapter_set(void* d, int64_t layer, int target, int64_t rank, const float* a,
                         const float* b) {
  static_cast<Model*>(d)->set_adapter(layer, static_cast<Target>(target), rank, a, b);
}
int decoder_adapter_commit(void* d, int64_t place) {
  return guarded(-1, [&] {
    static_cast<Model*>(d)->commit_adapter(place);
    return 0;
  });
}
void decoder_adapter_drop(void* d, int64_t place) { static_cast<Model*>(d)->drop_adapter(place); }
int decoder_score(void* d, const Slots* slots, int64_t slot, int64_t count, float* out) {
  return guarded(-1, [&] { return static_cast<Model*>(d)->score(*slots, slot, count, out) ? 0 : -1; });
}
void decoder_sleep(void* d) { static_cast<Model*>(d)->sleep(); }
void decoder_copy_block(void* d, int64_t from, int64_t to) {
  static_cast<Model*>(d)->copy_block(from, to);
}
void decoder_read(void* d, int part, int64_t layer, float* values) {
  static_cast<const Model*>(d)->get(static_cast<Part>(part), layer, values);
}
int64_t decoder_item_bytes() { return sizeof(MESHRL_STORAGE); }
void decoder_read_blocks(void* d, const int32_t* blocks, int64_t n, char* out) {
  static_cast<const Model*>(d)->read_blocks(blocks, n, out);
}
void decoder_write_blocks(void* d, const int32_t* blocks, int64_t n, const char* in) {
  static_cast<Model*>(d)->write_blocks(blocks, n, in);
}

// Computes count[i] tokens of slot[i], for n slots, and samples for those that reach the end of what
// is known. Up to `steps` times while nothing ends and `budget_s` is not spent; more than one step
// needs counts of 1. Answers the number of tokens sampled, -1 when memory ran out.
int64_t decoder_run(void* d, const Slots* slots, const int64_t* slot, const int64_t* count,
                    int64_t n, int64_t steps, double budget_s) {
  return guarded<int64_t>(-1, [&] {
    return static_cast<Model*>(d)->run(*slots, slot, count, n, steps, budget_s);
  });
}

}  // extern "C"
