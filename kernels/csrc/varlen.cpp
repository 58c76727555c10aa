// Causal attention of packed sequences, forward and backward: plain C functions over raw pointers,
// float, one thread.
//
// The softmax is online over chunks of keys. The backward pass recomputes the weights from each
// query's log-sum-exp (FlashAttention-2, Dao 2023), so memory does not grow with length squared.
// Scores are transposed, [key][query], with a block of queries in the lanes. So the softmax needs
// no sum across lanes, keys need no transpose, and only a block's last keys need a mask.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "simd.h"

namespace meshrl {

constexpr int kQueries = 16;                   // queries of a block
constexpr int kBlockVecs = kQueries / kLanes;  // vectors of a block's queries
constexpr int kKeys = 128;  // keys of a chunk: its scores fill a quarter of the L1 cache
constexpr float kMaskedScore = -1e30f;  // score of a masked key
constexpr int kUnlimited = 1 << 30;     // window without a limit
constexpr int kDone = 0, kNoMemory = 1, kOutOfRange = 2;

// Tile sizes whose sums fit the registers: 16 vectors with AVX2, else 32.
constexpr int kTileKeys = kLanes == 16 ? 16 : 4;
constexpr int kTileRows = kLanes == 8 ? 4 : 8;

// View of rows of heads: head h of token t starts at rows + t * stride + h * width.
struct Rows {
  const float* rows;
  int64_t stride;
};

struct Shape {
  int64_t heads, kv_heads;
  int window;  // attention window in tokens, itself included; kUnlimited: unlimited
  float scale;

  // Returns the first visible key of the block that starts at query `first`, a multiple of
  // kQueries.
  int first_key(int first) const {
    return window > first ? 0 : (first - window + 1) / kQueries * kQueries;
  }
  // Returns the number of keys from `from` on that are masked for the block's last query.
  int count_masked(int first, int from) const {
    return std::max(0, first + kQueries - window - from);
  }
};

// Computes c[M][N vectors] (+)= sum over k of a[i * Row + k * Step] * b[k * Across + vector].
// Strides are compile-time constants, so that elements of `a` become operands of the
// multiplications.
template <int M, int N, bool Add, int Row, int Step, int Across, int Down>
inline void tile(const float* a, const float* b, int count, float* c) {
  Vec sums[M][N];
  for (int i = 0; i < M; i++)
    for (int n = 0; n < N; n++) sums[i][n] = Add ? load(c + i * Down + n * kLanes) : Vec{};
#pragma GCC unroll 2
  for (int k = 0; k < count; k++) {
    Vec factor[N];
    for (int n = 0; n < N; n++) factor[n] = load(b + k * Across + n * kLanes);
    for (int i = 0; i < M; i++)
      for (int n = 0; n < N; n++) sums[i][n] = a[i * Row + k * Step] * factor[n] + sums[i][n];
  }
  for (int i = 0; i < M; i++)
    for (int n = 0; n < N; n++) store(c + i * Down + n * kLanes, sums[i][n]);
}

// Computes out[key][query] = sum over d of rows[key][d] * block[d][query]; `keys`
// is a multiple of 16.
template <int Width>
inline void compute_scores(const float* rows, int keys, const float* block, float* out) {
  for (int j = 0; j < keys; j += kTileKeys)
    tile<kTileKeys, kBlockVecs, false, Width, 1, kQueries, kQueries>(rows + j * Width, block, Width,
                                                                     out + j * kQueries);
}

// Computes out[i][Width] += sum over k of weights[i * Row + k * Step] * rows[k][Width].
template <int Width, int Row, int Step>
inline void add_weighted_rows(const float* weights, const float* rows, int rows_out, int count,
                              float* out) {
  constexpr int vecs_at_once = Width / kLanes % 2 ? 1 : 2;
  for (int i = 0; i < rows_out; i += kTileRows)
    for (int d = 0; d < Width; d += vecs_at_once * kLanes)
      tile<kTileRows, vecs_at_once, true, Row, Step, Width, Width>(weights + i * Row, rows + d,
                                                                   count, out + i * Width + d);
}

inline int padded(int n) { return (n + kQueries - 1) / kQueries * kQueries; }

// Copies `count` rows to contiguous memory, padded with zeros to a multiple of 16 rows.
template <int Width>
void gather(const float* rows, int64_t stride, int count, float* out) {
  for (int t = 0; t < count; t++) memcpy(out + t * Width, rows + t * stride, Width * sizeof(float));
  std::fill(out + count * Width, out + padded(count) * Width, 0.0f);
}

// Block of rows times `scale`, padded with zeros, in both row-major and transposed layout.
template <int Width>
struct Block {
  alignas(64) float rows[kQueries * Width], transposed[Width * kQueries];

  void read(const float* from, int64_t stride, int count, float scale) {
    for (int i = 0; i < count; i++)
      for (int d = 0; d < Width; d += kLanes)
        store(rows + i * Width + d, load(from + i * stride + d) * scale);
    std::fill(rows + count * Width, rows + kQueries * Width, 0.0f);
    for (int d = 0; d < Width; d++)
      for (int i = 0; i < kQueries; i++) transposed[d * kQueries + i] = rows[i * Width + d];
  }
};

// Replaces values of masked queries by `otherwise`. `key` is relative to the block's first query; a
// query attends to keys from itself back to `window` - 1 before.
inline Vec mask(Vec values, int part, int key, int window, float otherwise) {
  const auto late = lane_index() + part * kLanes - key;
  return (late >= 0) & (late < window) ? values : splat(otherwise);
}

template <int Width>
struct Forward {
  Shape shape;
  Rows q, k, v;
  float* out;      // [tokens, heads, width]
  float* log_sum;  // [heads, tokens]
  int64_t tokens;
  std::vector<float> buffer{};
  Block<Width> query{};
  alignas(64) float scores[kKeys * kQueries]{}, mixed[kQueries * Width]{};
  Vec max_score[kBlockVecs]{}, total[kBlockVecs]{};

  void sequence(int64_t start, int length) {
    const int shared = shape.heads / shape.kv_heads;
    const int64_t size = static_cast<int64_t>(padded(length)) * Width;
    if (static_cast<int64_t>(buffer.size()) < 2 * size) buffer.resize(2 * size);
    float *keys = buffer.data(), *values = keys + size;
    for (int g = 0; g < shape.kv_heads; g++) {
      gather<Width>(k.rows + start * k.stride + g * Width, k.stride, length, keys);
      gather<Width>(v.rows + start * v.stride + g * Width, v.stride, length, values);
      for (int h = g * shared; h < (g + 1) * shared; h++)
        for (int first = 0; first < length; first += kQueries)
          block(start + first, first, std::min(kQueries, length - first), h, keys, values);
    }
  }

  void block(int64_t at, int first, int count, int h, const float* keys, const float* values) {
    query.read(q.rows + at * q.stride + h * Width, q.stride, count, shape.scale);
    std::fill(mixed, mixed + kQueries * Width, 0.0f);
    for (int p = 0; p < kBlockVecs; p++) max_score[p] = splat(kMaskedScore), total[p] = Vec{};
    for (int from = shape.first_key(first); from <= first; from += kKeys) {
      const int count_keys = std::min(kKeys, first + kQueries - from);
      const int64_t chunk = static_cast<int64_t>(from) * Width;
      compute_scores<Width>(keys + chunk, count_keys, query.transposed, scores);
      update_softmax(count_keys, first - from, shape.count_masked(first, from));
      add_weighted_rows<Width, 1, kQueries>(scores, values + chunk, kQueries, count_keys, mixed);
    }
    float totals[kQueries], peaks[kQueries];
    for (int p = 0; p < kBlockVecs; p++)
      store(totals + p * kLanes, total[p]), store(peaks + p * kLanes, max_score[p]);
    for (int i = 0; i < count; i++) {
      float* to = out + ((at + i) * shape.heads + h) * Width;
      const float inverse = 1.0f / totals[i];
      for (int d = 0; d < Width; d += kLanes) store(to + d, load(mixed + i * Width + d) * inverse);
      log_sum[h * tokens + at + i] = peaks[i] + std::log(totals[i]);
    }
  }

  // Replaces a chunk's scores by weights relative to each query's running maximum. The causal mask
  // applies from key `causal_from` on, the window to the first `count_masked` keys.
  void update_softmax(int count_keys, int causal_from, int count_masked) {
    const int open = std::min(count_keys, causal_from), hidden = std::min(count_masked, open);
    for (int p = 0; p < kBlockVecs; p++) {
      float* column = scores + p * kLanes;
      Vec peak = max_score[p], added{};
      const auto update_peak = [&](int j) {
        const Vec score = load(column + j * kQueries);
        peak = larger(peak, mask(score, p, j - causal_from, shape.window, kMaskedScore));
      };
      const auto compute_weight = [&](int j) {
        const Vec e = exponential(load(column + j * kQueries) - peak);
        const Vec weight = mask(e, p, j - causal_from, shape.window, 0.0f);
        store(column + j * kQueries, weight);
        added += weight;
      };
      for (int j = 0; j < hidden; j++) update_peak(j);
      for (int j = hidden; j < open; j++) peak = larger(peak, load(column + j * kQueries));
      for (int j = open; j < count_keys; j++) update_peak(j);
      for (int j = 0; j < hidden; j++) compute_weight(j);
      for (int j = hidden; j < open; j++) {
        const Vec e = exponential(load(column + j * kQueries) - peak);
        store(column + j * kQueries, e);
        added += e;
      }
      for (int j = open; j < count_keys; j++) compute_weight(j);
      const Vec rescale = exponential(max_score[p] - peak);
      total[p] = total[p] * rescale + added;
      max_score[p] = peak;
      for (int i = 0; i < kLanes; i++) {
        if (rescale[i] == 1.0f) continue;
        float* row = mixed + (p * kLanes + i) * Width;
        for (int d = 0; d < Width; d += kLanes) store(row + d, load(row + d) * rescale[i]);
      }
    }
  }
};

template <int Width>
struct Backward {
  Shape shape;
  Rows q, k, v;
  const float *out, *log_sum;
  Rows out_grad_rows;               // dL/d(out)
  float *q_grad, *k_grad, *v_grad;  // [tokens, heads or kv_heads, width]
  int64_t tokens;
  std::vector<float> buffer{};
  Block<Width> query{}, out_grad{};
  alignas(64) float weights[kKeys * kQueries]{},
      score_grads[kKeys * kQueries]{}, mixed[kQueries * Width]{};

  // Keys and values of a sequence, and the sums of their gradients, [padded length][Width] each.
  struct Pair {
    float *keys, *values, *key_sums, *value_sums;
  };

  void sequence(int64_t start, int length) {
    const int shared = shape.heads / shape.kv_heads;
    const int64_t size = static_cast<int64_t>(padded(length)) * Width;
    if (static_cast<int64_t>(buffer.size()) < 4 * size) buffer.resize(4 * size);
    float* base = buffer.data();
    const Pair pair{base, base + size, base + 2 * size, base + 3 * size};
    for (int g = 0; g < shape.kv_heads; g++) {
      gather<Width>(k.rows + start * k.stride + g * Width, k.stride, length, pair.keys);
      gather<Width>(v.rows + start * v.stride + g * Width, v.stride, length, pair.values);
      std::fill(pair.key_sums, pair.key_sums + 2 * size, 0.0f);
      for (int h = g * shared; h < (g + 1) * shared; h++)
        for (int first = 0; first < length; first += kQueries)
          block(start + first, first, std::min(kQueries, length - first), h, pair);
      for (int t = 0; t < length; t++) {
        const int64_t to = ((start + t) * shape.kv_heads + g) * Width;
        memcpy(k_grad + to, pair.key_sums + t * Width, Width * sizeof(float));
        memcpy(v_grad + to, pair.value_sums + t * Width, Width * sizeof(float));
      }
    }
  }

  void block(int64_t at, int first, int count, int h, const Pair& pair) {
    query.read(q.rows + at * q.stride + h * Width, q.stride, count, shape.scale);
    out_grad.read(out_grad_rows.rows + at * out_grad_rows.stride + h * Width, out_grad_rows.stride,
                  count, 1.0f);
    float log_sums[kQueries] = {}, grad_dots[kQueries] = {};
    for (int i = 0; i < count; i++) {
      const float* result = out + ((at + i) * shape.heads + h) * Width;
      Vec dot{};
      for (int d = 0; d < Width; d += kLanes)
        dot += load(result + d) * load(out_grad.rows + i * Width + d);
      grad_dots[i] = sum(dot);
      log_sums[i] = log_sum[h * tokens + at + i];
    }
    std::fill(mixed, mixed + kQueries * Width, 0.0f);
    for (int from = shape.first_key(first); from <= first; from += kKeys) {
      const int count_keys = std::min(kKeys, first + kQueries - from);
      const int64_t chunk = static_cast<int64_t>(from) * Width;
      compute_scores<Width>(pair.keys + chunk, count_keys, query.transposed, weights);
      compute_scores<Width>(pair.values + chunk, count_keys, out_grad.transposed, score_grads);
      differentiate(count_keys, first - from, shape.count_masked(first, from), log_sums, grad_dots);
      add_weighted_rows<Width, kQueries, 1>(weights, out_grad.rows, count_keys, kQueries,
                                            pair.value_sums + chunk);
      add_weighted_rows<Width, kQueries, 1>(score_grads, query.rows, count_keys, kQueries,
                                            pair.key_sums + chunk);
      add_weighted_rows<Width, 1, kQueries>(score_grads, pair.keys + chunk, kQueries, count_keys,
                                            mixed);
    }
    for (int i = 0; i < count; i++) {
      float* to = q_grad + ((at + i) * shape.heads + h) * Width;
      for (int d = 0; d < Width; d += kLanes)
        store(to + d, load(mixed + i * Width + d) * shape.scale);
    }
  }

  // Replaces scores by weights, and gradients of weights by gradients of scores.
  void differentiate(int count_keys, int causal_from, int count_masked, const float* log_sums,
                     const float* grad_dots) {
    for (int p = 0; p < kBlockVecs; p++) {
      const Vec log_sum = load(log_sums + p * kLanes), grad_dot = load(grad_dots + p * kLanes);
      for (int j = 0; j < count_keys; j++) {
        float *weight = weights + j * kQueries + p * kLanes,
              *score_grad = score_grads + j * kQueries + p * kLanes;
        Vec e = exponential(load(weight) - log_sum);
        if (j >= causal_from || j < count_masked)
          e = mask(e, p, j - causal_from, shape.window, 0.0f);
        store(weight, e);
        store(score_grad, e * (load(score_grad) - grad_dot));
      }
    }
  }
};

// Returns the shape. A `window` of 0 tokens is unlimited.
Shape make_shape(int64_t heads, int64_t kv_heads, int64_t window, float scale) {
  const bool slides = window > 0 && window < kUnlimited;
  return {heads, kv_heads, slides ? static_cast<int>(window) : kUnlimited, scale};
}

bool is_partition(const int32_t* starts, int64_t sequences, int64_t tokens) {
  if (starts[0] != 0 || starts[sequences] > tokens) return false;
  for (int64_t s = 0; s < sequences; s++)
    if (starts[s] > starts[s + 1]) return false;
  return true;
}

template <class Pass>
int run_on_sequences(const int32_t* starts, int64_t sequences, int64_t tokens, Pass&& pass) {
  if (!is_partition(starts, sequences, tokens)) return kOutOfRange;
  try {
    for (int64_t s = 0; s < sequences; s++)
      if (starts[s + 1] > starts[s]) pass.sequence(starts[s], starts[s + 1] - starts[s]);
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace meshrl

using namespace meshrl;

// Evaluates `call` with Width as the head width.
#define MESHRL_WITH_WIDTH(call)  \
  switch (width) {               \
    case 16: {                   \
      constexpr int Width = 16;  \
      status = call;             \
      break;                     \
    }                            \
    case 32: {                   \
      constexpr int Width = 32;  \
      status = call;             \
      break;                     \
    }                            \
    case 64: {                   \
      constexpr int Width = 64;  \
      status = call;             \
      break;                     \
    }                            \
    case 96: {                   \
      constexpr int Width = 96;  \
      status = call;             \
      break;                     \
    }                            \
    case 128: {                  \
      constexpr int Width = 128; \
      status = call;             \
      break;                     \
    }                            \
  }

extern "C" {

// Returns 1 if attention is compiled for this head width.
int varlen_has_width(int64_t width) {
  return width == 16 || width == 32 || width == 64 || width == 96 || width == 128;
}

// Computes attention. Strides are in floats, between tokens. `window`: in tokens, itself included;
// 0: unlimited. Rows after the last sequence become 0.
int varlen_forward(const float* q, const float* k, const float* v, int64_t q_stride,
                   int64_t k_stride, int64_t v_stride, const int32_t* starts, int64_t sequences,
                   int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int64_t window,
                   float scale, float* out, float* log_sum) {
  const Shape shape = make_shape(heads, kv_heads, window, scale);
  const Rows queries{q, q_stride}, keys{k, k_stride}, values{v, v_stride};
  int status = kOutOfRange;
  MESHRL_WITH_WIDTH(
      run_on_sequences(starts, sequences, tokens,
                       Forward<Width>{shape, queries, keys, values, out, log_sum, tokens}))
  if (status == kDone)
    std::fill(out + starts[sequences] * heads * width, out + tokens * heads * width, 0.0f);
  return status;
}

int varlen_backward(const float* q, const float* k, const float* v, int64_t q_stride,
                    int64_t k_stride, int64_t v_stride, const int32_t* starts, int64_t sequences,
                    int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int64_t window,
                    float scale, const float* out, const float* log_sum, const float* out_grad_rows,
                    int64_t out_grad_stride, float* q_grad, float* k_grad, float* v_grad) {
  const Shape shape = make_shape(heads, kv_heads, window, scale);
  const Rows queries{q, q_stride}, keys{k, k_stride}, values{v, v_stride},
      out_grad{out_grad_rows, out_grad_stride};
  int status = kOutOfRange;
  MESHRL_WITH_WIDTH(run_on_sequences(starts, sequences, tokens,
                                     Backward<Width>{shape, queries, keys, values, out, log_sum,
                                                     out_grad, q_grad, k_grad, v_grad, tokens}))
  if (status != kDone) return status;
  const int64_t end = starts[sequences];
  std::fill(q_grad + end * heads * width, q_grad + tokens * heads * width, 0.0f);
  std::fill(k_grad + end * kv_heads * width, k_grad + tokens * kv_heads * width, 0.0f);
  std::fill(v_grad + end * kv_heads * width, v_grad + tokens * kv_heads * width, 0.0f);
  return kDone;
}

}  // extern "C"
