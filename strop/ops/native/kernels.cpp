// The kernels' C interface: raw pointers to float32 and integers, sizes in elements, no exceptions and no torch.
// A `stride` is the distance between rows, whose elements lie side by side; arrays without one are dense.

#include "attention.h"
#include "checksum.h"
#include "elementwise.h"
#include "halves.h"
#include "paged.h"

namespace strop {
Parallel parallel = nullptr;

namespace {

template <typename Body>
void for_rows(int64_t rows, int64_t width, int threads, const Body& body) {
  const int64_t step = rows_per_task(rows, width);
  for_tasks((rows + step - 1) / step, threads, [&](int64_t task) {
    body(task, task * step, least(rows, (task + 1) * step));
  });
}

// Like for_rows, with a part [D] of dw for each task, summed in the tasks' order at the end; dw may be null.
template <typename Body>
void for_rows_summing(int64_t rows, int64_t width, int64_t D, float* dw, int threads, const Body& body) {
  thread_local std::vector<float> parts;
  const int64_t step = rows_per_task(rows, width), tasks = (rows + step - 1) / step;
  if (dw) parts.assign(static_cast<size_t>(tasks * D), 0.0f);
  float* all_parts = parts.data();
  for_rows(rows, width, threads, [&](int64_t task, int64_t begin, int64_t end) {
    body(dw ? all_parts + task * D : nullptr, begin, end);
  });
  if (dw) sum_parts(all_parts, tasks, D, dw);
}

template <typename Body>
void with_half(int64_t half, const Body& body) {
  switch (half) {
    case 16: return body(std::integral_constant<int, 16>{});
    case 32: return body(std::integral_constant<int, 32>{});
    case 64: return body(std::integral_constant<int, 64>{});
    default: return body(std::integral_constant<int, 0>{});
  }
}

}  // namespace
}  // namespace strop

using namespace strop;

#define STROP_API extern "C" __attribute__((visibility("default")))

STROP_API void strop_use(void* gomp_parallel) { parallel = reinterpret_cast<Parallel>(gomp_parallel); }

STROP_API int32_t strop_width() { return W; }

// For tests of accuracy: e^x, and 2^x for x < 128.
STROP_API void strop_exp(const float* x, float* e, float* two, int64_t n) {
  for (int64_t i = 0; i < n; i += W) {
    const int count = static_cast<int>(least(W, n - i));
    store_part(e + i, exp_any(load_part(x + i, count, 0.0f)), count);
    store_part(two + i, exp2_small(load_part(x + i, count, 0.0f)), count);
  }
}

// y = rms_norm(x) * weight; with a residual, total = x + residual is what is normed and kept. rstd is [rows].
STROP_API void strop_rms_norm(const float* x, int64_t x_stride, const float* residual, int64_t residual_stride,
                              const float* weight, float* y, float* total, float* rstd, int64_t rows, int64_t D, float eps,
                              int32_t threads) {
  for_rows(rows, D, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      rms_norm_row(x + t * x_stride, residual ? residual + t * residual_stride : nullptr, weight, y + t * D,
                   residual ? total + t * D : nullptr, rstd + t, D, eps);
  });
}

// dx (plus `more`, if given) and dw; either may be null.
STROP_API void strop_rms_norm_backward(const float* dy, int64_t dy_stride, const float* x, int64_t x_stride,
                                       const float* weight, const float* rstd, const float* more, int64_t more_stride,
                                       float* dx, float* dw, int64_t rows, int64_t D, int32_t threads) {
  for_rows_summing(rows, D, D, dw, threads, [&](float* part, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      rms_norm_row_backward(dy + t * dy_stride, x + t * x_stride, weight, more ? more + t * more_stride : nullptr, rstd[t],
                            dx ? dx + t * D : nullptr, part, D);
  });
}

STROP_API void strop_swiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* y,
                            int64_t rows, int64_t F, int32_t threads) {
  for_rows(rows, F, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) swiglu_row(gate + t * gate_stride, up + t * up_stride, y + t * F, F);
  });
}

STROP_API void strop_swiglu_backward(const float* dy, int64_t dy_stride, const float* gate, int64_t gate_stride,
                                     const float* up, int64_t up_stride, float* dgate, float* dup, int64_t rows, int64_t F,
                                     int32_t threads) {
  for_rows(rows, F, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      swiglu_row_backward(dy + t * dy_stride, gate + t * gate_stride, up + t * up_stride, dgate + t * F, dup + t * F, F);
  });
}

// x [rows, N, C] -> y, dense: each head normed (when there is a weight [C]), then rotated. cos and sin are [rows, C].
STROP_API void strop_heads(const float* x, int64_t x_stride, const float* weight, float eps, const float* cos,
                           const float* sin, float* y, float* rstd, int64_t rows, int64_t N, int64_t C, int32_t threads) {
  with_half(C / 2, [&](auto half) {
    for_rows(rows, N * C, threads, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t n = 0; n < N; ++n)
          head_row<half>(x + t * x_stride + n * C, weight, cos + t * C, sin + t * C, y + (t * N + n) * C,
                         weight ? rstd + t * N + n : nullptr, C / 2, eps);
    });
  });
}

// dx is dense and, with a weight, may be null; so may dw.
STROP_API void strop_heads_backward(const float* dy, int64_t dy_stride, const float* x, int64_t x_stride,
                                    const float* weight, const float* rstd, const float* cos, const float* sin, float* dx,
                                    float* dw, int64_t rows, int64_t N, int64_t C, int32_t threads) {
  with_half(C / 2, [&](auto half) {
    for_rows_summing(rows, N * C, C, dw, threads, [&](float* part, int64_t begin, int64_t end) {
      thread_local std::vector<float> turned;
      turned.resize(static_cast<size_t>(C));
      for (int64_t t = begin; t < end; ++t)
        for (int64_t n = 0; n < N; ++n)
          head_row_backward<half>(dy + t * dy_stride + n * C, weight ? x + t * x_stride + n * C : nullptr, weight,
                                  cos + t * C, sin + t * C, weight ? rstd[t * N + n] : 1.0f,
                                  dx ? dx + (t * N + n) * C : nullptr, part, turned.data(), C / 2);
    });
  });
}

STROP_API void strop_attention(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                               int64_t v_stride, const int64_t* starts, const int64_t* lengths, const int64_t* parents,
                               int64_t sequences, float scale, float* out, float* lse, int64_t H, int64_t J, int64_t C,
                               int64_t CV, int32_t threads) {
  Attention a{};
  a.q = q, a.k = k, a.v = v, a.q_stride = q_stride, a.k_stride = k_stride, a.v_stride = v_stride;
  a.out = out, a.lse = lse, a.H = H, a.J = J, a.C = C, a.CV = CV, a.scale = scale;
  for_families(a, Sequences{starts, lengths, parents, sequences}, threads,
               [](const Family& family, Scratch& scratch) { family.forward(scratch); });
}

STROP_API void strop_attention_backward(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                                        int64_t v_stride, const int64_t* starts, const int64_t* lengths,
                                        const int64_t* parents, int64_t sequences, float scale, float* out, float* lse,
                                        const float* dout, float* dq, float* dk, float* dv, int64_t H, int64_t J, int64_t C,
                                        int64_t CV, int32_t threads) {
  Attention a{};
  a.q = q, a.k = k, a.v = v, a.q_stride = q_stride, a.k_stride = k_stride, a.v_stride = v_stride;
  a.out = out, a.lse = lse, a.dout = dout, a.dq = dq, a.dk = dk, a.dv = dv;
  a.H = H, a.J = J, a.C = C, a.CV = CV, a.scale = scale;
  for_families(a, Sequences{starts, lengths, parents, sequences}, threads,
               [](const Family& family, Scratch& scratch) { family.backward(scratch); });
}

STROP_API int64_t strop_paged_attention(const float* q, int64_t q_stride, const float* keys, const float* values,
                                        const int32_t* tables, int64_t requests, int64_t table_width, const int32_t* rows,
                                        const int32_t* contexts, int64_t T, int64_t pages, float scale, float* out,
                                        int64_t H, int64_t J, int64_t C, int64_t CV, int32_t threads) {
  Paged a{};
  a.q = q, a.q_stride = q_stride, a.keys = keys, a.values = values, a.tables = tables, a.table_width = table_width;
  a.rows = rows, a.contexts = contexts, a.T = T, a.pages = pages, a.scale = scale, a.out = out;
  a.H = H, a.J = J, a.C = C, a.CV = CV;
  return paged_attention(a, requests, threads);
}

STROP_API int64_t strop_paged_write(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                                    const int64_t* slots, int64_t T, int64_t pages, float* keys, float* values, int64_t J,
                                    int64_t C, int64_t CV) {
  return paged_write(k, k_stride, v, v_stride, slots, T, J, C, CV, pages, keys, values);
}

// Bytes in rows of `width` 64-bit words, a multiple of W; by_row [rows] is written, by_column [width] added to, `to` may be
// null.
STROP_API void strop_checksum(const char* from, char* to, int64_t rows, int64_t width, char* by_row, char* by_column) {
  if (to)
    checksum_rows<true>(from, to, rows, width, by_row, by_column);
  else
    checksum_rows<false>(from, to, rows, width, by_row, by_column);
}

STROP_API int32_t strop_has_tiles() { return has_tiles(); }

// c [M, N] (+)= a [M, K] @ b [K, N] in bfloat16, a in float32 where it is `wide`; strides of both axes, one of them 1.
// Returns 0, with nothing done, where `tiles` are asked for and cannot be had.
STROP_API int32_t strop_half_product(const void* a, int64_t a_row, int64_t a_k, int32_t wide, const void* b, int64_t b_k,
                                     int64_t b_column, float* c, int64_t c_stride, int32_t add, int64_t M, int64_t N,
                                     int64_t K, int32_t tiles, int32_t threads) {
  const Operand left{a, a_row, a_k}, right{b, b_column, b_k};
  return wide ? half_product<true>(left, right, M, N, K, c, c_stride, add != 0, tiles != 0, threads)
              : half_product<false>(left, right, M, N, K, c, c_stride, add != 0, tiles != 0, threads);
}
