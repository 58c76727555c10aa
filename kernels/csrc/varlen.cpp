// Causal attention within sequences that lie end to end, and its gradients: plain C functions over
// raw pointers, float, one thread.
//
// The softmax is taken online over chunks of keys, and the backward pass computes the weights again
// from each query's log-sum-exp (FlashAttention-2, Dao 2023), so memory does not grow with length
// squared. Scores lie transposed, [key][query], a block of queries in the lanes: so the softmax
// needs no sum across lanes, keys need no transposing, and only a block's last keys a mask.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "simd.h"

namespace meshrl {

constexpr int kQueries = 16;                // of a block
constexpr int kParts = kQueries / kLanes;   // vectors that hold one number of each
constexpr int kKeys = 128;                  // of a chunk: its scores fill a quarter of the first cache
constexpr float kUnseen = -1e30f;
constexpr int kAll = 1 << 30;  // a window as wide as any sequence
constexpr int kDone = 0, kNoMemory = 1, kOutOfRange = 2;

// Tiles whose sums stay in registers: 32 vectors, but for AVX2's 16.
constexpr int kTileKeys = kLanes == 16 ? 16 : 4;
constexpr int kTileRows = kLanes == 8 ? 4 : 8;

// Rows of heads in memory of somebody else: head h of token t begins at rows + t * stride + h *
// width.
struct Rows {
  const float* rows;
  int64_t stride;
};

struct Shape {
  int64_t heads, kv_heads;
  int window;  // tokens that a query sees, itself the last of them; kAll: all before it
  float scale;

  // The first key, of a multiple of kQueries, that a block from query `first` on sees.
  int begin(int first) const {
    return window > first ? 0 : (first - window + 1) / kQueries * kQueries;
  }
  // How many keys from `from` on the last query of the block does not see.
  int closed(int first, int from) const {
    return std::max(0, first + kQueries - window - from);
  }
};

// c[M][N vectors] (+)= sum over k of a[i * Row + k * Step] * b[k * Across + vector]. Strides are
// known to the compiler, so that the numbers of `a` are operands of the multiplications.
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

// out[key][query] = sum over the width of rows[key][d] * block[d][query]; `keys` a multiple of 16.
template <int Width>
inline void score(const float* rows, int keys, const float* block, float* out) {
  for (int j = 0; j < keys; j += kTileKeys)
    tile<kTileKeys, kParts, false, Width, 1, kQueries, kQueries>(rows + j * Width, block, Width,
                                                                 out + j * kQueries);
}

// out[i][Width] += sum over k of weights[i * Row + k * Step] * rows[k][Width].
template <int Width, int Row, int Step>
inline void mix(const float* weights, const float* rows, int rows_out, int count, float* out) {
  constexpr int together = Width / kLanes % 2 ? 1 : 2;
  for (int i = 0; i < rows_out; i += kTileRows)
    for (int d = 0; d < Width; d += together * kLanes)
      tile<kTileRows, together, true, Row, Step, Width, Width>(weights + i * Row, rows + d, count,
                                                               out + i * Width + d);
}

inline int padded(int n) { return (n + kQueries - 1) / kQueries * kQueries; }

// `count` rows one behind the other; zeros behind them up to a multiple of 16.
template <int Width>
void gather(const float* rows, int64_t stride, int count, float* out) {
  for (int t = 0; t < count; t++) memcpy(out + t * Width, rows + t * stride, Width * sizeof(float));
  std::fill(out + count * Width, out + padded(count) * Width, 0.0f);
}

// A block of rows times `scale`, zeros behind the last: as it is, and transposed.
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

// Which queries of a block see the key that lies `key` behind its first: those that are not before
// it, nor a window behind.
inline Vec seen(Vec values, int part, int key, int window, float otherwise) {
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
  std::vector<float> room{};
  Block<Width> query{};
  alignas(64) float scores[kKeys * kQueries]{}, mixed[kQueries * Width]{};
  Vec most[kParts]{}, total[kParts]{};

  void sequence(int64_t start, int length) {
    const int shared = shape.heads / shape.kv_heads;
    const int64_t size = static_cast<int64_t>(padded(length)) * Width;
    if (static_cast<int64_t>(room.size()) < 2 * size) room.resize(2 * size);
    float *keys = room.data(), *values = keys + size;
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
    for (int p = 0; p < kParts; p++) most[p] = splat(kUnseen), total[p] = Vec{};
    for (int from = shape.begin(first); from <= first; from += kKeys) {
      const int count_keys = std::min(kKeys, first + kQueries - from);
      const int64_t chunk = static_cast<int64_t>(from) * Width;
      score<Width>(keys + chunk, count_keys, query.transposed, scores);
      soften(count_keys, first - from, shape.closed(first, from));
      mix<Width, 1, kQueries>(scores, values + chunk, kQueries, count_keys, mixed);
    }
    float totals[kQueries], peaks[kQueries];
    for (int p = 0; p < kParts; p++)
      store(totals + p * kLanes, total[p]), store(peaks + p * kLanes, most[p]);
    for (int i = 0; i < count; i++) {
      float* to = out + ((at + i) * shape.heads + h) * Width;
      const float part = 1.0f / totals[i];
      for (int d = 0; d < Width; d += kLanes) store(to + d, load(mixed + i * Width + d) * part);
      log_sum[h * tokens + at + i] = peaks[i] + std::log(totals[i]);
    }
  }

  // Scores of a chunk become weights, relative to each query's largest so far; from key `own` on
  // they are the block's own, and of the first `closed` not every query sees each.
  void soften(int count_keys, int own, int closed) {
    const int open = std::min(count_keys, own), hidden = std::min(closed, open);
    for (int p = 0; p < kParts; p++) {
      float* column = scores + p * kLanes;
      Vec peak = most[p], added{};
      const auto look = [&](int j) {
        const Vec score = load(column + j * kQueries);
        peak = larger(peak, seen(score, p, j - own, shape.window, kUnseen));
      };
      const auto weigh = [&](int j) {
        const Vec e = exponential(load(column + j * kQueries) - peak);
        const Vec weight = seen(e, p, j - own, shape.window, 0.0f);
        store(column + j * kQueries, weight);
        added += weight;
      };
      for (int j = 0; j < hidden; j++) look(j);
      for (int j = hidden; j < open; j++) peak = larger(peak, load(column + j * kQueries));
      for (int j = open; j < count_keys; j++) look(j);
      for (int j = 0; j < hidden; j++) weigh(j);
      for (int j = hidden; j < open; j++) {
        const Vec e = exponential(load(column + j * kQueries) - peak);
        store(column + j * kQueries, e);
        added += e;
      }
      for (int j = open; j < count_keys; j++) weigh(j);
      const Vec shrink = exponential(most[p] - peak);
      total[p] = total[p] * shrink + added;
      most[p] = peak;
      for (int i = 0; i < kLanes; i++) {
        if (shrink[i] == 1.0f) continue;
        float* so_far = mixed + (p * kLanes + i) * Width;
        for (int d = 0; d < Width; d += kLanes) store(so_far + d, load(so_far + d) * shrink[i]);
      }
    }
  }
};

template <int Width>
struct Backward {
  Shape shape;
  Rows q, k, v;
  const float *out, *log_sum;
  Rows slope;                          // of the loss with respect to `out`
  float *q_slope, *k_slope, *v_slope;  // [tokens, heads or kv_heads, width]
  int64_t tokens;
  std::vector<float> room{};
  Block<Width> query{}, arriving{};
  alignas(64) float weights[kKeys * kQueries]{}, raised[kKeys * kQueries]{},
      mixed[kQueries * Width]{};

  // A sequence's keys and values, and the sums of their gradients, [padded length][Width] each.
  struct Pair {
    float *keys, *values, *key_sums, *value_sums;
  };

  void sequence(int64_t start, int length) {
    const int shared = shape.heads / shape.kv_heads;
    const int64_t size = static_cast<int64_t>(padded(length)) * Width;
    if (static_cast<int64_t>(room.size()) < 4 * size) room.resize(4 * size);
    float* base = room.data();
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
        memcpy(k_slope + to, pair.key_sums + t * Width, Width * sizeof(float));
        memcpy(v_slope + to, pair.value_sums + t * Width, Width * sizeof(float));
      }
    }
  }

  void block(int64_t at, int first, int count, int h, const Pair& pair) {
    query.read(q.rows + at * q.stride + h * Width, q.stride, count, shape.scale);
    arriving.read(slope.rows + at * slope.stride + h * Width, slope.stride, count, 1.0f);
    float log_sums[kQueries] = {}, shared_slope[kQueries] = {};
    for (int i = 0; i < count; i++) {
      const float* made = out + ((at + i) * shape.heads + h) * Width;
      Vec both{};
      for (int d = 0; d < Width; d += kLanes)
        both += load(made + d) * load(arriving.rows + i * Width + d);
      shared_slope[i] = sum(both);
      log_sums[i] = log_sum[h * tokens + at + i];
    }
    std::fill(mixed, mixed + kQueries * Width, 0.0f);
    for (int from = shape.begin(first); from <= first; from += kKeys) {
      const int count_keys = std::min(kKeys, first + kQueries - from);
      const int64_t chunk = static_cast<int64_t>(from) * Width;
      score<Width>(pair.keys + chunk, count_keys, query.transposed, weights);
      score<Width>(pair.values + chunk, count_keys, arriving.transposed, raised);
      differentiate(count_keys, first - from, shape.closed(first, from), log_sums, shared_slope);
      mix<Width, kQueries, 1>(weights, arriving.rows, count_keys, kQueries,
                              pair.value_sums + chunk);
      mix<Width, kQueries, 1>(raised, query.rows, count_keys, kQueries, pair.key_sums + chunk);
      mix<Width, 1, kQueries>(raised, pair.keys + chunk, kQueries, count_keys, mixed);
    }
    for (int i = 0; i < count; i++) {
      float* to = q_slope + ((at + i) * shape.heads + h) * Width;
      for (int d = 0; d < Width; d += kLanes)
        store(to + d, load(mixed + i * Width + d) * shape.scale);
    }
  }

  // Scores become weights, and gradients of weights those of scores.
  void differentiate(int count_keys, int own, int closed, const float* log_sums,
                     const float* shared_slope) {
    for (int p = 0; p < kParts; p++) {
      const Vec log_sum = load(log_sums + p * kLanes), common = load(shared_slope + p * kLanes);
      for (int j = 0; j < count_keys; j++) {
        float *weight = weights + j * kQueries + p * kLanes,
              *rise = raised + j * kQueries + p * kLanes;
        Vec e = exponential(load(weight) - log_sum);
        if (j >= own || j < closed) e = seen(e, p, j - own, shape.window, 0.0f);
        store(weight, e);
        store(rise, e * (load(rise) - common));
      }
    }
  }
};

// Of a window of so many tokens; 0: none.
Shape shape_of(int64_t heads, int64_t kv_heads, int64_t window, float scale) {
  const bool slides = window > 0 && window < kAll;
  return {heads, kv_heads, slides ? static_cast<int>(window) : kAll, scale};
}

bool is_partition(const int32_t* starts, int64_t sequences, int64_t tokens) {
  if (starts[0] != 0 || starts[sequences] > tokens) return false;
  for (int64_t s = 0; s < sequences; s++)
    if (starts[s] > starts[s + 1]) return false;
  return true;
}

template <class Pass>
int over_sequences(const int32_t* starts, int64_t sequences, int64_t tokens, Pass&& pass) {
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

// `call` with Width as the heads' width.
#define MESHRL_WIDE(call)                                      \
  switch (width) {                                             \
    case 16: { constexpr int Width = 16; status = call; break; }   \
    case 32: { constexpr int Width = 32; status = call; break; }   \
    case 64: { constexpr int Width = 64; status = call; break; }   \
    case 96: { constexpr int Width = 96; status = call; break; }   \
    case 128: { constexpr int Width = 128; status = call; break; } \
  }

extern "C" {

// Widths of heads that attention is compiled for.
int varlen_has_width(int64_t width) {
  return width == 16 || width == 32 || width == 64 || width == 96 || width == 128;
}

// Strides are in floats, between tokens. `window`: tokens that each one sees; 0: all before it.
// Rows behind the last sequence are zeroed.
int varlen_forward(const float* q, const float* k, const float* v, int64_t q_stride,
                   int64_t k_stride, int64_t v_stride, const int32_t* starts, int64_t sequences,
                   int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int64_t window,
                   float scale, float* out, float* log_sum) {
  const Shape shape = shape_of(heads, kv_heads, window, scale);
  const Rows queries{q, q_stride}, keys{k, k_stride}, values{v, v_stride};
  int status = kOutOfRange;
  MESHRL_WIDE(over_sequences(
      starts, sequences, tokens,
      Forward<Width>{shape, queries, keys, values, out, log_sum, tokens}))
  if (status == kDone)
    std::fill(out + starts[sequences] * heads * width, out + tokens * heads * width, 0.0f);
  return status;
}

int varlen_backward(const float* q, const float* k, const float* v, int64_t q_stride,
                    int64_t k_stride, int64_t v_stride, const int32_t* starts, int64_t sequences,
                    int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int64_t window,
                    float scale, const float* out, const float* log_sum, const float* slope,
                    int64_t slope_stride, float* q_slope, float* k_slope, float* v_slope) {
  const Shape shape = shape_of(heads, kv_heads, window, scale);
  const Rows queries{q, q_stride}, keys{k, k_stride}, values{v, v_stride},
      arriving{slope, slope_stride};
  int status = kOutOfRange;
  MESHRL_WIDE(over_sequences(starts, sequences, tokens,
                             Backward<Width>{shape, queries, keys, values, out, log_sum, arriving,
                                             q_slope, k_slope, v_slope, tokens}))
  if (status != kDone) return status;
  const int64_t end = starts[sequences];
  std::fill(q_slope + end * heads * width, q_slope + tokens * heads * width, 0.0f);
  std::fill(k_slope + end * kv_heads * width, k_slope + tokens * kv_heads * width, 0.0f);
  std::fill(v_slope + end * kv_heads * width, v_slope + tokens * kv_heads * width, 0.0f);
  return kDone;
}

}  // extern "C"
