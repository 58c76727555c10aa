// The custom operators of kernels/ops on a processor: plain C functions over raw pointers.
//
// Tensors are contiguous, in float or, where `narrow`, in bf16. One thread.
#include <cmath>
#include <limits>
#include <new>

#include "paged.h"
#include "simd.h"

namespace meshrl {

constexpr int kLogitsAtOnce = 1024;  // stay in the first cache

// log softmax(logits / temperature)[token], the sum taken online. No number: no number.
template <class T>
float token_logprob(const T* logits, int64_t vocab, int64_t token, float temperature) {
  const float scale = temperature == 0 ? 1.0f : 1.0f / temperature;
  float run[kLogitsAtOnce], most = -INFINITY;
  double total = 0;
  IntVec broken{};
  for (int64_t first = 0; first < vocab; first += kLogitsAtOnce) {
    const int64_t count = std::min<int64_t>(kLogitsAtOnce, vocab - first);
    Vec peak = splat(most);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Vec x = load_wide(logits + first + i);
      broken |= x != x;
      peak = larger(peak, x);
      store(run + i, x);
    }
    for (; i < count; i++) {
      run[i] = widened(logits[first + i]);
      broken[0] |= run[i] != run[i];
      peak[0] = std::max(peak[0], run[i]);
    }
    for (; i % kLanes; i++) run[i] = -INFINITY;
    const float now = largest(peak);
    if (now == -INFINITY) continue;
    Vec added{};
    for (int64_t j = 0; j < i; j += kLanes) added += exponential((load(run + j) - now) * scale);
    total = total * std::exp(static_cast<double>((most - now) * scale)) + sum(added);
    most = now;
  }
  for (int i = 0; i < kLanes; i++)
    if (broken[i] || !is_finite(most)) return std::numeric_limits<float>::quiet_NaN();
  return (widened(logits[token]) - most) * scale - static_cast<float>(std::log(total));
}

template <class T>
int token_logprobs(const T* logits, const int64_t* tokens, const float* temperature, int64_t n,
                   int64_t vocab, float* out) {
  for (int64_t i = 0; i < n; i++) {
    if (tokens[i] >= vocab) return kOutOfRange;
    out[i] = tokens[i] < 0
                 ? 0.0f
                 : token_logprob(logits + i * vocab, vocab, tokens[i], temperature[i]);
  }
  return kDone;
}

template <class Body>
int guarded(Body&& body) {
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

// What `call` answers, where T is the tensors' type.
#define MESHRL_TYPED(call)         \
  guarded([&]() -> int {           \
    if (narrow) {                  \
      using T = bf16;              \
      return call;                 \
    }                              \
    using T = float;               \
    return call;                   \
  })

extern "C" {

// Sizes that attention is compiled for.
int ops_has_width(int64_t width) { return is_width(width); }

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

int ops_paged_decode(int narrow, const void* queries, void* keys, void* values,
                     const int32_t* table, const int32_t* lengths, int64_t n, int64_t heads,
                     int64_t width, int64_t blocks, int64_t kv_heads, int64_t table_width,
                     int64_t window, float scale, void* out) {
  return MESHRL_TYPED(paged_decode<T>(
      as<T>(queries), {as<T>(keys), as<T>(values), blocks, kv_heads, width}, table, lengths, n,
      heads, table_width, window, scale, as<T>(out)));
}

int ops_paged_write(int narrow, void* keys, void* values, const void* new_keys,
                    const void* new_values, const int32_t* table, const int64_t* positions,
                    int64_t n, int64_t width, int64_t blocks, int64_t kv_heads,
                    int64_t table_width) {
  return MESHRL_TYPED(paged_write<T>({as<T>(keys), as<T>(values), blocks, kv_heads, width},
                                      as<T>(new_keys), as<T>(new_values), table, positions, n,
                                      table_width));
}

int ops_varlen_prefill(int narrow, const void* queries, const void* keys, const void* values,
                       const int32_t* starts, int64_t sequences, int64_t tokens, int64_t heads,
                       int64_t kv_heads, int64_t width, int64_t window, float scale, void* out) {
  return MESHRL_TYPED(varlen_prefill<T>(as<T>(queries), as<T>(keys), as<T>(values), starts,
                                         sequences, tokens, heads, kv_heads, width, window,
                                         scale, as<T>(out)));
}

int ops_token_logprob(int narrow, const void* logits, const int64_t* tokens,
                      const float* temperature, int64_t n, int64_t vocab, float* out) {
  return MESHRL_TYPED(token_logprobs<T>(as<T>(logits), tokens, temperature, n, vocab, out));
}

}  // extern "C"
