// A mixture of experts: where a router sends rows, and the rows of each expert side by side.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gemm.h"

namespace meshrl {

// The feed-forward part of a layer: a router and its experts' matrices, and those of an expert that
// every row goes to, if there is one. Without experts the layer is dense.
template <class T>
struct Mixture {
  Matrix<T> router;
  std::vector<Matrix<T>> gate_up, down;
  Matrix<T> shared_gate, shared_gate_up, shared_down;

  bool empty() const { return down.empty(); }
};

// Where the rows of a step go in one layer.
class Routes {
 public:
  Routes(int64_t experts, int64_t each, bool normalise)
      : experts_(experts), each_(each), normalise_(normalise) {}

  // Each row goes to the `each` likeliest experts by the softmax of its logits [rows, stride], the
  // first of equal ones, with their probabilities as shares (made to sum to 1, if so asked).
  void choose(const float* logits, int64_t rows, int64_t stride) {
    chosen_.resize(rows * each_), weights_.resize(rows * each_);
    begins_.assign(experts_ + 1, 0);
    for (int64_t r = 0; r < rows; r++) {
      choose_row(logits + r * stride, &chosen_[r * each_], &weights_[r * each_]);
      for (int64_t i = 0; i < each_; i++) begins_[chosen_[r * each_ + i] + 1]++;
    }
    for (int64_t e = 0; e < experts_; e++) begins_[e + 1] += begins_[e];
    rows_.resize(rows * each_), shares_.resize(rows * each_);
    places_.assign(begins_.begin(), begins_.end() - 1);
    for (int64_t i = 0; i < rows * each_; i++) {
      const int64_t place = places_[chosen_[i]]++;
      rows_[place] = i / each_, shares_[place] = weights_[i];
    }
  }

  // Experts of a row, [each].
  const int32_t* experts(int64_t row) const { return &chosen_[row * each_]; }
  // The rows of an expert, ascending, and its shares in them.
  int64_t count(int64_t expert) const { return begins_[expert + 1] - begins_[expert]; }
  const int64_t* rows(int64_t expert) const { return rows_.data() + begins_[expert]; }
  const float* shares(int64_t expert) const { return shares_.data() + begins_[expert]; }

 private:
  void choose_row(const float* logits, int32_t* chosen, float* weights) {
    const float most = *std::max_element(logits, logits + experts_);
    probabilities_.resize(experts_);
    float total = 0;
    for (int64_t e = 0; e < experts_; e++)
      total += probabilities_[e] = std::exp(logits[e] - most);
    float kept = 0;
    for (int64_t i = 0; i < each_; i++) {
      int32_t best = -1;  // the first that is free, then larger ones: found among no numbers too
      for (int32_t e = 0; e < experts_; e++)
        if (probabilities_[e] != kTaken &&
            (best < 0 || probabilities_[e] > probabilities_[best]))
          best = e;
      chosen[i] = best;
      weights[i] = probabilities_[best];
      kept += weights[i];
      probabilities_[best] = kTaken;
    }
    for (int64_t i = 0; i < each_; i++) weights[i] /= normalise_ ? kept : total;
  }

  static constexpr float kTaken = -1;

  const int64_t experts_, each_;
  const bool normalise_;
  std::vector<int32_t> chosen_;                 // [rows, each]
  std::vector<float> weights_;                  // [rows, each]
  std::vector<int64_t> begins_, rows_, places_;  // by expert
  std::vector<float> shares_, probabilities_;
};

}  // namespace meshrl
