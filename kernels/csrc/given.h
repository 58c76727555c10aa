// Tensors as somebody gives them: pieces of elements that follow each other, in float or in bf16,
// each where it happens to lie, so that nobody has to put them together first.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "simd.h"

namespace meshrl {

// Elements begin .. end of a tensor.
struct Piece {
  int64_t begin, end;
  const void* at;
  int64_t narrow;  // bf16
};

class Given {
 public:
  // All elements of a tensor, in their order; no piece is empty.
  Given(const Piece* pieces, int64_t count) : first_(pieces), last_(pieces + count), now_(pieces) {}

  // Elements begin .. begin + n. They lie there until the next call.
  const float* at(int64_t begin, int64_t n) {
    if (begin < now_->begin) now_ = first_;
    while (now_ + 1 < last_ && begin >= now_->end) now_++;
    if (!now_->narrow && begin + n <= now_->end)
      return static_cast<const float*>(now_->at) + (begin - now_->begin);
    row_.resize(n);
    for (int64_t done = 0; done < n; now_++) {
      const int64_t from = begin + done - now_->begin;
      const int64_t count = std::min(n - done, now_->end - begin - done);
      if (now_->narrow)
        widen(static_cast<const bf16*>(now_->at) + from, count, row_.data() + done);
      else
        memcpy(row_.data() + done, static_cast<const float*>(now_->at) + from, count * 4);
      done += count;
    }
    now_--;
    return row_.data();
  }

 private:
  static void widen(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      memcpy(to + i, &bits, 4);
    }
  }

  const Piece *first_, *last_, *now_;  // `now_`: where the last one lay that was asked for
  std::vector<float> row_;
};

}  // namespace meshrl
