// Causal attention within packed sequences, forward and backward.
//
// One task is a family (a sequence without a prefix, and the branches that name it as theirs) and one key-value head: it
// alone writes that family's gradients of keys and values. Inside, query rows (position-major, the heads of the group
// side by side) go in blocks against tiles of keys. The keys of a branch are its prefix's and then its own, numbered
// through, so a branch computes, to the bit, what its whole text would as one sequence.
#pragma once

#include "gemm.h"

namespace strop {

constexpr int64_t ROWS = 96;   // query rows of one block, at least one position
constexpr int64_t KEYS = 256;  // keys of one tile, a multiple of NR
constexpr int64_t LDS = KEYS + 2 * NR;  // floats between rows of scores: room for padding, and no power of two

struct Sequences {
  const int64_t *starts, *lengths, *parents;
  int64_t count;
};

struct Lineage {
  int64_t root;
  std::vector<int64_t> branches;
};

struct Attention {
  const float *q, *k, *v;  // [T, H, C], [T, J, C], [T, J, CV], heads dense, tokens `*_stride` apart
  int64_t q_stride, k_stride, v_stride;
  float *out, *lse;  // [T, H, CV] and [T, H], dense; `lse` is in bits and may be null in the forward pass
  const float* dout;  // [T, H, CV], dense
  float *dq, *dk, *dv;  // dense
  int64_t H, J, C, CV;
  float scale;
};

// A block of query rows: row m is head `m % group` of position `first + m / group` of a sequence with `prefix` keys before.
struct Block {
  int64_t token, first, rows, group, prefix;
  // How many keys row m sees.
  int64_t limit(int64_t m) const { return prefix + first + m / group + 1; }
};

// Scores of one block against keys [key, key + n), tile by tile, skipping what no row of a tile may see.
STROP_ONCE void block_products(const Block& block, const float* left, int64_t inner, int64_t ldl, const float* panels,
                                 int64_t key, int64_t n, float* scores) {
  for (int64_t at = 0; at < n; at += NR) {
    const float* panel = panels + (key + at) * inner;
    const int64_t blind = most(0, key + at - block.prefix - block.first) * block.group;  // rows that see none of them
    for (int64_t m = blind / MR * MR; m < block.rows; m += MR)
      with_rows(least(MR, block.rows - m), [&](auto count) {
        tile<count, 2, false>(inner, left + m * ldl, ldl, panel, NR, scores + m * LDS + at, LDS, false);
      });
  }
}

// out[m] (+)= weights[m] . right over the keys [key, key + n) that row m's register tile sees: right is packed by rows.
STROP_ONCE void block_mix(const Block& block, const float* weights, const float* right, int64_t capacity, int64_t key,
                            int64_t n, int64_t width, float* out, bool add) {
  for (int64_t c = 0; c < width; c += NR)
    for (int64_t m = 0; m < block.rows; m += MR) {
      const int64_t rows = least(MR, block.rows - m);
      const int64_t seen = least(n, block.limit(m + rows - 1) - key);
      if (seen <= 0) continue;
      with_rows(rows, [&](auto count) {
        tile<count, 2, false>(seen, weights + m * LDS, LDS, right + c * capacity + key * NR, NR, out + m * width + c,
                              width, add);
      });
    }
}

// grads[key] += sum over rows m of weights[m][key] * left[m], for keys [key, key + n).
STROP_ONCE void block_gather(const Block& block, const float* weights, const float* left, int64_t width, int64_t key,
                               int64_t n, float* grads) {
  for (int64_t c = 0; c < width; c += NR)
    for (int64_t at = 0; at < n; at += MR) {
      const int64_t blind = most(0, key + at - block.prefix - block.first) * block.group;
      if (blind >= block.rows) break;
      with_rows(least(MR, n - at), [&](auto count) {
        tile<count, 2, true>(block.rows - blind, weights + blind * LDS + at, LDS, left + blind * width + c, width,
                             grads + (key + at) * width + c, width, true);
      });
    }
}

// Row m's heads in memory -> dense rows [rows][width], times `factor`, padded with zeros.
STROP_INLINE void take_rows(const float* from, int64_t stride, int64_t C, const Block& block, float factor, float* to,
                            int64_t width) {
  for (int64_t m = 0; m < block.rows; ++m) {
    const float* row = from + (block.token + m / block.group) * stride + m % block.group * C;
    for (int64_t c = 0; c < C; ++c) to[m * width + c] = row[c] * factor;
    for (int64_t c = C; c < width; ++c) to[m * width + c] = 0.0f;
  }
}

STROP_INLINE void give_rows(const float* from, int64_t width, const Block& block, float factor, float* to, int64_t stride,
                            int64_t C) {
  for (int64_t m = 0; m < block.rows; ++m) {
    float* row = to + (block.token + m / block.group) * stride + m % block.group * C;
    for (int64_t c = 0; c < C; ++c) row[c] = from[m * width + c] * factor;
  }
}

class Family {
 public:
  Family(const Attention& a, const Sequences& all, const Lineage& line, int64_t head)
      : a_(a), all_(all), line_(line), root_(line.root), head_(head) {
    group_ = a.H / a.J;
    width_k_ = round_up(a.C, NR);
    width_v_ = round_up(a.CV, NR);
    block_rows_ = most(1, ROWS / group_) * group_;
    int64_t longest = 0;
    for (const int64_t s : line.branches) longest = most(longest, all.lengths[s]);
    capacity_ = round_up(all.lengths[root_] + longest, NR);
  }

  // body(sequence, its number of prefix keys): the root first, then its branches.
  template <typename Body>
  void each(const Body& body) const {
    body(root_, int64_t{0});
    for (const int64_t s : line_.branches) body(s, all_.lengths[root_]);
  }

  void forward(Scratch& scratch) const {
    scratch.reserve(capacity_ * (a_.C + width_v_) + block_rows_ * (a_.C + width_v_ + LDS + 2) + 128);
    float* keys = scratch.take(capacity_ * a_.C);
    float* values = scratch.take(capacity_ * width_v_);
    float* q = scratch.take(block_rows_ * a_.C);
    float* out = scratch.take(block_rows_ * width_v_);
    float* scores = scratch.take(block_rows_ * LDS);
    float* top = scratch.take(block_rows_);
    float* total = scratch.take(block_rows_);
    each([&](int64_t s, int64_t prefix) {
      const int64_t start = all_.starts[s], length = all_.lengths[s];
      pack_columns(key_row(start), a_.k_stride, length, a_.C, keys, prefix);
      pack_rows(value_row(start), a_.v_stride, length, a_.CV, values, prefix, capacity_);
      blocks(start, length, prefix, [&](const Block& block) {
        take_rows(a_.q + head_ * group_ * a_.C, a_.q_stride, a_.C, block, a_.scale * LOG2E, q, a_.C);
        const int64_t end = block.limit(block.rows - 1);
        for (int64_t key = 0; key < end; key += KEYS) {
          const int64_t n = least(KEYS, end - key);
          block_products(block, q, a_.C, a_.C, keys, key, n, scores);
          for (int64_t m = 0; m < block.rows; ++m)
            soften(scores + m * LDS, most(0, least(n, block.limit(m) - key)), key == 0, top[m], total[m],
                   out + m * width_v_);
          block_mix(block, scores, values, capacity_, key, n, width_v_, out, key > 0);
        }
        finish(block, out, top, total);
      });
    });
  }

  void backward(Scratch& scratch) const {
    scratch.reserve(capacity_ * (a_.C + a_.CV + 2 * width_k_ + width_v_) +
                    block_rows_ * (2 * width_k_ + width_v_ + 2 * LDS + 2) + 192);
    float* keys = scratch.take(capacity_ * a_.C);
    float* values = scratch.take(capacity_ * a_.CV);
    float* key_rows = scratch.take(capacity_ * width_k_);
    float* dkeys = scratch.take(capacity_ * width_k_);
    float* dvalues = scratch.take(capacity_ * width_v_);
    float* q = scratch.take(block_rows_ * width_k_);
    float* dq = scratch.take(block_rows_ * width_k_);
    float* dout = scratch.take(block_rows_ * width_v_);
    float* weights = scratch.take(block_rows_ * LDS);
    float* dscores = scratch.take(block_rows_ * LDS);
    float* lse = scratch.take(block_rows_);
    float* along = scratch.take(block_rows_);
    each([&](int64_t s, int64_t prefix) {
      const int64_t start = all_.starts[s], length = all_.lengths[s];
      pack_columns(key_row(start), a_.k_stride, length, a_.C, keys, prefix);
      pack_columns(value_row(start), a_.v_stride, length, a_.CV, values, prefix);
      pack_rows(key_row(start), a_.k_stride, length, a_.C, key_rows, prefix, capacity_);
      std::memset(dkeys + prefix * width_k_, 0, sizeof(float) * static_cast<size_t>(length * width_k_));
      std::memset(dvalues + prefix * width_v_, 0, sizeof(float) * static_cast<size_t>(length * width_v_));
      blocks(start, length, prefix, [&](const Block& block) {
        take_rows(a_.q + head_ * group_ * a_.C, a_.q_stride, a_.C, block, a_.scale * LOG2E, q, width_k_);
        take_rows(a_.dout + head_ * group_ * a_.CV, a_.H * a_.CV, a_.CV, block, 1.0f, dout, width_v_);
        recall(block, lse, along);
        const int64_t end = block.limit(block.rows - 1);
        for (int64_t key = 0; key < end; key += KEYS) {
          const int64_t n = least(KEYS, end - key);
          block_products(block, q, a_.C, width_k_, keys, key, n, weights);
          block_products(block, dout, a_.CV, width_v_, values, key, n, dscores);
          for (int64_t m = 0; m < block.rows; ++m)
            soften_backward(weights + m * LDS, dscores + m * LDS, most(0, least(n, block.limit(m) - key)), lse[m], along[m]);
          block_gather(block, weights, dout, width_v_, key, n, dvalues);
          block_gather(block, dscores, q, width_k_, key, n, dkeys);
          block_mix(block, dscores, key_rows, capacity_, key, n, width_k_, dq, key > 0);
        }
        give_rows(dq, width_k_, block, a_.scale, a_.dq + head_ * group_ * a_.C, a_.H * a_.C, a_.C);
      });
      if (s != root_) give_keys(s, prefix, dkeys, dvalues);
    });
    give_keys(root_, 0, dkeys, dvalues);
  }

 private:
  const float* key_row(int64_t token) const { return a_.k + token * a_.k_stride + head_ * a_.C; }
  const float* value_row(int64_t token) const { return a_.v + token * a_.v_stride + head_ * a_.CV; }

  template <typename Body>
  void blocks(int64_t start, int64_t length, int64_t prefix, const Body& body) const {
    const int64_t step = block_rows_ / group_;
    for (int64_t first = 0; first < length; first += step)
      body(Block{start + first, first, least(step, length - first) * group_, group_, prefix});
  }

  // One row of scores [0, n) becomes weights relative to the row's maximum so far; what was summed before is scaled to it.
  void soften(float* scores, int64_t n, bool fresh, float& top, float& total, float* out) const {
    float peak = row_max(scores, n);
    if (!fresh) peak = top > peak ? top : peak;
    const float fresh_total = exponentials(scores, n, peak);
    if (fresh) {
      total = fresh_total;
    } else if (n > 0) {
      const float shrink = peak == top ? 1.0f : std::exp2(top - peak);
      total = total * shrink + fresh_total;
      if (shrink != 1.0f)
        for (int64_t c = 0; c < width_v_; ++c) out[c] *= shrink;
    }
    top = peak;
  }

  // weights hold scores and dscores hold dout . v; they become P and P * (dscores - along).
  static void soften_backward(float* weights, float* dscores, int64_t n, float lse, float along) {
    int64_t c = 0;
    for (; c + W <= n; c += W) {
      const vf p = exp2_small(load(weights + c) - lse);
      store(weights + c, p);
      store(dscores + c, p * (load(dscores + c) - along));
    }
    if (c < n) {
      const vi seen = lanes() < static_cast<int32_t>(n - c);
      const vf p = exp2_small(load(weights + c) - lse);
      const vf d = p * (load(dscores + c) - along);
      store(weights + c, seen ? p : vf{});
      store(dscores + c, seen ? d : vf{});
      c += W;
    }
    for (const int64_t end = n + NR; c < end; c += W) {
      store(weights + c, vf{});
      store(dscores + c, vf{});
    }
  }

  void finish(const Block& block, const float* out, const float* top, const float* total) const {
    for (int64_t m = 0; m < block.rows; ++m) {
      const int64_t token = block.token + m / group_, head = head_ * group_ + m % group_;
      float* to = a_.out + (token * a_.H + head) * a_.CV;
      const float inverse = 1.0f / total[m];
      for (int64_t c = 0; c < a_.CV; ++c) to[c] = out[m * width_v_ + c] * inverse;
      if (a_.lse) a_.lse[token * a_.H + head] = top[m] + std::log2(total[m]);
    }
  }

  // Each row's log-sum-exp, and sum(dout * out): what the softmax's backward subtracts.
  void recall(const Block& block, float* lse, float* along) const {
    for (int64_t m = 0; m < block.rows; ++m) {
      const int64_t row = (block.token + m / group_) * a_.H + head_ * group_ + m % group_;
      const float *o = a_.out + row * a_.CV, *d = a_.dout + row * a_.CV;
      vf dots{};
      float tail = 0.0f;
      int64_t c = 0;
      for (; c + W <= a_.CV; c += W) dots += load(o + c) * load(d + c);
      for (; c < a_.CV; ++c) tail += o[c] * d[c];
      along[m] = sum(dots) + tail;
      lse[m] = a_.lse[row];
    }
  }

  void give_keys(int64_t s, int64_t prefix, const float* dkeys, const float* dvalues) const {
    for (int64_t i = 0; i < all_.lengths[s]; ++i) {
      const int64_t row = (all_.starts[s] + i) * a_.J + head_;
      const float *dk = dkeys + (prefix + i) * width_k_, *dv = dvalues + (prefix + i) * width_v_;
      for (int64_t c = 0; c < a_.C; ++c) a_.dk[row * a_.C + c] = dk[c] * LN2;  // the queries carried log2(e)
      for (int64_t c = 0; c < a_.CV; ++c) a_.dv[row * a_.CV + c] = dv[c];
    }
  }

  const Attention& a_;
  const Sequences& all_;
  const Lineage& line_;
  int64_t root_, head_, group_, width_k_, width_v_, block_rows_, capacity_;
};

template <typename Body>
void for_families(const Attention& a, const Sequences& all, int threads, const Body& body) {
  std::vector<Lineage> lines;
  std::vector<size_t> line_of(static_cast<size_t>(all.count));
  for (int64_t s = 0; s < all.count; ++s) {
    if (all.parents[s] < 0) {
      line_of[static_cast<size_t>(s)] = lines.size();
      lines.push_back(Lineage{s, {}});
    } else {
      lines[line_of[static_cast<size_t>(all.parents[s])]].branches.push_back(s);
    }
  }
  for_tasks(static_cast<int64_t>(lines.size()) * a.J, threads, [&](int64_t task) {
    thread_local Scratch scratch;
    body(Family(a, all, lines[static_cast<size_t>(task / a.J)], task % a.J), scratch);
  });
}

}  // namespace strop
