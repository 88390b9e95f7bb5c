// The sampler's attention over a paged cache: keys [pages, J, C, PAGE], values [pages, J, PAGE, CV].
//
// A block is a run of tokens of one request; a task is one key-value head of a few blocks, so that pages which the
// requests of a group share stay in the cache between them. All scores of a block are computed, then softened, then mixed:
// every number is one chain in the order of positions, so a token's bits depend neither on its neighbours in the call nor
// on the number of threads.
#pragma once

#include "gemm.h"

namespace strop {

constexpr int64_t PAGE = 16;
constexpr int VP = PAGE / W;  // vectors across one page of keys
static_assert(PAGE % W == 0, "a page holds whole vectors");

struct Paged {
  const float *q, *keys, *values;
  float* out;
  const int32_t *tables, *rows, *contexts;
  int64_t q_stride, T, H, J, C, CV, pages, table_width;
  float scale;
};

constexpr int AHEAD = 2;  // pages of values fetched before they are used

struct Run {
  int64_t token, tokens, context;  // the longest context of the run
};

// scores[M][P * PAGE] = q . keys for P pages; the pages to come are fetched meanwhile, a line a channel.
template <int M, int P>
STROP_INLINE void page_scores(int64_t C, const float* q, int64_t ldq, const float* const* pages, const float* const* next,
                              float* scores, int64_t lds) {
  vf acc[M][P * VP] = {};
  for (int64_t c = 0; c < C; ++c) {
    vf row[P * VP];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(next[p] + c * PAGE);
#pragma GCC unroll 2
      for (int j = 0; j < VP; ++j) row[p * VP + j] = load(pages[p] + c * PAGE + j * W);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const vf left = all(q[i * ldq + c]);
#pragma GCC unroll 8
      for (int j = 0; j < P * VP; ++j) acc[i][j] += left * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < P * VP; ++j) store(scores + i * lds + j * W, acc[i][j]);
}

// out[M][N * W] = weights . values over the first `n` positions of the pages, whose rows are `width` apart.
template <int M, int N>
STROP_INLINE void page_mix(int64_t n, const float* weights, int64_t lds, const float* const* pages, int64_t first,
                           int64_t width, float* out) {
  vf acc[M][N] = {};
  for (int64_t at = 0; at < n; at += PAGE) {
    const float* row = pages[0] + first;
    const float* ahead = pages[AHEAD] + first;
    ++pages;
    const float* left = weights + at;
    const int64_t count = least(PAGE, n - at);
    for (int64_t k = 0; k < count; ++k, row += width, ahead += width, ++left) {
#pragma GCC unroll 8
      for (int j = 0; j < N; j += 64 / (4 * W)) __builtin_prefetch(ahead + j * W);
      vf right[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) right[j] = load(row + j * W);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const vf p = all(left[i * lds]);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[i][j] += p * right[j];
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(out + i * width + first + j * W, acc[i][j]);
}

// How many pages of keys, or vectors of value channels, M rows take at a time: enough chains to hide the latency of a
// multiply-add, few enough to stay in 16 registers.
constexpr int pages_at_once(int M) { return M * VP >= 8 ? 1 : M * VP >= 5 ? 2 : M * VP >= 4 ? 3 : 4; }
constexpr int vectors_at_once(int M) { return M == 1 ? 8 : M <= 3 ? 4 : 2; }

struct PagedScratch {
  Scratch floats;
  std::vector<const float*> keys, values;
};

class PagedRun {
 public:
  PagedRun(const Paged& a, const Run& run, int64_t head) : a_(a), run_(run), head_(head) {
    group_ = a.H / a.J;
    rows_ = run.tokens * group_;
    pages_ = (run.context + PAGE - 1) / PAGE;
    width_ = round_up(a.CV, PAGE);  // value rows are padded to whole vectors in the cache
    lds_ = pages_ * PAGE + NR;
  }

  void attend(PagedScratch& scratch) const {
    scratch.floats.reserve(rows_ * (a_.C + width_ + lds_ + 1) + 64);
    float* q = scratch.floats.take(rows_ * a_.C);
    float* out = scratch.floats.take(rows_ * width_);
    float* scores = scratch.floats.take(rows_ * lds_);
    float* total = scratch.floats.take(rows_);
    find_pages(scratch);
    for (int64_t m = 0; m < rows_; ++m) {
      const float* row = a_.q + (run_.token + m / group_) * a_.q_stride + (head_ * group_ + m % group_) * a_.C;
      for (int64_t c = 0; c < a_.C; ++c) q[m * a_.C + c] = row[c] * (a_.scale * LOG2E);
    }
    tiles([&](int64_t m, auto count) { score<count>(q + m * a_.C, scratch.keys.data(), scores + m * lds_); });
    for (int64_t m = 0; m < rows_; ++m) {
      float* row = scores + m * lds_;
      const int64_t n = context(m);
      total[m] = exponentials(row, n, row_max(row, n));
      for (int64_t c = n; c < run_.context; ++c) row[c] = 0.0f;
    }
    tiles([&](int64_t m, auto count) {
      int64_t n = 0;
      for (int64_t i = m; i < m + count; ++i) n = most(n, context(i));
      mix<count>(n, scores + m * lds_, scratch.values.data(), out + m * width_);
    });
    for (int64_t m = 0; m < rows_; ++m) {
      float* to = a_.out + ((run_.token + m / group_) * a_.H + head_ * group_ + m % group_) * a_.CV;
      const float inverse = 1.0f / total[m];
      for (int64_t c = 0; c < a_.CV; ++c) to[c] = out[m * width_ + c] * inverse;
    }
  }

 private:
  int64_t context(int64_t m) const { return a_.contexts[run_.token + m / group_]; }

  void find_pages(PagedScratch& scratch) const {
    const int32_t* table = a_.tables + a_.rows[run_.token] * a_.table_width;
    scratch.keys.clear();
    scratch.values.clear();
    for (int64_t p = 0; p < pages_; ++p) {
      scratch.keys.push_back(a_.keys + (table[p] * a_.J + head_) * a_.C * PAGE);
      scratch.values.push_back(a_.values + (table[p] * a_.J + head_) * PAGE * width_);
    }
    // what is fetched ahead: the first values after the last keys, and nothing new after the last values
    for (int k = 0; k < 4; ++k) scratch.keys.push_back(scratch.values[least(k, pages_ - 1)]);
    for (int k = 0; k < AHEAD; ++k) scratch.values.push_back(scratch.values.back());
  }

  // body(first row, rows) for register tiles of nearly equal height.
  template <typename Body>
  void tiles(const Body& body) const {
    const int64_t tiles = (rows_ + MR - 1) / MR;
    for (int64_t i = 0, m = 0; i < tiles; ++i) {
      const int64_t count = (rows_ - m) / (tiles - i);
      with_rows(count, [&](auto rows) { body(m, rows); });
      m += count;
    }
  }

  template <int M>
  void score(const float* q, const float* const* pages, float* scores) const {
    constexpr int P = pages_at_once(M);
    int64_t p = 0;
    for (; p + P <= pages_; p += P)
      page_scores<M, P>(a_.C, q, a_.C, pages + p, pages + p + P, scores + p * PAGE, lds_);
    if (P > 2 && p + 2 <= pages_) {
      page_scores<M, 2>(a_.C, q, a_.C, pages + p, pages + p + 2, scores + p * PAGE, lds_);
      p += 2;
    }
    if (P > 1 && p < pages_) page_scores<M, 1>(a_.C, q, a_.C, pages + p, pages + p + 1, scores + p * PAGE, lds_);
  }

  template <int M>
  void mix(int64_t n, const float* weights, const float* const* pages, float* out) const {
    constexpr int N = vectors_at_once(M);
    int64_t c = 0;
    const auto step = [&](auto count) {
      page_mix<M, count>(n, weights, lds_, pages, c, width_, out);
      c += count * W;
    };
    while (c + N * W <= width_) step(std::integral_constant<int, N>{});
    if (N > 4 && c + 4 * W <= width_) step(std::integral_constant<int, 4>{});
    if (N > 2 && c + 2 * W <= width_) step(std::integral_constant<int, 2>{});
    if (c + W <= width_) step(std::integral_constant<int, 1>{});
  }

  const Paged& a_;
  const Run& run_;
  int64_t head_, group_, rows_, pages_, width_, lds_;
};

constexpr int64_t RUN_ROWS = 48;         // query rows of one run at the most,
constexpr int64_t RUN_SCORES = 1 << 16;  // and their scores, so that they stay in the second-level cache
constexpr int64_t RUNS = 8;              // runs of one task

// Consecutive tokens of one request, cut where they would outgrow a run. Returns the first token whose request, context or
// pages cannot be, or -1.
STROP_INLINE int64_t find_runs(const Paged& a, int64_t requests, std::vector<Run>& runs) {
  const int64_t group = a.H / a.J;
  int64_t seen = 0;  // pages of the current request that have been looked at
  for (int64_t t = 0; t < a.T; ++t) {
    const int64_t context = a.contexts[t];
    const bool known = a.rows[t] >= 0 && a.rows[t] < requests;
    if (!known || context < 1 || context > a.table_width * PAGE) return t;
    const int32_t* table = a.tables + a.rows[t] * a.table_width;
    if (t == 0 || a.rows[t] != a.rows[t - 1]) seen = 0;
    for (; seen * PAGE < context; ++seen)
      if (table[seen] < 0 || table[seen] >= a.pages) return t;
    if (!runs.empty() && a.rows[runs.back().token] == a.rows[t]) {
      Run& run = runs.back();
      const int64_t longest = most(run.context, context), rows = (run.tokens + 1) * group;
      if (rows <= RUN_ROWS && rows * longest <= RUN_SCORES) {
        run = Run{run.token, run.tokens + 1, longest};
        continue;
      }
    }
    runs.push_back(Run{t, 1, context});
  }
  return -1;
}

STROP_INLINE int64_t paged_attention(const Paged& a, int64_t requests, int threads) {
  std::vector<Run> runs;
  const int64_t wrong = find_runs(a, requests, runs);
  if (wrong >= 0) return wrong;
  const int64_t count = static_cast<int64_t>(runs.size());
  for_tasks((count + RUNS - 1) / RUNS * a.J, threads, [&](int64_t task) {
    thread_local PagedScratch scratch;
    const int64_t first = task / a.J * RUNS;
    for (int64_t i = first; i < least(first + RUNS, count); ++i)
      PagedRun(a, runs[static_cast<size_t>(i)], task % a.J).attend(scratch);
  });
  return -1;
}

// The keys and values of T tokens go to their slots; returns the first token whose slot cannot be, or -1.
STROP_INLINE int64_t paged_write(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const int64_t* slots,
                                 int64_t T, int64_t J, int64_t C, int64_t CV, int64_t pages, float* keys, float* values) {
  const int64_t width = round_up(CV, PAGE);
  for (int64_t t = 0; t < T; ++t)
    if (slots[t] < 0 || slots[t] >= pages * PAGE) return t;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t page = slots[t] / PAGE, at = slots[t] % PAGE;
    for (int64_t j = 0; j < J; ++j) {
      float* key = keys + (page * J + j) * C * PAGE + at;
      for (int64_t c = 0; c < C; ++c) key[c * PAGE] = k[t * k_stride + j * C + c];
      std::memcpy(values + ((page * J + j) * PAGE + at) * width, v + t * v_stride + j * CV,
                  sizeof(float) * static_cast<size_t>(CV));
    }
  }
  return -1;
}

}  // namespace strop
