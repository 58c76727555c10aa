// Reader of a tensor that is stored in several buffers, each in float or bf16. It saves the caller
// from concatenating the buffers first.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "simd.h"

namespace meshrl {

// Elements [begin, end) of a tensor.
struct TensorPiece {
  int64_t begin, end;
  const void* data;
  int64_t is_bf16;  // 1: bf16, 0: float
};

class TensorReader {
 public:
  // `pieces` [count] cover all elements of the tensor in order; no piece is empty.
  TensorReader(const TensorPiece* pieces, int64_t count)
      : first_(pieces), last_(pieces + count), current_(pieces) {}

  // Returns elements [begin, begin + n) as float. The pointer is valid until the next call.
  const float* read(int64_t begin, int64_t n) {
    if (begin < current_->begin) current_ = first_;
    while (current_ + 1 < last_ && begin >= current_->end) current_++;
    if (!current_->is_bf16 && begin + n <= current_->end)
      return static_cast<const float*>(current_->data) + (begin - current_->begin);
    converted_.resize(n);
    for (int64_t done = 0; done < n; current_++) {
      const int64_t from = begin + done - current_->begin;
      const int64_t count = std::min(n - done, current_->end - begin - done);
      if (current_->is_bf16)
        widen(static_cast<const bf16*>(current_->data) + from, count, converted_.data() + done);
      else
        memcpy(converted_.data() + done, static_cast<const float*>(current_->data) + from,
               count * 4);
      done += count;
    }
    current_--;
    return converted_.data();
  }

 private:
  static void widen(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      memcpy(to + i, &bits, 4);
    }
  }

  const TensorPiece *first_, *last_, *current_;  // current_: piece of the last element read
  std::vector<float> converted_;
};

}  // namespace meshrl
