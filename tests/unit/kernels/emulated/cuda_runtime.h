// Runs the kernels of kernels/csrc/*.cu on a processor, so that their arithmetic is tested without a
// GPU: thread blocks one after the other, a thread block's threads as coroutines.
//
// The test rewrites `kernel<<<grid, block, shared, stream>>>(arguments)` to emulated::run. Threads
// change at barriers and warp exchanges only; a barrier that not all reach ends the program.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // one thread block at a time
#define __launch_bounds__(threads)

using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
using cudaStream_t = void*;
constexpr int cudaErrorInvalidValue = 1;
inline int cudaGetLastError() { return 0; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}

namespace emulated {

constexpr int kWarp = 32, kStack = 1 << 16;

struct Barrier {
  int arrived = 0, passed = 0;
};
struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  bool done = true;
  const Barrier* waits = nullptr;
  int until = 0;         // the barrier has been passed so often
  float given[2] = {};   // to an exchange, and to the one after it
  int exchanges = 0;
};

inline std::vector<Thread> threads;
inline std::vector<Barrier> warps;
inline Barrier all;
inline ucontext_t scheduler;
inline int current;
inline const std::function<void()>* body;

inline void meet(Barrier& barrier, int size) {
  Thread& self = threads[current];
  self.waits = &barrier, self.until = barrier.passed + 1;
  if (++barrier.arrived == size) barrier.arrived = 0, barrier.passed++;
  swapcontext(&self.context, &scheduler);
}
inline void start() {
  (*body)();
  threads[current].done = true;
}

inline void run_block() {
  const int count = blockDim.x;
  if (static_cast<int>(threads.size()) < count) threads.resize(count);
  warps.assign(count / kWarp + 1, {});
  all = {};
  for (int t = 0; t < count; t++) {
    Thread& thread = threads[t];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, start, 0);
    thread.done = false, thread.waits = nullptr;
  }
  for (int left = count; left > 0;) {
    bool moved = false;
    for (int t = 0; t < count; t++) {
      Thread& thread = threads[t];
      if (thread.done || (thread.waits && thread.waits->passed < thread.until)) continue;
      current = t, threadIdx = dim3(t, 0, 0), moved = true;
      swapcontext(&scheduler, &thread.context);
      left -= thread.done;
    }
    if (!moved) fprintf(stderr, "a barrier that not all threads reach\n"), abort();
  }
}

inline void run(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  gridDim = grid, blockDim = block, body = &kernel;
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        run_block();
      }
}

}  // namespace emulated

inline void __syncthreads() { emulated::meet(emulated::all, blockDim.x); }
inline void __syncwarp() {
  emulated::meet(emulated::warps[emulated::current / emulated::kWarp], emulated::kWarp);
}
inline float __shfl_xor_sync(unsigned, float x, int across) {
  using namespace emulated;
  const int slot = threads[current].exchanges++ % 2, partner = current ^ across;
  threads[current].given[slot] = x;
  __syncwarp();
  return threads[partner].given[slot];
}
