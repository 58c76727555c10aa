// GPU kernel for attention of one query per sequence over the paged cache of attention.h.
//
// A thread block computes one sequence and one key-value head with up to 8 of its queries. It takes
// one of `splits` shares of the sequence's tokens (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023).
// So one long context keeps the whole GPU busy. Warps take cache blocks of 16 tokens in turn; each
// has an online softmax in base 2. The kernel then merges warps, and a second kernel merges splits.
// The launch depends on shapes alone, so a CUDA graph can capture it.
#include <assert.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

namespace {

constexpr int kBlock = 16;  // tokens of a cache block
constexpr int kWarp = 32;   // threads
constexpr int kWarps = 4;   // per thread block; several thread blocks share an SM
constexpr int kMaxQueries = 8;
constexpr int kReads = 8;  // outstanding reads of a lane, 16 bytes each
constexpr unsigned kAll = 0xffffffffu;
constexpr float kLog2E = 1.44269504f;

using bf16 = uint16_t;  // the upper half of a float

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
__device__ inline void put(float* p, float x) { *p = x; }
__device__ inline void put(bf16* p, float x) {  // rounds to nearest, ties to even
  const unsigned bits = __float_as_uint(x);
  *p = x != x ? 0x7fc0 : static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// 16 bytes of the cache: four neighbours (tokens of keys, features of values) at one index of the
// summed dimension. In bf16 the four neighbours are at two indices.
template <class T>
struct Quad {
  static constexpr int interleave = sizeof(T) == 2 ? 2 : 1;
  uint4 words;
  __device__ void read(const T* p) { words = *reinterpret_cast<const uint4*>(p); }
  __device__ float at(int inner, int i) const {
    const unsigned word = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    if (interleave == 1) return __uint_as_float(word);
    return __uint_as_float(inner == 0 ? word << 16 : word & 0xffff0000u);
  }
};

struct Problem {
  const int32_t *table, *lengths;
  int heads, kv_heads, table_width, splits, window, parts;
  int64_t blocks;
  float scale;     // score scale times log2(e)
  float* partial;  // [n, heads, splits, width + 2]: sums, maximum score, total weight
};

// Running softmax of a warp's share, replicated in all lanes. `mixed` has the sums of four features
// over the tokens that this lane reads.
template <int Queries>
struct Running {
  float max_score[Queries], total[Queries], mixed[Queries][4];
};

template <class T, int Width, int Queries>
__device__ inline void score_block(const T* keys, const float (*queries)[Width],
                                   float (&scores)[Queries][4]) {
  constexpr int interleave = Quad<T>::interleave, rows = Width / interleave;
  const int lane = threadIdx.x % kWarp;
  for (int g = 0; g < Queries; g++)
    for (int i = 0; i < 4; i++) scores[g][i] = 0;
  constexpr int reads = rows / 8 < kReads ? rows / 8 : kReads;
#pragma unroll 1
  for (int row = lane / 4; row < rows; row += 8 * reads) {
    Quad<T> quads[reads];
#pragma unroll
    for (int j = 0; j < reads; j++)
      quads[j].read(keys + ((row + 8 * j) * kBlock + lane % 4 * 4) * interleave);
#pragma unroll
    for (int j = 0; j < reads; j++)
#pragma unroll
      for (int g = 0; g < Queries; g++)
#pragma unroll
        for (int k = 0; k < interleave; k++) {
          const float query = queries[g][(row + 8 * j) * interleave + k];
#pragma unroll
          for (int i = 0; i < 4; i++) scores[g][i] += query * quads[j].at(k, i);
        }
  }
#pragma unroll
  for (int g = 0; g < Queries; g++)
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int across = 4; across < kWarp; across *= 2)
        scores[g][i] += __shfl_xor_sync(kAll, scores[g][i], across);
}

// Updates the softmax with a block's scores and writes their weights to `weights`. Only tokens
// [visible_begin, visible_end) of the block count; there is at least one.
template <int Queries>
__device__ inline void update_softmax(const float (&scores)[Queries][4], int visible_begin,
                                      int visible_end, float (*weights)[kBlock],
                                      Running<Queries>& running) {
  const int lane = threadIdx.x % kWarp, first = lane % 4 * 4;
#pragma unroll
  for (int g = 0; g < Queries; g++) {
    float new_max = running.max_score[g], added = 0;
    for (int i = 0; i < 4; i++)
      if (first + i >= visible_begin && first + i < visible_end)
        new_max = fmaxf(new_max, scores[g][i]);
    for (int across = 1; across < 4; across *= 2)
      new_max = fmaxf(new_max, __shfl_xor_sync(kAll, new_max, across));
    float weight[4];
    for (int i = 0; i < 4; i++) {
      const bool is_visible = first + i >= visible_begin && first + i < visible_end;
      weight[i] = is_visible ? exp2f(scores[g][i] - new_max) : 0;
      added += weight[i];
    }
    for (int across = 1; across < 4; across *= 2) added += __shfl_xor_sync(kAll, added, across);
    const float rescale = exp2f(running.max_score[g] - new_max);
    running.max_score[g] = new_max;
    running.total[g] = running.total[g] * rescale + added;
    for (int i = 0; i < 4; i++) running.mixed[g][i] *= rescale;
    if (lane < 4)
      for (int i = 0; i < 4; i++) weights[g][first + i] = weight[i];
  }
}

template <class T, int Width, int Queries>
__device__ inline void accumulate_values(const T* values, int visible_end,
                                         const float (*weights)[kBlock],
                                         Running<Queries>& running) {
  constexpr int interleave = Quad<T>::interleave, rows = kBlock / interleave;
  constexpr int across = Width / 4, at_once = kWarp / across;  // lanes per row, rows per read
  const int lane = threadIdx.x % kWarp;
  constexpr int reads = rows / at_once < kReads ? rows / at_once : kReads;
#pragma unroll 1
  for (int row = lane / across; row < rows; row += at_once * reads) {
    Quad<T> quads[reads];
#pragma unroll
    for (int j = 0; j < reads; j++)
      quads[j].read(values + ((row + at_once * j) * Width + lane % across * 4) * interleave);
#pragma unroll
    for (int j = 0; j < reads; j++)
#pragma unroll
      for (int k = 0; k < interleave; k++) {
        const int token = (row + at_once * j) * interleave + k;
        // Stale values after the last token may be NaN, and 0 * NaN is NaN.
        if (token >= visible_end) continue;
#pragma unroll
        for (int g = 0; g < Queries; g++)
#pragma unroll
          for (int i = 0; i < 4; i++) running.mixed[g][i] += weights[g][token] * quads[j].at(k, i);
      }
  }
}

// Grid: (splits, key-value heads * parts of their queries, sequences).
template <class T, int Width, int Queries>
__global__ void __launch_bounds__(kWarps* kWarp)
    decode(const T* queries, const T* keys, const T* values, Problem problem, T* out) {
  __shared__ float query[Queries][Width];
  __shared__ float weights[kWarps][Queries][kBlock];
  __shared__ float mixed[kWarps][Queries][Width], max_score[kWarps][Queries],
      total[kWarps][Queries];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int shared = problem.heads / problem.kv_heads;
  const int head = blockIdx.y / problem.parts, part = blockIdx.y % problem.parts;
  const int count = min(Queries, shared - part * Queries);
  const int64_t first = static_cast<int64_t>(blockIdx.z) * problem.heads + head * shared +
                        part * Queries;  // index of this thread block's first query
  for (int e = threadIdx.x; e < Queries * Width; e += kWarps * kWarp)
    query[e / Width][e % Width] =
        e < count * Width ? to_float(queries[first * Width + e]) * problem.scale : 0;
  Running<Queries> running;
  for (int g = 0; g < Queries; g++) {
    running.max_score[g] = -INFINITY, running.total[g] = 0;
    for (int i = 0; i < 4; i++) running.mixed[g][i] = 0;
  }
  __syncthreads();

  const int length = max(problem.lengths[blockIdx.z], 0);
  const int blocks = (length + kBlock - 1) / kBlock;
  assert(blocks <= problem.table_width);
  const int hidden = problem.window ? max(length - problem.window, 0) : 0;
  const int begin = hidden / kBlock;  // first cache block that is not masked
  const int share = max((blocks - begin + problem.splits - 1) / problem.splits, kWarps);
  const int end = min(blocks, begin + (static_cast<int>(blockIdx.x) + 1) * share);
  const int32_t* table = problem.table + static_cast<int64_t>(blockIdx.z) * problem.table_width;
  int b = begin + blockIdx.x * share + warp;
  int64_t next = b < end ? table[b] : 0;
  for (; b < end; b += kWarps) {
    assert(next >= 0 && next < problem.blocks);
    const int64_t offset = (next * problem.kv_heads + head) * kBlock * Width;
    if (b + kWarps < end) next = table[b + kWarps];
    float scores[Queries][4];
    score_block<T, Width, Queries>(keys + offset, query, scores);
    update_softmax<Queries>(scores, hidden - b * kBlock, length - b * kBlock, weights[warp],
                            running);
    __syncwarp();
    accumulate_values<T, Width, Queries>(values + offset, length - b * kBlock, weights[warp],
                                         running);
    __syncwarp();
  }

#pragma unroll
  for (int g = 0; g < Queries; g++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float sum = running.mixed[g][i];
      for (int across = Width / 4; across < kWarp; across *= 2)
        sum += __shfl_xor_sync(kAll, sum, across);
      if (lane < Width / 4) mixed[warp][g][lane * 4 + i] = sum;
    }
    if (lane == 0) max_score[warp][g] = running.max_score[g], total[warp][g] = running.total[g];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < count * Width; e += kWarps * kWarp) {
    const int g = e / Width, d = e % Width;
    float peak = -INFINITY, sum = 0, all = 0;
    for (int w = 0; w < kWarps; w++) peak = fmaxf(peak, max_score[w][g]);
    for (int w = 0; w < kWarps; w++) {
      if (max_score[w][g] == -INFINITY) continue;
      const float rescale = exp2f(max_score[w][g] - peak);
      sum += mixed[w][g][d] * rescale, all += total[w][g] * rescale;
    }
    if (problem.splits == 1) {
      put(out + (first + g) * Width + d, all == 0 ? 0 : sum / all);
      continue;
    }
    float* partial = problem.partial + ((first + g) * problem.splits + blockIdx.x) * (Width + 2);
    partial[d] = sum;
    if (d == 0) partial[Width] = peak, partial[Width + 1] = all;
  }
}

// Merges the splits. Grid: (heads, sequences); one thread per feature.
template <class T>
__global__ void merge_splits(const float* partial, int splits, int width, T* out) {
  const int64_t head = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int d = threadIdx.x;
  partial += head * splits * (width + 2);
  float peak = -INFINITY, sum = 0, all = 0;
  for (int s = 0; s < splits; s++) peak = fmaxf(peak, partial[s * (width + 2) + width]);
  for (int s = 0; s < splits; s++) {
    const float* of_split = partial + s * (width + 2);
    if (of_split[width] == -INFINITY) continue;  // split without tokens
    const float rescale = exp2f(of_split[width] - peak);
    sum += of_split[d] * rescale, all += of_split[width + 1] * rescale;
  }
  put(out + head * width + d, all == 0 ? 0 : sum / all);
}

template <class T, int Width, int Queries>
void launch(const T* queries, const T* keys, const T* values, int n, Problem problem, T* out,
            cudaStream_t stream) {
  problem.parts = (problem.heads / problem.kv_heads + Queries - 1) / Queries;
  const dim3 grid(problem.splits, problem.kv_heads * problem.parts, n);
  decode<T, Width, Queries>
      <<<grid, kWarps * kWarp, 0, stream>>>(queries, keys, values, problem, out);
  if (problem.splits == 1) return;
  const dim3 heads(problem.heads, n);
  merge_splits<T><<<heads, Width, 0, stream>>>(problem.partial, problem.splits, Width, out);
}

template <class T, int Width>
void launch_for(int shared, const T* queries, const T* keys, const T* values, int n,
                const Problem& problem, T* out, cudaStream_t stream) {
  auto* take = shared <= 1   ? launch<T, Width, 1>
               : shared <= 2 ? launch<T, Width, 2>
               : shared <= 4 ? launch<T, Width, 4>
                             : launch<T, Width, kMaxQueries>;
  take(queries, keys, values, n, problem, out, stream);
}

template <class T>
int launch_any(int width, const void* queries, const void* keys, const void* values, int n,
               const Problem& problem, void* out, void* stream) {
  auto* take = width == 32    ? launch_for<T, 32>
               : width == 64  ? launch_for<T, 64>
               : width == 128 ? launch_for<T, 128>
                              : nullptr;
  if (take == nullptr) return cudaErrorInvalidValue;
  take(problem.heads / problem.kv_heads, static_cast<const T*>(queries),
       static_cast<const T*>(keys), static_cast<const T*>(values), n, problem, static_cast<T*>(out),
       static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

}  // namespace

// Returns a cudaError_t. Each query attends to the last `window` tokens of its sequence (0: all).
// All tensors are contiguous; `keys` and `values` are aligned to 16 bytes. `partial` is a float
// buffer [n, heads, splits, width + 2], unused if splits is 1.
extern "C" int paged_decode_launch(int is_bf16, const void* queries, const void* keys,
                                   const void* values, const int32_t* table, const int32_t* lengths,
                                   int n, int heads, int width, int64_t blocks, int kv_heads,
                                   int table_width, int splits, int window, float scale,
                                   float* partial, void* out, void* stream) {
  const Problem problem = {table,  lengths, heads,  kv_heads,       table_width, splits,
                           window, 1,       blocks, scale * kLog2E, partial};
  return (is_bf16 ? launch_any<bf16> : launch_any<float>)(width, queries, keys, values, n, problem,
                                                          out, stream);
}
