// Sampling of a token from a row of logits, and its log-probabilities.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "simd.h"

namespace meshrl {

// Returns output number `position` of a key's stream, in (0, 1). SplitMix64 (Steele, Lea, Flood
// 2014), as in common/generation/counter_rng.py.
inline double uniform(uint64_t key, int64_t position) {
  uint64_t z = key + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return (static_cast<double>(z >> 32) + 0.5) * 0x1p-32;
}

struct Sampling {
  float temperature;  // 0: greedy, with the log-probability at temperature 1
  float top_p;        // 1: all
  float min_p;        // 0: all
  int64_t top_k;      // 0: all
};

// Changes of a row's logits before sampling; `Sampler::adjust` applies them in this order.
struct Adjustments {
  const int64_t* biased_ids;  // padded with -1
  const float* biases;
  int64_t bias_count;
  float repetition_penalty;  // of `tokens`; 1: none
  float presence_penalty;    // of `tokens` from `output_start` on; 0: none
  const int64_t* tokens;
  int64_t num_tokens, output_start;
  const int64_t* banned_ids;  // padded with -1
  int64_t banned_count;
};

struct SampledToken {
  int64_t token;  // 0 if logprob is NaN
  float logprob;  // in the sampled distribution; NaN if a logit is NaN or the largest is infinite
};

// Ids [first, end) without a token.
struct Absent {
  int64_t first, end;
};

constexpr int kRunLogits = 256;  // logits per partial sum; a draw scans the sums, then one run

class Sampler {
 public:
  // Ids in `absent` have probability 0.
  explicit Sampler(std::vector<Absent> absent) : absent_(std::move(absent)) {}

  // Samples from `logits` [vocab], padded to a multiple of kLanes; overwrites them.
  SampledToken sample(float* logits, int64_t vocab, const Sampling& sampling, double uniform) {
    const float max_logit = mask_absent(logits, vocab);
    if (!std::isfinite(max_logit)) return {0, NAN};
    if (sampling.temperature == 0) {
      const int64_t best = std::find(logits, logits + vocab, max_logit) - logits;
      return {best, static_cast<float>(-std::log(total(logits, vocab, max_logit, 1.0f)))};
    }
    double mass = compute_weights(logits, vocab, max_logit, 1.0f / sampling.temperature);
    if (sampling.top_k > 0 || sampling.top_p < 1 || sampling.min_p > 0)
      mass = filter_likely(logits, vocab, sampling);
    const int64_t token = draw(logits, vocab, uniform * mass);
    return {token, static_cast<float>(std::log(logits[token] / mass))};
  }

  // Changes `logits` [vocab], as common/generation/backends/logit_adjustments.py does.
  void adjust(float* logits, int64_t vocab, const Adjustments& a) {
    for (int64_t i = 0; i < a.bias_count; i++)
      if (a.biased_ids[i] >= 0) logits[a.biased_ids[i]] += a.biases[i];
    if (a.repetition_penalty != 1)
      for_each_seen(logits, vocab, a, 0, [&](float& x) {
        x = x > 0 ? x / a.repetition_penalty : x * a.repetition_penalty;
      });
    if (a.presence_penalty != 0)
      for_each_seen(logits, vocab, a, a.output_start, [&](float& x) { x -= a.presence_penalty; });
    for (int64_t i = 0; i < a.banned_count; i++)
      if (a.banned_ids[i] >= 0 && a.banned_ids[i] < vocab) logits[a.banned_ids[i]] = -INFINITY;
  }

  // Returns the log-probability of `token` at temperature 1, without filtering.
  float compute_raw_logprob(float* logits, int64_t vocab, int64_t token) const {
    const float max_logit = mask_absent(logits, vocab);
    return logits[token] - max_logit -
           static_cast<float>(std::log(total(logits, vocab, max_logit, 1.0f)));
  }

 private:
  // Calls `change` once with the logit of each token from position `start` on.
  template <class Change>
  void for_each_seen(float* logits, int64_t vocab, const Adjustments& a, int64_t start,
                     Change&& change) {
    seen_.assign(vocab, false);
    for (int64_t i = start; i < a.num_tokens; i++)
      if (!seen_[a.tokens[i]]) {
        seen_[a.tokens[i]] = true;
        change(logits[a.tokens[i]]);
      }
  }

  // Sets absent ids and padding to -inf. Returns the largest logit, or NaN if a logit is NaN.
  float mask_absent(float* logits, int64_t vocab) const {
    fill_absent(logits, -INFINITY);
    for (int64_t i = vocab; i % kLanes; i++) logits[i] = -INFINITY;
    Vec max_logit = load(logits);
    IntVec nan_lanes = max_logit != max_logit;
    for (int64_t i = kLanes; i < vocab; i += kLanes) {
      const Vec here = load(logits + i);
      max_logit = larger(max_logit, here);
      nan_lanes |= here != here;
    }
    for (int i = 0; i < kLanes; i++)
      if (nan_lanes[i]) return NAN;
    return largest(max_logit);
  }

  void fill_absent(float* row, float value) const {
    for (const Absent& ids : absent_) std::fill(row + ids.first, row + ids.end, value);
  }

  static double total(const float* logits, int64_t vocab, float max_logit, float scale) {
    double all = 0;
    for (int64_t run = 0; run < vocab; run += kRunLogits) {
      Vec part{};
      for (int64_t i = run; i < std::min(run + kRunLogits, vocab); i += kLanes)
        part += exponential((load(logits + i) - max_logit) * scale);
      all += sum(part);
    }
    return all;
  }

  // Replaces logits by weights exp((x - most) * scale) and saves the sum of each run. Returns the
  // total.
  double compute_weights(float* logits, int64_t vocab, float max_logit, float scale) {
    sums_.clear();
    double all = 0;
    for (int64_t run = 0; run < vocab; run += kRunLogits) {
      Vec part{};
      for (int64_t i = run; i < std::min(run + kRunLogits, vocab); i += kLanes) {
        const Vec e = exponential((load(logits + i) - max_logit) * scale);
        store(logits + i, e);
        part += e;
      }
      sums_.push_back(sum(part));
      all += sums_.back();
    }
    fill_absent(logits,
                0);  // `exponential` returns small positive numbers, which a draw could select
    return all;
  }

  // Sets weights outside top-k, then top-p, then min-p to 0 (the order of transformers' warpers).
  // Token ids order equal weights. Returns the remaining weight.
  double filter_likely(float* weights, int64_t vocab, const Sampling& sampling) {
    order_.resize(vocab);
    for (int64_t i = 0; i < vocab; i++) order_[i] = i;
    auto is_likelier = [&](int64_t a, int64_t b) {
      return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    };
    int64_t num_kept = vocab;
    if (sampling.top_k > 0 && sampling.top_k < vocab) {
      num_kept = sampling.top_k;
      std::nth_element(order_.begin(), order_.begin() + num_kept - 1, order_.end(), is_likelier);
    }
    std::sort(order_.begin(), order_.begin() + num_kept, is_likelier);
    double mass = 0;
    for (int64_t i = 0; i < num_kept; i++) mass += weights[order_[i]];
    if (sampling.top_p < 1) {
      double reached = 0;
      int64_t i = 0;
      while (i < num_kept && reached < sampling.top_p * mass) reached += weights[order_[i++]];
      num_kept = std::max<int64_t>(i, 1);
    }
    const float least = sampling.min_p * weights[order_[0]];
    while (num_kept > 1 && weights[order_[num_kept - 1]] < least) num_kept--;
    for (int64_t i = num_kept; i < vocab; i++) weights[order_[i]] = 0;
    sums_.assign((vocab + kRunLogits - 1) / kRunLogits, 0.0);
    mass = 0;
    for (int64_t i = 0; i < num_kept; i++) {
      sums_[order_[i] / kRunLogits] += weights[order_[i]];
      mass += weights[order_[i]];
    }
    return mass;
  }

  // Returns the first token whose cumulative weight exceeds `threshold`.
  int64_t draw(const float* weights, int64_t vocab, double threshold) const {
    size_t run = 0;
    while (run + 1 < sums_.size() && sums_[run] <= threshold) threshold -= sums_[run++];
    int64_t last = -1;
    for (int64_t i = run * kRunLogits; i < std::min<int64_t>((run + 1) * kRunLogits, vocab); i++) {
      if (weights[i] <= 0) continue;
      last = i;
      threshold -= weights[i];
      if (threshold < 0) return i;
    }
    if (last >= 0) return last;  // rounding moved `threshold` past the run's last weight
    for (int64_t i = vocab - 1; i > 0; i--)
      if (weights[i] > 0) return i;
    return 0;
  }

  const std::vector<Absent> absent_;
  std::vector<double> sums_;
  std::vector<int64_t> order_;
  std::vector<bool> seen_;  // [vocab]
};

}  // namespace meshrl
