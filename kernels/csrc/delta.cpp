// Which elements of one run of bytes differ from those of another, and writing such elements over
// what is there: plain C functions over raw pointers, one thread. Bytes are compared, so that it
// matters to none of them what an element means.
#include <bit>
#include <cstdint>
#include <cstring>

namespace meshrl {

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kWord = 8, kBlock = 64;  // bytes; a block is a cache line
constexpr int64_t kTooMany = -1, kNoSuchWidth = -2;

inline uint64_t word(const uint8_t* p) {
  uint64_t value;
  memcpy(&value, p, kWord);
  return value;
}

inline bool differ(const uint8_t* a, const uint8_t* b) {
  uint64_t bits = 0;
  for (int64_t i = 0; i < kBlock; i += kWord) bits |= word(a + i) ^ word(b + i);
  return bits != 0;
}

// The elements of type T in which `now` differs from `old`: before each how many do not since the
// last one, and what it is now. kTooMany where there is no room for them.
template <class T>
int64_t differences(const uint8_t* old, const uint8_t* now, int64_t bytes, int64_t most,
                    uint32_t* gaps, T* values) {
  constexpr int kBits = 8 * sizeof(T);
  int64_t found = 0, next = 0;  // `next`: the element after the last that differs
  const auto add = [&](int64_t i) {
    gaps[found] = static_cast<uint32_t>(i - next);
    memcpy(values + found, now + i * sizeof(T), sizeof(T));
    found++;
    next = i + 1;
  };
  int64_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) {
    if (!differ(old + at, now + at)) continue;
    if (found + kBlock / static_cast<int64_t>(sizeof(T)) > most) return kTooMany;
    for (int64_t w = at; w < at + kBlock; w += kWord) {
      uint64_t bits = word(old + w) ^ word(now + w);
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
    if (!memcmp(old + at, now + at, sizeof(T))) continue;
    if (found == most) return kTooMany;
    add(at / static_cast<int64_t>(sizeof(T)));
  }
  return found;
}

// Writes the values from `begin` on whose positions are below `first` + `elements` over a block
// that begins with element `first`; the number of the value after the last one written.
template <class T>
int64_t overwrite(uint8_t* block, int64_t first, int64_t elements, const uint32_t* positions,
                  const T* values, int64_t begin, int64_t count) {
  for (; begin < count; begin++) {
    const int64_t at = static_cast<int64_t>(positions[begin]) - first;
    if (at >= elements) break;
    memcpy(block + at * sizeof(T), values + begin, sizeof(T));
  }
  return begin;
}

// with_width(w, f): f of a value of the type of so many bytes.
template <class F>
int64_t with_width(int64_t width, F&& f) {
  switch (width) {
    case 1: return f(uint8_t{});
    case 2: return f(uint16_t{});
    case 4: return f(uint32_t{});
    case 8: return f(uint64_t{});
    default: return kNoSuchWidth;
  }
}

}  // namespace meshrl

using namespace meshrl;

extern "C" {

int64_t delta_differences(const uint8_t* old, const uint8_t* now, int64_t bytes, int64_t width,
                          int64_t most, uint32_t* gaps, void* values) {
  return with_width(width, [&](auto kind) {
    return differences(old, now, bytes, most, gaps, static_cast<decltype(kind)*>(values));
  });
}

int64_t delta_overwrite(uint8_t* block, int64_t first, int64_t elements, int64_t width,
                        const uint32_t* positions, const void* values, int64_t begin,
                        int64_t count) {
  return with_width(width, [&](auto kind) {
    return overwrite(block, first, elements, positions,
                     static_cast<const decltype(kind)*>(values), begin, count);
  });
}
}
