// Attention over the paged cache of attention.h, and writes to that cache, with tensors of rows.
//
// Tensors are contiguous, in float or bf16. A function returns kDone, or kOutOfRange before it
// accesses an element out of range.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "simd.h"

namespace meshrl {

constexpr int kDone = 0, kNoMemory = 1, kOutOfRange = 2;  // as kernels/backends/native.py

inline Vec load_float(const float* p) { return load(p); }
inline Vec load_float(const bf16* p) {
  typedef uint16_t Bf16Vec __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const Bf16Vec*>(p), IntVec) << 16);
}

inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { *p = to_bf16(x); }

inline bool is_finite(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7f800000) != 0x7f800000;
}
inline bool is_finite(bf16 x) { return (x & 0x7f80) != 0x7f80; }

// Attention of consecutive rows of one sequence, up to kMaxQueries queries of a head at a time. If
// attention.h has no kernel for a group's size, copies of its last query fill the group.
template <class T>
class Attention {
 public:
  Attention(int64_t heads, int64_t kv_heads, int64_t width, int64_t window, float scale)
      : heads_(heads),
        kv_heads_(kv_heads),
        width_(width),
        shared_(heads / kv_heads),
        window_(window),
        scale_(scale) {}

  // Computes attention of queries [rows, heads, width] into `out`. Row r attends to the first
  // `visible` + r tokens of the context, limited to the last `window` of them (0: all).
  void attend(const T* queries, int64_t rows, int64_t visible, const Context<T>& context, T* out) {
    for (int64_t first = 0; first < rows * shared_; first += kMaxQueries) {
      const int64_t num_queries = std::min<int64_t>(kMaxQueries, rows * shared_ - first);
      int64_t count = num_queries;
      while (!has_count_kernel(count)) count++;
      gather(queries, first, num_queries, count, visible);
      attend_any<T>(width_, count, packed_.data(), context, visible_.data(), window_,
                    targets_.data(), scratch_);
      for (int64_t h = 0; h < kv_heads_; h++)
        for (int64_t q = 0; q < num_queries; q++) {
          T* to = out + query_offset(h, first + q);
          const float* from = targets_[h * count + q];
          for (int64_t d = 0; d < width_; d++) put(to + d, from[d]);
        }
    }
  }

 private:
  // Returns the offset of query `query` of key-value head h in [rows, heads, width].
  int64_t query_offset(int64_t h, int64_t query) const {
    return (query / shared_ * heads_ + h * shared_ + query % shared_) * width_;
  }

  void gather(const T* queries, int64_t first, int64_t num_queries, int64_t count,
              int64_t visible) {
    packed_.resize(kv_heads_ * count * width_), mixed_.resize(kv_heads_ * count * width_);
    targets_.resize(kv_heads_ * count), visible_.resize(count);
    for (int64_t i = 0; i < kv_heads_ * count; i++) {
      const int64_t query = first + std::min(i % count, num_queries - 1);
      const T* from = queries + query_offset(i / count, query);
      for (int64_t d = 0; d < width_; d += kLanes)
        store_act(packed_.data() + i * width_ + d, load_float(from + d) * scale_);
      targets_[i] = mixed_.data() + i * width_;
      visible_[i % count] = static_cast<int32_t>(visible + query / shared_);
    }
  }

  const int64_t heads_, kv_heads_, width_, shared_, window_;
  const float scale_;
  std::vector<Act<T>> packed_;
  std::vector<float> mixed_;
  std::vector<int32_t> visible_;
  std::vector<float*> targets_;
  Scratch<T> scratch_;
};

// Contiguous blocks of one sequence, with zeros after its last token.
template <class T>
struct Blocks {
  Blocks(int64_t tokens, int64_t kv_heads, int64_t width)
      : stride(kBlock * kv_heads * width),
        keys(count(tokens) * stride),
        values(keys.size()),
        table(count(tokens)) {
    for (size_t i = 0; i < table.size(); i++) table[i] = static_cast<int32_t>(i);
  }
  static int64_t count(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }
  Context<T> context(int64_t kv_heads) const {
    return {keys.data(), values.data(), table.data(), stride, static_cast<int>(kv_heads)};
  }
  const int64_t stride;
  std::vector<T> keys, values;
  std::vector<int32_t> table;
};

// Return the offset of element d of token `at` in a head's block of keys or of values.
template <class T>
inline int64_t key_offset(int64_t at, int64_t d) {
  return (d / kInterleave<T> * kBlock + at) * kInterleave<T> + d % kInterleave<T>;
}
template <class T>
inline int64_t value_offset(int64_t at, int64_t d, int64_t width) {
  return (at / kInterleave<T> * width + d) * kInterleave<T> + at % kInterleave<T>;
}

template <class T>
struct Cache {
  T *keys, *values;
  int64_t blocks, kv_heads, width;
  int64_t head() const { return kBlock * width; }  // elements of a block and head
  int64_t stride() const { return kv_heads * head(); }
};

// Computes attention of a sequence over a copy of its cache with zeros after its last token. Needed
// if these stale values are not finite, because 0 * NaN is NaN.
template <class T>
void attend_clean_copy(Attention<T>& attention, const Cache<T>& cache, const int32_t* table,
                       int64_t length, const T* queries, T* out) {
  Blocks<T> copy(length, cache.kv_heads, cache.width);
  for (size_t b = 0; b < copy.table.size(); b++) {
    const int64_t from = table[b] * cache.stride(), to = b * cache.stride();
    std::copy_n(cache.keys + from, cache.stride(), copy.keys.data() + to);
    std::copy_n(cache.values + from, cache.stride(), copy.values.data() + to);
  }
  T* last = copy.values.data() + (copy.table.size() - 1) * cache.stride();
  for (int64_t h = 0; h < cache.kv_heads; h++)
    for (int64_t at = length % kBlock; at < kBlock; at++)
      for (int64_t d = 0; d < cache.width; d++)
        last[h * cache.head() + value_offset<T>(at, d, cache.width)] = T{};
  attention.attend(queries, 1, length, copy.context(cache.kv_heads), out);
}

template <class T>
int paged_decode(const T* queries, const Cache<T>& cache, const int32_t* table,
                 const int32_t* lengths, int64_t n, int64_t heads, int64_t table_width,
                 int64_t window, float scale, T* out) {
  Attention<T> attention(heads, cache.kv_heads, cache.width, window, scale);
  const int64_t row = heads * cache.width;
  for (int64_t i = 0; i < n; i++, table += table_width, queries += row, out += row) {
    const int64_t length = lengths[i], blocks = Blocks<T>::count(length);
    if (length <= 0) {
      std::fill_n(out, row, T{});
      continue;
    }
    if (blocks > table_width) return kOutOfRange;
    for (int64_t b = 0; b < blocks; b++)
      if (table[b] < 0 || table[b] >= cache.blocks) return kOutOfRange;
    const T* last = cache.values + table[blocks - 1] * cache.stride();
    bool clean = true;
    if (length % kBlock)
      for (int64_t e = 0; e < cache.stride(); e++) clean &= is_finite(last[e]);
    const Context<T> context = {cache.keys, cache.values, table, cache.stride(),
                                static_cast<int>(cache.kv_heads)};
    if (clean)
      attention.attend(queries, 1, length, context, out);
    else
      attend_clean_copy(attention, cache, table, length, queries, out);
  }
  return kDone;
}

template <class T>
int paged_write(const Cache<T>& cache, const T* keys, const T* values, const int32_t* table,
                const int64_t* positions, int64_t n, int64_t table_width) {
  const int64_t width = cache.width;
  for (int64_t i = 0; i < n; i++, table += table_width) {
    const int64_t position = positions[i];
    if (position < 0) continue;
    if (position >= table_width * kBlock) return kOutOfRange;
    const int64_t block = table[position / kBlock], at = position % kBlock;
    if (block < 0 || block >= cache.blocks) return kOutOfRange;
    for (int64_t h = 0; h < cache.kv_heads; h++) {
      const int64_t from = (i * cache.kv_heads + h) * width;
      const int64_t to = block * cache.stride() + h * cache.head();
      for (int64_t d = 0; d < width; d++) {
        cache.keys[to + key_offset<T>(at, d)] = keys[from + d];
        cache.values[to + value_offset<T>(at, d, width)] = values[from + d];
      }
    }
  }
  return kDone;
}

template <class T>
int varlen_prefill(const T* queries, const T* keys, const T* values, const int32_t* starts,
                   int64_t sequences, int64_t tokens, int64_t heads, int64_t kv_heads,
                   int64_t width, int64_t window, float scale, T* out) {
  if (starts[0] != 0 || starts[sequences] > tokens) return kOutOfRange;
  for (int64_t s = 0; s < sequences; s++)
    if (starts[s + 1] < starts[s]) return kOutOfRange;
  Attention<T> attention(heads, kv_heads, width, window, scale);
  const int64_t row = heads * width;
  std::fill(out + starts[sequences] * row, out + tokens * row, T{});
  for (int64_t s = 0; s < sequences; s++) {
    const int64_t first = starts[s], length = starts[s + 1] - first;
    Blocks<T> blocks(length, kv_heads, width);
    for (int64_t t = 0; t < length; t++)
      for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t from = ((first + t) * kv_heads + h) * width;
        const int64_t to = t / kBlock * blocks.stride + h * kBlock * width;
        for (int64_t d = 0; d < width; d++) {
          blocks.keys[to + key_offset<T>(t % kBlock, d)] = keys[from + d];
          blocks.values[to + value_offset<T>(t % kBlock, d, width)] = values[from + d];
        }
      }
    attention.attend(queries + first * row, length, 1, blocks.context(kv_heads), out + first * row);
  }
  return kDone;
}

}  // namespace meshrl
