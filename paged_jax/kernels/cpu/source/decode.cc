// Attention with a single query for each sequence. Keys and values are read in place in the pools.
//
// A part of the work is one KV head of one segment of a sequence. The result of a sequence does not depend on
// the other sequences, because the boundaries of segments do not depend on the batch, and the results of
// segments are merged in order.

#include "attention.h"

namespace {

constexpr int SEGMENT = 256;  // tokens, a multiple of TILE
constexpr int MAX_U = 512;

struct Segment {
  int sequence, begin, end;  // index of the sequence, and range of token positions
};

struct Decode {
  Attention attention;
  const float* q;  // [B, H, stride], scaled, in the order of `arrange<Type>`
  Segment* segments;
  float* partial;  // states of softmaxes: [segments, H, state_size]
  float *out, *lse;

  float* partial_of(int64_t segment, int64_t head) const {
    return partial + (segment * attention.H + head) * attention.state_size();
  }

  void run(int64_t part) {
    const Attention& its = attention;
    int64_t segment = part / its.K, head = part % its.K;
    auto [sequence, begin, end] = segments[segment];
    const int32_t* table = its.tables + sequence * its.M;
    for (int g = 0; g < its.G; g++) its.start(partial_of(segment, head * its.G + g), LOWEST, 0);
    Tile tile = its.find(table, head, begin, end);
    for (int t = 0; t < tile.count; t++) {  // later tiles are prefetched by `fold_rows`
      its.fetch(its.k + tile.rows[t] * its.lanes, its.D);
      if (!its.shares_values) its.fetch(its.v + tile.rows[t] * its.v_lanes, its.U);
    }
    for (int token = begin; token < end; token += TILE) {
      Tile next = its.find(table, head, token + TILE, end);
      Seen seen[ROWS];
      for (Seen& each : seen) each = {0, tile.count};
      for (int g = 0; g < its.G; g += ROWS) {
        const float* queries = q + (sequence * (int64_t)its.H + head * its.G + g) * its.stride;
        float* state = partial_of(segment, head * its.G + g);
        its.fold_rows(its.G - g, queries, tile, seen, g ? nullptr : &next, state);
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
    const Attention& its = decode.attention;
    // A sink is treated as a token without a value.
    float peak = its.has_sink(h) ? its.sinks[h] : LOWEST, total = its.has_sink(h) ? 1.0f : 0.0f;
    float sums[MAX_U] = {};
    for (int s = first_segment[b]; s < first_segment[b + 1]; s++) {
      const float* state = decode.partial_of(s, h);
      float old_peak = peak;
      peak = state[0] > peak ? state[0] : peak;
      float rescale = exponential(fill(old_peak - peak))[0];
      float weight = exponential(fill(state[0] - peak))[0];
      total = total * rescale + state[1] * weight;
      for (int d = 0; d < its.v_stride; d += LANES)
        store(sums + d, load<Floats>(sums + d) * rescale + load<Floats>(state + 2 + d) * weight);
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
  const Attention& its = decode.attention;
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
