// Multiplication by interleaved weights. A bundle is BUNDLE_ROWS rows of the weight. It contains a word (four
// bytes) of each row in turn, so that no transposition is needed to load a vector of words:
//
//   word 0 of rows 0 1 ... 31 | word 1 of rows 0 1 ... 31 | ...
//
// Float scales and minima are stored in the same way, float by float. Scales of two levels are stored word by
// word. Each group must consist of complete units, and N must be a multiple of BUNDLE_ROWS. The results are the
// same bits as for other weights.
#pragma once

#include "weight_units.h"

namespace {

constexpr int BUNDLE_ROWS = 32;
// Maximum size of a panel of which both the sums and the totals fit into the registers.
constexpr int MAX_IN_REGISTERS = LANES == 16 ? 12 : 2;
// Number of bytes between the units in use and the prefetched units.
constexpr int BYTES_AHEAD = 8192;

// Returns the address of row `row` in an array of words or floats of `size` bytes.
inline const uint8_t* find_row(const ByteRows& rows, int64_t row, int size) {
  int64_t place = row % BUNDLE_ROWS;
  return rows.begin + (row - place) * rows.row_bytes + place * size;
}

// Loads a unit.
INLINE DecoderWords load_words(const uint8_t* from) {
  DecoderWords words;
#pragma GCC unroll 5
  for (int i = 0; i < Decoder::WORDS; i++) words.each[i] = load<Ints>(from + 4 * BUNDLE_ROWS * i);
  return Decoder::arrange(words);
}

// Prefetches a unit of each of `blocks` blocks into the second-level cache.
INLINE void prefetch_units(const uint8_t* from, int blocks) {
#pragma GCC unroll 5
  for (int i = 0; i < Decoder::WORDS; i++, from += 4 * BUNDLE_ROWS)
#pragma GCC unroll 2
    for (int byte = 0; byte < blocks * 4 * LANES; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// Place of the scales and minima of a group in a bundle.
struct GroupPlace {
  int index;
  Sections::Place in_sections;
};

// Scales or minima of LANES rows, one group after the other.
struct GroupFloats {
  const uint8_t* from;  // null if there are none
  ScaleKind kind;

  GroupFloats(const ByteRows& rows, int64_t row, ScaleKind kind) : kind(kind) {
    from = rows.begin ? find_row(rows, row, size()) : nullptr;
  }

  // Returns the size of an interleaved element in bytes.
  int size() const { return kind == FLOAT32 || kind == TWO_LEVELS ? 4 : 2; }

  // Loads the floats of a group for LANES rows, from row `offset` on.
  INLINE Floats load(const GroupPlace& group, int offset = 0) const {
    auto find = [&](int index) { return from + (index * BUNDLE_ROWS + offset) * size(); };
    if (kind == TWO_LEVELS) {
      const Sections::Place& place = group.in_sections;
      return place.scales(::load<Ints>(find(place.number_word)), ::load<Floats>(find(place.factor_word)));
    }
    const uint8_t* place = find(group.index);
    if (kind == FLOAT32) return ::load<Floats>(place);
    if (kind == BFLOAT16) return (Floats)(widen((const uint16_t*)place) << 16);
    return Float16::half((const uint16_t*)place, 0);
  }
};

// Loads groups `first` to `last`.
inline void load_floats(
    float* to, const GroupFloats& floats, int first, int last, const Sections& sections) {
  for (int group = first; group < last; group++, to += LANES)
    store(to, floats.load({group, sections.find(group)}));
}

// Sums of the products of B blocks with a panel of size M. They are members of nested structs, like `Sums`.
template <int B, int M, class Sum>
struct BlockSums {
  BlockSums<B - 1, M, Sum> others;
  Sums<M, Sum> last;

  INLINE void start(const Rounding* roundings) {
    others.start(roundings);
    last.start(roundings);
  }

  // Adds the products of a unit of each block with cells of x.
  INLINE void add_units(const Decoder& decoder, const uint8_t* from, const Cell* x) {
    others.add_units(decoder, from, x);
    DecoderWords words = load_words(from + (B - 1) * 4 * LANES);
    decoder.decode(words, [&](int cell, Cells::Vector w) __attribute__((always_inline)) {
      last.add(w, x + cell * M);
    });
  }

  INLINE void add_to(
      BlockSums<B, M, Floats>& totals, const GroupFloats& scales, const GroupPlace& group,
      const Rounding* roundings) const {
    others.add_to(totals.others, scales, group, roundings);
    last.add_to(totals.last, scales.load(group, (B - 1) * LANES), roundings);
  }

  INLINE void add_mins(const GroupFloats& mins, const GroupPlace& group, const float* x_sums) {
    others.add_mins(mins, group, x_sums);
    last.add_mins(mins.load(group, (B - 1) * LANES), x_sums);
  }

  INLINE void store_to(float* to) const {
    others.store_to(to);
    last.store_to(to + (B - 1) * M * LANES);
  }
};

template <int M, class Sum>
struct BlockSums<0, M, Sum> {
  INLINE void start(const Rounding*) {}
  INLINE void add_units(const Decoder&, const uint8_t*, const Cell*) {}
  INLINE void add_to(
      BlockSums<0, M, Floats>&, const GroupFloats&, const GroupPlace&, const Rounding*) const {}
  INLINE void add_mins(const GroupFloats&, const GroupPlace&, const float*) {}
  INLINE void store_to(float*) const {}
};

// Number of blocks that are multiplied by a panel of size M at a time. With few rows of x, one block has so few
// sums that their additions would wait for each other.
template <int M>
constexpr int BLOCKS = M * 8 <= 2 * LANES ? 2 : 1;

// Multiplies BLOCKS<M> blocks, from row `row` on, by a panel of size M, and writes the totals. The sums and the
// totals stay in registers.
template <int M>
NOINLINE void multiply_whole_rows(const Matrix& matrix, int64_t row, const Panel<Cell>& panel, float* to) {
  constexpr int B = BLOCKS<M>;
  const Groups& groups = matrix.groups;
  const GroupFloats scales(matrix.scales, row, matrix.scale_kind), mins(matrix.mins, row, matrix.min_kind);
  const Sections sections(groups.size);
  const uint8_t* from = find_row(matrix.values, row, 4);
  const Cell* x = panel.cells;
  const Rounding* roundings = panel.roundings;
  BlockSums<B, M, Floats> totals;
  for (int index = 0; index < groups.count; index++) {
    GroupPlace group = {index, sections.find(index)};
    for (int rest = groups.cells; rest > 0; rest -= groups.segment_cells) {
      BlockSums<B, M, Cells::Sum> sums;
      if constexpr (Cells::HAS_SCALES) sums.start(roundings);
      for (int left = smaller(rest, groups.segment_cells); left > 0; left -= Decoder::CELLS) {
        prefetch_units(from + BYTES_AHEAD, B);
        sums.add_units(*matrix.decoder, from, x);
        from += DECODER_BYTES * BUNDLE_ROWS, x += Decoder::CELLS * M;
      }
      sums.add_to(totals, scales, group, roundings);
      if (Cells::HAS_SCALES) roundings += M;
    }
    if (mins.from) totals.add_mins(mins, group, panel.sums + index * M);
  }
  totals.store_to(to);
}

// Does the same as `multiply_units`, for interleaved weights.
template <int M, bool KEEPS>
NOINLINE void multiply_interleaved(
    const Decoder& decoder, const Strip& strip, const Panel<Cell>* panel, float* totals) {
  Position at(strip, panel);
  const uint8_t* from = find_row(strip.matrix->values, strip.row, 4);
  from += strip.cells_before(strip.first) / Decoder::CELLS * DECODER_BYTES * BUNDLE_ROWS;
  Cell* tile = strip.tile;
  for (int i = strip.first; i < strip.last; i++) {
    Sums<M, Cells::Sum> sums;
    if constexpr (Cells::HAS_SCALES) sums.start(at.roundings);
    for (int left = at.num_cells(); left > 0; left -= Decoder::CELLS) {
      prefetch_units(from + BYTES_AHEAD, 1);
      decoder.decode(load_words(from), [&](int cell, Cells::Vector w) __attribute__((always_inline)) {
        if (KEEPS) memcpy(tile + cell * LANES, &w, sizeof w);
        sums.add(w, at.x + cell * M);
      });
      from += DECODER_BYTES * BUNDLE_ROWS;
      at.x += Decoder::CELLS * M;
      if (KEEPS) tile += Decoder::CELLS * LANES;
    }
    sums.add_to(
        totals, load<Floats>(at.scales), at.roundings, at.ends_group() ? at.mins : nullptr, at.x_sums);
    at.next(M);
  }
}

}  // namespace
