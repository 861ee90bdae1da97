// Causal attention with a chunk of queries for each sequence. Keys and values are read in place in the
// pools.
//
// A row is a query of one head. A part of the work is some rows of a sequence that have the same KV head.
// Each lane of a vector belongs to one row, so a group of LANES rows is multiplied by a tile of tokens like
// this:
//
//   queries [cells of D][LANES]     x keys [TILE][cells of D]   = scores [TILE][LANES]
//   weights [cells of TILE][LANES]  x values [cells of TILE][U] = sums [U][LANES]
//
// A cell is a float32 number, or two bfloat16 numbers that the processor multiplies and adds at a time: two
// elements of a key, or the same element of the values of two tokens. The keys and values of a tile are
// copied to scratch memory as cells, once for all groups of the part.
//
// A caller may divide a chunk into several sequences that have the same block table and consecutive
// positions. They are joined again, so that parts are large.
//
// Tiles start at multiples of TILE, and no operation mixes lanes. The result of a query therefore does not
// depend on the other queries of its chunk.
//
// If the kernel is exact, it also sums in the order of `decode.cc`, so that a query has the same result in both
// kernels: scores and totals in LANES partial sums, and each segment of tokens in a softmax of its own.

#include "attention.h"
#include "codes.h"

namespace {

constexpr int ROWS_OF_PART = 64;  // approximate number of rows in a part
constexpr int BLOCK = 8;          // number of vectors that are summed in registers at a time

template <class>
constexpr bool FITS_BFLOAT16 = false;  // whether bfloat16 represents all elements of the pools
template <>
constexpr bool FITS_BFLOAT16<Bfloat16> = true;
template <>
constexpr bool FITS_BFLOAT16<Int8> = true;
template <>
constexpr bool FITS_BFLOAT16<Float8> = true;

// Returns the bits of LANES elements of a pool as float32 numbers, in their order in memory.
inline Ints float_bits(const Element* from) {
  if constexpr (Type::IN_ORDER)
    return (Ints)Type::half(from, 0);
  else
    return widen(from) << 16;  // bfloat16
}

// Calls store(i, bits) for each vector of `count` elements of a pool. Zeros follow the last element.
template <class Store>
inline void for_each_vector(const Element* from, int count, Store store) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(i, float_bits(from + i));
  if (i == count) return;
  Element last[LANES] = {};
  memcpy(last, from + i, (count - i) * sizeof *last);
  store(i, float_bits(last));
}

// Puts two bfloat16 numbers, given as float32 numbers, into each lane.
inline Ints pair(Ints first, Ints second) {
  return (first >> 16 & 0xffff) | (second & (int32_t)0xffff0000);
}

// Queries `first` to `last` (exclusive) of a chunk. Queries from `end` on are padding. The chunk starts with
// the first query of `sequence`.
struct Part {
  int64_t sequence, first, end, last;
};

template <class Cells, bool IS_EXACT>
struct Prefill : Attention {
  using Cell = typename Cells::Cell;
  using Vector = typename Cells::Vector;
  static constexpr int INPUTS = Cells::INPUTS;  // numbers in a cell

  const float* q;  // [B, T, H, D]
  const int32_t* query_lengths;
  int64_t T;
  Part* parts;
  float *out, *lse;  // [B, T, H, U], [B, T, H]
  bool is_short_of_memory;

  // Softmaxes of a group of rows.
  struct Group {
    Ints positions;  // positions of the queries; -1 for lanes without a row
    Floats peaks, totals;
    Floats merged_peaks, merged_totals;  // of all earlier segments, if the kernel is exact
  };

  // Scratch memory of a part.
  struct Scratch {
    Group* groups;
    Cell* queries;                  // of all groups
    Cell *keys, *values;            // of a tile
    Floats *sums, *merged_sums;     // [groups, U]
  };

  // Numbers of cells of a key and of a value, and of vectors of sums, with padding. The padding of a value may
  // be the beginning of the next value, because the sums of padding are not used.
  int key_cells() const { return round_up(D, LANES * INPUTS) / INPUTS; }
  int value_stride() const { return has_common_tile() ? key_cells() : round_up(U, LANES); }
  int sum_vectors() const { return round_up(U, BLOCK); }

  // Whether a tile of keys is also the tile of values.
  bool has_common_tile() const { return shares_values && INPUTS == 1; }

  int64_t row_of(int64_t sequence, int64_t token, int64_t head) const {
    return (sequence * T + token) * H + head;
  }

  // Returns whether the queries of a sequence continue the chunk of the sequence before.
  bool continues(int64_t sequence) const {
    const int32_t *count = query_lengths + sequence, *length = lengths + sequence;
    const int32_t* table = tables + sequence * M;
    return sequence > 0 && count[-1] == T && count[0] > 0 && length[0] == length[-1] + count[0] &&
           !memcmp(table - M, table, M * sizeof *table);
  }

  // Lists the parts of all chunks. Returns their number, or -1 if there is no memory.
  int64_t list_parts(int64_t B) {
    int64_t num_tokens = ROWS_OF_PART / G > 1 ? ROWS_OF_PART / G : 1, num_parts = 0;
    parts = (Part*)malloc(B * ((T + num_tokens - 1) / num_tokens) * sizeof *parts + 1);
    if (!parts) return -1;
    for (int64_t sequence = 0, next; sequence < B; sequence = next) {
      int64_t num_queries = query_lengths[sequence];
      for (next = sequence + 1; next < B && continues(next); next++) num_queries += query_lengths[next];
      int64_t size = (next - sequence) * T;
      for (int64_t first = 0; first < size; first += num_tokens) {
        int64_t last = smaller(first + num_tokens, size);
        int64_t end = smaller(num_queries, last);
        parts[num_parts++] = {sequence, first, end > first ? end : first, last};
      }
    }
    return num_parts;
  }

  void run(int64_t index) {
    int64_t head = index % K;
    auto [sequence, first, end, last] = parts[index / K];
    if (first < end) attend(sequence, head, first, end);
    for (int64_t token = end; token < last; token++)
      for (int g = 0; g < G; g++) {
        int64_t row = row_of(sequence, token, head * G + g);
        memset(out + row * U, 0, U * sizeof *out);
        lse[row] = -__builtin_inff();
      }
  }

  // Attends with queries `first` to `last` (exclusive) of the chunk that starts with `sequence`.
  void attend(int64_t sequence, int64_t head, int64_t first, int64_t last) {
    int num_rows = (last - first) * G, num_groups = (num_rows + LANES - 1) / LANES;
    int64_t sums_size = (IS_EXACT ? 2 : 1) * sum_vectors() * sizeof(Floats);
    int64_t group_size = sizeof(Group) + key_cells() * sizeof(Vector) + sums_size;
    int64_t values_size = has_common_tile() ? 0 : TILE / INPUTS * value_stride() * sizeof(Cell);
    int64_t keys_size = TILE * key_cells() * sizeof(Cell);
    void* memory = aligned_alloc(64, round_up(num_groups * group_size + keys_size + values_size, 64) + 64);
    if (!memory) return __atomic_store_n(&is_short_of_memory, true, __ATOMIC_RELAXED);
    Scratch its = {};
    its.groups = (Group*)memory;
    its.sums = (Floats*)(its.groups + num_groups);
    its.merged_sums = IS_EXACT ? its.sums + num_groups * sum_vectors() : its.sums;
    its.queries = (Cell*)(its.merged_sums + num_groups * sum_vectors());
    its.keys = its.queries + num_groups * key_cells() * LANES;
    its.values = has_common_tile() ? its.keys : its.keys + TILE * key_cells();

    int start = lengths[sequence] - query_lengths[sequence] + first;  // position of the first query
    start_groups(its, row_of(sequence, first, head * G), head, start, num_rows);
    int room = M * C, end = start + (last - first) < room ? start + (last - first) : room;
    int begin = window && start >= window ? start - window + 1 : 0;
    const int32_t* table = tables + sequence * M;
    for (int base = begin / TILE * TILE; base < end; base += TILE) {
      int from = begin > base ? begin - base : 0, count = end - base < TILE ? end - base : TILE;
      Tile tile = find(table, head, base + from, base + count);
      copy_tile(its, tile, from);
      for (int group = 0; group < num_groups; group++) {
        int oldest = start + group * LANES / G;
        int newest = start + (smaller(num_rows, (group + 1) * LANES) - 1) / G;
        if (newest < base || (window && base + TILE - 1 <= oldest - window)) continue;
        fold(its, group, tile, from, base);
      }
      if (IS_EXACT && ((base + TILE) % SEGMENT == 0 || base + TILE >= end)) merge_segment(its, num_groups);
    }
    finish(its, row_of(sequence, first, head * G), num_rows);
    free(memory);
  }

  // Copies the queries to scratch memory and starts the softmaxes. `row` is the first row of the part.
  void start_groups(Scratch& its, int64_t row, int64_t head, int start, int num_rows) const {
    int num_groups = (num_rows + LANES - 1) / LANES;
    memset(its.queries, 0, num_groups * key_cells() * LANES * sizeof(Cell));
    memset(its.sums, 0, num_groups * sum_vectors() * sizeof(Floats));
    memset(its.merged_sums, 0, num_groups * sum_vectors() * sizeof(Floats));
    for (int i = 0; i < num_groups * LANES; i++) {
      Group& group = its.groups[i / LANES];
      int lane = i % LANES, g = i % G;
      // A sink is treated as a token without a value.
      bool is_sink = i < num_rows && has_sink(head * G + g);
      group.positions[lane] = i < num_rows ? start + i / G : -1;
      group.peaks[lane] = is_sink ? sinks[head * G + g] : LOWEST;
      group.totals[lane] = is_sink ? 1 : 0;
      if (IS_EXACT) {  // the first segment starts without the sink
        group.merged_peaks[lane] = group.peaks[lane], group.merged_totals[lane] = group.totals[lane];
        group.peaks[lane] = LOWEST, group.totals[lane] = 0;
      }
      if (i >= num_rows) continue;
      const float* from = q + (row + (int64_t)(i / G) * H + g) * D;
      Cell* to = its.queries + i / LANES * key_cells() * LANES + lane;
      for (int d = 0; d < D; d += INPUTS, to += LANES) {
        float numbers[2] = {from[d], d + 1 < D ? from[d + 1] : 0};
        if (IS_EXACT) numbers[0] *= scale;
        uint32_t bits[2];
        memcpy(bits, numbers, sizeof bits);
        // If cells have two numbers, the queries are bfloat16 numbers, so their lower bits are 0.
        uint32_t cell = INPUTS == 1 ? bits[0] : bits[0] >> 16 | (bits[1] & 0xffff0000);
        memcpy(to, &cell, sizeof cell);
      }
    }
  }

  // Copies a tile to scratch memory, from place `from` on. Places without a token become zeros.
  void copy_tile(Scratch& its, const Tile& tile, int from) const {
    int64_t stride = value_stride();
    if (tile.count < TILE) {
      memset(its.keys, 0, TILE * key_cells() * sizeof(Cell));
      if (!has_common_tile()) memset(its.values, 0, TILE / INPUTS * stride * sizeof(Cell));
    }
    for (int i = 0; i < tile.count; i++) {
      Cell* to = its.keys + (from + i) * key_cells();
      for_each_vector(k + tile.rows[i] * lanes, D, [to](int d, Ints bits) { write(to, d, bits); });
    }
    if (has_common_tile()) return;
    for (int cell = from / INPUTS; cell * INPUTS < from + tile.count; cell++) {
      Cell* to = its.values + cell * stride;
      for (int which = 0; which < INPUTS; which++) {
        int i = cell * INPUTS + which - from;
        if (i < 0 || i >= tile.count) continue;
        for_each_vector(v + tile.rows[i] * v_lanes, U, [to, which](int d, Ints bits) {
          Ints before = which ? load<Ints>(to + d) << 16 : Ints{};
          Ints cells = INPUTS == 1 ? bits : which ? pair(before, bits) : pair(bits, Ints{});
          memcpy(to + d, &cells, sizeof cells);
        });
      }
    }
  }

  // Writes LANES numbers of a key, which start at element d, to its cells.
  static void write(Cell* cells, int d, Ints bits) {
    if constexpr (INPUTS == 1) {
      memcpy(cells + d, &bits, sizeof bits);
    } else {
#if HAS_PAIRS
      _mm256_storeu_si256((__m256i*)((uint16_t*)cells + d), _mm512_cvtepi32_epi16((__m512i)(bits >> 16)));
#endif
    }
  }

  // Adds a tile to the softmaxes of a group.
  void fold(Scratch& its, int index, const Tile& tile, int from, int base) const {
    Group& group = its.groups[index];
    int count = from + tile.count, padded = round_up(count, BLOCK);
    Floats weights[TILE];
    const Cell* queries = its.queries + (int64_t)index * key_cells() * LANES;
    for (int t = 0; t < padded; t += BLOCK) score(queries, its.keys + t * key_cells(), weights + t);

    // A row attends to the tokens from `oldest` (exclusive) to `newest`.
    Ints newest = group.positions - base, last = Ints{} + (count - 1);
    Ints oldest = window ? newest - window : Ints{} - 1;
    newest = newest < last ? newest : last;
    Floats peaks = group.peaks;
    for (int t = 0; t < padded; t++) {
      Floats scores = IS_EXACT ? weights[t] : weights[t] * scale;
      if (k_scale && t >= from && t < count) scores *= k_scale[tile.rows[t - from]];
      if (soft_cap != 0) scores = soft_cap * hyperbolic_tangent(scores / soft_cap);
      weights[t] = (newest >= t) & (oldest < t) ? scores : fill(UNSEEN);
      peaks = larger(peaks, weights[t]);
    }
    Floats rescale = exponential(group.peaks - peaks);
    group.peaks = peaks;
    if (!IS_EXACT) group.totals *= rescale;
    Floats partial[LANES] = {};
    for (int t = 0; t < padded; t++) {
      weights[t] = exponential(weights[t] - peaks);
      (IS_EXACT ? partial[t % LANES] : group.totals) += weights[t];
      if (v_scale && t >= from && t < count) weights[t] *= v_scale[tile.rows[t - from]];
    }
    if (IS_EXACT) group.totals = scaled_sum(group.totals, rescale, sum_partial<1>(partial));
    Vector cells[TILE / INPUTS];
    for (int t = 0; t < padded; t += INPUTS)
      if constexpr (INPUTS == 1)
        cells[t] = weights[t];
      else
        cells[t / 2] = pair((Ints)rounded(weights[t]), (Ints)rounded(weights[t + 1]));
    Floats* sums = its.sums + (int64_t)index * sum_vectors();
    for (int d = 0; d < U; d += BLOCK)
      add_values(cells, padded / INPUTS, its.values + d, rescale, sums + d);
  }

  // Merges the softmaxes of a segment with the softmaxes of earlier segments, and starts new ones.
  void merge_segment(Scratch& its, int num_groups) const {
    for (int index = 0; index < num_groups; index++) {
      Group& group = its.groups[index];
      Floats peaks = larger(group.merged_peaks, group.peaks);
      Floats rescale = exponential(group.merged_peaks - peaks), weight = exponential(group.peaks - peaks);
      group.merged_peaks = peaks;
      group.merged_totals = merged(group.merged_totals, rescale, group.totals, weight);
      group.peaks = fill(LOWEST), group.totals = Floats{};
      Floats *sums = its.sums + (int64_t)index * sum_vectors(), *to = its.merged_sums + (sums - its.sums);
      for (int d = 0; d < sum_vectors(); d++) to[d] = merged(to[d], rescale, sums[d], weight), sums[d] = Floats{};
    }
  }

  // Adds LANES partial sums, which are COUNT vectors apart, in the order of `sum`.
  template <int COUNT>
  static Floats sum_partial(Floats* partial) {
    for (int width = LANES / 2; width >= 4; width /= 2)
      for (int i = 0; i < width; i++) partial[i * COUNT] += partial[(i + width) * COUNT];
    return (partial[0] + partial[2 * COUNT]) + (partial[COUNT] + partial[3 * COUNT]);
  }

  // Multiplies the queries of a group by the keys of BLOCK tokens. Partial sum `lane` has the elements that
  // `decode.cc` adds in this lane.
  void score_exactly(const Cell* queries, const Cell* const* key, Floats* scores) const {
    Floats partial[LANES][BLOCK];
    for (int lane = 0; lane < LANES; lane++) {
      Floats totals[BLOCK] = {};
      // In a step of elements, a lane has one element of each half.
      int first = Type::IN_ORDER ? lane : 2 * lane, distance = Type::IN_ORDER ? LANES : 1;
      for (int step = 0; step < D; step += STEP)
        for (int d = step + first; d <= step + first + distance && d < D; d += distance) {
          Vector query = load<Vector>(queries + d * LANES);
#pragma GCC unroll 8
          for (int i = 0; i < BLOCK; i++) Cells::add(totals[i], query, key[i] + d);
        }
      memcpy(partial[lane], totals, sizeof totals);
    }
    for (int i = 0; i < BLOCK; i++) scores[i] = sum_partial<BLOCK>(&partial[0][i]);
  }

  // Multiplies the queries of a group by the keys of BLOCK tokens.
  void score(const Cell* queries, const Cell* keys, Floats* scores) const {
    Floats totals[BLOCK] = {};
    const Cell* key[BLOCK];
    for (int i = 0; i < BLOCK; i++) key[i] = keys + i * key_cells();
    if constexpr (IS_EXACT) return score_exactly(queries, key, scores);
    int num_cells = (D + INPUTS - 1) / INPUTS;
    for (int d = 0; d < num_cells; d++) {
      Vector query = load<Vector>(queries + d * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < BLOCK; i++) Cells::add(totals[i], query, key[i] + d);
    }
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++) scores[i] = totals[i];
  }

  // Adds BLOCK elements of the weighted values of a tile to the sums of a group.
  void add_values(
      const Vector* weights, int num_cells, const Cell* values, Floats rescale, Floats* sums) const {
    Floats totals[BLOCK];
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++) totals[i] = sums[i] * rescale;
    int64_t stride = value_stride();
    for (int cell = 0; cell < num_cells; cell++, values += stride) {
      Vector weight = weights[cell];
#pragma GCC unroll 8
      for (int i = 0; i < BLOCK; i++) Cells::add(totals[i], weight, values + i);
    }
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++) sums[i] = totals[i];
  }

  // Writes the weighted means of the values and the log-sum-exps, which are 0 and -inf if no token was seen.
  void finish(const Scratch& its, int64_t row, int num_rows) const {
    for (int first = 0; first < num_rows; first += LANES) {
      const Group& group = its.groups[first / LANES];
      const Floats* sums = its.merged_sums + (int64_t)(first / LANES) * sum_vectors();
      Floats totals = IS_EXACT ? group.merged_totals : group.totals;
      Floats peaks = IS_EXACT ? group.merged_peaks : group.peaks;
      Floats factors = totals == 0 ? Floats{} : 1 / totals;
      int64_t rows[LANES];
      for (int lane = 0; lane < LANES && first + lane < num_rows; lane++) {
        float total = totals[lane];
        rows[lane] = row + (int64_t)((first + lane) / G) * H + (first + lane) % G;
        lse[rows[lane]] = total == 0 ? -__builtin_inff() : peaks[lane] + __builtin_logf(total);
      }
      for (int d = 0; d < U; d++) {
        float each[LANES];
        store(each, sums[d] * factors);
        for (int lane = 0; lane < LANES && first + lane < num_rows; lane++)
          out[rows[lane] * U + d] = each[lane];
      }
    }
  }
};

template <class Cells, bool IS_EXACT = false>
XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer* q = argument(frame, 0);
  Prefill<Cells, IS_EXACT> prefill = {};
  int next = prefill.read(frame);
  prefill.q = (const float*)q->data;
  prefill.query_lengths = (const int32_t*)argument(frame, next)->data;
  prefill.out = (float*)result(frame, 0)->data;
  prefill.lse = (float*)result(frame, 1)->data;
  prefill.T = q->dims[1];
  int64_t num_parts = prefill.list_parts(q->dims[0]);
  if (num_parts > 0) in_parallel(frame, prefill, num_parts * prefill.K);
  free(prefill.parts);
  if (num_parts >= 0 && !prefill.is_short_of_memory) return nullptr;
  return error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "prefill: no memory");
}

XLA_FFI_Error* run_in_cells(XLA_FFI_CallFrame* frame) {
  if (attribute<int32_t>(frame, "is_exact")) return run<Singles, true>(frame);
#if HAS_PAIRS
  if constexpr (FITS_BFLOAT16<Type>)
    if (attribute<int32_t>(frame, "has_bfloat16_queries")) return run<Pairs>(frame);
#endif
  return run<Singles>(frame);
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_prefill(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run_in_cells(frame);
}
