// Multiplication of rows of x by rows of a quantised weight, for `quantised_linear.cc`.
//
// A block is LANES rows of the weight. A panel is up to MAX_PANEL rows of x. For each row of x, a vector with
// the sums of all rows of the block stays in a register:
//
//   sums[row of x] += w[cell] * x[cell, row of x]                       for all cells of a segment
//   totals[row of x] += scales[group] * sums[row of x]                  after each segment; if the inputs are
//                                                                       int8, also times their scale
//   totals[row of x] += mins[group] * (sum of x[group, row of x])       after each group
//
// Cells of the weight are multiplied by the first panel as soon as they are converted. If there are more
// panels, the cells are also kept in a tile, by which the other panels are multiplied. The result of a row does
// not depend on the other rows.
#pragma once

#include "panels.h"

namespace {

template <int BITS>
struct Packed {};  // values of BITS bits

template <class Input>
struct CellsFor {
  using Cells = Singles;
};
#if HAS_PAIRS
template <>
struct CellsFor<Bfloat16> {
  using Cells = Pairs;
};
#endif
template <>
struct CellsFor<Int8>
#if HAS_QUADS
{
  using Cells = Quads;
}
#endif
;  // other processors have no kernels for int8 inputs
using Cells = CellsFor<INPUT>::Cells;  // INPUT is a compiler option
using Cell = Cells::Cell;

template <class>
struct DecoderFor;
template <>
struct DecoderFor<Int8> {
  using Decoder = ByteDecoder<Int8Code, Cells>;
};
template <>
struct DecoderFor<Float8> {
  using Decoder = ByteDecoder<Float8Code, Cells>;
};
template <int BITS>
struct DecoderFor<Packed<BITS>> {
  using Decoder = PackedDecoder<Cells, BITS>;
};
using Decoder = DecoderFor<ELEMENT>::Decoder;  // ELEMENT is a compiler option
using DecoderWords = WordsOf<Decoder::WORDS>;
constexpr int DECODER_BYTES = 4 * Decoder::WORDS;  // of a row in a unit

template <class>
constexpr bool ROUNDS = false;
template <>
constexpr bool ROUNDS<Bfloat16> = true;

// Maximum number of panels that are multiplied by a block before the next block. Their totals stay in a
// cache.
constexpr int CHUNK_PANELS = 264 / PANEL_OF_MANY;
// Approximate number of inputs of the cells in a tile, so that the tile stays in a cache.
constexpr int TILE_INPUTS = 640;
constexpr int64_t PART_BYTES = 64 * 1024;

// A quantised weight [N, K].
struct Matrix {
  ByteRows values, scales, mins;  // mins.begin is null if there are no minima
  ScaleKind scale_kind, min_kind;
  const Decoder* decoder;
  int64_t N;
  Groups groups;
  bool is_interleaved;  // see `bundles.h`
};

// Consecutive segments of a block, which are converted together.
struct Strip {
  const Matrix* matrix;
  Groups groups;
  int64_t row;  // the first row
  int num_rows;
  int first, last;             // range of segments; `last` is exclusive
  const float *scales, *mins;  // [groups, LANES] from the group of the first segment on; mins may be null
  Cell* tile;
  const char* next_line;  // next address to prefetch while units are converted

  // Returns whether the strip consists of complete units that follow each other in the rows of the weight.
  bool is_whole() const {
    return num_rows == LANES && groups.has_whole_units && groups.size % Decoder::INPUTS == 0;
  }

  int64_t cells_before(int segment) const {
    int64_t group = segment / groups.num_segments, rest = segment % groups.num_segments;
    return group * groups.cells + rest * groups.segment_cells;
  }

  // Returns the address of the first unit of the first row.
  const uint8_t* first_unit() const {
    const ByteRows& values = matrix->values;
    return values.begin + row * values.row_bytes + cells_before(first) / Decoder::CELLS * DECODER_BYTES;
  }

  int64_t num_units() const { return (cells_before(last) - cells_before(first)) / Decoder::CELLS; }
};

// Current position in the segments of a strip and in a panel.
struct Position {
  const Groups& groups;
  int group, segment;
  const float *scales, *mins;
  const Cell* x = nullptr;
  const float* x_sums = nullptr;
  const Rounding* roundings = nullptr;

  Position(const Strip& strip, const Panel<Cell>* panel) : groups(strip.groups) {
    group = strip.first / groups.num_segments, segment = strip.first % groups.num_segments;
    scales = strip.scales, mins = strip.mins;
    if (!panel) return;
    x = panel->cells + (group * groups.cells + segment * groups.segment_cells) * panel->size;
    x_sums = panel->sums + group * panel->size;
    if (Cells::HAS_SCALES) roundings = panel->roundings + (int64_t)strip.first * panel->size;
  }

  bool ends_group() const { return segment + 1 == groups.num_segments; }

  int num_cells() const {
    return ends_group() ? groups.cells - segment * groups.segment_cells : groups.segment_cells;
  }

  void next(int panel_size) {
    segment++;
    if (Cells::HAS_SCALES) roundings += panel_size;
    if (segment < groups.num_segments) return;
    segment = 0, group++, scales += LANES, x_sums += panel_size;
    if (mins) mins += LANES;
  }
};

// Returns the sum of a segment, multiplied by the scale of the inputs if they are int8.
inline Floats scaled(Floats sum, const Rounding*) { return sum; }
inline Floats scaled(Ints sum, const Rounding* rounding) {
  return __builtin_convertvector(sum, Floats) * fill(rounding->scale);
}

// Sums of the products of a block with M rows of x. They are members of nested structs, because GCC would
// keep an array in memory.
template <int M, class Sum>
struct Sums {
  Sums<M - 1, Sum> others;
  Sum last = {};

  // Sets the initial sums at the beginning of a segment.
  INLINE void start(const Rounding* roundings) {
    others.start(roundings);
    last = Ints{} + roundings[M - 1].start;
  }

  INLINE void add(Cells::Vector w, const Cell* x) {
    others.add(w, x);
    Cells::add(last, w, x + M - 1);
  }

  INLINE void load_from(const float* from) {
    others.load_from(from);
    last = load<Floats>(from + (M - 1) * LANES);
  }

  INLINE void store_to(float* to) const {
    others.store_to(to);
    store(to + (M - 1) * LANES, last);
  }

  // Adds the scaled sums to totals in registers.
  INLINE void add_to(Sums<M, Floats>& totals, Floats scale, const Rounding* roundings) const {
    others.add_to(totals.others, scale, roundings);
    add_product(totals.last, scaled(last, roundings + M - 1), scale);
  }

  INLINE void add_mins(Floats mins, const float* x_sums) {
    others.add_mins(mins, x_sums);
    Singles::add(last, mins, x_sums + M - 1);
  }

  // Adds the scaled sums to totals in memory. If there are minima, adds their products too.
  INLINE void add_to(
      float* totals, Floats scale, const Rounding* roundings, const float* mins,
      const float* x_sums) const {
    others.add_to(totals, scale, roundings, mins, x_sums);
    float* its = totals + (M - 1) * LANES;
    Floats total;
    if constexpr (Cells::HAS_SCALES) {
      total = scaled(last, roundings + M - 1);
      scale_and_add(total, scale, its);
    } else {
      total = load<Floats>(its);
      add_product(total, scaled(last, roundings + M - 1), scale);
    }
    if (mins) Singles::add(total, load<Floats>(mins), x_sums + M - 1);
    store(its, total);
  }
};

template <class Sum>
struct Sums<0, Sum> {
  INLINE void start(const Rounding*) {}
  INLINE void add(Cells::Vector, const Cell*) {}
  INLINE void load_from(const float*) {}
  INLINE void store_to(float*) const {}
  INLINE void add_to(Sums<0, Floats>&, Floats, const Rounding*) const {}
  INLINE void add_mins(Floats, const float*) {}
  INLINE void add_to(float*, Floats, const Rounding*, const float*, const float*) const {}
};

// Loads the unit that starts at byte `offset` of the rows of a strip, and transposes it. Bytes from `valid` on
// are zeros. Units of 20 bytes must be complete, which `_quantised_refusal` in Python checks.
inline DecoderWords load_words(const Strip& strip, int64_t offset, int valid) {
  const ByteRows& values = strip.matrix->values;
  Unit unit = load_unit(values, strip.row, strip.num_rows, offset, smaller(valid, UNIT_BYTES));
  const uint8_t* from = values.begin + strip.row * values.row_bytes + offset;
  return add_words<Decoder::WORDS>(Decoder::transpose(unit), from, values.row_bytes, strip.num_rows);
}

// Converts all units of a strip to cells in the tile. Rows or units may be incomplete.
void convert_units(const Decoder& decoder, const Strip& strip) {
  Position at(strip, nullptr);
  const Groups& groups = strip.groups;
  int64_t group_bytes = groups.size * DECODER_BYTES / Decoder::INPUTS;
  int64_t byte = at.segment * (groups.segment_cells / Decoder::CELLS) * DECODER_BYTES;
  Cell* tile = strip.tile;
  for (int i = strip.first; i < strip.last; i++, at.next(0)) {
    if (at.segment == 0) byte = 0;
    for (int left = at.num_cells(); left > 0; left -= Decoder::CELLS, byte += DECODER_BYTES) {
      int valid = smaller(group_bytes - byte, DECODER_BYTES);
      DecoderWords words = load_words(strip, at.group * group_bytes + byte, valid);
      decoder.decode(words, [&](int, Cells::Vector w) __attribute__((always_inline)) {
        memcpy(tile, &w, sizeof w);
        tile += LANES;
      });
    }
  }
}

// Whether units are converted one step ahead of the additions, which would otherwise wait for the conversion.
// With 16 rows of x, the additions of a step hide the conversion of packed values, and there are too few
// registers for both. With one row, reading packed values from memory takes longer than either of them.
template <int M, bool KEEPS>
constexpr bool CONVERTS_AHEAD =
    Cells::INPUTS == 2 && !KEEPS && (!Decoder::IS_PACKED || (M > 1 && M <= 12));

// Calls a function for the cells of consecutive units, without converting ahead.
template <class Decoder, bool IS_AHEAD>
struct UnitCells {
  UnitCells(const Decoder&, const DecoderWords&) {}

  template <class Function>
  INLINE void decode(const Decoder& decoder, const DecoderWords& words, const DecoderWords&, Function f) {
    decoder.decode(words, f);
  }
};

#if HAS_PAIRS
// Calls a function for the cells of consecutive units, and converts one step ahead.
template <class Decoder>
struct UnitCells<Decoder, true> {
  TwoPairs next;

  INLINE UnitCells(const Decoder& decoder, const DecoderWords& words) : next(decoder.pairs(words, 0)) {}

  template <class Function>
  INLINE void decode(
      const Decoder& decoder, const DecoderWords& words, const DecoderWords& following, Function f) {
#pragma GCC unroll 8
    for (int step = 0; step < Decoder::STEPS; step++) {
      TwoPairs pairs = next;
      bool is_last = step + 1 == Decoder::STEPS;
      next = decoder.pairs(is_last ? following : words, is_last ? 0 : step + 1);
      // Keep the compiler from delaying the conversion.
      asm volatile("" : "+v"(next.first), "+v"(next.second));
      f(2 * step, pairs.first);
      f(2 * step + 1, pairs.second);
    }
  }
};
#endif

// Converts the units of a strip and multiplies them by a panel of size M. The strip must be whole. If KEEPS,
// the cells are also written to the tile. (If GCC inlined this function, it would keep the sums of 16 rows in
// memory.)
template <int M, bool KEEPS>
NOINLINE void multiply_units(
    const Decoder& decoder, const Strip& strip, const Panel<Cell>* panel, float* totals) {
  constexpr bool IS_AHEAD = CONVERTS_AHEAD<M, KEEPS>;
  // Prefetch packed weights into the first-level cache if few rows of x leave space there. 8-bit weights
  // arrive too slowly for that: pending lines would delay the loads of this block. (Measured on Zen 4.)
  constexpr int LEVEL = Decoder::IS_PACKED && M <= 4 ? 3 : 2;
  // Prefetches are spread over a unit, because several prefetches at a time would delay loads.
  constexpr int CELLS_OF_LINE = Decoder::CELLS * 64 / (LANES * DECODER_BYTES);
  Position at(strip, panel);
  int64_t stride = strip.matrix->values.row_bytes;
  const uint8_t* from = strip.first_unit();
  const uint8_t* end = from + strip.num_units() * DECODER_BYTES;
  auto load_next = [&] {
    Unit unit;
    unit.load<IS_AHEAD>(from, stride);
    DecoderWords words = add_words<Decoder::WORDS>(Decoder::transpose(unit), from, stride, LANES);
    from += DECODER_BYTES;
    return words;
  };
  Cell* tile = strip.tile;
  const char* next_line = strip.next_line;
  DecoderWords words, following = load_next();
  UnitCells<Decoder, IS_AHEAD> cells(decoder, following);
  for (int i = strip.first; i < strip.last; i++) {
    Sums<M, Cells::Sum> sums;
    if constexpr (Cells::HAS_SCALES) sums.start(at.roundings);
    for (int left = at.num_cells(); left > 0; left -= Decoder::CELLS) {
      words = following;
      if (from < end) following = load_next();  // during the additions of this unit
      auto add = [&](int cell, Cells::Vector w) __attribute__((always_inline)) {
        if (KEEPS) memcpy(tile + cell * LANES, &w, sizeof w);
        if (cell % CELLS_OF_LINE == 0)
          __builtin_prefetch(next_line + cell / CELLS_OF_LINE * 64, 0, LEVEL);
        sums.add(w, at.x + cell * M);
      };
      cells.decode(decoder, words, following, add);
      next_line += LANES * DECODER_BYTES;
      at.x += Decoder::CELLS * M;
      if (KEEPS) tile += Decoder::CELLS * LANES;
    }
    sums.add_to(
        totals, load<Floats>(at.scales), at.roundings, at.ends_group() ? at.mins : nullptr, at.x_sums);
    at.next(M);
  }
}

// Whether the sums of segments are added to totals in registers. This needs enough registers. Storing the
// totals would delay the additions of the next segment.
template <int M>
constexpr bool KEEPS_TOTALS = LANES == 16 && M <= 12;

// Multiplies the cells in the tile by a panel of size M.
template <int M>
NOINLINE void multiply_tile(const Strip& strip, const Panel<Cell>* panel, float* totals) {
  Position at(strip, panel);
  const Cell* tile = strip.tile;
  Sums<M, Floats> kept;
  if constexpr (KEEPS_TOTALS<M>) kept.load_from(totals);
  for (int i = strip.first; i < strip.last; i++) {
    Sums<M, Cells::Sum> sums;
    if constexpr (Cells::HAS_SCALES) sums.start(at.roundings);
#pragma GCC unroll 2
    for (int left = at.num_cells(); left > 0; left--, tile += LANES, at.x += M)
      sums.add(load<Cells::Vector>(tile), at.x);
    Floats scale = load<Floats>(at.scales);
    const float* mins = at.ends_group() ? at.mins : nullptr;
    if constexpr (KEEPS_TOTALS<M>) {
      sums.add_to(kept, scale, at.roundings);
      if (mins) kept.add_mins(load<Floats>(mins), at.x_sums);
    } else {
      sums.add_to(totals, scale, at.roundings, mins, at.x_sums);
    }
    at.next(M);
  }
  if constexpr (KEEPS_TOTALS<M>) kept.store_to(totals);
}

}  // namespace
