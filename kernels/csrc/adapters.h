// Low-rank adapters beside the base model: what rows that ask for one get added to the products of
// a layer's matrices (LoRA, arXiv 2106.09685). Rows of one adapter lie side by side in a step.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "gemm.h"

namespace meshrl {

// The matrices that adapters change; as common/generation/batch/adapter_deltas.py orders them.
enum Target { kToQkv, kToOutput, kToGateUp, kToDown, kTargets };

// W acts as W + b a: a [ranks, inputs], b [outputs, ranks]. Without ranks there is no change.
template <class T>
struct LowRank {
  Matrix<T> a, b;
  bool empty() const { return a.outputs == 0; }
};

template <class T>
class Adapter {
 public:
  explicit Adapter(int64_t layers) : changes_(layers * kTargets) {}

  LowRank<T>& of(int64_t layer, int64_t target) { return changes_[layer * kTargets + target]; }
  const LowRank<T>& of(int64_t layer, int64_t target) const {
    return changes_[layer * kTargets + target];
  }

  // Allocates what has been shaped, all zeros. False: no memory.
  bool place() {
    int64_t elements = 0;
    for (LowRank<T>& change : changes_) elements += change.a.elements() + change.b.elements();
    if (!weights_.resize(elements)) return false;
    T* at = weights_.at();
    for (LowRank<T>& change : changes_)
      for (Matrix<T>* matrix : {&change.a, &change.b}) {
        matrix->place(at);
        at += matrix->elements();
        widest_ = std::max(widest_, change.a.outputs);
      }
    return true;
  }

  int64_t widest() const { return widest_; }  // ranks of one change, at most

 private:
  std::vector<LowRank<T>> changes_;  // [layers, kTargets]
  Buffer<T> weights_;
  int64_t widest_ = 0;
};

// Rows that follow each other in a step and share an adapter; nullptr: they have none.
template <class T>
struct Stretch {
  int64_t first, rows;
  const Adapter<T>* adapter;
};

// The adapters that are loaded, each in a place from 1 on, and the products with them.
template <class T>
class Adapters {
 public:
  // A change of an adapter takes effect as a whole: what is loaded goes into a new one, which then
  // takes its place.
  void begin(int64_t layers) { coming_ = std::make_unique<Adapter<T>>(layers); }
  Adapter<T>& coming() { return *coming_; }
  void commit(int64_t place) {
    if (place >= static_cast<int64_t>(loaded_.size())) loaded_.resize(place + 1);
    loaded_[place] = std::move(coming_);
  }
  void drop(int64_t place) {
    if (place < static_cast<int64_t>(loaded_.size())) loaded_[place].reset();
  }
  const Adapter<T>* at(int64_t place) const {
    return place < static_cast<int64_t>(loaded_.size()) ? loaded_[place].get() : nullptr;
  }

  // Whose rows the next step has, in order: `place(row)` is the place of each.
  template <class Place>
  bool arrange(int64_t rows, Place&& place) {
    stretches_.clear();
    changes_ = false;
    int64_t widest = 0;
    for (int64_t r = 0; r < rows; r++) {
      const Adapter<T>* adapter = at(place(r));
      if (stretches_.empty() || stretches_.back().adapter != adapter)
        stretches_.push_back({r, 0, adapter});
      stretches_.back().rows++;
      if (adapter != nullptr) changes_ = true, widest = std::max(widest, adapter->widest());
    }
    if (!changes_ || rows * widest <= room_) return true;
    room_ = 0;
    if (!narrow_.resize(rows * widest) || !inputs_.resize(rows * widest)) return false;
    room_ = rows * widest;
    return true;
  }

  // Whether a row of the step has an adapter that changes this matrix.
  bool change(int64_t layer, Target target) const {
    if (!changes_) return false;
    for (const Stretch<T>& stretch : stretches_)
      if (stretch.adapter != nullptr && !stretch.adapter->of(layer, target).empty()) return true;
    return false;
  }

  // y [rows, outputs] += x [rows, inputs] a^T b^T, each row by its adapter.
  void add(int64_t layer, Target target, const Act<T>* x, float* y) {
    if (!changes_) return;
    for (const Stretch<T>& stretch : stretches_) {
      if (stretch.adapter == nullptr) continue;
      const LowRank<T>& change = stretch.adapter->of(layer, target);
      if (change.empty()) continue;
      multiply(x + stretch.first * change.a.inputs, stretch.rows, change.a, nullptr, false,
               narrow_.at());
      for (int64_t i = 0; i < stretch.rows * change.a.outputs; i += kLanes)
        store_act(inputs_.at() + i, load(narrow_.at() + i));
      multiply(inputs_.at(), stretch.rows, change.b, nullptr, true,
               y + stretch.first * change.b.outputs);
    }
  }

 private:
  std::vector<std::unique_ptr<Adapter<T>>> loaded_;
  std::unique_ptr<Adapter<T>> coming_;
  std::vector<Stretch<T>> stretches_;
  bool changes_ = false;  // some row of the step has an adapter
  int64_t room_ = 0;      // elements that these hold
  Buffer<float> narrow_;
  Buffer<Act<T>> inputs_;
};

}  // namespace meshrl
