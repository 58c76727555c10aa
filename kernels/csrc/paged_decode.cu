// Attention of one query per sequence over the paged cache of attention.h, on a GPU.
//
// A thread block takes one sequence, one key-value head with up to 8 of its queries, and one of
// `splits` shares of the sequence's tokens (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023), so
// that one long context keeps the whole GPU busy. Its warps take a cache block of 16 tokens in turn
// and keep a softmax each, online and in base 2; then warps and after them splits are joined. The
// launch depends on nothing but shapes: a CUDA graph may hold it.
#include <assert.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

namespace {

constexpr int kBlock = 16;  // tokens of a cache block
constexpr int kWarp = 32;
constexpr int kWarps = 4;  // of a thread block; more share an SM
constexpr int kMostQueries = 8;
constexpr int kReads = 8;  // of 16 bytes that a lane has under way
constexpr unsigned kAll = 0xffffffffu;
constexpr float kLog2E = 1.44269504f;

using bf16 = uint16_t;  // the upper half of a float

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(bf16 x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
__device__ inline void put(float* p, float x) { *p = x; }
__device__ inline void put(bf16* p, float x) {  // rounds to nearest, ties to even
  const unsigned bits = __float_as_uint(x);
  *p = x != x ? 0x7fc0 : static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// 16 bytes of the cache: four neighbours (tokens of keys, features of values) at one index of the
// summed dimension, at two in bf16.
template <class T>
struct Quad {
  static constexpr int together = sizeof(T) == 2 ? 2 : 1;
  uint4 words;
  __device__ void read(const T* p) { words = *reinterpret_cast<const uint4*>(p); }
  __device__ float at(int inner, int i) const {
    const unsigned word = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    if (together == 1) return __uint_as_float(word);
    return __uint_as_float(inner == 0 ? word << 16 : word & 0xffff0000u);
  }
};

struct Problem {
  const int32_t *table, *lengths;
  int heads, kv_heads, table_width, splits, window, parts;
  int64_t blocks;
  float scale;      // of a score, in base 2
  float* partial;   // [n, heads, splits, width + 2]: sums, their maximum, their total
};

// The running softmax of a warp's share: every lane holds it, and in `mixed` the sums of four
// features over the tokens that this lane reads.
template <int Queries>
struct Running {
  float most[Queries], total[Queries], mixed[Queries][4];
};

template <class T, int Width, int Queries>
__device__ inline void score_block(const T* keys, const float (*queries)[Width],
                                   float (&scores)[Queries][4]) {
  constexpr int together = Quad<T>::together, rows = Width / together;
  const int lane = threadIdx.x % kWarp;
  for (int g = 0; g < Queries; g++)
    for (int i = 0; i < 4; i++) scores[g][i] = 0;
  constexpr int reads = rows / 8 < kReads ? rows / 8 : kReads;
#pragma unroll 1
  for (int row = lane / 4; row < rows; row += 8 * reads) {
    Quad<T> quads[reads];
#pragma unroll
    for (int j = 0; j < reads; j++)
      quads[j].read(keys + ((row + 8 * j) * kBlock + lane % 4 * 4) * together);
#pragma unroll
    for (int j = 0; j < reads; j++)
#pragma unroll
      for (int g = 0; g < Queries; g++)
#pragma unroll
        for (int k = 0; k < together; k++) {
          const float query = queries[g][(row + 8 * j) * together + k];
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

// Takes a block's scores into the softmax; their weights go to `weights`. Tokens from `hidden` up to
// `seen` count, of which there is one at least.
template <int Queries>
__device__ inline void soften(const float (&scores)[Queries][4], int hidden, int seen,
                              float (*weights)[kBlock], Running<Queries>& running) {
  const int lane = threadIdx.x % kWarp, first = lane % 4 * 4;
#pragma unroll
  for (int g = 0; g < Queries; g++) {
    float now = running.most[g], added = 0;
    for (int i = 0; i < 4; i++)
      if (first + i >= hidden && first + i < seen) now = fmaxf(now, scores[g][i]);
    for (int across = 1; across < 4; across *= 2)
      now = fmaxf(now, __shfl_xor_sync(kAll, now, across));
    float weight[4];
    for (int i = 0; i < 4; i++) {
      const bool counts = first + i >= hidden && first + i < seen;
      weight[i] = counts ? exp2f(scores[g][i] - now) : 0;
      added += weight[i];
    }
    for (int across = 1; across < 4; across *= 2) added += __shfl_xor_sync(kAll, added, across);
    const float shrink = exp2f(running.most[g] - now);
    running.most[g] = now;
    running.total[g] = running.total[g] * shrink + added;
    for (int i = 0; i < 4; i++) running.mixed[g][i] *= shrink;
    if (lane < 4)
      for (int i = 0; i < 4; i++) weights[g][first + i] = weight[i];
  }
}

template <class T, int Width, int Queries>
__device__ inline void mix_block(const T* values, int seen, const float (*weights)[kBlock],
                                 Running<Queries>& running) {
  constexpr int together = Quad<T>::together, rows = kBlock / together;
  constexpr int across = Width / 4, at_once = kWarp / across;  // lanes of a row, rows of a read
  const int lane = threadIdx.x % kWarp;
  constexpr int reads = rows / at_once < kReads ? rows / at_once : kReads;
#pragma unroll 1
  for (int row = lane / across; row < rows; row += at_once * reads) {
    Quad<T> quads[reads];
#pragma unroll
    for (int j = 0; j < reads; j++)
      quads[j].read(values + ((row + at_once * j) * Width + lane % across * 4) * together);
#pragma unroll
    for (int j = 0; j < reads; j++)
#pragma unroll
      for (int k = 0; k < together; k++) {
        const int token = (row + at_once * j) * together + k;
        // What lies behind the last token may be no number, and 0 times that is none either.
        if (token >= seen) continue;
#pragma unroll
        for (int g = 0; g < Queries; g++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            running.mixed[g][i] += weights[g][token] * quads[j].at(k, i);
      }
  }
}

// Grid: splits, key-value heads * parts of their queries, sequences.
template <class T, int Width, int Queries>
__global__ void __launch_bounds__(kWarps* kWarp)
    decode(const T* queries, const T* keys, const T* values, Problem problem, T* out) {
  __shared__ float query[Queries][Width];
  __shared__ float weights[kWarps][Queries][kBlock];
  __shared__ float mixed[kWarps][Queries][Width], most[kWarps][Queries], total[kWarps][Queries];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int shared = problem.heads / problem.kv_heads;
  const int head = blockIdx.y / problem.parts, part = blockIdx.y % problem.parts;
  const int count = min(Queries, shared - part * Queries);
  const int64_t first = static_cast<int64_t>(blockIdx.z) * problem.heads + head * shared +
                        part * Queries;  // of this block's queries, among all
  for (int e = threadIdx.x; e < Queries * Width; e += kWarps * kWarp)
    query[e / Width][e % Width] =
        e < count * Width ? widened(queries[first * Width + e]) * problem.scale : 0;
  Running<Queries> running;
  for (int g = 0; g < Queries; g++) {
    running.most[g] = -INFINITY, running.total[g] = 0;
    for (int i = 0; i < 4; i++) running.mixed[g][i] = 0;
  }
  __syncthreads();

  const int length = max(problem.lengths[blockIdx.z], 0);
  const int blocks = (length + kBlock - 1) / kBlock;
  assert(blocks <= problem.table_width);
  const int hidden = problem.window ? max(length - problem.window, 0) : 0;
  const int begin = hidden / kBlock;  // the first block that is seen
  const int share = max((blocks - begin + problem.splits - 1) / problem.splits, kWarps);
  const int end = min(blocks, begin + (static_cast<int>(blockIdx.x) + 1) * share);
  const int32_t* table = problem.table + static_cast<int64_t>(blockIdx.z) * problem.table_width;
  int b = begin + blockIdx.x * share + warp;
  int64_t next = b < end ? table[b] : 0;
  for (; b < end; b += kWarps) {
    assert(next >= 0 && next < problem.blocks);
    const int64_t place = (next * problem.kv_heads + head) * kBlock * Width;
    if (b + kWarps < end) next = table[b + kWarps];
    float scores[Queries][4];
    score_block<T, Width, Queries>(keys + place, query, scores);
    soften<Queries>(scores, hidden - b * kBlock, length - b * kBlock, weights[warp], running);
    __syncwarp();
    mix_block<T, Width, Queries>(values + place, length - b * kBlock, weights[warp], running);
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
    if (lane == 0) most[warp][g] = running.most[g], total[warp][g] = running.total[g];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < count * Width; e += kWarps * kWarp) {
    const int g = e / Width, d = e % Width;
    float peak = -INFINITY, sum = 0, all = 0;
    for (int w = 0; w < kWarps; w++) peak = fmaxf(peak, most[w][g]);
    for (int w = 0; w < kWarps; w++) {
      if (most[w][g] == -INFINITY) continue;
      const float shrink = exp2f(most[w][g] - peak);
      sum += mixed[w][g][d] * shrink, all += total[w][g] * shrink;
    }
    if (problem.splits == 1) {
      put(out + (first + g) * Width + d, all == 0 ? 0 : sum / all);
      continue;
    }
    float* partial = problem.partial +
                     ((first + g) * problem.splits + blockIdx.x) * (Width + 2);
    partial[d] = sum;
    if (d == 0) partial[Width] = peak, partial[Width + 1] = all;
  }
}

// Joins the splits. Grid: heads, sequences; a thread is a feature.
template <class T>
__global__ void join(const float* partial, int splits, int width, T* out) {
  const int64_t head = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int d = threadIdx.x;
  partial += head * splits * (width + 2);
  float peak = -INFINITY, sum = 0, all = 0;
  for (int s = 0; s < splits; s++) peak = fmaxf(peak, partial[s * (width + 2) + width]);
  for (int s = 0; s < splits; s++) {
    const float* of_split = partial + s * (width + 2);
    if (of_split[width] == -INFINITY) continue;  // it had no tokens
    const float shrink = exp2f(of_split[width] - peak);
    sum += of_split[d] * shrink, all += of_split[width + 1] * shrink;
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
  join<T><<<heads, Width, 0, stream>>>(problem.partial, problem.splits, Width, out);
}

template <class T, int Width>
void launch_for(int shared, const T* queries, const T* keys, const T* values, int n,
                const Problem& problem, T* out, cudaStream_t stream) {
  auto* take = shared <= 1   ? launch<T, Width, 1>
               : shared <= 2 ? launch<T, Width, 2>
               : shared <= 4 ? launch<T, Width, 4>
                             : launch<T, Width, kMostQueries>;
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
       static_cast<const T*>(keys), static_cast<const T*>(values), n, problem,
       static_cast<T*>(out), static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

}  // namespace

// Answers a cudaError_t. Of each sequence the last `window` tokens are seen, if it is not 0. All is contiguous and `keys`, `values` lie on 16 bytes; `partial` has room
// for [n, heads, splits, width + 2] where splits > 1.
extern "C" int paged_decode_launch(int narrow, const void* queries, const void* keys,
                                   const void* values, const int32_t* table,
                                   const int32_t* lengths, int n, int heads, int width,
                                   int64_t blocks, int kv_heads, int table_width, int splits,
                                   int window, float scale, float* partial, void* out, void* stream) {
  const Problem problem = {table, lengths, heads,  kv_heads,       table_width, splits,
                           window, 1,      blocks, scale * kLog2E, partial};
  return (narrow ? launch_any<bf16> : launch_any<float>)(width, queries, keys, values, n, problem,
                                                         out, stream);
}
