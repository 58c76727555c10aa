// One token from a row of logits, and its log-probabilities.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "simd.h"

namespace meshrl {

// SplitMix64 (Steele, Lea, Flood 2014), as in common/generation/counter_rng.py: the position-th
// output of a key's stream, as a number in (0, 1).
inline double uniform(uint64_t key, int64_t position) {
  uint64_t z = key + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return (static_cast<double>(z >> 32) + 0.5) * 0x1p-32;
}

struct Sampling {
  float temperature;  // 0: the likeliest token, with its log-probability at temperature 1
  float top_p;        // 1: all
  float min_p;        // 0: all
  int64_t top_k;      // 0: all
};

struct Sampled {
  int64_t token;  // 0 if a logit is no finite number
  float logprob;  // of the distribution that was sampled from; NaN if a logit is no finite number
};

// Ids [first, end) that the tokenizer lacks.
struct Absent {
  int64_t first, end;
};

constexpr int kRun = 256;  // logits whose sum is kept, so that a draw need not scan them all

class Sampler {
 public:
  // Ids in `absent` are never sampled and have no probability.
  explicit Sampler(std::vector<Absent> absent) : absent_(std::move(absent)) {}

  // `logits` [vocab], with room up to a multiple of kLanes behind it; its contents are lost.
  Sampled sample(float* logits, int64_t vocab, const Sampling& how, double uniform) {
    const float most = cover(logits, vocab);
    if (!std::isfinite(most)) return {0, NAN};
    if (how.temperature == 0) {
      const int64_t best = std::find(logits, logits + vocab, most) - logits;
      return {best, static_cast<float>(-std::log(total(logits, vocab, most, 1.0f)))};
    }
    double mass = weigh(logits, vocab, most, 1.0f / how.temperature);
    if (how.top_k > 0 || how.top_p < 1 || how.min_p > 0) mass = keep_likely(logits, vocab, how);
    const int64_t token = draw(logits, vocab, uniform * mass);
    return {token, static_cast<float>(std::log(logits[token] / mass))};
  }

  // Log-probability of `token` at temperature 1, nothing left out.
  float unmodified(float* logits, int64_t vocab, int64_t token) const {
    const float most = cover(logits, vocab);
    return logits[token] - most - static_cast<float>(std::log(total(logits, vocab, most, 1.0f)));
  }

 private:
  // The largest logit, or NaN if any is; absent ids and what lies behind the vocabulary are hidden.
  float cover(float* logits, int64_t vocab) const {
    fill_absent(logits, -INFINITY);
    for (int64_t i = vocab; i % kLanes; i++) logits[i] = -INFINITY;
    Vec most = load(logits);
    IntVec broken = most != most;
    for (int64_t i = kLanes; i < vocab; i += kLanes) {
      const Vec here = load(logits + i);
      most = larger(most, here);
      broken |= here != here;
    }
    for (int i = 0; i < kLanes; i++)
      if (broken[i]) return NAN;
    return largest(most);
  }

  void fill_absent(float* row, float value) const {
    for (const Absent& ids : absent_) std::fill(row + ids.first, row + ids.end, value);
  }

  static double total(const float* logits, int64_t vocab, float most, float scale) {
    double all = 0;
    for (int64_t run = 0; run < vocab; run += kRun) {
      Vec part{};
      for (int64_t i = run; i < std::min(run + kRun, vocab); i += kLanes)
        part += exponential((load(logits + i) - most) * scale);
      all += sum(part);
    }
    return all;
  }

  // Logits become weights exp((x - most) * scale); the sum of each run is kept.
  double weigh(float* logits, int64_t vocab, float most, float scale) {
    sums_.clear();
    double all = 0;
    for (int64_t run = 0; run < vocab; run += kRun) {
      Vec part{};
      for (int64_t i = run; i < std::min(run + kRun, vocab); i += kLanes) {
        const Vec e = exponential((load(logits + i) - most) * scale);
        store(logits + i, e);
        part += e;
      }
      sums_.push_back(sum(part));
      all += sums_.back();
    }
    fill_absent(logits, 0);  // `exponential` gives them nearly 0, which a draw could still find
    return all;
  }

  // Weights outside top-k, then top-p of what is left, then below min-p of the largest become 0
  // (the order of transformers' warpers). Equal weights go by token id.
  double keep_likely(float* weights, int64_t vocab, const Sampling& how) {
    order_.resize(vocab);
    for (int64_t i = 0; i < vocab; i++) order_[i] = i;
    auto likelier = [&](int64_t a, int64_t b) {
      return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    };
    int64_t kept = vocab;
    if (how.top_k > 0 && how.top_k < vocab) {
      kept = how.top_k;
      std::nth_element(order_.begin(), order_.begin() + kept - 1, order_.end(), likelier);
    }
    std::sort(order_.begin(), order_.begin() + kept, likelier);
    double mass = 0;
    for (int64_t i = 0; i < kept; i++) mass += weights[order_[i]];
    if (how.top_p < 1) {
      double reached = 0;
      int64_t i = 0;
      while (i < kept && reached < how.top_p * mass) reached += weights[order_[i++]];
      kept = std::max<int64_t>(i, 1);
    }
    const float least = how.min_p * weights[order_[0]];
    while (kept > 1 && weights[order_[kept - 1]] < least) kept--;
    for (int64_t i = kept; i < vocab; i++) weights[order_[i]] = 0;
    sums_.assign((vocab + kRun - 1) / kRun, 0.0);
    mass = 0;
    for (int64_t i = 0; i < kept; i++) {
      sums_[order_[i] / kRun] += weights[order_[i]];
      mass += weights[order_[i]];
    }
    return mass;
  }

  // The first token whose cumulative weight exceeds `height`.
  int64_t draw(const float* weights, int64_t vocab, double height) const {
    size_t run = 0;
    while (run + 1 < sums_.size() && sums_[run] <= height) height -= sums_[run++];
    int64_t last = -1;
    for (int64_t i = run * kRun; i < std::min<int64_t>((run + 1) * kRun, vocab); i++) {
      if (weights[i] <= 0) continue;
      last = i;
      height -= weights[i];
      if (height < 0) return i;
    }
    if (last >= 0) return last;  // rounding carried the height past the last weight of its run
    for (int64_t i = vocab - 1; i > 0; i--)
      if (weights[i] > 0) return i;
    return 0;
  }

  const std::vector<Absent> absent_;
  std::vector<double> sums_;
  std::vector<int64_t> order_;
};

}  // namespace meshrl
