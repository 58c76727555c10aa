// Low-rank adapters of the base model (LoRA, arXiv 2106.09685). Each row of a step may use an
// adapter, whose delta is added to the products of a layer's matrices. Rows of one adapter are
// contiguous.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "gemm.h"

namespace meshrl {

// Matrices that adapters change, in the order of common/generation/batch/adapter_deltas.py.
enum Target { kToQkv, kToOutput, kToGateUp, kToDown, kTargets };

// Delta b a of a matrix W: a [ranks, inputs], b [outputs, ranks]. It is empty if there are no
// ranks.
template <class T>
struct LowRankDelta {
  Matrix<T> a, b;
  bool empty() const { return a.outputs == 0; }
};

template <class T>
class Adapter {
 public:
  explicit Adapter(int64_t layers) : deltas_(layers * kTargets) {}

  LowRankDelta<T>& delta(int64_t layer, int64_t target) {
    return deltas_[layer * kTargets + target];
  }
  const LowRankDelta<T>& delta(int64_t layer, int64_t target) const {
    return deltas_[layer * kTargets + target];
  }

  // Allocates all shaped matrices, filled with zeros. Returns false if memory runs out.
  bool allocate() {
    int64_t elements = 0;
    for (LowRankDelta<T>& delta : deltas_) elements += delta.a.elements() + delta.b.elements();
    if (!weights_.resize(elements)) return false;
    T* at = weights_.data();
    for (LowRankDelta<T>& delta : deltas_)
      for (Matrix<T>* matrix : {&delta.a, &delta.b}) {
        matrix->set_storage(at);
        at += matrix->elements();
        max_rank_ = std::max(max_rank_, delta.a.outputs);
      }
    return true;
  }

  int64_t max_rank() const { return max_rank_; }  // maximum rank of a delta

 private:
  std::vector<LowRankDelta<T>> deltas_;  // [layers, kTargets]
  Buffer<T> weights_;
  int64_t max_rank_ = 0;
};

// Contiguous rows of a step that share an adapter; nullptr: the base model alone.
template <class T>
struct AdapterRows {
  int64_t first, rows;
  const Adapter<T>* adapter;
};

// Loaded adapters by index, from 1 on, and the products of a step's rows with them.
template <class T>
class Adapters {
 public:
  // An update replaces an adapter as a whole: the caller fills a pending adapter and commits it.
  void begin(int64_t layers) { pending_ = std::make_unique<Adapter<T>>(layers); }
  Adapter<T>& pending() { return *pending_; }
  void commit(int64_t index) {
    if (index >= static_cast<int64_t>(committed_.size())) committed_.resize(index + 1);
    committed_[index] = std::move(pending_);
  }
  void drop(int64_t index) {
    if (index < static_cast<int64_t>(committed_.size())) committed_[index].reset();
  }
  const Adapter<T>* find(int64_t index) const {
    return index < static_cast<int64_t>(committed_.size()) ? committed_[index].get() : nullptr;
  }

  // Sets the adapter of each row of the next step; `get_index(row)` returns its index, 0 for none.
  // Returns false if memory runs out.
  template <class GetIndex>
  bool assign_rows(int64_t rows, GetIndex&& get_index) {
    row_ranges_.clear();
    has_adapters_ = false;
    int64_t max_rank = 0;
    for (int64_t r = 0; r < rows; r++) {
      const Adapter<T>* adapter = find(get_index(r));
      if (row_ranges_.empty() || row_ranges_.back().adapter != adapter)
        row_ranges_.push_back({r, 0, adapter});
      row_ranges_.back().rows++;
      if (adapter != nullptr)
        has_adapters_ = true, max_rank = std::max(max_rank, adapter->max_rank());
    }
    if (!has_adapters_ || rows * max_rank <= capacity_) return true;
    capacity_ = 0;
    if (!low_rank_.resize(rows * max_rank) || !low_rank_act_.resize(rows * max_rank)) return false;
    capacity_ = rows * max_rank;
    return true;
  }

  // Returns true if an adapter of the step changes this matrix.
  bool has_delta(int64_t layer, Target target) const {
    if (!has_adapters_) return false;
    for (const AdapterRows<T>& range : row_ranges_)
      if (range.adapter != nullptr && !range.adapter->delta(layer, target).empty()) return true;
    return false;
  }

  // Computes y [rows, outputs] += x [rows, inputs] a^T b^T, with each row's adapter.
  void add(int64_t layer, Target target, const Act<T>* x, float* y) {
    if (!has_adapters_) return;
    for (const AdapterRows<T>& range : row_ranges_) {
      if (range.adapter == nullptr) continue;
      const LowRankDelta<T>& delta = range.adapter->delta(layer, target);
      if (delta.empty()) continue;
      multiply(x + range.first * delta.a.inputs, range.rows, delta.a, nullptr, false,
               low_rank_.data());
      for (int64_t i = 0; i < range.rows * delta.a.outputs; i += kLanes)
        store_act(low_rank_act_.data() + i, load(low_rank_.data() + i));
      multiply(low_rank_act_.data(), range.rows, delta.b, nullptr, true,
               y + range.first * delta.b.outputs);
    }
  }

 private:
  std::vector<std::unique_ptr<Adapter<T>>> committed_;
  std::unique_ptr<Adapter<T>> pending_;
  std::vector<AdapterRows<T>> row_ranges_;
  bool has_adapters_ = false;  // a row of the step has an adapter
  int64_t capacity_ = 0;       // capacity of the two buffers, in elements
  Buffer<float> low_rank_;
  Buffer<Act<T>> low_rank_act_;
};

}  // namespace meshrl
