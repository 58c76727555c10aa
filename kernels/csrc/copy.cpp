// Copy of memory past the caches. Plain C functions over raw pointers, one thread.
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace meshrl {

#if defined(__AVX512F__)
using Vector = __m512i;
inline Vector load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void stream(uint8_t* p, Vector v) { _mm512_stream_si512(reinterpret_cast<Vector*>(p), v); }
#elif defined(__AVX__)
using Vector = __m256i;
inline Vector load(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const Vector*>(p));
}
inline void stream(uint8_t* p, Vector v) { _mm256_stream_si256(reinterpret_cast<Vector*>(p), v); }
#endif

}  // namespace meshrl

extern "C" {

// Copies `bytes` bytes. Stores bypass the caches: an ordinary store first reads the line that it
// overwrites. Four pages are copied side by side, as glibc does: each has a prefetch of its own.
void copy_past_caches(uint8_t* target, const uint8_t* source, int64_t bytes) {
#if defined(__AVX__)
  using namespace meshrl;
  constexpr int64_t kVector = sizeof(Vector), kLine = 64, kPage = 4096, kBlock = 4 * kPage;
  const int64_t misaligned = reinterpret_cast<uintptr_t>(target) % kLine;
  const int64_t head = misaligned ? kLine - misaligned : 0;
  if (head + kBlock <= bytes) {
    memcpy(target, source, head);
    target += head, source += head, bytes -= head;
    for (; bytes >= kBlock; target += kBlock, source += kBlock, bytes -= kBlock) {
      for (int64_t i = 0; i < kPage; i += kVector) {
        const Vector a = load(source + i), b = load(source + i + kPage);
        const Vector c = load(source + i + 2 * kPage), d = load(source + i + 3 * kPage);
        stream(target + i, a);
        stream(target + i + kPage, b);
        stream(target + i + 2 * kPage, c);
        stream(target + i + 3 * kPage, d);
      }
    }
    _mm_sfence();  // other threads see the bytes before anything that is written later
  }
#endif
  memcpy(target, source, bytes);
}
}
