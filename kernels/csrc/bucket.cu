// GPU kernels that copy rows into a bucket's buffers and back, and tokens into the paged cache.
//
// Kernels read indices on the device, and grids depend on shapes alone. So a CUDA graph can capture
// them.
#include <assert.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kBlock = 16;  // tokens of a cache block
constexpr int kThreads = 256;
constexpr int64_t kMaxChunks = 64;  // maximum of thread blocks per row

// Grid: (lanes, chunks of a row). A row has `words` words.
template <class Word>
__global__ void pack(const Word* rows, const int64_t* index, int64_t n, int64_t words,
                     Word* packed) {
  const int64_t row = index[blockIdx.x];
  assert(row < n);
  Word* to = packed + blockIdx.x * words;
  for (int64_t i = blockIdx.y * kThreads + threadIdx.x; i < words; i += gridDim.y * kThreads)
    to[i] = row < 0 ? Word{} : rows[row * words + i];
}

template <class Word>
__global__ void scatter(const Word* packed, const int64_t* index, int64_t n, int64_t words,
                        Word* rows) {
  const int64_t row = index[blockIdx.x];
  assert(row < n);
  if (row < 0) return;
  const Word* from = packed + blockIdx.x * words;
  for (int64_t i = blockIdx.y * kThreads + threadIdx.x; i < words; i += gridDim.y * kThreads)
    rows[row * words + i] = from[i];
}

template <class Word>
void move_rows(bool into_bucket, const void* from, const int64_t* index, int64_t b, int64_t n,
               int64_t row_bytes, void* to, cudaStream_t stream) {
  const int64_t words = row_bytes / sizeof(Word), chunks = (words + kThreads - 1) / kThreads;
  const dim3 grid(b, chunks < kMaxChunks ? chunks : kMaxChunks);
  auto* source = static_cast<const Word*>(from);
  auto* target = static_cast<Word*>(to);
  if (into_bucket)
    pack<Word><<<grid, kThreads, 0, stream>>>(source, index, n, words, target);
  else
    scatter<Word><<<grid, kThreads, 0, stream>>>(source, index, n, words, target);
}

// Grid: (tokens, key-value heads); one thread per feature. kInterleave as in simd.h.
template <class T, int kInterleave>
__global__ void write(T* keys, T* values, const T* new_keys, const T* new_values,
                      const int32_t* table, const int64_t* positions, int64_t blocks,
                      int table_width) {
  const int64_t position = positions[blockIdx.x];
  if (position < 0) return;
  assert(position < static_cast<int64_t>(table_width) * kBlock);
  const int64_t block = table[static_cast<int64_t>(blockIdx.x) * table_width + position / kBlock];
  assert(block >= 0 && block < blocks);
  const int at = position % kBlock, d = threadIdx.x, width = blockDim.x;
  const int64_t from = (static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * width + d;
  const int64_t head = (block * gridDim.y + blockIdx.y) * kBlock * width;
  keys[head + (d / kInterleave * kBlock + at) * kInterleave + d % kInterleave] = new_keys[from];
  values[head + (at / kInterleave * width + d) * kInterleave + at % kInterleave] = new_values[from];
}

}  // namespace

// Each function returns a cudaError_t. All tensors are contiguous.
extern "C" {

// Packs [n, row_bytes] into [b, row_bytes] if into_bucket is 1, else scatters [b, ..] into [n, ..].
int bucket_launch(int into_bucket, const void* from, const int64_t* index, int64_t b, int64_t n,
                  int64_t row_bytes, void* to, void* stream) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                        static_cast<uintptr_t>(row_bytes);
  auto* move = all % 16 == 0  ? move_rows<uint4>
               : all % 4 == 0 ? move_rows<uint32_t>
                              : move_rows<unsigned char>;
  move(into_bucket, from, index, b, n, row_bytes, to, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int paged_write_launch(int is_bf16, void* keys, void* values, const void* new_keys,
                       const void* new_values, const int32_t* table, const int64_t* positions,
                       int64_t n, int width, int64_t blocks, int kv_heads, int table_width,
                       void* stream) {
  const dim3 grid(n, kv_heads);
  const auto on = static_cast<cudaStream_t>(stream);
  if (is_bf16)
    write<uint16_t, 2><<<grid, width, 0, on>>>(
        static_cast<uint16_t*>(keys), static_cast<uint16_t*>(values),
        static_cast<const uint16_t*>(new_keys), static_cast<const uint16_t*>(new_values), table,
        positions, blocks, table_width);
  else
    write<uint32_t, 1><<<grid, width, 0, on>>>(
        static_cast<uint32_t*>(keys), static_cast<uint32_t*>(values),
        static_cast<const uint32_t*>(new_keys), static_cast<const uint32_t*>(new_values), table,
        positions, blocks, table_width);
  return cudaGetLastError();
}

}  // extern "C"
