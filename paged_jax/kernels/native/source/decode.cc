// Attention with a single query for each sequence. Keys and values are read in place in the pools.
//
// Sequences are divided into segments of SEGMENT tokens. A part of the work is one KV head of one segment.
// The result of a sequence does not depend on the other sequences, because the boundaries of segments do not
// depend on the batch, and the results of segments are merged in order.

#include "attention.h"

namespace {

constexpr int MAX_U = 512;
constexpr int ROWS = 4;  // number of queries that are multiplied by a tile at a time

// Adds tiles of tokens to the softmaxes of a few queries at a time. Elements of keys and values are in lanes.
struct Softmaxes : Attention {
  int stride, v_stride;  // D and U, rounded up to a multiple of STEP

  void read(XLA_FFI_CallFrame* frame) {
    Attention::read(frame);
    stride = round_up(D, STEP), v_stride = round_up(U, STEP);
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

  // Adds a tile to the softmaxes of up to ROWS queries. `left` is the number of queries that the tile has not
  // been added to yet. Prefetches tile `next` at the same time, unless it is null.
  template <int ROWS_ = ROWS>
  void fold_rows(
      int left, const float* queries, const Tile& tile, const Tile* next, float* state) const {
    if (left >= ROWS_) return fold<ROWS_>(queries, tile, next, state);
    if constexpr (ROWS_ > 1) fold_rows<ROWS_ - 1>(left, queries, tile, next, state);
  }

  template <int ROWS_>
  void fold(
      const float* queries, const Tile& tile, const Tile* next, float* state) const {
    float weights[ROWS_][TILE], rescale[ROWS_];
    score<ROWS_>(queries, tile, next, weights);
    for (int h = 0; h < ROWS_; h++) {
      float* softmax = state + h * state_size();
      rescale[h] = weigh(weights[h], tile, softmax[0], softmax[1]);
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

  // Computes the scores of a tile. After its last token, they are zeros.
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
      for (int h = 0; h < ROWS_; h++) scores[h][t] = 0;
  }

  template <int ROWS_, int TOKENS_>
  void score_tokens(
      const float* queries, const Element** keys, int t, float scores[ROWS_][TILE]) const {
    float sums[ROWS_][TOKENS_];
    const float* heads[ROWS_];
    for (int h = 0; h < ROWS_; h++) heads[h] = queries + h * stride;
    multiply<InFloats<Type>, TOKENS_, ROWS_>(keys + t, heads, D, sums);
    for (int h = 0; h < ROWS_; h++) memcpy(scores[h] + t, sums[h], sizeof sums[h]);
  }

  // Replaces the scores of a tile by weights relative to the new peak. After the last token, they are 0. Returns
  // the factor that converts sums relative to the old peak to sums relative to the new peak.
  float weigh(float* weights, const Tile& tile, float& peak, float& total) const {
    if (k_scale)
      for (int t = 0; t < tile.count; t++) weights[t] *= k_scale[tile.rows[t]];
    if (soft_cap != 0)
      for (int t = 0; t < TILE; t += LANES)
        store(weights + t, soft_cap * hyperbolic_tangent(load<Floats>(weights + t) / soft_cap));
    // Move the scores to their places in the tile, on which the order of summation depends.
    if (tile.from) memmove(weights + tile.from, weights, tile.count * sizeof *weights);
    for (int t = 0; t < tile.from; t++) weights[t] = UNSEEN;
    for (int t = tile.from + tile.count; t < TILE; t++) weights[t] = UNSEEN;
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
    if (tile.from) memmove(weights, weights + tile.from, tile.count * sizeof *weights);
    float rescale = exponential(fill(old_peak - peak))[0];
    total = scaled_sum(fill(total), fill(rescale), fill(sum(sums)))[0];
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

struct Segment {
  int sequence, begin, end;  // index of the sequence, and range of token positions
};

struct Decode {
  Softmaxes attention;
  const float* q;  // [B, H, stride], scaled, in the order of `arrange<Type>`
  Segment* segments;
  float* partial;  // states of softmaxes: [segments, H, state_size]
  float *out, *lse;

  float* partial_of(int64_t segment, int64_t head) const {
    return partial + (segment * attention.H + head) * attention.state_size();
  }

  void run(int64_t part) {
    const Softmaxes& its = attention;
    int64_t segment = part / its.K, head = part % its.K;
    auto [sequence, begin, end] = segments[segment];
    const int32_t* table = its.tables + sequence * its.M;
    for (int g = 0; g < its.G; g++) its.start(partial_of(segment, head * its.G + g), LOWEST, 0);
    Tile tile = its.find(table, head, begin, end);
    for (int t = 0; t < tile.count; t++) {  // later tiles are prefetched by `fold_rows`
      its.fetch(its.k + tile.rows[t] * its.lanes, its.D);
      if (!its.shares_values) its.fetch(its.v + tile.rows[t] * its.v_lanes, its.U);
    }
    for (int token = begin; tile.count > 0;) {
      token += tile.count;
      Tile next = its.find(table, head, token, end);
      for (int g = 0; g < its.G; g += ROWS) {
        const float* queries = q + (sequence * (int64_t)its.H + head * its.G + g) * its.stride;
        float* state = partial_of(segment, head * its.G + g);
        its.fold_rows(its.G - g, queries, tile, g ? nullptr : &next, state);
      }
      tile = next;
    }
  }
};

// Merges the segments of each sequence in order (Dao et al., 2023, "Flash-Decoding").
struct Merge {
  static constexpr int SEQUENCES = 8;  // per part of the work

  const Decode& decode;
  const int* first_segment;  // [B + 1]
  int B;

  void run(int64_t part) const {
    int end = (part + 1) * SEQUENCES < B ? (part + 1) * SEQUENCES : B;
    for (int b = part * SEQUENCES; b < end; b++)
      for (int h = 0; h < decode.attention.H; h++) merge(b, h);
  }

  void merge(int b, int h) const {
    const Softmaxes& its = decode.attention;
    // A sink is treated as a token without a value.
    float peak = its.has_sink(h) ? its.sinks[h] : LOWEST, total = its.has_sink(h) ? 1.0f : 0.0f;
    float sums[MAX_U] = {};
    for (int s = first_segment[b]; s < first_segment[b + 1]; s++) {
      const float* state = decode.partial_of(s, h);
      float old_peak = peak;
      peak = state[0] > peak ? state[0] : peak;
      Floats rescale = exponential(fill(old_peak - peak)), weight = exponential(fill(state[0] - peak));
      total = merged(fill(total), rescale, fill(state[1]), weight)[0];
      for (int d = 0; d < its.v_stride; d += LANES)
        store(sums + d, merged(load<Floats>(sums + d), rescale, load<Floats>(state + 2 + d), weight));
    }
    int64_t row = (int64_t)b * its.H + h;
    its.finish(peak, total, sums, decode.out + row * its.U, decode.lse + row);
  }
};

// Returns the index of the first segment of each sequence, [B + 1].
int* count_segments(const int32_t* lengths, int B, int window) {
  int* first = (int*)malloc((B + 1) * sizeof(int));
  if (!first) return nullptr;
  first[0] = 0;
  for (int b = 0; b < B; b++) {
    int begin = window && lengths[b] > window ? lengths[b] - window : 0;
    first[b + 1] = first[b] + (lengths[b] + SEGMENT - 1) / SEGMENT - begin / SEGMENT;
  }
  return first;
}

// Lists the segments. They end at multiples of SEGMENT, so they depend only on the sequence.
void list_segments(Segment* segments, const int* first, const int32_t* lengths, int B, int window) {
  for (int b = 0; b < B; b++) {
    int begin = window && lengths[b] > window ? lengths[b] - window : 0;
    for (int s = first[b]; s < first[b + 1]; s++) {
      int end = (begin / SEGMENT + 1) * SEGMENT;
      segments[s] = {b, begin, end < lengths[b] ? end : lengths[b]};
      begin = end;
    }
  }
}

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer* q = argument(frame, 0);
  Decode decode = {};
  decode.attention.read(frame);
  const Softmaxes& its = decode.attention;
  int B = q->dims[0];
  decode.out = (float*)result(frame, 0)->data;
  decode.lse = (float*)result(frame, 1)->data;

  int64_t num_heads = (int64_t)B * its.H;
  int* first = count_segments(its.lengths, B, its.window);
  int num_segments = first ? first[B] : 0;
  decode.segments = (Segment*)malloc((num_segments + 1) * sizeof(Segment));
  decode.partial = (float*)malloc((int64_t)num_segments * its.H * its.state_size() * 4 + 1);
  float* queries = (float*)malloc(num_heads * its.stride * sizeof(float));
  bool has_memory = first && decode.segments && decode.partial && queries;
  if (has_memory) {
    for (int64_t row = 0; row < num_heads; row++)
      arrange<Type>(
          queries + row * its.stride, (const float*)q->data + row * its.D, its.D, its.scale);
    decode.q = queries;
    list_segments(decode.segments, first, its.lengths, B, its.window);
    in_parallel(frame, decode, num_segments * its.K);
    Merge merge = {decode, first, B};
    in_parallel(frame, merge, (B + merge.SEQUENCES - 1) / merge.SEQUENCES);
  }
  free(queries);
  free(decode.partial);
  free(decode.segments);
  free(first);
  if (has_memory) return nullptr;
  return error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "decode: no memory");
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_decode(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
