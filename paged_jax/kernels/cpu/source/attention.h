// Code shared by decode and prefill: locations of tokens in the pools, and an online softmax (Milakov
// and Gimelshein, 2018), to which a tile of tokens is added at a time. A tile is a list of rows of the
// pools, so its tokens can be in any blocks.
#pragma once

#include "frame.h"
#include "products.h"

namespace {

using Type = ELEMENT;  // dtype of the pools, a compiler option
using Element = Type::Element;

constexpr int TILE = 32;         // tokens
constexpr int ROWS = 4;          // number of queries that are multiplied by a tile at a time
// Initial peak of a softmax. It is finite, because the difference of two infinities is NaN.
constexpr float LOWEST = -__FLT_MAX__;
constexpr float UNSEEN = -__builtin_inff();  // masked score; its weight is 0 for any peak

struct Tile {
  int count;
  int64_t rows[TILE];  // row of each token in the pools and in the scales
};

// Range of tokens in a tile that a query attends to.
struct Seen {
  int begin, end;
};

struct Attention {
  const Element *k, *v;
  const float *k_scale, *v_scale, *sinks;
  const int32_t *tables, *lengths;
  int64_t P, K, C, M, lanes, v_lanes, layer;
  int64_t block_step, head_step, token_step;  // distances between neighbours, in rows of the pools
  int H, G, D, stride, window;                // window and soft_cap are 0 if there is none
  int U, v_stride;                            // elements of a value and of an output
  bool shares_values;                         // values are the first elements of the keys
  float scale, soft_cap;

  // Reads the operands that decode and prefill have in common. Returns the index of the next operand.
  int read(XLA_FFI_CallFrame* frame) {
    const XLA_FFI_Buffer *q = argument(frame, 0), *keys = argument(frame, 1);
    const XLA_FFI_Buffer *values = argument(frame, 2), *table = argument(frame, 3);
    k = (const Element*)keys->data;
    v = (const Element*)values->data;
    tables = (const int32_t*)table->data;
    M = table->dims[1];
    lengths = (const int32_t*)argument(frame, 4)->data;
    layer = *(const int32_t*)argument(frame, 5)->data;
    int next = 6;
    if (attribute<int32_t>(frame, "has_scales")) {
      k_scale = (const float*)argument(frame, next++)->data;
      v_scale = (const float*)argument(frame, next++)->data;
    }
    if (attribute<int32_t>(frame, "has_sinks")) sinks = (const float*)argument(frame, next++)->data;
    shares_values = attribute<int32_t>(frame, "shares_values");  // one array, passed as both
    if (attribute<int32_t>(frame, "is_interleaved")) {
      // [P, C, 2 * K, D], or [P, C, 1, D] if values are shared, passed as keys and as values
      P = keys->dims[0], C = keys->dims[1], token_step = keys->dims[2], lanes = keys->dims[3];
      head_step = shares_values ? 1 : 2;
      K = token_step / head_step;
      if (!shares_values) v += lanes;
      block_step = C * token_step;
    } else {  // [L, P, K, C, lanes]
      P = keys->dims[1], K = keys->dims[2], C = keys->dims[3], lanes = keys->dims[4];
      token_step = 1, head_step = C;
      block_step = K * head_step;
    }
    v_lanes = values->dims[values->rank - 1];
    const XLA_FFI_Buffer* out = result(frame, 0);
    H = q->dims[q->rank - 2], D = q->dims[q->rank - 1], U = out->dims[out->rank - 1];
    G = H / K;
    stride = round_up(D, STEP), v_stride = round_up(U, STEP);
    scale = attribute<float>(frame, "scale");
    soft_cap = attribute<float>(frame, "soft_cap");
    window = attribute<int32_t>(frame, "sliding_window");
    return next;
  }

  // Number of floats in the state of a softmax: peak, total, and weighted sum of values.
  int state_size() const { return 2 + v_stride; }

  void start(float* state, float peak, float total) const {
    memset(state, 0, state_size() * sizeof *state);
    state[0] = peak;
    state[1] = total;
  }

  // Writes the weighted mean of the values and the log-sum-exp, which are 0 and -inf if no token was seen.
  void finish(float peak, float total, const float* sums, float* out, float* lse) const {
    restore<Type>(out, sums, U, total == 0 ? 0.0f : 1 / total);
    *lse = total == 0 ? -__builtin_inff() : peak + __builtin_logf(total);
  }

  bool has_sink(int h) const { return sinks && sinks[h] != -__builtin_inff(); }

  // Returns the tile that starts at position `token`. It is empty if `token` is not before `end`.
  Tile find(const int32_t* table, int64_t head, int token, int end) const {
    Tile tile = {};
    if (token < end) tile.count = end - token < TILE ? end - token : TILE;
    int64_t column = token / C, offset = token % C;
    for (int i = 0; i < tile.count; column++, offset = 0) {
      int64_t block = table[column];
      block = block < 0 ? 0 : block < P ? block : P - 1;  // an invalid id must not crash the process
      int64_t first = (layer * P + block) * block_step + head * head_step;
      for (; offset < C && i < tile.count; offset++) tile.rows[i++] = first + offset * token_step;
    }
    return tile;
  }

  // Adds a tile to the softmaxes of the next queries, at most ROWS of the `left` queries that are left.
  // Prefetches tile `next` at the same time, unless it is null.
  template <int ROWS_ = ROWS>
  void fold_rows(
      int left, const float* queries, const Tile& tile, const Seen* seen, const Tile* next,
      float* state) const {
    if (left >= ROWS_) return fold<ROWS_>(queries, tile, seen, next, state);
    if constexpr (ROWS_ > 1) fold_rows<ROWS_ - 1>(left, queries, tile, seen, next, state);
  }

  template <int ROWS_>
  void fold(
      const float* queries, const Tile& tile, const Seen* seen, const Tile* next, float* state) const {
    float weights[ROWS_][TILE], rescale[ROWS_];
    score<ROWS_>(queries, tile, next, weights);
    for (int h = 0; h < ROWS_; h++) {
      float* softmax = state + h * state_size();
      rescale[h] = weigh(weights[h], tile, seen[h], softmax[0], softmax[1]);
    }
    if (shares_values) next = nullptr;  // `score` has prefetched it
    for (int d = 0; d < v_stride; d += STEP) {
      if (U - d >= STEP)
        add_values<ROWS_, true>(weights, rescale, tile, next, d, state + 2 + d);
      else
        add_values<ROWS_, false>(weights, rescale, tile, next, d, state + 2 + d);
    }
  }

  // Prefetches numbers into the second-level cache. In the first level, pending lines would delay other
  // loads.
  static void fetch(const Element* numbers, int count) {
    for (int i = 0; i < count; i += 64 / sizeof(Element)) __builtin_prefetch(numbers + i, 0, 2);
  }

  // Computes the scores of a tile. After its last token, they are UNSEEN.
  template <int ROWS_>
  void score(
      const float* queries, const Tile& tile, const Tile* next, float scores[ROWS_][TILE]) const {
    const Element* keys[TILE];
    for (int t = 0; t < tile.count; t++) keys[t] = k + tile.rows[t] * lanes;
    constexpr int TOKENS = (LANES == 16 ? 16 : 8) / (ROWS_ == 3 ? 4 : ROWS_);
    int t = 0;
    for (; t + TOKENS <= tile.count; t += TOKENS) {
      for (int i = t; next && i < t + TOKENS; i++) fetch(k + next->rows[i] * lanes, D);
      score_tokens<ROWS_, TOKENS>(queries, keys, t, scores);
    }
    for (; t < tile.count; t++) score_tokens<ROWS_, 1>(queries, keys, t, scores);
    for (; t < TILE; t++)
      for (int h = 0; h < ROWS_; h++) scores[h][t] = UNSEEN;
  }

  template <int ROWS_, int TOKENS_>
  void score_tokens(
      const float* queries, const Element** keys, int t, float scores[ROWS_][TILE]) const {
    float sums[ROWS_][TOKENS_];
    const float* heads[ROWS_];
    for (int h = 0; h < ROWS_; h++) heads[h] = queries + h * stride;
    multiply<InFloats<Type>, TOKENS_, ROWS_>(keys + t, heads, D, sums);
    for (int h = 0; h < ROWS_; h++)
      for (int i = 0; i < TOKENS_; i++) scores[h][t + i] = sums[h][i];
  }

  // Replaces the scores of a tile by weights relative to the new peak. Masked tokens have weight 0. Returns
  // the factor that converts sums relative to the old peak to sums relative to the new peak.
  float weigh(float* weights, const Tile& tile, Seen seen, float& peak, float& total) const {
    if (seen.begin >= seen.end) {
      memset(weights, 0, TILE * sizeof *weights);
      return 1;
    }
    if (k_scale)
      for (int t = 0; t < tile.count; t++) weights[t] *= k_scale[tile.rows[t]];
    if (soft_cap != 0)
      for (int t = 0; t < TILE; t += LANES)
        store(weights + t, soft_cap * hyperbolic_tangent(load<Floats>(weights + t) / soft_cap));
    for (int t = 0; t < seen.begin; t++) weights[t] = UNSEEN;
    for (int t = seen.end; t < TILE; t++) weights[t] = UNSEEN;
    float old_peak = peak;
    Floats peaks = fill(peak);
    for (int t = 0; t < TILE; t += LANES) peaks = larger(peaks, load<Floats>(weights + t));
    peak = largest(peaks);
    Floats sums = {};
    for (int t = 0; t < TILE; t += LANES) {
      Floats weight = exponential(load<Floats>(weights + t) - peak);
      store(weights + t, weight);
      sums += weight;
    }
    float rescale = exponential(fill(old_peak - peak))[0];
    total = total * rescale + sum(sums);
    if (v_scale)
      for (int t = 0; t < tile.count; t++) weights[t] *= v_scale[tile.rows[t]];
    return rescale;
  }

  // Adds STEP elements of the weighted values of a tile to the sums of ROWS_ queries.
  template <int ROWS_, bool IS_WHOLE>
  void add_values(
      const float weights[ROWS_][TILE], const float* rescale, const Tile& tile, const Tile* next,
      int d, float* sums) const {
    Floats total[ROWS_][2];
#pragma GCC unroll 8
    for (int h = 0; h < ROWS_; h++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
        total[h][half] = load<Floats>(sums + h * state_size() + half * LANES) * rescale[h];
    for (int t = 0; t < tile.count; t++) {
      if (next) fetch(v + next->rows[t] * v_lanes + d, STEP);
      const Element* values = v + tile.rows[t] * v_lanes + d;
      Element last[STEP] = {};
      if (!IS_WHOLE) values = (Element*)memcpy(last, values, (U - d) * sizeof *values);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        Floats value = Type::half(values, half);
#pragma GCC unroll 8
        for (int h = 0; h < ROWS_; h++) add_product(total[h][half], value, fill(weights[h][t]));
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < ROWS_; h++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
        store(sums + h * state_size() + half * LANES, total[h][half]);
  }
};

}  // namespace
