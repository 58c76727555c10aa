// CPU implementation of the operators in kernels/ops: plain C functions over raw pointers, one
// thread.
//
// Tensors are contiguous, in float or, if `is_bf16` is 1, in bf16.
#include <cmath>
#include <limits>
#include <new>

#include "paged.h"
#include "simd.h"

namespace meshrl {

constexpr int kChunkLogits = 1024;  // logits per chunk; they stay in the L1 cache

// Returns log softmax(logits / temperature)[token] with an online sum; NaN if a logit is
// NaN or the largest logit is infinite.
template <class T>
float token_logprob(const T* logits, int64_t vocab, int64_t token, float temperature) {
  const float scale = temperature == 0 ? 1.0f : 1.0f / temperature;
  float chunk[kChunkLogits], max_logit = -INFINITY;
  double total = 0;
  IntVec nan_lanes{};
  for (int64_t first = 0; first < vocab; first += kChunkLogits) {
    const int64_t count = std::min<int64_t>(kChunkLogits, vocab - first);
    Vec chunk_max = splat(max_logit);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Vec x = load_float(logits + first + i);
      nan_lanes |= x != x;
      chunk_max = larger(chunk_max, x);
      store(chunk + i, x);
    }
    for (; i < count; i++) {
      chunk[i] = to_float(logits[first + i]);
      nan_lanes[0] |= chunk[i] != chunk[i];
      chunk_max[0] = std::max(chunk_max[0], chunk[i]);
    }
    for (; i % kLanes; i++) chunk[i] = -INFINITY;
    const float new_max = largest(chunk_max);
    if (new_max == -INFINITY) continue;
    Vec added{};
    for (int64_t j = 0; j < i; j += kLanes)
      added += exponential((load(chunk + j) - new_max) * scale);
    total = total * std::exp(static_cast<double>((max_logit - new_max) * scale)) + sum(added);
    max_logit = new_max;
  }
  for (int i = 0; i < kLanes; i++)
    if (nan_lanes[i] || !is_finite(max_logit)) return std::numeric_limits<float>::quiet_NaN();
  return (to_float(logits[token]) - max_logit) * scale - static_cast<float>(std::log(total));
}

template <class T>
int token_logprobs(const T* logits, const int64_t* tokens, const float* temperature, int64_t n,
                   int64_t vocab, float* out) {
  for (int64_t i = 0; i < n; i++) {
    if (tokens[i] >= vocab) return kOutOfRange;
    out[i] =
        tokens[i] < 0 ? 0.0f : token_logprob(logits + i * vocab, vocab, tokens[i], temperature[i]);
  }
  return kDone;
}

template <class Body>
int catch_bad_alloc(Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

template <class T>
T* as(void* p) {
  return static_cast<T*>(p);
}
template <class T>
const T* as(const void* p) {
  return static_cast<const T*>(p);
}

}  // namespace meshrl

using namespace meshrl;

// Evaluates `call` with T as the tensors' type.
#define MESHRL_TYPED(call)       \
  catch_bad_alloc([&]() -> int { \
    if (is_bf16) {               \
      using T = bf16;            \
      return call;               \
    }                            \
    using T = float;             \
    return call;                 \
  })

extern "C" {

// Returns 1 if attention is compiled for this head width.
int ops_has_width(int64_t width) { return has_width_kernel(width); }

int ops_bucket_pack(const char* rows, int64_t n, int64_t row_bytes, const int64_t* index, int64_t b,
                    char* packed) {
  for (int64_t i = 0; i < b; i++, packed += row_bytes) {
    if (index[i] >= n) return kOutOfRange;
    if (index[i] < 0)
      memset(packed, 0, row_bytes);
    else
      memcpy(packed, rows + index[i] * row_bytes, row_bytes);
  }
  return kDone;
}

int ops_bucket_scatter(const char* packed, const int64_t* index, int64_t b, int64_t n,
                       int64_t row_bytes, char* rows) {
  for (int64_t i = 0; i < b; i++, packed += row_bytes) {
    if (index[i] >= n) return kOutOfRange;
    if (index[i] >= 0) memcpy(rows + index[i] * row_bytes, packed, row_bytes);
  }
  return kDone;
}

int ops_paged_decode(int is_bf16, const void* queries, void* keys, void* values,
                     const int32_t* table, const int32_t* lengths, int64_t n, int64_t heads,
                     int64_t width, int64_t blocks, int64_t kv_heads, int64_t table_width,
                     int64_t window, float scale, void* out) {
  return MESHRL_TYPED(paged_decode<T>(as<T>(queries),
                                      {as<T>(keys), as<T>(values), blocks, kv_heads, width}, table,
                                      lengths, n, heads, table_width, window, scale, as<T>(out)));
}

int ops_paged_write(int is_bf16, void* keys, void* values, const void* new_keys,
                    const void* new_values, const int32_t* table, const int64_t* positions,
                    int64_t n, int64_t width, int64_t blocks, int64_t kv_heads,
                    int64_t table_width) {
  return MESHRL_TYPED(paged_write<T>({as<T>(keys), as<T>(values), blocks, kv_heads, width},
                                     as<T>(new_keys), as<T>(new_values), table, positions, n,
                                     table_width));
}

int ops_varlen_prefill(int is_bf16, const void* queries, const void* keys, const void* values,
                       const int32_t* starts, int64_t sequences, int64_t tokens, int64_t heads,
                       int64_t kv_heads, int64_t width, int64_t window, float scale, void* out) {
  return MESHRL_TYPED(varlen_prefill<T>(as<T>(queries), as<T>(keys), as<T>(values), starts,
                                        sequences, tokens, heads, kv_heads, width, window, scale,
                                        as<T>(out)));
}

int ops_token_logprob(int is_bf16, const void* logits, const int64_t* tokens,
                      const float* temperature, int64_t n, int64_t vocab, float* out) {
  return MESHRL_TYPED(token_logprobs<T>(as<T>(logits), tokens, temperature, n, vocab, out));
}

}  // extern "C"
