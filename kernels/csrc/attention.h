// Attention of a few queries over keys and values that lie in blocks of 16 tokens.
//
// A block holds one key-value head's 16 tokens: keys transposed [width][16], values [16][width]; in
// bf16 two neighbours along the summed dimension lie beside each other: keys [width/2][16][2],
// values [8][width][2]. The softmax is taken online, kChunk tokens at a time (Milakov, Gimelshein
// 2018), so that scores stay in the first cache however long the context is.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "simd.h"

namespace meshrl {

constexpr int kBlock = 16;      // tokens
constexpr int kChunk = 128;     // tokens; a multiple of kBlock
constexpr int kMostQueries = 8; // that share the reading of keys and values
constexpr int kAhead = 2;       // blocks that are prefetched
constexpr int kParts = kBlock / kLanes;
constexpr float kHidden = -1e30f;  // score of a token that a query may not see: its exp is 0

// The blocks of one sequence: block table[b] begins `stride` * table[b] elements behind `keys` and
// `values`, and holds kv_heads heads one after the other.
template <class T>
struct Context {
  const T* keys;
  const T* values;
  const int32_t* table;
  int64_t stride;
  int kv_heads;
};

template <class T>
inline void put_token(T* keys, T* values, int at, int width, const float* key,
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

// Sums that a product of few queries is spread over: each waits for the one before it.
constexpr int chains(int sums) { return sums <= 2 ? 4 : sums <= 4 ? 2 : 1; }

// Scores of Queries queries with the tokens of one block.
template <class T, int Width, int Queries>
inline void score_block(const Act<T>* queries, const T* keys, Vec (&scores)[Queries][kParts]) {
  constexpr int step = kTogether<T>, split = chains(Queries * kParts);
  Vec sums[split][Queries][kParts] = {};
#pragma GCC unroll 4
  for (int d = 0; d < Width; d += step * split)
    for (int i = 0; i < split; i++)
      for (int part = 0; part < kParts; part++) {
        Factor<T> key;
        key.read(keys + (d + i * step) * kBlock + part * kLanes * step);
        for (int q = 0; q < Queries; q++)
          sums[i][q][part] =
              key.add_product(queries + q * Width + d + i * step, sums[i][q][part]);
      }
  for (int q = 0; q < Queries; q++)
    for (int part = 0; part < kParts; part++) {
      scores[q][part] = sums[0][q][part];
      for (int i = 1; i < split; i++) scores[q][part] += sums[i][q][part];
    }
}

// sums[i][q][v] += weight of each token * value of each token, over one block and Vecs vectors.
template <class T, int Width, int Queries, int Vecs, int Split>
inline void mix_block(const Act<T>* weights, const T* values,
                      Vec (&sums)[Split][Queries][Vecs]) {
  constexpr int step = kTogether<T>;
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

// What one thread needs beside its registers; grows to the largest use.
template <class T>
struct Scratch {
  std::vector<float> scores, mixed, most, total;
  std::vector<Act<T>> weights;
};

// The softmax of a chunk's scores of one row, as a running maximum and total.
template <class T, int Width>
inline void soften(int row, int tokens, Scratch<T>& scratch) {
  const float* scores = scratch.scores.data() + row * kChunk;
  Vec peak = splat(scratch.most[row]);
  for (int t = 0; t < tokens; t += kLanes) peak = larger(peak, load(scores + t));
  const float now = largest(peak), shrink = std::exp(scratch.most[row] - now);
  scratch.most[row] = now;
  Vec added{};
  for (int t = 0; t < tokens; t += kLanes) {
    const Vec s = load(scores + t);
    const Vec e = s <= splat(kHidden) ? Vec{} : exponential(s - now);
    added += e;
    store_act(scratch.weights.data() + row * kChunk + t, e);
  }
  scratch.total[row] = scratch.total[row] * shrink + sum(added);
  if (shrink == 1.0f) return;
  float* mixed = scratch.mixed.data() + row * Width;
  for (int d = 0; d < Width; d += kLanes) store(mixed + d, load(mixed + d) * shrink);
}

// Attention of Queries queries for each key-value head: queries [kv_heads, Queries, Width], already
// scaled; query q sees the first visible[q] tokens, the last of them most, and of those the last
// `window` (0: all). Writes width * kv_heads * Queries numbers: query q of head h to
// out[h * Queries + q].
//
// Heads are the inner loop, so that blocks are read from end to end as they lie in memory.
template <class T, int Width, int Queries>
void attend(const Act<T>* queries, const Context<T>& context, const int32_t* visible,
            int64_t window, float* const* out, Scratch<T>& scratch) {
  constexpr int vecs = Width / kLanes, chunk_blocks = kChunk / kBlock;
  constexpr int together =  // vectors of a value whose sums are held in registers
      std::min<int>(vecs, std::bit_floor(std::max(1u, kLanes / static_cast<unsigned>(Queries))));
  constexpr int split = chains(Queries * together);
  const int heads = context.kv_heads, rows = heads * Queries;
  const int length = visible[Queries - 1], blocks = (length + kBlock - 1) / kBlock;
  const int block_elements = heads * kBlock * Width;
  int32_t hidden[Queries];  // tokens that lie before each query's window
  for (int q = 0; q < Queries; q++)
    hidden[q] = window > 0 && visible[q] > window ? static_cast<int32_t>(visible[q] - window) : 0;
  const int begin = *std::min_element(hidden, hidden + Queries) / kBlock;
  scratch.scores.resize(rows * kChunk), scratch.weights.resize(rows * kChunk);
  scratch.mixed.assign(rows * Width, 0.0f);
  scratch.most.assign(rows, kHidden), scratch.total.assign(rows, 0.0f);

  for (int first = begin; first < blocks; first += chunk_blocks) {
    const int last = std::min(first + chunk_blocks, blocks);
    for (int b = first; b < last; b++) {
      const T* block = context.keys + context.table[b] * context.stride;
      if (b + kAhead < blocks)
        prefetch_block(context.keys + context.table[b + kAhead] * context.stride, block_elements);
      for (int h = 0; h < heads; h++) {
        Vec scores[Queries][kParts];
        score_block<T, Width, Queries>(queries + h * Queries * Width,
                                       block + h * kBlock * Width, scores);
        for (int q = 0; q < Queries; q++)
          for (int part = 0; part < kParts; part++) {
            const int seen = visible[q] - b * kBlock - part * kLanes;
            Vec s = scores[q][part];
            if (seen < kLanes) s = lane_index() < seen ? s : splat(kHidden);
            const int before = hidden[q] - b * kBlock - part * kLanes;
            if (before > 0) s = lane_index() >= before ? s : splat(kHidden);
            store(scratch.scores.data() + (h * Queries + q) * kChunk + (b - first) * kBlock +
                      part * kLanes,
                  s);
          }
      }
    }
    for (int row = 0; row < rows; row++)
      soften<T, Width>(row, (last - first) * kBlock, scratch);
    for (int b = first; b < last; b++) {
      const T* block = context.values + context.table[b] * context.stride;
      if (b + kAhead < blocks)
        prefetch_block(context.values + context.table[b + kAhead] * context.stride,
                       block_elements);
      for (int h = 0; h < heads; h++)
        for (int v = 0; v < vecs; v += together) {
          Vec sums[split][Queries][together] = {};
          mix_block<T, Width, Queries, together, split>(
              scratch.weights.data() + h * Queries * kChunk + (b - first) * kBlock,
              block + h * kBlock * Width + v * kLanes * kTogether<T>, sums);
          for (int q = 0; q < Queries; q++)
            for (int i = 0; i < together; i++) {
              float* place =
                  scratch.mixed.data() + (h * Queries + q) * Width + (v + i) * kLanes;
              Vec all = load(place);
              for (int s = 0; s < split; s++) all += sums[s][q][i];
              store(place, all);
            }
        }
    }
  }
  for (int row = 0; row < rows; row++)
    for (int d = 0; d < Width; d += kLanes)
      store(out[row] + d,
            load(scratch.mixed.data() + row * Width + d) / splat(scratch.total[row]));
}

constexpr bool is_width(int64_t width) { return width == 32 || width == 64 || width == 128; }
// How many queries of a head may share a call.
constexpr bool is_count(int64_t n) { return (n >= 1 && n <= 4) || n == 8; }

// As above, for sizes known at run time: is_width(width), is_count(count).
template <class T>
void attend_any(int64_t width, int64_t count, const Act<T>* queries, const Context<T>& context,
                const int32_t* visible, int64_t window, float* const* out, Scratch<T>& scratch) {
  switch (width * 16 + count) {
#define MESHRL_CASE(w, n)                                          \
  case w * 16 + n:                                                 \
    return attend<T, w, n>(queries, context, visible, window, out, scratch);
#define MESHRL_CASES(w) \
  MESHRL_CASE(w, 1) MESHRL_CASE(w, 2) MESHRL_CASE(w, 3) MESHRL_CASE(w, 4) MESHRL_CASE(w, 8)
    MESHRL_CASES(32) MESHRL_CASES(64) MESHRL_CASES(128)
#undef MESHRL_CASES
#undef MESHRL_CASE
  }
}

}  // namespace meshrl
