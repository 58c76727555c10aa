// Differences of two byte arrays by elements, and their application to another array. Plain C
// functions over raw pointers, one thread. They compare bytes, so the type of an element does not
// matter.
#include <bit>
#include <cstdint>
#include <cstring>

namespace meshrl {

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kWord = 8, kBlock = 64;  // bytes; a block is a cache line
constexpr int64_t kTooManyDifferences = -1, kUnsupportedWidth = -2;

inline uint64_t load_word(const uint8_t* p) {
  uint64_t value;
  memcpy(&value, p, kWord);
  return value;
}

inline bool blocks_differ(const uint8_t* a, const uint8_t* b) {
  uint64_t bits = 0;
  for (int64_t i = 0; i < kBlock; i += kWord) bits |= load_word(a + i) ^ load_word(b + i);
  return bits != 0;
}

// Finds the elements of type T that differ between `old` and `current`. For each, writes the number
// of equal elements since the previous one to `gaps` and its new value to `values`. Returns their
// number, or kTooManyDifferences if more than `max_elements` may differ.
template <class T>
int64_t find_differences(const uint8_t* old, const uint8_t* current, int64_t bytes,
                         int64_t max_elements, uint32_t* gaps, T* values) {
  constexpr int kBits = 8 * sizeof(T);
  int64_t num_found = 0, next = 0;  // next: index after the last difference
  const auto add = [&](int64_t i) {
    gaps[num_found] = static_cast<uint32_t>(i - next);
    memcpy(values + num_found, current + i * sizeof(T), sizeof(T));
    num_found++;
    next = i + 1;
  };
  int64_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) {
    if (!blocks_differ(old + at, current + at)) continue;
    if (num_found + kBlock / static_cast<int64_t>(sizeof(T)) > max_elements)
      return kTooManyDifferences;
    for (int64_t w = at; w < at + kBlock; w += kWord) {
      uint64_t bits = load_word(old + w) ^ load_word(current + w);
      while (bits) {
        const int lane = std::countr_zero(bits) / kBits;
        add(w / static_cast<int64_t>(sizeof(T)) + lane);
        if constexpr (sizeof(T) == kWord)
          bits = 0;
        else
          bits &= ~(((uint64_t{1} << kBits) - 1) << (lane * kBits));
      }
    }
  }
  for (; at < bytes; at += sizeof(T)) {
    if (!memcmp(old + at, current + at, sizeof(T))) continue;
    if (num_found == max_elements) return kTooManyDifferences;
    add(at / static_cast<int64_t>(sizeof(T)));
  }
  return num_found;
}

// Overwrites elements of a block that holds elements [first, first + elements) of an array. Takes
// values from index `begin` on while their positions are in the block. Returns the index after the
// last written value.
template <class T>
int64_t overwrite_elements(uint8_t* block, int64_t first, int64_t elements,
                           const uint32_t* positions, const T* values, int64_t begin,
                           int64_t count) {
  for (; begin < count; begin++) {
    const int64_t at = static_cast<int64_t>(positions[begin]) - first;
    if (at >= elements) break;
    memcpy(block + at * sizeof(T), values + begin, sizeof(T));
  }
  return begin;
}

// Calls f with a zero of the unsigned type of `width` bytes.
template <class F>
int64_t call_with_width(int64_t width, F&& f) {
  switch (width) {
    case 1: return f(uint8_t{});
    case 2: return f(uint16_t{});
    case 4: return f(uint32_t{});
    case 8: return f(uint64_t{});
    default: return kUnsupportedWidth;
  }
}

}  // namespace meshrl

using namespace meshrl;

extern "C" {

int64_t delta_differences(const uint8_t* old, const uint8_t* current, int64_t bytes, int64_t width,
                          int64_t max_elements, uint32_t* gaps, void* values) {
  return call_with_width(width, [&](auto kind) {
    return find_differences(old, current, bytes, max_elements, gaps,
                            static_cast<decltype(kind)*>(values));
  });
}

int64_t delta_overwrite(uint8_t* block, int64_t first, int64_t elements, int64_t width,
                        const uint32_t* positions, const void* values, int64_t begin,
                        int64_t count) {
  return call_with_width(width, [&](auto kind) {
    return overwrite_elements(block, first, elements, positions,
                              static_cast<const decltype(kind)*>(values), begin, count);
  });
}
}
