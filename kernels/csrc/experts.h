// Mixture of experts: routing of rows, and the rows of each expert.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gemm.h"

namespace meshrl {

// Feed-forward part of a sparse layer: the router, the experts' matrices and an optional shared
// expert. It is empty in a dense layer.
template <class T>
struct Mixture {
  Matrix<T> router;
  std::vector<Matrix<T>> gate_up, down;
  Matrix<T> shared_gate, shared_gate_up, shared_down;

  bool empty() const { return down.empty(); }
};

// Routing of a step's rows in one layer.
class Routes {
 public:
  Routes(int64_t experts, int64_t experts_per_row, bool normalise)
      : experts_(experts), experts_per_row_(experts_per_row), normalise_(normalise) {}

  // Routes each row to its `experts_per_row` most probable experts, by the softmax of its logits
  // [rows, stride]. Ties go to the lower id. Shares are the probabilities; `normalise` divides them
  // by their sum.
  void choose(const float* logits, int64_t rows, int64_t stride) {
    chosen_.resize(rows * experts_per_row_), weights_.resize(rows * experts_per_row_);
    offsets_.assign(experts_ + 1, 0);
    for (int64_t r = 0; r < rows; r++) {
      choose_row(logits + r * stride, &chosen_[r * experts_per_row_],
                 &weights_[r * experts_per_row_]);
      for (int64_t i = 0; i < experts_per_row_; i++)
        offsets_[chosen_[r * experts_per_row_ + i] + 1]++;
    }
    for (int64_t e = 0; e < experts_; e++) offsets_[e + 1] += offsets_[e];
    rows_.resize(rows * experts_per_row_), shares_.resize(rows * experts_per_row_);
    cursors_.assign(offsets_.begin(), offsets_.end() - 1);
    for (int64_t i = 0; i < rows * experts_per_row_; i++) {
      const int64_t index = cursors_[chosen_[i]]++;
      rows_[index] = i / experts_per_row_, shares_[index] = weights_[i];
    }
  }

  // Returns the experts of a row, [experts_per_row].
  const int32_t* experts(int64_t row) const { return &chosen_[row * experts_per_row_]; }
  // Rows of an expert, ascending, and its share in each.
  int64_t count(int64_t expert) const { return offsets_[expert + 1] - offsets_[expert]; }
  const int64_t* rows(int64_t expert) const { return rows_.data() + offsets_[expert]; }
  const float* shares(int64_t expert) const { return shares_.data() + offsets_[expert]; }

 private:
  void choose_row(const float* logits, int32_t* chosen, float* weights) {
    const float max_logit = *std::max_element(logits, logits + experts_);
    probabilities_.resize(experts_);
    float total = 0;
    for (int64_t e = 0; e < experts_; e++)
      total += probabilities_[e] = std::exp(logits[e] - max_logit);
    float chosen_total = 0;
    for (int64_t i = 0; i < experts_per_row_; i++) {
      int32_t best = -1;  // starts at the first free expert, so that NaN logits also yield an id
      for (int32_t e = 0; e < experts_; e++)
        if (probabilities_[e] != kChosen && (best < 0 || probabilities_[e] > probabilities_[best]))
          best = e;
      chosen[i] = best;
      weights[i] = probabilities_[best];
      chosen_total += weights[i];
      probabilities_[best] = kChosen;
    }
    for (int64_t i = 0; i < experts_per_row_; i++) weights[i] /= normalise_ ? chosen_total : total;
  }

  static constexpr float kChosen = -1;

  const int64_t experts_, experts_per_row_;
  const bool normalise_;
  std::vector<int32_t> chosen_;                    // [rows, experts_per_row]
  std::vector<float> weights_;                     // [rows, experts_per_row]
  std::vector<int64_t> offsets_, rows_, cursors_;  // grouped by expert
  std::vector<float> shares_, probabilities_;
};

}  // namespace meshrl
