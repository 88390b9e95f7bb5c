// Norms, gated activation and rotary embedding: one pass over memory each, forward and backward.
#pragma once

#include "vector.h"

namespace strop {

// Rows of one task: fixed by the shape alone, because each task sums its own part of a weight's gradient.
STROP_INLINE int64_t rows_per_task(int64_t rows, int64_t width) {
  const int64_t by_size = most(1, 16384 / most(width, 1));
  return most(by_size, round_up(rows, 64) / 64);
}

// The weight's gradient: parts [tasks, D] summed in order.
STROP_INLINE void sum_parts(const float* parts, int64_t tasks, int64_t D, float* out) {
  std::memset(out, 0, sizeof(float) * static_cast<size_t>(D));
  for (int64_t task = 0; task < tasks; ++task)
    for (int64_t c = 0; c < D; ++c) out[c] += parts[task * D + c];
}

STROP_INLINE void rms_norm_row(const float* x, const float* residual, const float* weight, float* y, float* total,
                               float* rstd, int64_t D, float eps) {
  int64_t c = 0;
  if (residual) {
    for (; c + W <= D; c += W) store(total + c, load(x + c) + load(residual + c));
    for (; c < D; ++c) total[c] = x[c] + residual[c];
  }
  const float* from = residual ? total : x;
  float squares = sum_vectors(D, c, [&](int64_t at) { return load(from + at) * load(from + at); });
  for (; c < D; ++c) squares += from[c] * from[c];
  const float r = 1.0f / std::sqrt(squares / static_cast<float>(D) + eps);
  *rstd = r;
  for (c = 0; c + W <= D; c += W) store(y + c, load(from + c) * r * load(weight + c));
  for (; c < D; ++c) y[c] = from[c] * r * weight[c];
}

// dx = rstd * (g - xhat * mean(g * xhat)) with g = dy * weight and xhat = x * rstd, plus `more`; dw += dy * xhat.
STROP_INLINE void rms_norm_row_backward(const float* dy, const float* x, const float* weight, const float* more, float r,
                                        float* dx, float* dw, int64_t D) {
  int64_t c = 0;
  float dot = sum_vectors(D, c, [&](int64_t at) { return load(dy + at) * load(weight + at) * load(x + at); });
  for (; c < D; ++c) dot += dy[c] * weight[c] * x[c];
  const float along = dot * r * r / static_cast<float>(D);
  for (c = 0; c + W <= D; c += W) {
    const vf g = load(dy + c), v = load(x + c);
    if (dx) {
      vf d = (g * load(weight + c) - v * along) * r;
      if (more) d += load(more + c);
      store(dx + c, d);
    }
    if (dw) store(dw + c, load(dw + c) + g * (v * r));
  }
  for (; c < D; ++c) {
    if (dx) dx[c] = (dy[c] * weight[c] - x[c] * along) * r + (more ? more[c] : 0.0f);
    if (dw) dw[c] += dy[c] * (x[c] * r);
  }
}

STROP_INLINE vf sigmoid(vf g) { return 1.0f / (1.0f + exp_any(-g)); }

STROP_INLINE void swiglu_row(const float* gate, const float* up, float* y, int64_t F) {
  int64_t c = 0;
  for (; c + W <= F; c += W) {
    const vf g = load(gate + c);
    store(y + c, g / (1.0f + exp_any(-g)) * load(up + c));
  }
  if (const int n = static_cast<int>(F - c)) {
    const vf g = load_part(gate + c, n, 0.0f);
    store_part(y + c, g / (1.0f + exp_any(-g)) * load_part(up + c, n, 0.0f), n);
  }
}

STROP_INLINE void swiglu_pair(vf dy, vf g, vf u, vf& dgate, vf& dup) {
  const vf s = sigmoid(g);
  dup = dy * (g * s);
  dgate = dy * u * (s * (1.0f + g * (1.0f - s)));
}

STROP_INLINE void swiglu_row_backward(const float* dy, const float* gate, const float* up, float* dgate, float* dup,
                                      int64_t F) {
  int64_t c = 0;
  vf dg, du;
  for (; c + W <= F; c += W) {
    swiglu_pair(load(dy + c), load(gate + c), load(up + c), dg, du);
    store(dgate + c, dg);
    store(dup + c, du);
  }
  if (const int n = static_cast<int>(F - c)) {
    swiglu_pair(load_part(dy + c, n, 0.0f), load_part(gate + c, n, 0.0f), load_part(up + c, n, 0.0f), dg, du);
    store_part(dgate + c, dg, n);
    store_part(dup + c, du, n);
  }
}

// One head of C channels: y = rope(x * rstd * weight), or rope(x) without a weight. HALF is C / 2 when it is known at
// compile time, else 0.
template <int HALF>
STROP_INLINE void head_row(const float* x, const float* weight, const float* cos, const float* sin, float* y, float* rstd,
                           int64_t half, float eps) {
  if (HALF) half = HALF;
  float r = 1.0f;
  if (weight) {
    int64_t c = 0;
    float squares = sum_vectors(2 * half, c, [&](int64_t at) { return load(x + at) * load(x + at); });
    for (; c < 2 * half; ++c) squares += x[c] * x[c];
    r = 1.0f / std::sqrt(squares / static_cast<float>(2 * half) + eps);
    *rstd = r;
  }
  int64_t c = 0;
  for (; c + W <= half; c += W) {
    vf a = load(x + c), b = load(x + half + c);
    if (weight) {
      a = a * r * load(weight + c);
      b = b * r * load(weight + half + c);
    }
    store(y + c, a * load(cos + c) - b * load(sin + c));
    store(y + half + c, b * load(cos + half + c) + a * load(sin + half + c));
  }
  for (; c < half; ++c) {
    float a = x[c], b = x[half + c];
    if (weight) {
      a = a * r * weight[c];
      b = b * r * weight[half + c];
    }
    y[c] = a * cos[c] - b * sin[c];
    y[half + c] = b * cos[half + c] + a * sin[half + c];
  }
}

// The transpose of the rotation, then the norm's backward. `turned` is scratch [C].
template <int HALF>
STROP_INLINE void head_row_backward(const float* dy, const float* x, const float* weight, const float* cos,
                                    const float* sin, float r, float* dx, float* dw, float* turned, int64_t half) {
  if (HALF) half = HALF;
  float* back = weight ? turned : dx;
  int64_t c = 0;
  for (; c + W <= half; c += W) {
    const vf a = load(dy + c), b = load(dy + half + c);
    store(back + c, a * load(cos + c) + b * load(sin + half + c));
    store(back + half + c, b * load(cos + half + c) - a * load(sin + c));
  }
  for (; c < half; ++c) {
    const float a = dy[c], b = dy[half + c];
    back[c] = a * cos[c] + b * sin[half + c];
    back[half + c] = b * cos[half + c] - a * sin[c];
  }
  if (weight) rms_norm_row_backward(turned, x, weight, nullptr, r, dx, dw, 2 * half);
}

}  // namespace strop
