// Products of a few activation rows with a matrix that is packed once per weight version.
//
// A packed matrix is cut into panels of kLanes output features; a panel holds, for each inner index
// (for each pair of them in bf16), one vector of that many features. A tile keeps rows x panels of
// sums in registers and reads each weight once for all its rows; panels are the outer loop, so that
// the second cache serves all tiles of rows but the first. Weights come from the third cache or from
// memory: each tile prefetches a share of the next panels while it works on its own.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "simd.h"

namespace meshrl {

constexpr int kMostRows = 8;  // of a tile

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Zeroed, on huge pages where the system has them: decoding streams over all of it. Pages cost
// memory when they are first written.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }
  // Makes room for n elements, all zero; what was there is gone. False: no memory.
  bool resize(int64_t n) {
    release();
    const size_t bytes = std::max<size_t>(n * sizeof(T), 1);
    void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) return false;
    madvise(place, bytes, MADV_HUGEPAGE);
    at_ = static_cast<T*>(place), bytes_ = bytes;
    return true;
  }
  void release() {
    if (at_ != nullptr) munmap(at_, bytes_);
    at_ = nullptr;
  }
  T* at() const { return at_; }

 private:
  T* at_ = nullptr;
  size_t bytes_ = 0;
};

// [outputs, inputs] in panels, in memory of somebody else. Both are rounded up to 16, with zeros.
//
// Matrices that are used one after the other should lie one after the other: what is prefetched
// behind the end of one is the beginning of the next.
template <class T>
class Matrix {
 public:
  int64_t outputs = 0, inputs = 0;

  void shape(int64_t rows, int64_t columns) {
    outputs = rounded_up(rows, 16), inputs = rounded_up(columns, 16);
  }
  int64_t elements() const { return outputs * inputs; }
  // Where it lies: `elements()` zeros.
  void place(T* at) { packed_ = at; }
  T* panel(int64_t index) const { return packed_ + index * inputs * kLanes; }

  // Row r of the matrix is what `values(source(r))` points to, until it is asked again; a negative
  // source is zeros.
  template <class Values, class Source>
  void pack_rows(Values&& values, int64_t rows, int64_t columns, Source source) {
    constexpr int together = kTogether<T>;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t number = source(r);
      const float* from = number < 0 ? nullptr : values(number);
      T* row = panel(r / kLanes) + r % kLanes * together;
      for (int64_t c = 0; c < columns; c++) {
        const float value = from == nullptr ? 0.0f : from[c];
        T* place = row + c / together * together * kLanes + c % together;
        if constexpr (std::is_same_v<T, bf16>)
          *place = to_bf16(value);
        else
          *place = value;
      }
    }
  }
  // The same of `weights` [.., columns].
  template <class Source>
  void pack(const float* weights, int64_t rows, int64_t columns, Source source) {
    pack_rows([=](int64_t r) { return weights + r * columns; }, rows, columns, source);
  }
  // The inverse: the values of what was packed, as they were rounded.
  template <class Source>
  void unpack(float* weights, int64_t rows, int64_t columns, Source source) const {
    constexpr int together = kTogether<T>;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t to = source(r);
      if (to < 0) continue;
      const T* row = panel(r / kLanes) + r % kLanes * together;
      for (int64_t c = 0; c < columns; c++)
        weights[to * columns + c] = to_float(row[c / together * together * kLanes + c % together]);
    }
  }
  void pack(const float* weights, int64_t rows, int64_t columns) {
    pack(weights, rows, columns, [](int64_t r) { return r; });
  }

 private:
  T* packed_ = nullptr;
};

// Panels that a tile of `rows` holds beside each other: sums, weights and activations must fit the
// register file, of 32 vectors with AVX-512 and 16 elsewhere.
constexpr int panels_beside(int rows) {
  const int wide = rows <= 4 ? 4 : 2;
  return kLanes < 16 ? std::max(wide / 2, 2) : wide;
}

// sums[r][p] += x[r] . panel p, over inner indices [from, to); `ahead` of them is prefetched.
template <bool Prefetch, class T, int Rows, int Panels>
inline void accumulate(const Act<T>* x, const T* panels, int64_t inputs, int64_t from, int64_t to,
                       int64_t ahead, Vec (&sums)[Rows][Panels]) {
#pragma GCC unroll 4
  for (int64_t k = from; k < to; k += kTogether<T>) {
    Factor<T> weights[Panels];
    for (int p = 0; p < Panels; p++) {
      const T* place = panels + (p * inputs + k) * kLanes;
      if constexpr (Prefetch) __builtin_prefetch(place + ahead, 0, 2);
      weights[p].read(place);
    }
    for (int r = 0; r < Rows; r++)
      for (int p = 0; p < Panels; p++)
        sums[r][p] = weights[p].add_product(x + r * inputs + k, sums[r][p]);
  }
}

// Runs body<Rows, Panels>() for sizes known at run time; panels is a power of 2.
template <int Rows, class Body>
inline void with_panels(int panels, Body&& body) {
  if constexpr (panels_beside(Rows) >= 4)
    if (panels == 4) return body.template operator()<Rows, 4>();
  if (panels == 2) return body.template operator()<Rows, 2>();
  body.template operator()<Rows, 1>();
}

template <class Body>
inline void with_tile(int rows, int panels, Body&& body) {
  switch (rows) {
    case 1: return with_panels<1>(panels, body);
    case 2: return with_panels<2>(panels, body);
    case 3: return with_panels<3>(panels, body);
    case 4: return with_panels<4>(panels, body);
    case 5: return with_panels<5>(panels, body);
    case 6: return with_panels<6>(panels, body);
    case 7: return with_panels<7>(panels, body);
    case 8: return with_panels<8>(panels, body);
  }
}

// x [rows, inputs] w^T + start, tile by tile: finish(first row, first panel, sums[Rows][Panels]).
// `start` [rows, outputs] has its rows `stride` apart: 0, it is one row, a bias; or there is none.
template <class T, class Finish>
void product(const Act<T>* x, int64_t rows, const Matrix<T>& w, const float* start, int64_t stride,
             Finish&& finish) {
  const int64_t inputs = w.inputs, panels = w.outputs / kLanes;
  const int64_t tiles = (rows + kMostRows - 1) / kMostRows;
  const int widest = panels_beside(static_cast<int>((rows + tiles - 1) / tiles));
  const int64_t share = rounded_up((inputs + tiles - 1) / tiles, 2);  // that a tile prefetches
  int wide = widest;
  for (int64_t panel = 0; panel < panels; panel += wide) {
    while (wide > panels - panel) wide /= 2;
    const T* weights = w.panel(panel);
    int64_t row = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int tall = static_cast<int>((rows - row + tiles - tile - 1) / (tiles - tile));
      with_tile(tall, wide, [&]<int Rows, int Panels>() {
        Vec sums[Rows][Panels];
        for (int r = 0; r < Rows; r++)
          for (int p = 0; p < Panels; p++)
            sums[r][p] = start == nullptr
                             ? Vec{}
                             : load(start + (row + r) * stride + (panel + p) * kLanes);
        const Act<T>* input = x + row * inputs;
        const int64_t from = std::min(tile * share, inputs), to = std::min(from + share, inputs);
        const int64_t ahead = Panels * inputs * kLanes;
        accumulate<false, T>(input, weights, inputs, 0, from, ahead, sums);
        accumulate<true, T>(input, weights, inputs, from, to, ahead, sums);
        accumulate<false, T>(input, weights, inputs, to, inputs, ahead, sums);
        finish(row, panel, sums);
      });
      row += tall;
    }
  }
}

// y [rows, outputs] = x [rows, inputs] w^T + bias, or added to what y holds.
template <class T>
void multiply(const Act<T>* x, int64_t rows, const Matrix<T>& w, const float* bias, bool add,
              float* y) {
  const int64_t outputs = w.outputs;
  product<T>(x, rows, w, bias, 0, [&]<int R, int P>(int64_t row, int64_t panel,
                                                    Vec (&sums)[R][P]) {
    float* target = y + row * outputs + panel * kLanes;
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) {
        float* place = target + r * outputs + p * kLanes;
        store(place, add ? sums[r][p] + load(place) : sums[r][p]);
      }
  });
}

// x sigmoid(x)
inline Vec swish(Vec x) {
  const Vec e = exponential(x < 0 ? x : -x);  // of -|x|, so that nothing overflows
  return x * (x < 0 ? e : splat(1.0f)) / (1.0f + e);
}

// y [rows, outputs / 2] = silu(gate) * up, where w's panels alternate: gate, up, gate, up. The
// products are added to `start` [rows, outputs], if there is one.
template <class T>
void multiply_swiglu(const Act<T>* x, int64_t rows, const Matrix<T>& w, Act<T>* y,
                     const float* start = nullptr) {
  const int64_t width = w.outputs / 2;
  product<T>(x, rows, w, start, w.outputs,
             [&]<int R, int P>(int64_t row, int64_t panel, Vec (&sums)[R][P]) {
               if constexpr (P % 2 == 0)
                 for (int r = 0; r < R; r++)
                   for (int p = 0; p < P; p += 2)
                     store_act(y + (row + r) * width + (panel + p) / 2 * kLanes,
                               swish(sums[r][p]) * sums[r][p + 1]);
             });
}

}  // namespace meshrl
