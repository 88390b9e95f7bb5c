// Vectors of floats, exponentials, and loops over tasks on torch's own threads: what every kernel is written with.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifndef STROP_WIDTH
#ifdef __AVX512F__
#define STROP_WIDTH 16
#else
#define STROP_WIDTH 8
#endif
#endif

#define STROP_INLINE static inline __attribute__((always_inline))
#define STROP_ONCE static __attribute__((noinline))  // many register tiles inside: one copy is enough

namespace strop {

constexpr int W = STROP_WIDTH;  // floats in one vector
constexpr int NR = 2 * W;       // columns of one register tile and of one packed panel
constexpr int MR = 6;           // rows of one register tile: 6 x 2 accumulators, 2 columns and 1 broadcast fit 16 registers

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float vf_at __attribute__((vector_size(4 * W), aligned(4), may_alias));

STROP_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_at*>(p); }
STROP_INLINE void store(float* p, vf v) { *reinterpret_cast<vf_at*>(p) = v; }
STROP_INLINE vf all(float x) { return x - vf{}; }

// One fixed order of additions, so that a row's sum never depends on what surrounds the call.
STROP_INLINE float sum(vf v) {
  float a[W];
  std::memcpy(a, &v, sizeof a);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  return a[0];
}

// The sum of value(c) over c = 0, W, 2W, ... below D rounded down to whole vectors, in four chains that hide the latency of
// an addition; `c` ends where the vectors end.
template <typename Value>
STROP_INLINE float sum_vectors(int64_t D, int64_t& c, const Value& value) {
  vf a{}, b{}, d{}, e{};
  for (c = 0; c + 4 * W <= D; c += 4 * W) {
    a += value(c);
    b += value(c + W);
    d += value(c + 2 * W);
    e += value(c + 3 * W);
  }
  for (; c + W <= D; c += W) a += value(c);
  return sum((a + b) + (d + e));
}

STROP_INLINE float largest(vf v) {
  float a[W];
  std::memcpy(a, &v, sizeof a);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] = a[i + half] > a[i] ? a[i + half] : a[i];
  return a[0];
}

STROP_INLINE vi lanes() {
  vi v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

// The first n < W floats of p; the other lanes hold `rest`.
STROP_INLINE vf load_part(const float* p, int n, float rest) {
  vf v = all(rest);
  std::memcpy(&v, p, 4 * static_cast<size_t>(n));
  return v;
}

STROP_INLINE void store_part(float* p, vf v, int n) { std::memcpy(p, &v, 4 * static_cast<size_t>(n)); }

// Adding 1.5 * 2^23 rounds to an integer n, which then stands in the low bits; shifted into the exponent it scales by 2^n.
constexpr float ROUND = 12582912.0f;

// 2^x for x < 128: -inf and everything below -126 give 0, NaN stays NaN. Error at most 1.5 ulp.
STROP_INLINE vf exp2_small(vf x) {
  const vf t = x + ROUND;
  const vf r = x - (t - ROUND);
  vf p = 0.00015469731971234628f * r + 0.0013410000965944722f;
  p = p * r + 0.009618030782531324f;
  p = p * r + 0.05550297314199902f;
  p = p * r + 0.24022651084117055f;
  p = p * r + 0.6931472253950107f;
  p = p * r + 1.0f;
  const vi bits = reinterpret_cast<vi>(p) + (reinterpret_cast<vi>(t) << 23);
  return x < -126.0f ? vf{} : reinterpret_cast<vf>(bits);
}

// e^x for every x: 0 below the smallest normal result, inf above the largest, NaN stays NaN. Error at most 2 ulp.
STROP_INLINE vf exp_any(vf x) {
  const vf t = x * 1.44269504088896341f + ROUND;
  const vf n = t - ROUND;
  const vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, the first exact in 10 bits
  vf p = 0.0013948592780100456f * r + 0.008381118868159756f;
  p = p * r + 0.0416662405420771f;
  p = p * r + 0.16666325557443454f;
  p = p * r + 0.5000000080848797f;
  p = p * r + 1.0000000647221903f;
  p = p * r + 1.0f;
  const vi bits = reinterpret_cast<vi>(p) + (reinterpret_cast<vi>(t) << 23);
  const vf y = x < -87.3365447505531f ? vf{} : reinterpret_cast<vf>(bits);
  return x > 88.7228391116729996f ? all(INFINITY) : y;
}

constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2 = 0.69314718055994531f;

STROP_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
STROP_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
STROP_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// scores[0, n) become exp2(scores - max); zeros follow, as far as a register tile may read. Returns their sum.
STROP_INLINE float exponentials(float* scores, int64_t n, float top) {
  vf total{};
  int64_t c = 0;
  for (; c + W <= n; c += W) {
    const vf e = exp2_small(load(scores + c) - top);
    store(scores + c, e);
    total += e;
  }
  if (c < n) {
    const vf e = lanes() < static_cast<int32_t>(n - c) ? exp2_small(load(scores + c) - top) : vf{};
    store(scores + c, e);
    total += e;
    c += W;
  }
  for (const int64_t end = n + NR; c < end; c += W) store(scores + c, vf{});
  return sum(total);
}

STROP_INLINE float row_max(const float* scores, int64_t n) {
  vf top = all(-INFINITY);
  int64_t c = 0;
  for (; c + W <= n; c += W) {
    const vf s = load(scores + c);
    top = s > top ? s : top;
  }
  if (c < n) {
    const vf s = load(scores + c);
    top = ((lanes() < static_cast<int32_t>(n - c)) & (s > top)) ? s : top;
  }
  return largest(top);
}

// GOMP_parallel of the OpenMP runtime that torch itself runs on, set once when the library is loaded.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
extern Parallel parallel;

// body(task) for every task, on up to `threads` threads. Which thread takes which task is left to chance, so a task
// must neither read what another writes nor share its sums.
template <typename Body>
void for_tasks(int64_t tasks, int threads, const Body& body) {
  if (threads <= 1 || tasks <= 1 || parallel == nullptr) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  struct Shared {
    const Body& body;
    int64_t tasks;
    std::atomic<int64_t> next;
  } shared{body, tasks, {0}};
  parallel(
      [](void* data) {
        Shared& s = *static_cast<Shared*>(data);
        for (int64_t task = s.next++; task < s.tasks; task = s.next++) s.body(task);
      },
      &shared, static_cast<unsigned>(least(tasks, threads)), 0);
}

// Scratch of one thread: grows, is never cleared, starts on a cache line.
class Scratch {
 public:
  // Room for n floats; what an earlier call returned is gone after the next `reserve`.
  void reserve(int64_t n) {
    if (static_cast<int64_t>(room_.size()) < n + 16) room_.resize(static_cast<size_t>(n + 16));
    const uintptr_t at = reinterpret_cast<uintptr_t>(room_.data());
    next_ = room_.data() + ((64 - at % 64) % 64) / 4;
  }
  float* take(int64_t n) {
    float* taken = next_;
    next_ += round_up(n, 16);
    return taken;
  }

 private:
  std::vector<float> room_;
  float* next_ = nullptr;
};

}  // namespace strop
