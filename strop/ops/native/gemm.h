// Products of small packed matrices: one register tile, and the packed forms that feed it.
//
// Every output number is one chain of fused multiply-adds in the order of k, whatever the tile's shape: so a row's bits
// do not depend on which rows are computed beside it.
#pragma once

#include <type_traits>

#include "vector.h"

namespace strop {

// c[M][N * W] (+)= sum over k of a(i, k) * b[k][N * W], where a(i, k) is a[i * lda + k], or a[k * lda + i] if TURNED.
template <int M, int N, bool TURNED>
STROP_INLINE void tile(int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                       bool add) {
  vf acc[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[i][j] = add ? load(c + i * ldc + j * W) : vf{};
  for (int64_t k = 0; k < K; ++k) {
    vf row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = load(b + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const vf left = all(TURNED ? a[i] : a[i * lda]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) acc[i][j] += left * row[j];
    }
    b += ldb;
    a += TURNED ? lda : 1;
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(c + i * ldc + j * W, acc[i][j]);
}

// body(rows) with the number of rows as a compile-time constant, 1 <= rows <= MR.
template <typename Body>
STROP_INLINE void with_rows(int64_t rows, const Body& body) {
  switch (rows) {
    case 6: return body(std::integral_constant<int, 6>{});
    case 5: return body(std::integral_constant<int, 5>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 2: return body(std::integral_constant<int, 2>{});
    default: return body(std::integral_constant<int, 1>{});
  }
}

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_at __attribute__((vector_size(32), aligned(4), may_alias));

STROP_INLINE void transpose_8x8(const float* from, int64_t stride, float* to, int64_t ldt) {
  v8 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = *reinterpret_cast<const v8_at*>(from + i * stride);
  for (int i = 0; i < 8; i += 2) {
    s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + j + 2] = __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<v8_at*>(to + i * ldt) = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *reinterpret_cast<v8_at*>(to + (i + 4) * ldt) = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Rows [n][C] become columns [first, first + n) of panels [column / NR][C][NR]: the right-hand side of a product over C.
STROP_INLINE void pack_columns(const float* from, int64_t stride, int64_t n, int64_t C, float* to, int64_t first) {
  for (int64_t i = 0; i < n;) {
    const int64_t at = first + i;
    float* panel = to + at / NR * C * NR + at % NR;
    const float* row = from + i * stride;
    if (at % 8 == 0 && n - i >= 8) {
      int64_t c = 0;
      for (; c + 8 <= C; c += 8) transpose_8x8(row + c, stride, panel + c * NR, NR);
      for (; c < C; ++c)
        for (int k = 0; k < 8; ++k) panel[c * NR + k] = row[k * stride + c];
      i += 8;
    } else {
      for (int64_t c = 0; c < C; ++c) panel[c * NR] = row[c];
      ++i;
    }
  }
}

// Rows [n][C] become rows [first, first + n) of panels [C / NR][capacity][NR], padded with zeros: the right-hand side of a
// product over rows.
STROP_INLINE void pack_rows(const float* from, int64_t stride, int64_t n, int64_t C, float* to, int64_t first,
                            int64_t capacity) {
  for (int64_t i = 0; i < n; ++i) {
    const float* row = from + i * stride;
    for (int64_t c = 0; c < C; c += NR) {
      float* at = to + (c * capacity) + (first + i) * NR;
      const int64_t room = least(NR, C - c);
      if (room == NR) {
        store(at, load(row + c));
        store(at + W, load(row + c + W));
      } else {
        for (int64_t k = 0; k < NR; ++k) at[k] = k < room ? row[c + k] : 0.0f;
      }
    }
  }
}

}  // namespace strop
