// Sums of 64-bit words, laid out in rows, by row and by column, wrapping: one pass over memory, copying on the way.
#pragma once

#include "vector.h"

namespace strop {

typedef uint64_t vw __attribute__((vector_size(4 * W), aligned(1), may_alias));
constexpr int WORDS = W / 2;  // in one vector

template <bool copies>
STROP_ONCE void checksum_rows(const char* from, char* to, int64_t rows, int64_t width, char* by_row, char* by_column) {
  const int64_t step = 4 * W, bytes = 8 * width;
  for (int64_t r = 0; r < rows; ++r, from += bytes, to += copies ? bytes : 0) {
    vw even{}, odd{};
    for (int64_t at = 0; at < bytes; at += 2 * step) {
      const vw a = *reinterpret_cast<const vw*>(from + at), b = *reinterpret_cast<const vw*>(from + at + step);
      *reinterpret_cast<vw*>(by_column + at) += a;
      *reinterpret_cast<vw*>(by_column + at + step) += b;
      even += a, odd += b;
      if (copies) {
        *reinterpret_cast<vw*>(to + at) = a;
        *reinterpret_cast<vw*>(to + at + step) = b;
      }
    }
    even += odd;
    uint64_t total = 0;
    for (int i = 0; i < WORDS; ++i) total += even[i];
    std::memcpy(by_row + 8 * r, &total, 8);
  }
}

}  // namespace strop
