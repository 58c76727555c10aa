// Products of a few activation rows with a matrix that is packed once per weight version.
//
// A packed matrix consists of panels of kLanes output features. A panel holds one vector of kLanes
// features for each inner index (in bf16: for each pair). A tile keeps rows x panels of sums in
// registers and reads each weight once for all its rows. Panels are the outer loop, so all tiles
// but the first read weights from the L2 cache. The first tile reads them from the L3 cache or
// memory; therefore each tile prefetches a share of the next panels.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "simd.h"

namespace meshrl {

constexpr int kMaxRows = 8;  // maximum of rows per tile

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Zeroed memory, on huge pages where available, because decoding streams over all weights. Pages
// take memory at their first write.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }
  // Replaces the contents by n zeros. Returns false if memory runs out.
  bool resize(int64_t n) {
    release();
    const size_t bytes = std::max<size_t>(n * sizeof(T), 1);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    madvise(memory, bytes, MADV_HUGEPAGE);
    data_ = static_cast<T*>(memory), bytes_ = bytes;
    return true;
  }
  void release() {
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = nullptr;
  }
  // Returns the pages to the host; they are zero at their next use.
  void discard() {
    if (data_ != nullptr) madvise(data_, bytes_, MADV_DONTNEED);
  }
  T* data() const { return data_; }
  size_t bytes() const { return data_ == nullptr ? 0 : bytes_; }

 private:
  T* data_ = nullptr;
  size_t bytes_ = 0;
};

// View of a packed matrix [outputs, inputs]; both sizes are rounded up to 16 and padded with zeros.
//
// Matrices should be in memory in the order of their use. Prefetching past the end of a matrix then
// fetches the start of the next.
template <class T>
class Matrix {
 public:
  int64_t outputs = 0, inputs = 0;

  void shape(int64_t rows, int64_t columns) {
    outputs = rounded_up(rows, 16), inputs = rounded_up(columns, 16);
  }
  int64_t elements() const { return outputs * inputs; }
  // Sets the storage: `elements()` zeros.
  void set_storage(T* zeros) { packed_ = zeros; }
  T* panel(int64_t index) const { return packed_ + index * inputs * kLanes; }

  // Packs row r from the pointer `values(source(r))`, which is valid until the next call. A
  // negative source gives a row of zeros.
  template <class Values, class Source>
  void pack_rows(Values&& values, int64_t rows, int64_t columns, Source source) {
    constexpr int interleave = kInterleave<T>;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t number = source(r);
      const float* from = number < 0 ? nullptr : values(number);
      T* row = panel(r / kLanes) + r % kLanes * interleave;
      for (int64_t c = 0; c < columns; c++) {
        const float value = from == nullptr ? 0.0f : from[c];
        T* element = row + c / interleave * interleave * kLanes + c % interleave;
        if constexpr (std::is_same_v<T, bf16>)
          *element = to_bf16(value);
        else
          *element = value;
      }
    }
  }
  // Packs rows of `weights` [.., columns].
  template <class Source>
  void pack(const float* weights, int64_t rows, int64_t columns, Source source) {
    pack_rows([=](int64_t r) { return weights + r * columns; }, rows, columns, source);
  }
  // Inverse of `pack`: returns the values as they were rounded.
  template <class Source>
  void unpack(float* weights, int64_t rows, int64_t columns, Source source) const {
    constexpr int interleave = kInterleave<T>;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t to = source(r);
      if (to < 0) continue;
      const T* row = panel(r / kLanes) + r % kLanes * interleave;
      for (int64_t c = 0; c < columns; c++)
        weights[to * columns + c] =
            to_float(row[c / interleave * interleave * kLanes + c % interleave]);
    }
  }
  void pack(const float* weights, int64_t rows, int64_t columns) {
    pack(weights, rows, columns, [](int64_t r) { return r; });
  }

 private:
  T* packed_ = nullptr;
};

// Returns the number of panels of a tile with `rows` rows. Sums, weights and activations must fit
// the register file: 32 vectors with AVX-512, 16 elsewhere.
constexpr int count_tile_panels(int rows) {
  const int panels = rows <= 4 ? 4 : 2;
  return kLanes < 16 ? std::max(panels / 2, 2) : panels;
}

// Computes sums[r][p] += x[r] . panel p over inner indices [from, to). Prefetches weights `ahead`
// elements ahead.
template <bool Prefetch, class T, int Rows, int Panels>
inline void accumulate(const Act<T>* x, const T* panels, int64_t inputs, int64_t from, int64_t to,
                       int64_t ahead, Vec (&sums)[Rows][Panels]) {
#pragma GCC unroll 4
  for (int64_t k = from; k < to; k += kInterleave<T>) {
    Factor<T> weights[Panels];
    for (int p = 0; p < Panels; p++) {
      const T* element = panels + (p * inputs + k) * kLanes;
      if constexpr (Prefetch) __builtin_prefetch(element + ahead, 0, 2);
      weights[p].read(element);
    }
    for (int r = 0; r < Rows; r++)
      for (int p = 0; p < Panels; p++)
        sums[r][p] = weights[p].add_product(x + r * inputs + k, sums[r][p]);
  }
}

// Calls body<Rows, Panels>() for sizes known at run time; `panels` is a power of 2.
template <int Rows, class Body>
inline void call_with_panels(int panels, Body&& body) {
  if constexpr (count_tile_panels(Rows) >= 4)
    if (panels == 4) return body.template operator()<Rows, 4>();
  if (panels == 2) return body.template operator()<Rows, 2>();
  body.template operator()<Rows, 1>();
}

template <class Body>
inline void call_with_tile(int rows, int panels, Body&& body) {
  switch (rows) {
    case 1: return call_with_panels<1>(panels, body);
    case 2: return call_with_panels<2>(panels, body);
    case 3: return call_with_panels<3>(panels, body);
    case 4: return call_with_panels<4>(panels, body);
    case 5: return call_with_panels<5>(panels, body);
    case 6: return call_with_panels<6>(panels, body);
    case 7: return call_with_panels<7>(panels, body);
    case 8: return call_with_panels<8>(panels, body);
  }
}

// Computes x [rows, inputs] w^T + start by tiles, and passes each tile to
// finish(first row, first panel, sums[Rows][Panels]). Rows of `start` [rows, outputs] are `stride`
// floats apart; stride 0 makes it a bias, null adds nothing.
template <class T, class Finish>
void product(const Act<T>* x, int64_t rows, const Matrix<T>& w, const float* start, int64_t stride,
             Finish&& finish) {
  const int64_t inputs = w.inputs, panels = w.outputs / kLanes;
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int max_panels = count_tile_panels(static_cast<int>((rows + tiles - 1) / tiles));
  // Inner indices for which a tile prefetches weights.
  const int64_t share = rounded_up((inputs + tiles - 1) / tiles, 2);
  int tile_panels = max_panels;
  for (int64_t panel = 0; panel < panels; panel += tile_panels) {
    while (tile_panels > panels - panel) tile_panels /= 2;
    const T* weights = w.panel(panel);
    int64_t row = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int tile_rows = static_cast<int>((rows - row + tiles - tile - 1) / (tiles - tile));
      call_with_tile(tile_rows, tile_panels, [&]<int Rows, int Panels>() {
        Vec sums[Rows][Panels];
        for (int r = 0; r < Rows; r++)
          for (int p = 0; p < Panels; p++)
            sums[r][p] =
                start == nullptr ? Vec{} : load(start + (row + r) * stride + (panel + p) * kLanes);
        const Act<T>* input = x + row * inputs;
        const int64_t from = std::min(tile * share, inputs), to = std::min(from + share, inputs);
        const int64_t ahead = Panels * inputs * kLanes;
        accumulate<false, T>(input, weights, inputs, 0, from, ahead, sums);
        accumulate<true, T>(input, weights, inputs, from, to, ahead, sums);
        accumulate<false, T>(input, weights, inputs, to, inputs, ahead, sums);
        finish(row, panel, sums);
      });
      row += tile_rows;
    }
  }
}

// Computes y [rows, outputs] = x [rows, inputs] w^T + bias; `add` adds the result to y instead.
template <class T>
void multiply(const Act<T>* x, int64_t rows, const Matrix<T>& w, const float* bias, bool add,
              float* y) {
  const int64_t outputs = w.outputs;
  product<T>(x, rows, w, bias, 0, [&]<int R, int P>(int64_t row, int64_t panel, Vec(&sums)[R][P]) {
    float* target = y + row * outputs + panel * kLanes;
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) {
        float* element = target + r * outputs + p * kLanes;
        store(element, add ? sums[r][p] + load(element) : sums[r][p]);
      }
  });
}

// Returns x * sigmoid(x).
inline Vec swish(Vec x) {
  const Vec e = exponential(x < 0 ? x : -x);  // of -|x|, which cannot overflow
  return x * (x < 0 ? e : splat(1.0f)) / (1.0f + e);
}

// Computes y [rows, outputs / 2] = silu(gate) * up; the panels of w alternate between gate and up.
// The products start from `start` [rows, outputs] if it is not null.
template <class T>
void multiply_swiglu(const Act<T>* x, int64_t rows, const Matrix<T>& w, Act<T>* y,
                     const float* start = nullptr) {
  const int64_t width = w.outputs / 2;
  product<T>(x, rows, w, start, w.outputs,
             [&]<int R, int P>(int64_t row, int64_t panel, Vec(&sums)[R][P]) {
               if constexpr (P % 2 == 0)
                 for (int r = 0; r < R; r++)
                   for (int p = 0; p < P; p += 2)
                     store_act(y + (row + r) * width + (panel + p) / 2 * kLanes,
                               swish(sums[r][p]) * sums[r][p + 1]);
             });
}

}  // namespace meshrl
