// What a decoder does to numbers, heads and tokens one by one, between its matrix products, and the
// gradients: plain C functions over raw pointers, float, one thread.
//
// Each reads what it is given and writes what it makes once. Little is kept for the backward pass:
// sigmoids are computed again, of a norm there is one number a row.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

namespace meshrl {

constexpr int kRows = 32;  // rows whose share of a weight's gradient is summed before the rest

// The first `count` lanes; a whole vector where the compiler knows that it is one.
inline Vec load(const float* p, int64_t count) {
  if (count == kLanes) return load(p);
  Vec v{};
  memcpy(&v, p, count * sizeof(float));
  return v;
}

inline void store(float* p, Vec v, int64_t count) {
  if (count == kLanes) return store(p, v);
  memcpy(p, &v, count * sizeof(float));
}

// step(first, count) over `size` floats, a vector at a time; the last may be a part of one.
template <class Step>
inline void over(int64_t size, Step&& step) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) step(i, std::integral_constant<int64_t, kLanes>{});
  if (i < size) step(i, size - i);
}

inline Vec sigmoid(Vec x) {
  const Vec e = exponential(x < 0.0f ? x : -x);
  const Vec part = 1.0f / (1.0f + e);
  return x < 0.0f ? e * part : part;
}

inline float inverse_rms(const float* x, int64_t size, float eps) {
  Vec squares{};
  over(size, [&](int64_t i, auto count) {
    const Vec value = load(x + i, count);
    squares += value * value;
  });
  return 1.0f / std::sqrt(sum(squares) / size + eps);
}

// Of y = x * inverse * weight, `inverse` being that of the root of x's mean square. `slope` is the
// loss's by y and may be where x's goes; the weight's is added to.
inline void norm_slopes(const float* x, const float* weight, const float* slope, float inverse,
                        int64_t size, float* x_slope, float* weight_slope) {
  Vec products{};
  over(size, [&](int64_t i, auto count) {
    products += load(x + i, count) * load(weight + i, count) * load(slope + i, count);
  });
  const float shared = sum(products) * inverse * inverse / size;
  over(size, [&](int64_t i, auto count) {
    const Vec value = load(x + i, count), arriving = load(slope + i, count);
    if (weight_slope)
      store(weight_slope + i, load(weight_slope + i, count) + arriving * value * inverse, count);
    if (x_slope)
      store(x_slope + i, (arriving * load(weight + i, count) - value * shared) * inverse, count);
  });
}

// Adds up a weight's gradient over many rows. Float sums of thousands of rows would lose digits, so
// those of a few are summed apart; the order is fixed.
struct WeightSlope {
  float *total, *few;  // null: not wanted
  int64_t size;
  int rows = 0;

  void begin() {
    if (total) std::fill(total, total + size, 0.0f), std::fill(few, few + size, 0.0f);
  }

  // Where the next row adds its share.
  float* next() {
    if (total && rows++ == kRows) flush(), rows = 1;
    return few;
  }

  void flush() {
    if (!total) return;
    over(size, [&](int64_t i, auto count) {
      store(total + i, load(total + i, count) + load(few + i, count), count);
      store(few + i, Vec{}, count);
    });
  }
};

// Cosines and sines of a token, [width] each, one token `stride` floats behind the other. Of halves
// (a, b), which are rotated to (a cos + b sin, b cos + a sin), each has its own.
struct Angles {
  const float *cosines, *sines;
  int64_t stride;
};

// Queries and keys of a token's heads: `weight` [width] is their norm's, null without one.
struct Part {
  int64_t heads;
  const float* weight;
};

struct Heads {
  Angles angles;
  Part queries, keys;
  int64_t tokens, width;

  int64_t normed() const { return queries.heads + keys.heads; }
  int64_t all() const { return normed() + keys.heads; }

  void forward(const float* qkv, float eps, float* q, float* k, float* v, float* inverse) const {
    for (int64_t t = 0; t < tokens; t++) {
      const float* row = qkv + t * all() * width;
      float* kept = inverse ? inverse + t * normed() : nullptr;
      turn_part(queries, t, row, eps, q + t * queries.heads * width, kept);
      row += queries.heads * width;
      turn_part(keys, t, row, eps, k + t * keys.heads * width,
                kept ? kept + queries.heads : nullptr);
      row += keys.heads * width;
      memcpy(v + t * keys.heads * width, row, keys.heads * width * sizeof(float));
    }
  }

  void turn_part(const Part& part, int64_t t, const float* x, float eps, float* out,
                 float* kept) const {
    for (int64_t h = 0; h < part.heads; h++, x += width, out += width) {
      if (!part.weight) {
        turn(t, x, out);
        continue;
      }
      const float inverse = kept[h] = inverse_rms(x, width, eps);
      over(width, [&](int64_t i, auto count) {
        store(out + i, load(x + i, count) * inverse * load(part.weight + i, count), count);
      });
      turn(t, out, out);
    }
  }

  void turn(int64_t t, const float* x, float* out) const {
    const int64_t half = width / 2;
    const float *cosine = angles.cosines + t * angles.stride, *sine = angles.sines + t * angles.stride;
    over(half, [&](int64_t i, auto count) {
      const Vec a = load(x + i, count), b = load(x + half + i, count);
      store(out + i, a * load(cosine + i, count) + b * load(sine + i, count), count);
      store(out + half + i,
            b * load(cosine + half + i, count) + a * load(sine + half + i, count), count);
    });
  }

  // The gradient by what was rotated: the rotation's transpose.
  void turn_back(int64_t t, const float* slope, float* out) const {
    const int64_t half = width / 2;
    const float *cosine = angles.cosines + t * angles.stride, *sine = angles.sines + t * angles.stride;
    over(half, [&](int64_t i, auto count) {
      const Vec a = load(slope + i, count), b = load(slope + half + i, count);
      store(out + i, a * load(cosine + i, count) + b * load(sine + half + i, count), count);
      store(out + half + i, b * load(cosine + half + i, count) + a * load(sine + i, count), count);
    });
  }

  void backward(const float* qkv, const float* inverse, const float* q_slope, const float* k_slope,
                const float* v_slope, float* qkv_slope, WeightSlope& query_weight,
                WeightSlope& key_weight) const {
    query_weight.begin(), key_weight.begin();
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t at = t * all() * width, behind = at + queries.heads * width;
      const float* x = qkv ? qkv + at : nullptr;
      const float* kept = inverse ? inverse + t * normed() : nullptr;
      turn_part_back(queries, t, x, kept, q_slope + t * queries.heads * width, qkv_slope + at,
                     query_weight);
      turn_part_back(keys, t, x ? qkv + behind : nullptr, kept ? kept + queries.heads : nullptr,
                     k_slope + t * keys.heads * width, qkv_slope + behind, key_weight);
      memcpy(qkv_slope + behind + keys.heads * width, v_slope + t * keys.heads * width,
             keys.heads * width * sizeof(float));
    }
    query_weight.flush(), key_weight.flush();
  }

  void turn_part_back(const Part& part, int64_t t, const float* x, const float* kept,
                      const float* slope, float* out, WeightSlope& weight_slope) const {
    for (int64_t h = 0; h < part.heads; h++) {
      turn_back(t, slope + h * width, out + h * width);
      if (part.weight)
        norm_slopes(x + h * width, part.weight, out + h * width, kept[h], width, out + h * width,
                    weight_slope.next());
    }
  }
};

}  // namespace meshrl

using namespace meshrl;

extern "C" {

// out[rows][size] = silu(gate) * up, of gate_up[rows][2 * size].
void pointwise_swiglu(const float* gate_up, int64_t rows, int64_t size, float* out) {
  for (int64_t r = 0; r < rows; r++) {
    const float *gate = gate_up + 2 * r * size, *up = gate + size;
    float* to = out + r * size;
    over(size, [&](int64_t i, auto count) {
      const Vec x = load(gate + i, count);
      store(to + i, x * sigmoid(x) * load(up + i, count), count);
    });
  }
}

void pointwise_swiglu_backward(const float* gate_up, const float* slope, int64_t rows, int64_t size,
                               float* gate_up_slope) {
  for (int64_t r = 0; r < rows; r++) {
    const float *gate = gate_up + 2 * r * size, *up = gate + size, *from = slope + r * size;
    float *gate_slope = gate_up_slope + 2 * r * size, *up_slope = gate_slope + size;
    over(size, [&](int64_t i, auto count) {
      const Vec x = load(gate + i, count), arriving = load(from + i, count), s = sigmoid(x);
      store(gate_slope + i, arriving * load(up + i, count) * s * (1.0f + x * (1.0f - s)), count);
      store(up_slope + i, arriving * x * s, count);
    });
  }
}

// out[rows][size] = x * weight over the root of x's mean square; `inverse` [rows] is 1 over that.
void pointwise_norm(const float* x, const float* weight, int64_t rows, int64_t size, float eps,
                    float* out, float* inverse) {
  for (int64_t r = 0; r < rows; r++) {
    const float* from = x + r * size;
    float* to = out + r * size;
    const float factor = inverse[r] = inverse_rms(from, size, eps);
    over(size, [&](int64_t i, auto count) {
      store(to + i, load(from + i, count) * factor * load(weight + i, count), count);
    });
  }
}

// Either gradient may be null, which is not wanted. `few` [size] is room to add in.
void pointwise_norm_backward(const float* x, const float* weight, const float* inverse,
                             const float* slope, int64_t rows, int64_t size, float* x_slope,
                             float* weight_slope, float* few) {
  WeightSlope sums{weight_slope, weight_slope ? few : nullptr, size};
  sums.begin();
  for (int64_t r = 0; r < rows; r++)
    norm_slopes(x + r * size, weight, slope + r * size, inverse[r], size,
                x_slope ? x_slope + r * size : nullptr, sums.next());
  sums.flush();
}

// q[tokens][heads][width], k and v [tokens][kv_heads][width] of qkv, whose rows hold a token's heads
// in that order; queries and keys normed, where there are weights, and rotated. `inverse` [tokens]
// [heads + kv_heads] is as above, null without weights.
void pointwise_heads(const float* qkv, const float* cosines, const float* sines, int64_t stride,
                     const float* query_norm, const float* key_norm, int64_t tokens, int64_t heads,
                     int64_t kv_heads, int64_t width, float eps, float* q, float* k, float* v,
                     float* inverse) {
  const Angles angles{cosines, sines, stride};
  const Heads shape{angles, {heads, query_norm}, {kv_heads, key_norm}, tokens, width};
  shape.forward(qkv, eps, q, k, v, inverse);
}

// `qkv` may be null without weights; `few` [2][width] is room to add their gradients in, which are
// not made where null.
void pointwise_heads_backward(const float* qkv, const float* cosines, const float* sines,
                              int64_t stride, const float* query_norm, const float* key_norm,
                              int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width,
                              const float* inverse, const float* q_slope, const float* k_slope,
                              const float* v_slope, float* qkv_slope, float* query_norm_slope,
                              float* key_norm_slope, float* few) {
  const Angles angles{cosines, sines, stride};
  const Heads shape{angles, {heads, query_norm}, {kv_heads, key_norm}, tokens, width};
  WeightSlope query_sums{query_norm_slope, query_norm_slope ? few : nullptr, width};
  WeightSlope key_sums{key_norm_slope, key_norm_slope ? few + width : nullptr, width};
  shape.backward(qkv, inverse, q_slope, k_slope, v_slope, qkv_slope, query_sums, key_sums);
}

}  // extern "C"
