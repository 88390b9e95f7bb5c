// Products of bfloat16 matrices, summed in float32: operands packed into tiles, and the processor's instructions on those.
//
// A tile is 16 x 32 halves along k, as 16 x 16 pairs: [row][pair] on the left, [pair][column] on the right. Every output
// number is summed in the order of k, whatever stands beside it. A float32 operand on the left is taken as the sum of two
// bfloat16, which hold 16 of its bits: two tiles for each.
#pragma once

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define STROP_AMX
#endif

namespace strop {

constexpr int64_t SIDE = 16, DEPTH = 32, TILE = SIDE * SIDE;  // rows and halves of a tile; its pairs
constexpr int64_t BLOCK = 2 * SIDE;                           // rows and columns of a block of four tiles

typedef uint32_t pairs __attribute__((vector_size(4 * SIDE)));
typedef uint32_t pairs_at __attribute__((vector_size(4 * SIDE), aligned(2), may_alias));
typedef float singles __attribute__((vector_size(4 * SIDE)));
typedef uint16_t halves __attribute__((vector_size(2 * SIDE)));
typedef uint16_t halves_at __attribute__((vector_size(2 * SIDE), aligned(2), may_alias));

// float32 bits to those of the nearest bfloat16, in the upper half; NaN stays NaN.
STROP_INLINE pairs rounded(pairs bits) {
  const pairs near = bits + 0x7fff + ((bits >> 16) & 1);
  return ((bits & 0x7fffffff) > 0x7f800000 ? (bits | 0x400000) : near) & 0xffff0000;
}

// What rounding took away, as float32 bits; 0 where nothing finite is left.
STROP_INLINE pairs remainder(pairs bits) {
  const pairs near = rounded(bits);
  const singles left = reinterpret_cast<singles>(bits) - reinterpret_cast<singles>(near);
  return (near & 0x7f800000) == 0x7f800000 ? pairs{} : reinterpret_cast<pairs>(left);
}

template <bool LOW>
STROP_INLINE pairs part(pairs bits) { return rounded(LOW ? remainder(bits) : bits); }

template <bool LOW>
STROP_INLINE pairs in_order(const uint16_t* from) { return *reinterpret_cast<const pairs_at*>(from); }

template <bool LOW>
STROP_INLINE pairs in_order(const float* from) {
  const pairs a = *reinterpret_cast<const pairs_at*>(from), b = *reinterpret_cast<const pairs_at*>(from + SIDE);
  const pairs even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const pairs odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return (part<LOW>(even) >> 16) | part<LOW>(odd);
}

template <bool LOW>
STROP_INLINE pairs side_by_side(const uint16_t* first, const uint16_t* second) {
  const halves a = *reinterpret_cast<const halves_at*>(first), b = *reinterpret_cast<const halves_at*>(second);
  return __builtin_convertvector(a, pairs) | (__builtin_convertvector(b, pairs) << 16);
}

template <bool LOW>
STROP_INLINE pairs side_by_side(const float* first, const float* second) {
  const pairs a = *reinterpret_cast<const pairs_at*>(first), b = *reinterpret_cast<const pairs_at*>(second);
  return (part<LOW>(a) >> 16) | part<LOW>(b);
}

// Exchange what lies S apart in both directions.
template <int S>
STROP_INLINE void exchange(pairs* r) {
#define STROP_A(l) ((l) & S ? 16 + (l)-S : (l))
#define STROP_B(l) ((l) & S ? 16 + (l) : (l) + S)
#define STROP_EACH(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; ++i) {
    if (i & S) continue;
    const pairs a = r[i], b = r[i + S];
    r[i] = __builtin_shufflevector(a, b, STROP_EACH(STROP_A));
    r[i + S] = __builtin_shufflevector(a, b, STROP_EACH(STROP_B));
  }
#undef STROP_A
#undef STROP_B
#undef STROP_EACH
}

STROP_INLINE void turn(pairs* r) {
  exchange<8>(r);
  exchange<4>(r);
  exchange<2>(r);
  exchange<1>(r);
}

// One tile of a panel. ALONG: each row's numbers lie side by side, and rows `stride` apart; otherwise the other way about.
// TURNED: pairs outside, as the right side takes them.
template <bool ALONG, bool TURNED, bool LOW, typename T>
STROP_INLINE void pack_tile(const T* from, int64_t stride, uint32_t* to) {
  pairs r[SIDE];
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; ++i)
    r[i] = ALONG ? in_order<LOW>(from + i * stride) : side_by_side<LOW>(from + 2 * i * stride, from + (2 * i + 1) * stride);
  if (ALONG == TURNED) turn(r);
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; ++i) *reinterpret_cast<pairs_at*>(to + i * SIDE) = r[i];
}

// Of `rows` rows of K numbers, 16 at the most: tiles [K / 32][16][16], and after each that of the remainders where they are
// float32; zeros beyond the end.
template <bool ALONG, bool TURNED, typename T>
STROP_INLINE void pack_panel(const T* from, int64_t stride, int64_t rows, int64_t K, uint32_t* to) {
  for (int64_t k = 0; k < K; k += DEPTH) {
    const T* at = from + (ALONG ? k : k * stride);
    int64_t step = stride;
    T padded[SIDE * DEPTH];
    if (rows < SIDE || K - k < DEPTH) {
      std::memset(padded, 0, sizeof padded);
      const int64_t depth = least(DEPTH, K - k), outer = ALONG ? rows : depth, inner = ALONG ? depth : rows;
      step = ALONG ? DEPTH : SIDE;
      for (int64_t i = 0; i < outer; ++i)
        std::memcpy(padded + i * step, at + i * stride, sizeof(T) * static_cast<size_t>(inner));
      at = padded;
    }
    pack_tile<ALONG, TURNED, false>(at, step, to);
    to += TILE;
    if (std::is_same<T, float>::value) {
      pack_tile<ALONG, TURNED, true>(at, step, to);
      to += TILE;
    }
  }
}

// Where an operand's numbers are: its rows (columns, of the right one) are `row` apart, and steps of k `k`; one of both is 1.
struct Operand {
  const void* at;
  int64_t row, k;
};

// Pairs of one panel of 16 rows.
STROP_INLINE int64_t panel_size(int64_t K, bool wide) { return round_up(K, DEPTH) / DEPTH * TILE * (wide ? 2 : 1); }

template <bool TURNED, typename T>
STROP_ONCE void pack_operand(const Operand& from, int64_t rows, int64_t K, uint32_t* to, int threads) {
  const int64_t panel = panel_size(K, std::is_same<T, float>::value);
  for_tasks(round_up(rows, BLOCK) / SIDE, threads, [&](int64_t task) {
    const int64_t first = task * SIDE, count = least(SIDE, rows - first);
    const T* at = static_cast<const T*>(from.at) + first * from.row;
    uint32_t* into = to + task * panel;
    if (count <= 0)  // the empty half of the last block
      std::memset(into, 0, 4 * static_cast<size_t>(panel));
    else if (from.k == 1)
      pack_panel<true, TURNED>(at, from.row, count, K, into);
    else
      pack_panel<false, TURNED>(at, from.k, count, K, into);
  });
}

// Two panels of the left side, and two of the right; `depth` tiles along k, and with `wide` twice as many on the left.
struct Panels {
  const uint32_t *left, *right;
  int64_t left_size, right_size, depth;
};

// c[32][32] (+)= left @ right
struct PlainBlock {
  static void enter() {}
  static void leave() {}
  template <bool WIDE>
  static void run(const Panels& of, float* c, int64_t ldc, bool add) {
    const auto number = [](uint32_t pair, bool second) {
      const uint32_t bits = second ? pair & 0xffff0000 : pair << 16;
      float x;
      std::memcpy(&x, &bits, 4);
      return x;
    };
    constexpr int64_t PARTS = WIDE ? 2 : 1;
    for (int64_t i = 0; i < BLOCK; ++i)
      for (int64_t j = 0; j < BLOCK; ++j) {
        const uint32_t* left = of.left + i / SIDE * of.left_size + i % SIDE * SIDE;
        const uint32_t* right = of.right + j / SIDE * of.right_size + j % SIDE;
        float total = add ? c[i * ldc + j] : 0.0f;
        for (int64_t t = 0; t < of.depth; ++t)
          for (int64_t u = PARTS * t; u < PARTS * (t + 1); ++u)
            for (int64_t p = 0; p < DEPTH; ++p)
              total += number(left[u * TILE + p / 2], p % 2) * number(right[t * TILE + p / 2 * SIDE], p % 2);
        c[i * ldc + j] = total;
      }
  }
};

#ifdef STROP_AMX
// The system hands the tile registers out to a process that asks.
STROP_ONCE bool may_use_tiles() {
  constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}

struct TileBlock {
  static void enter() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
  }
  static void leave() { _tile_release(); }
  template <bool WIDE>
  static void run(const Panels& of, float* c, int64_t ldc, bool add) {
    float *right = c + SIDE, *below = c + SIDE * ldc, *last = below + SIDE;
    const int64_t stride = 4 * ldc;
    if (add) {
      _tile_loadd(0, c, stride);
      _tile_loadd(1, right, stride);
      _tile_loadd(2, below, stride);
      _tile_loadd(3, last, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const uint32_t *a = of.left, *b = of.right;
    for (int64_t t = 0; t < of.depth; ++t, b += TILE) {
      _tile_loadd(6, b, 64);
      _tile_loadd(7, b + of.right_size, 64);
#pragma GCC unroll 2
      for (int part = 0; part < (WIDE ? 2 : 1); ++part, a += TILE) {
        _tile_loadd(4, a, 64);
        _tile_loadd(5, a + of.left_size, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, right, stride);
    _tile_stored(2, below, stride);
    _tile_stored(3, last, stride);
  }
};
#endif

// c[M][N] (+)= left @ right, both packed: `all` are the first panels of each.
template <typename Block, bool WIDE>
STROP_ONCE void packed_product(const Panels& all, int64_t M, int64_t N, float* c, int64_t ldc, bool add, int threads) {
  for_tasks((N + BLOCK - 1) / BLOCK, threads, [&](int64_t task) {
    Block::enter();
    Panels of = all;
    const int64_t n = task * BLOCK, columns = least(BLOCK, N - n);
    of.right = all.right + n / SIDE * all.right_size;
    for (int64_t m = 0; m < M; m += BLOCK) {
      const int64_t rows = least(BLOCK, M - m);
      float* at = c + m * ldc + n;
      of.left = all.left + m / SIDE * all.left_size;
      if (rows == BLOCK && columns == BLOCK) {
        Block::template run<WIDE>(of, at, ldc, add);
        continue;
      }
      alignas(64) float whole[BLOCK * BLOCK] = {};
      const size_t bytes = 4 * static_cast<size_t>(columns);
      if (add)
        for (int64_t i = 0; i < rows; ++i) std::memcpy(whole + i * BLOCK, at + i * ldc, bytes);
      Block::template run<WIDE>(of, whole, BLOCK, add);
      for (int64_t i = 0; i < rows; ++i) std::memcpy(at + i * ldc, whole + i * BLOCK, bytes);
    }
    Block::leave();
  });
}

STROP_ONCE bool has_tiles() {
#ifdef STROP_AMX
  static const bool given = may_use_tiles();
  return given;
#else
  return false;
#endif
}

// On the tile registers, or, which is for tests, on any processor. Returns whether that can be had here.
template <bool WIDE>
STROP_ONCE bool half_product(const Operand& a, const Operand& b, int64_t M, int64_t N, int64_t K, float* c, int64_t ldc,
                             bool add, bool tiles, int threads) {
  if (tiles && !has_tiles()) return false;
  thread_local Scratch scratch;
  const int64_t left_size = panel_size(K, WIDE), right_size = panel_size(K, false);
  const int64_t left = round_up(M, BLOCK) / SIDE * left_size, right = round_up(N, BLOCK) / SIDE * right_size;
  scratch.reserve(left + right);
  uint32_t* packed_left = reinterpret_cast<uint32_t*>(scratch.take(left));
  uint32_t* packed_right = reinterpret_cast<uint32_t*>(scratch.take(right));
  pack_operand<false, std::conditional_t<WIDE, float, uint16_t>>(a, M, K, packed_left, threads);
  pack_operand<true, uint16_t>(b, N, K, packed_right, threads);
  const Panels all{packed_left, packed_right, left_size, right_size, right_size / TILE};
#ifdef STROP_AMX
  if (tiles) packed_product<TileBlock, WIDE>(all, M, N, c, ldc, add, threads);
#endif
  if (!tiles) packed_product<PlainBlock, WIDE>(all, M, N, c, ldc, add, threads);
  return true;
}

}  // namespace strop
