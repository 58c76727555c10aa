// SwiGLU, RMSNorm and rotary embedding of a decoder, forward and backward: plain C functions over
// raw pointers, float, one thread.
//
// Each function reads its inputs and writes its outputs once. The backward pass saves little: it
// recomputes sigmoids, and a norm saves one number per row.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

namespace meshrl {

constexpr int kRows = 32;  // rows per partial sum of a weight's gradient

// Loads the first `count` lanes and zeros the others. A constant count of kLanes takes one load.
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

// Calls step(first, count) for each vector of `size` floats; the last vector may be partial.
template <class Step>
inline void for_each_vec(int64_t size, Step&& step) {
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
  for_each_vec(size, [&](int64_t i, auto count) {
    const Vec value = load(x + i, count);
    squares += value * value;
  });
  return 1.0f / std::sqrt(sum(squares) / size + eps);
}

// Computes gradients of y = x * inverse * weight, with inverse = 1 / rms(x). `grad` is dL/dy and
// may alias x_grad. The function adds to weight_grad; a null gradient is skipped.
inline void norm_backward(const float* x, const float* weight, const float* grad, float inverse,
                          int64_t size, float* x_grad, float* weight_grad) {
  Vec products{};
  for_each_vec(size, [&](int64_t i, auto count) {
    products += load(x + i, count) * load(weight + i, count) * load(grad + i, count);
  });
  const float shared = sum(products) * inverse * inverse / size;
  for_each_vec(size, [&](int64_t i, auto count) {
    const Vec value = load(x + i, count), out_grad = load(grad + i, count);
    if (weight_grad)
      store(weight_grad + i, load(weight_grad + i, count) + out_grad * value * inverse, count);
    if (x_grad)
      store(x_grad + i, (out_grad * load(weight + i, count) - value * shared) * inverse, count);
  });
}

// Sum of a weight's gradient over many rows. A float sum of thousands of rows would lose precision,
// so partial sums of kRows rows are added to the total. The order is fixed.
struct WeightGrad {
  float *total, *partial;  // null: no gradient
  int64_t size;
  int rows = 0;

  void begin() {
    if (total) std::fill(total, total + size, 0.0f), std::fill(partial, partial + size, 0.0f);
  }

  // Returns the buffer to which the next row adds its gradient.
  float* next() {
    if (total && rows++ == kRows) flush(), rows = 1;
    return partial;
  }

  void flush() {
    if (!total) return;
    for_each_vec(size, [&](int64_t i, auto count) {
      store(total + i, load(total + i, count) + load(partial + i, count), count);
      store(partial + i, Vec{}, count);
    });
  }
};

// Cosines and sines of each token, [width]; tokens are `stride` floats apart. A head's halves
// (a, b) become (a cos + b sin, b cos + a sin). Each half has its own cosines and sines, with
// signs.
struct Angles {
  const float *cosines, *sines;
  int64_t stride;
};

// Query heads or key heads of a token. `weight` [width] is the weight of their norm; null: no norm.
struct Part {
  int64_t heads;
  const float* weight;
};

struct Heads {
  Angles angles;
  Part queries, keys;
  int64_t tokens, width;

  int64_t num_normed_heads() const { return queries.heads + keys.heads; }
  int64_t num_heads() const { return num_normed_heads() + keys.heads; }

  void forward(const float* qkv, float eps, float* q, float* k, float* v, float* inverse) const {
    for (int64_t t = 0; t < tokens; t++) {
      const float* row = qkv + t * num_heads() * width;
      float* saved_inverse = inverse ? inverse + t * num_normed_heads() : nullptr;
      forward_part(queries, t, row, eps, q + t * queries.heads * width, saved_inverse);
      row += queries.heads * width;
      forward_part(keys, t, row, eps, k + t * keys.heads * width,
                   saved_inverse ? saved_inverse + queries.heads : nullptr);
      row += keys.heads * width;
      memcpy(v + t * keys.heads * width, row, keys.heads * width * sizeof(float));
    }
  }

  void forward_part(const Part& part, int64_t t, const float* x, float eps, float* out,
                    float* saved_inverse) const {
    for (int64_t h = 0; h < part.heads; h++, x += width, out += width) {
      if (!part.weight) {
        rotate(t, x, out);
        continue;
      }
      const float inverse = saved_inverse[h] = inverse_rms(x, width, eps);
      for_each_vec(width, [&](int64_t i, auto count) {
        store(out + i, load(x + i, count) * inverse * load(part.weight + i, count), count);
      });
      rotate(t, out, out);
    }
  }

  void rotate(int64_t t, const float* x, float* out) const {
    const int64_t half = width / 2;
    const float *cosine = angles.cosines + t * angles.stride,
                *sine = angles.sines + t * angles.stride;
    for_each_vec(half, [&](int64_t i, auto count) {
      const Vec a = load(x + i, count), b = load(x + half + i, count);
      store(out + i, a * load(cosine + i, count) + b * load(sine + i, count), count);
      store(out + half + i, b * load(cosine + half + i, count) + a * load(sine + half + i, count),
            count);
    });
  }

  // Applies the rotation's transpose to a gradient.
  void rotate_backward(int64_t t, const float* grad, float* out) const {
    const int64_t half = width / 2;
    const float *cosine = angles.cosines + t * angles.stride,
                *sine = angles.sines + t * angles.stride;
    for_each_vec(half, [&](int64_t i, auto count) {
      const Vec a = load(grad + i, count), b = load(grad + half + i, count);
      store(out + i, a * load(cosine + i, count) + b * load(sine + half + i, count), count);
      store(out + half + i, b * load(cosine + half + i, count) + a * load(sine + i, count), count);
    });
  }

  void backward(const float* qkv, const float* inverse, const float* q_grad, const float* k_grad,
                const float* v_grad, float* qkv_grad, WeightGrad& query_weight,
                WeightGrad& key_weight) const {
    query_weight.begin(), key_weight.begin();
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t at = t * num_heads() * width, behind = at + queries.heads * width;
      const float* x = qkv ? qkv + at : nullptr;
      const float* saved_inverse = inverse ? inverse + t * num_normed_heads() : nullptr;
      backward_part(queries, t, x, saved_inverse, q_grad + t * queries.heads * width, qkv_grad + at,
                    query_weight);
      backward_part(keys, t, x ? qkv + behind : nullptr,
                    saved_inverse ? saved_inverse + queries.heads : nullptr,
                    k_grad + t * keys.heads * width, qkv_grad + behind, key_weight);
      memcpy(qkv_grad + behind + keys.heads * width, v_grad + t * keys.heads * width,
             keys.heads * width * sizeof(float));
    }
    query_weight.flush(), key_weight.flush();
  }

  void backward_part(const Part& part, int64_t t, const float* x, const float* saved_inverse,
                     const float* grad, float* out, WeightGrad& weight_grad) const {
    for (int64_t h = 0; h < part.heads; h++) {
      rotate_backward(t, grad + h * width, out + h * width);
      if (part.weight)
        norm_backward(x + h * width, part.weight, out + h * width, saved_inverse[h], width,
                      out + h * width, weight_grad.next());
    }
  }
};

}  // namespace meshrl

using namespace meshrl;

extern "C" {

// Computes out [rows, size] = silu(gate) * up from gate_up [rows, 2 * size].
void pointwise_swiglu(const float* gate_up, int64_t rows, int64_t size, float* out) {
  for (int64_t r = 0; r < rows; r++) {
    const float *gate = gate_up + 2 * r * size, *up = gate + size;
    float* to = out + r * size;
    for_each_vec(size, [&](int64_t i, auto count) {
      const Vec x = load(gate + i, count);
      store(to + i, x * sigmoid(x) * load(up + i, count), count);
    });
  }
}

void pointwise_swiglu_backward(const float* gate_up, const float* grad, int64_t rows, int64_t size,
                               float* gate_up_grad) {
  for (int64_t r = 0; r < rows; r++) {
    const float *gate = gate_up + 2 * r * size, *up = gate + size, *from = grad + r * size;
    float *gate_grad = gate_up_grad + 2 * r * size, *up_grad = gate_grad + size;
    for_each_vec(size, [&](int64_t i, auto count) {
      const Vec x = load(gate + i, count), out_grad = load(from + i, count), s = sigmoid(x);
      store(gate_grad + i, out_grad * load(up + i, count) * s * (1.0f + x * (1.0f - s)), count);
      store(up_grad + i, out_grad * x * s, count);
    });
  }
}

// Computes out [rows, size] = x * inverse * weight, with inverse [rows] = 1 / rms(x).
void pointwise_norm(const float* x, const float* weight, int64_t rows, int64_t size, float eps,
                    float* out, float* inverse) {
  for (int64_t r = 0; r < rows; r++) {
    const float* from = x + r * size;
    float* to = out + r * size;
    const float factor = inverse[r] = inverse_rms(from, size, eps);
    for_each_vec(size, [&](int64_t i, auto count) {
      store(to + i, load(from + i, count) * factor * load(weight + i, count), count);
    });
  }
}

// Computes the gradients that are not null. `partial` [size] is a scratch buffer.
void pointwise_norm_backward(const float* x, const float* weight, const float* inverse,
                             const float* grad, int64_t rows, int64_t size, float* x_grad,
                             float* weight_grad, float* partial) {
  WeightGrad sums{weight_grad, weight_grad ? partial : nullptr, size};
  sums.begin();
  for (int64_t r = 0; r < rows; r++)
    norm_backward(x + r * size, weight, grad + r * size, inverse[r], size,
                  x_grad ? x_grad + r * size : nullptr, sums.next());
  sums.flush();
}

// Splits qkv, whose rows hold a token's heads in this order, into q [tokens, heads, width], k and v
// [tokens, kv_heads, width]. Queries and keys are normalized, if there are weights, and rotated.
// `inverse` [tokens, heads + kv_heads] is 1 / rms of each head; null without weights.
void pointwise_heads(const float* qkv, const float* cosines, const float* sines, int64_t stride,
                     const float* query_norm, const float* key_norm, int64_t tokens, int64_t heads,
                     int64_t kv_heads, int64_t width, float eps, float* q, float* k, float* v,
                     float* inverse) {
  const Angles angles{cosines, sines, stride};
  const Heads shape{angles, {heads, query_norm}, {kv_heads, key_norm}, tokens, width};
  shape.forward(qkv, eps, q, k, v, inverse);
}

// Computes the gradients that are not null. `qkv` may be null without weights. `partial` [2, width]
// is a scratch buffer.
void pointwise_heads_backward(const float* qkv, const float* cosines, const float* sines,
                              int64_t stride, const float* query_norm, const float* key_norm,
                              int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width,
                              const float* inverse, const float* q_grad, const float* k_grad,
                              const float* v_grad, float* qkv_grad, float* query_norm_grad,
                              float* key_norm_grad, float* partial) {
  const Angles angles{cosines, sines, stride};
  const Heads shape{angles, {heads, query_norm}, {kv_heads, key_norm}, tokens, width};
  WeightGrad query_sums{query_norm_grad, query_norm_grad ? partial : nullptr, width};
  WeightGrad key_sums{key_norm_grad, key_norm_grad ? partial + width : nullptr, width};
  shape.backward(qkv, inverse, q_grad, k_grad, v_grad, qkv_grad, query_sums, key_sums);
}

}  // extern "C"
