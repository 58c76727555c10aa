// Attention of a few queries to paged keys and values, in blocks of 16 tokens.
//
// A block holds 16 tokens of one key-value head: keys transposed [width][16], values [16][width].
// bf16 interleaves two neighbours along the summed dimension: keys [width/2][16][2], values
// [8][width][2]. The softmax is online (Milakov, Gimelshein 2018), over chunks of kChunk tokens. So
// scores stay in the L1 cache at any context length.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "simd.h"

namespace meshrl {

constexpr int kBlock = 16;          // tokens
constexpr int kChunk = 128;         // tokens; a multiple of kBlock
constexpr int kMaxQueries = 8;      // queries that share one read of keys and values
constexpr int kPrefetchBlocks = 2;  // prefetch distance, in blocks
constexpr int kBlockVecs = kBlock / kLanes;
constexpr float kMaskedScore = -1e30f;  // score of a masked token: its exp is 0

// Cache of one sequence. Block table[b] starts `stride` * table[b] elements after `keys` and
// `values`. It holds kv_heads heads one after another.
template <class T>
struct Context {
  const T* keys;
  const T* values;
  const int32_t* table;
  int64_t stride;
  int kv_heads;
};

template <class T>
inline void write_token(T* keys, T* values, int at, int width, const float* key,
                        const float* value) {
  for (int d = 0; d < width; d++) {
    if constexpr (std::is_same_v<T, bf16>) {
      keys[(d / 2 * kBlock + at) * 2 + d % 2] = to_bf16(key[d]);
      values[(at / 2 * width + d) * 2 + at % 2] = to_bf16(value[d]);
    } else {
      keys[d * kBlock + at] = key[d];
      values[at * width + d] = value[d];
    }
  }
}

template <class T>
inline void prefetch_block(const T* block, int elements) {
  const char* p = reinterpret_cast<const char*>(block);
  for (size_t i = 0; i < elements * sizeof(T); i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Number of independent accumulators. With few sums, dependent multiply-adds would wait for each
// other.
constexpr int count_accumulators(int sums) { return sums <= 2 ? 4 : sums <= 4 ? 2 : 1; }

// Computes the scores of Queries queries with the tokens of one block.
template <class T, int Width, int Queries>
inline void score_block(const Act<T>* queries, const T* keys, Vec (&scores)[Queries][kBlockVecs]) {
  constexpr int step = kInterleave<T>, split = count_accumulators(Queries * kBlockVecs);
  Vec sums[split][Queries][kBlockVecs] = {};
#pragma GCC unroll 4
  for (int d = 0; d < Width; d += step * split)
    for (int i = 0; i < split; i++)
      for (int part = 0; part < kBlockVecs; part++) {
        Factor<T> key;
        key.read(keys + (d + i * step) * kBlock + part * kLanes * step);
        for (int q = 0; q < Queries; q++)
          sums[i][q][part] = key.add_product(queries + q * Width + d + i * step, sums[i][q][part]);
      }
  for (int q = 0; q < Queries; q++)
    for (int part = 0; part < kBlockVecs; part++) {
      scores[q][part] = sums[0][q][part];
      for (int i = 1; i < split; i++) scores[q][part] += sums[i][q][part];
    }
}

// Adds weight * value of each token of one block to sums[i][q][v], over Vecs vectors of the value.
template <class T, int Width, int Queries, int Vecs, int Split>
inline void accumulate_values(const Act<T>* weights, const T* values,
                              Vec (&sums)[Split][Queries][Vecs]) {
  constexpr int step = kInterleave<T>;
#pragma GCC unroll 4
  for (int t = 0; t < kBlock; t += step * Split)
    for (int i = 0; i < Split; i++)
      for (int v = 0; v < Vecs; v++) {
        Factor<T> value;
        value.read(values + (t + i * step) * Width + v * kLanes * step);
        for (int q = 0; q < Queries; q++)
          sums[i][q][v] = value.add_product(weights + q * kChunk + t + i * step, sums[i][q][v]);
      }
}

// Buffers of one thread; they grow to the largest use.
template <class T>
struct Scratch {
  std::vector<float> scores, mixed, max_score, total;
  std::vector<Act<T>> weights;
};

// Updates a row's running maximum and total of the softmax with the scores of a chunk.
template <class T, int Width>
inline void update_softmax(int row, int tokens, Scratch<T>& scratch) {
  const float* scores = scratch.scores.data() + row * kChunk;
  Vec chunk_max = splat(scratch.max_score[row]);
  for (int t = 0; t < tokens; t += kLanes) chunk_max = larger(chunk_max, load(scores + t));
  const float new_max = largest(chunk_max), rescale = std::exp(scratch.max_score[row] - new_max);
  scratch.max_score[row] = new_max;
  Vec added{};
  for (int t = 0; t < tokens; t += kLanes) {
    const Vec s = load(scores + t);
    const Vec e = s <= splat(kMaskedScore) ? Vec{} : exponential(s - new_max);
    added += e;
    store_act(scratch.weights.data() + row * kChunk + t, e);
  }
  scratch.total[row] = scratch.total[row] * rescale + sum(added);
  if (rescale == 1.0f) return;
  float* mixed = scratch.mixed.data() + row * Width;
  for (int d = 0; d < Width; d += kLanes) store(mixed + d, load(mixed + d) * rescale);
}

// Computes attention of Queries queries of each key-value head: queries [kv_heads, Queries, Width],
// already scaled. Query q attends to the first visible[q] tokens; visible is ascending. A window
// limits it to the last `window` of these tokens (0: all). The result of query q of head h goes to
// out[h * Queries + q], [Width].
//
// Heads are the inner loop, so that the kernel reads each block in memory order.
template <class T, int Width, int Queries>
void attend(const Act<T>* queries, const Context<T>& context, const int32_t* visible,
            int64_t window, float* const* out, Scratch<T>& scratch) {
  constexpr int vecs = Width / kLanes, chunk_blocks = kChunk / kBlock;
  constexpr int vecs_at_once =  // vectors of a value with sums in registers
      std::min<int>(vecs, std::bit_floor(std::max(1u, kLanes / static_cast<unsigned>(Queries))));
  constexpr int split = count_accumulators(Queries * vecs_at_once);
  const int heads = context.kv_heads, rows = heads * Queries;
  const int length = visible[Queries - 1], blocks = (length + kBlock - 1) / kBlock;
  const int block_elements = heads * kBlock * Width;
  int32_t hidden[Queries];  // tokens before each query's window
  for (int q = 0; q < Queries; q++)
    hidden[q] = window > 0 && visible[q] > window ? static_cast<int32_t>(visible[q] - window) : 0;
  const int begin = *std::min_element(hidden, hidden + Queries) / kBlock;
  scratch.scores.resize(rows * kChunk), scratch.weights.resize(rows * kChunk);
  scratch.mixed.assign(rows * Width, 0.0f);
  scratch.max_score.assign(rows, kMaskedScore), scratch.total.assign(rows, 0.0f);

  for (int first = begin; first < blocks; first += chunk_blocks) {
    const int last = std::min(first + chunk_blocks, blocks);
    for (int b = first; b < last; b++) {
      const T* block = context.keys + context.table[b] * context.stride;
      if (b + kPrefetchBlocks < blocks)
        prefetch_block(context.keys + context.table[b + kPrefetchBlocks] * context.stride,
                       block_elements);
      for (int h = 0; h < heads; h++) {
        Vec scores[Queries][kBlockVecs];
        score_block<T, Width, Queries>(queries + h * Queries * Width, block + h * kBlock * Width,
                                       scores);
        for (int q = 0; q < Queries; q++)
          for (int part = 0; part < kBlockVecs; part++) {
            const int visible_end = visible[q] - b * kBlock - part * kLanes;
            Vec s = scores[q][part];
            if (visible_end < kLanes) s = lane_index() < visible_end ? s : splat(kMaskedScore);
            const int hidden_end = hidden[q] - b * kBlock - part * kLanes;
            if (hidden_end > 0) s = lane_index() >= hidden_end ? s : splat(kMaskedScore);
            store(scratch.scores.data() + (h * Queries + q) * kChunk + (b - first) * kBlock +
                      part * kLanes,
                  s);
          }
      }
    }
    for (int row = 0; row < rows; row++)
      update_softmax<T, Width>(row, (last - first) * kBlock, scratch);
    for (int b = first; b < last; b++) {
      const T* block = context.values + context.table[b] * context.stride;
      if (b + kPrefetchBlocks < blocks)
        prefetch_block(context.values + context.table[b + kPrefetchBlocks] * context.stride,
                       block_elements);
      for (int h = 0; h < heads; h++)
        for (int v = 0; v < vecs; v += vecs_at_once) {
          Vec sums[split][Queries][vecs_at_once] = {};
          accumulate_values<T, Width, Queries, vecs_at_once, split>(
              scratch.weights.data() + h * Queries * kChunk + (b - first) * kBlock,
              block + h * kBlock * Width + v * kLanes * kInterleave<T>, sums);
          for (int q = 0; q < Queries; q++)
            for (int i = 0; i < vecs_at_once; i++) {
              float* mixed = scratch.mixed.data() + (h * Queries + q) * Width + (v + i) * kLanes;
              Vec all = load(mixed);
              for (int s = 0; s < split; s++) all += sums[s][q][i];
              store(mixed, all);
            }
        }
    }
  }
  for (int row = 0; row < rows; row++)
    for (int d = 0; d < Width; d += kLanes)
      store(out[row] + d, load(scratch.mixed.data() + row * Width + d) / splat(scratch.total[row]));
}

constexpr bool has_width_kernel(int64_t width) {
  return width == 32 || width == 64 || width == 128;
}
// Returns true if there is a kernel for n queries of a head.
constexpr bool has_count_kernel(int64_t n) { return (n >= 1 && n <= 4) || n == 8; }

// Calls `attend` for sizes known at run time; has_width_kernel(width) and has_count_kernel(count)
// must be true.
template <class T>
void attend_any(int64_t width, int64_t count, const Act<T>* queries, const Context<T>& context,
                const int32_t* visible, int64_t window, float* const* out, Scratch<T>& scratch) {
  switch (width * 16 + count) {
#define MESHRL_CASE(w, n) \
  case w * 16 + n: return attend<T, w, n>(queries, context, visible, window, out, scratch);
#define MESHRL_CASES(w) \
  MESHRL_CASE(w, 1) MESHRL_CASE(w, 2) MESHRL_CASE(w, 3) MESHRL_CASE(w, 4) MESHRL_CASE(w, 8)
    MESHRL_CASES(32) MESHRL_CASES(64) MESHRL_CASES(128)
#undef MESHRL_CASES
#undef MESHRL_CASE
  }
}

}  // namespace meshrl
