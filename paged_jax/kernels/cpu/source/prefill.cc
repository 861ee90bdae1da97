// Causal attention with a chunk of queries for each sequence. Keys and values are read in place in the
// pools.
//
// A part of the work is some queries of a sequence, with all query heads of a KV head. While a tile of tokens
// is in the cache, it is multiplied by all these rows. Tiles end at multiples of TILE.

#include "attention.h"

namespace {

constexpr int ROWS_OF_PART = 64;  // approximate number of pairs of a query and a head in a part

struct Prefill {
  Attention attention;
  const float* q;  // [B, T, H, D]
  const int32_t* query_lengths;
  int64_t T;
  int tokens_of_part;
  float *out, *lse;  // [B, T, H, U], [B, T, H]
  bool is_short_of_memory;

  int64_t parts_of_sequence() const { return (T + tokens_of_part - 1) / tokens_of_part; }

  int64_t row_of(int64_t sequence, int64_t token, int64_t head) const {
    return (sequence * T + token) * attention.H + head;
  }

  void run(int64_t part) {
    int64_t head = part % attention.K, rest = part / attention.K;
    int64_t sequence = rest / parts_of_sequence();
    int64_t first = rest % parts_of_sequence() * tokens_of_part;
    int64_t last = first + tokens_of_part < T ? first + tokens_of_part : T;
    int64_t end = query_lengths[sequence] < last ? query_lengths[sequence] : last;
    if (first < end) attend(sequence, head, first, end);
    for (int64_t token = end > first ? end : first; token < last; token++)  // padding
      for (int g = 0; g < attention.G; g++) {
        int64_t row = row_of(sequence, token, head * attention.G + g);
        memset(out + row * attention.U, 0, attention.U * sizeof *out);
        lse[row] = -__builtin_inff();
      }
  }

  // Attends with queries `first` to `last` (exclusive) of a sequence.
  void attend(int64_t sequence, int64_t head, int64_t first, int64_t last) {
    const Attention& its = attention;
    int G = its.G, num_rows = (last - first) * G;
    auto* queries = (float*)malloc(num_rows * (int64_t)(its.stride + its.state_size()) * sizeof(float));
    if (!queries) return __atomic_store_n(&is_short_of_memory, true, __ATOMIC_RELAXED);
    float* states = queries + (int64_t)num_rows * its.stride;
    for (int row = 0; row < num_rows; row++) {
      int h = head * G + row % G;
      const float* from = q + row_of(sequence, first + row / G, h) * its.D;
      arrange<Type>(queries + (int64_t)row * its.stride, from, its.D, its.scale);
      // A sink is treated as a token without a value.
      float* state = states + (int64_t)row * its.state_size();
      its.has_sink(h) ? its.start(state, its.sinks[h], 1) : its.start(state, LOWEST, 0);
    }
    int start = its.lengths[sequence] - query_lengths[sequence] + first;  // position of the first query
    int room = its.M * its.C, end = start + (last - first) < room ? start + (last - first) : room;
    int begin = its.window && start >= its.window ? start - its.window + 1 : 0;
    const int32_t* table = its.tables + sequence * its.M;
    for (int token = begin; token < end; token = (token / TILE + 1) * TILE) {
      int tile_end = (token / TILE + 1) * TILE;
      Tile tile = its.find(table, head, token, tile_end < end ? tile_end : end);
      for (int row = 0; row < num_rows; row += ROWS) {
        Seen seen[ROWS];
        bool is_seen = false;
        for (int i = 0; i < ROWS && row + i < num_rows; i++) {
          seen[i] = seen_by(start + (row + i) / G, token, tile.count);
          is_seen |= seen[i].begin < seen[i].end;
        }
        if (is_seen)
          its.fold_rows(
              num_rows - row, queries + (int64_t)row * its.stride, tile, seen, nullptr,
              states + (int64_t)row * its.state_size());
      }
    }
    for (int row = 0; row < num_rows; row++) {
      const float* state = states + (int64_t)row * its.state_size();
      int64_t to = row_of(sequence, first + row / G, head * G + row % G);
      its.finish(state[0], state[1], state + 2, out + to * its.U, lse + to);
    }
    free(queries);
  }

  // Returns the range of tokens that a query attends to, in the tile that starts at `token`.
  Seen seen_by(int position, int token, int count) const {
    int begin = attention.window ? position - attention.window + 1 - token : 0;
    int end = position + 1 - token;
    return {begin > 0 ? begin : 0, end < count ? end : count};
  }
};

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer* q = argument(frame, 0);
  Prefill prefill = {};
  int next = prefill.attention.read(frame);
  prefill.q = (const float*)q->data;
  prefill.query_lengths = (const int32_t*)argument(frame, next)->data;
  prefill.out = (float*)result(frame, 0)->data;
  prefill.lse = (float*)result(frame, 1)->data;
  int64_t B = q->dims[0];
  prefill.T = q->dims[1];
  int tokens = ROWS_OF_PART / prefill.attention.G;
  prefill.tokens_of_part = tokens > 1 ? tokens : 1;
  in_parallel(frame, prefill, B * prefill.parts_of_sequence() * prefill.attention.K);
  if (!prefill.is_short_of_memory) return nullptr;
  return error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "prefill: no memory");
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_prefill(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
