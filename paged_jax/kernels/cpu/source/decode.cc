// Attention of one query for each sequence, over keys and values where they lie in the pools.
//
// A part of the work is one KV head of one segment of a sequence. Segments are as long in any batch,
// and their results are merged in order, so that a sequence's result does not depend on others. Within
// a segment a tile of tokens after the other is folded into a running softmax (Milakov and
// Gimelshein, 2018); a tile is a list of addresses, and its tokens may lie in any blocks.

#include "frame.h"
#include "products.h"

namespace {

using Type = ELEMENT;  // of the pools: the compiler is told which
using Element = Type::Element;

constexpr int TILE = 32;      // tokens
constexpr int SEGMENT = 256;  // tokens, a multiple of TILE
constexpr int HEADS = 4;      // query heads that meet a tile together
constexpr int MAX_D = 512;
constexpr float LOWEST = -1e30f;  // finite, for differences

struct Tile {
  int count;
  int64_t rows[TILE];  // of its tokens: D numbers of a key or a value each, and a scale
};

struct Segment {
  int sequence, begin, end;  // its tokens
};

struct Decode {
  const float* q;  // [B, H, stride], scaled, in Type's order
  const Element *k, *v;
  const float *k_scale, *v_scale, *sinks;
  const int32_t *tables, *lengths;
  int64_t P, K, C, M, lanes, layer;
  int64_t block_step, head_step, token_step;  // rows from one to the next
  int H, G, D, stride;
  float soft_cap;  // 0 for none
  Segment* segments;
  float* partial;  // [segments, H, 2 + stride]: softmaxes in progress, peak, total, and sum of values
  float *out, *lse;

  float* partial_of(int64_t segment, int64_t head) const {
    return partial + (segment * H + head) * (2 + stride);
  }

  void run(int64_t part) {
    int64_t segment = part / K, head = part % K;
    const Segment& its = segments[segment];
    const int32_t* table = tables + its.sequence * M;
    for (int g = 0; g < G; g++) {
      float* state = partial_of(segment, head * G + g);
      memset(state, 0, (2 + stride) * sizeof *state);
      state[0] = LOWEST;
    }
    Tile tile = find(table, head, its.begin, its.end);
    for (int t = 0; t < tile.count; t++) {  // later ones are fetched while others are computed
      fetch(k + tile.rows[t] * lanes, D);
      fetch(v + tile.rows[t] * lanes, D);
    }
    for (int token = its.begin; token < its.end; token += TILE) {
      Tile next = find(table, head, token + TILE, its.end);
      for (int g = 0; g < G; g += HEADS) {
        const float* queries = q + (its.sequence * (int64_t)H + head * G + g) * stride;
        float* state = partial_of(segment, head * G + g);
        fold_heads<HEADS>(G - g, queries, tile, g ? tile : next, state);
      }
      tile = next;
    }
  }

  // The tile that begins with a token, empty at the end.
  Tile find(const int32_t* table, int64_t head, int token, int end) const {
    Tile tile = {};
    if (token < end) tile.count = end - token < TILE ? end - token : TILE;
    int64_t column = token / C, offset = token % C;
    for (int i = 0; i < tile.count; column++, offset = 0) {
      int64_t block = table[column];
      block = block < 0 ? 0 : block < P ? block : P - 1;  // what is no block must not end the process
      int64_t first = (layer * P + block) * block_step + head * head_step;
      for (; offset < C && i < tile.count; offset++) tile.rows[i++] = first + offset * token_step;
    }
    return tile;
  }

  template <int HEADS_>
  void fold_heads(
      int left, const float* queries, const Tile& tile, const Tile& next, float* state) const {
    if (left >= HEADS_) return fold<HEADS_>(queries, tile, next, state);
    if constexpr (HEADS_ > 1) fold_heads<HEADS_ - 1>(left, queries, tile, next, state);
  }

  // Folds a tile into the softmaxes of a few query heads, while the next one is fetched from memory.
  template <int HEADS_>
  void fold(const float* queries, const Tile& tile, const Tile& next, float* state) const {
    float weights[HEADS_][TILE], rescale[HEADS_];
    score<HEADS_>(queries, tile, next, weights);
    for (int h = 0; h < HEADS_; h++) {
      float* softmax = state + h * (2 + stride);
      rescale[h] = weigh(weights[h], tile, softmax[0], softmax[1]);
    }
    for (int d = 0; d < stride; d += STEP) {
      if (D - d >= STEP)
        add_values<HEADS_, true>(weights, rescale, tile, next, d, state + 2 + d);
      else
        add_values<HEADS_, false>(weights, rescale, tile, next, d, state + 2 + d);
    }
  }

  // Into the second cache: in the first one, what is on its way keeps others waiting.
  static void fetch(const Element* numbers, int count) {
    for (int i = 0; i < count; i += 64 / sizeof(Element)) __builtin_prefetch(numbers + i, 0, 2);
  }

  // Scores of a tile; LOWEST past its tokens.
  template <int HEADS_>
  void score(
      const float* queries, const Tile& tile, const Tile& next, float scores[HEADS_][TILE]) const {
    const Element* keys[TILE];
    for (int t = 0; t < tile.count; t++) keys[t] = k + tile.rows[t] * lanes;
    constexpr int TOKENS = (LANES == 16 ? 16 : 8) / (HEADS_ == 3 ? 4 : HEADS_);
    int t = 0;
    for (; t + TOKENS <= tile.count; t += TOKENS) {
      for (int i = t; i < t + TOKENS; i++) fetch(k + next.rows[i] * lanes, D);
      score_tokens<HEADS_, TOKENS>(queries, keys, t, scores);
    }
    for (; t < tile.count; t++) score_tokens<HEADS_, 1>(queries, keys, t, scores);
    for (; t < TILE; t++)
      for (int h = 0; h < HEADS_; h++) scores[h][t] = LOWEST;
  }

  template <int HEADS_, int TOKENS_>
  void score_tokens(
      const float* queries, const Element** keys, int t, float scores[HEADS_][TILE]) const {
    float sums[HEADS_][TOKENS_];
    const float* heads[HEADS_];
    for (int h = 0; h < HEADS_; h++) heads[h] = queries + h * stride;
    multiply<InFloats<Type>, TOKENS_, HEADS_>(keys + t, heads, D, sums);
    for (int h = 0; h < HEADS_; h++)
      for (int i = 0; i < TOKENS_; i++) scores[h][t + i] = sums[h][i];
  }

  // Turns the scores of a tile into weights of its values, relative to the new peak; returns what
  // weights relative to the old one are multiplied by.
  float weigh(float* weights, const Tile& tile, float& peak, float& total) const {
    int count = tile.count;
    if (k_scale)
      for (int t = 0; t < count; t++) weights[t] *= k_scale[tile.rows[t]];
    if (soft_cap != 0)
      for (int t = 0; t < TILE; t += LANES)
        store(weights + t, soft_cap * hyperbolic_tangent(load<Floats>(weights + t) / soft_cap));
    float old_peak = peak;
    for (int t = 0; t < count; t++) peak = weights[t] > peak ? weights[t] : peak;
    Floats sums = {};
    for (int t = 0; t < TILE; t += LANES) {
      Floats weight = exponential(load<Floats>(weights + t) - peak);
      store(weights + t, weight);
    }
    for (int t = count; t < TILE; t++) weights[t] = 0;
    for (int t = 0; t < TILE; t += LANES) sums += load<Floats>(weights + t);
    float rescale = exponential(fill(old_peak - peak))[0];
    total = total * rescale + sum(sums);
    if (v_scale)
      for (int t = 0; t < count; t++) weights[t] *= v_scale[tile.rows[t]];
    return rescale;
  }

  // Adds a step of the weighted values of a tile to the sums of a few heads.
  template <int HEADS_, bool IS_WHOLE>
  void add_values(
      const float weights[HEADS_][TILE], const float* rescale, const Tile& tile, const Tile& next,
      int d, float* sums) const {
    Floats total[HEADS_][2];
#pragma GCC unroll 8
    for (int h = 0; h < HEADS_; h++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
        total[h][half] = load<Floats>(sums + h * (2 + stride) + half * LANES) * rescale[h];
    for (int t = 0; t < tile.count; t++) {
      fetch(v + next.rows[t] * lanes + d, STEP);
      const Element* values = v + tile.rows[t] * lanes + d;
      Element last[STEP] = {};
      if (!IS_WHOLE) values = (Element*)memcpy(last, values, (D - d) * sizeof *values);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        Floats value = Type::half(values, half);
#pragma GCC unroll 8
        for (int h = 0; h < HEADS_; h++) add_product(total[h][half], value, fill(weights[h][t]));
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < HEADS_; h++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
        store(sums + h * (2 + stride) + half * LANES, total[h][half]);
  }
};

// Merges the segments of some sequences, in order (Dao et al., 2023, "Flash-Decoding").
struct Merge {
  static constexpr int SEQUENCES = 8;  // in a part

  const Decode& decode;
  const int* first_segment;  // [B + 1]
  int B;

  void run(int64_t part) const {
    int end = (part + 1) * SEQUENCES < B ? (part + 1) * SEQUENCES : B;
    for (int b = part * SEQUENCES; b < end; b++)
      for (int h = 0; h < decode.H; h++) merge(b, h);
  }

  void merge(int b, int h) const {
    // A sink is a token without a value.
    bool has_sink = decode.sinks && decode.sinks[h] != -__builtin_inff();
    float peak = has_sink ? decode.sinks[h] : LOWEST, total = has_sink ? 1.0f : 0.0f;
    float sums[MAX_D] = {};
    for (int s = first_segment[b]; s < first_segment[b + 1]; s++) {
      const float* state = decode.partial_of(s, h);
      float old_peak = peak;
      peak = state[0] > peak ? state[0] : peak;
      float rescale = exponential(fill(old_peak - peak))[0];
      float weight = exponential(fill(state[0] - peak))[0];
      total = total * rescale + state[1] * weight;
      for (int d = 0; d < decode.stride; d += LANES)
        store(sums + d, load<Floats>(sums + d) * rescale + load<Floats>(state + 2 + d) * weight);
    }
    int64_t row = (int64_t)b * decode.H + h;
    restore<Type>(decode.out + row * decode.D, sums, decode.D, total == 0 ? 0.0f : 1 / total);
    decode.lse[row] = total == 0 ? -__builtin_inff() : peak + __builtin_logf(total);
  }
};

// Where the segments of each sequence begin in the list of all: [B + 1].
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

// Segments end where SEGMENT divides positions, so that they depend on nothing but the sequence.
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
  const XLA_FFI_Buffer *q = argument(frame, 0), *k = argument(frame, 1), *v = argument(frame, 2);
  const XLA_FFI_Buffer *tables = argument(frame, 3), *lengths = argument(frame, 4);
  int next = 6;
  Decode decode = {};
  decode.k = (const Element*)k->data;
  decode.v = (const Element*)v->data;
  decode.tables = (const int32_t*)tables->data;
  decode.lengths = (const int32_t*)lengths->data;
  decode.layer = *(const int32_t*)argument(frame, 5)->data;
  if (attribute<int32_t>(frame, "has_scales")) {
    decode.k_scale = (const float*)argument(frame, next++)->data;
    decode.v_scale = (const float*)argument(frame, next++)->data;
  }
  if (attribute<int32_t>(frame, "has_sinks"))
    decode.sinks = (const float*)argument(frame, next++)->data;
  if (attribute<int32_t>(frame, "is_interleaved")) {  // [P, C, 2 * K, D], given as both
    decode.P = k->dims[0], decode.C = k->dims[1], decode.K = k->dims[2] / 2, decode.lanes = k->dims[3];
    decode.v += decode.lanes;
    decode.head_step = 2, decode.token_step = 2 * decode.K;
    decode.block_step = decode.C * decode.token_step;
  } else {  // [L, P, K, C, lanes]
    decode.P = k->dims[1], decode.K = k->dims[2], decode.C = k->dims[3], decode.lanes = k->dims[4];
    decode.token_step = 1, decode.head_step = decode.C;
    decode.block_step = decode.K * decode.head_step;
  }
  decode.M = tables->dims[1];
  int B = q->dims[0];
  decode.H = q->dims[1], decode.D = q->dims[2];
  decode.G = decode.H / decode.K;
  int stride = decode.stride = round_up(decode.D, STEP);
  decode.soft_cap = attribute<float>(frame, "soft_cap");
  decode.out = (float*)result(frame, 0)->data;
  decode.lse = (float*)result(frame, 1)->data;

  int window = attribute<int32_t>(frame, "sliding_window");
  int64_t num_heads = (int64_t)B * decode.H;
  int* first = count_segments(decode.lengths, B, window);
  int num_segments = first ? first[B] : 0;
  decode.segments = (Segment*)malloc((num_segments + 1) * sizeof(Segment));
  decode.partial = (float*)malloc((int64_t)num_segments * decode.H * (2 + stride) * 4 + 1);
  float* queries = (float*)malloc(num_heads * stride * sizeof(float));
  bool has_memory = first && decode.segments && decode.partial && queries;
  if (has_memory) {
    float scale = attribute<float>(frame, "scale");
    for (int64_t row = 0; row < num_heads; row++)
      arrange<Type>(
          queries + row * stride, (const float*)q->data + row * decode.D, decode.D, scale);
    decode.q = queries;
    list_segments(decode.segments, first, decode.lengths, B, window);
    in_parallel(frame, decode, num_segments * decode.K);
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
