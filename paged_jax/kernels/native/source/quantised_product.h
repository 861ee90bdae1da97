// Product of a quantised weight and panels: its division into parts for threads, and of these into strips.
#pragma once

#include "bundles.h"

namespace {

#define FOR_EACH_PANEL_SIZE(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(6) CASE(8) CASE(12) CASE(16)

// Product of a weight and panels.
struct Product {
  Matrix matrix;
  const Panel<Cell>* panels;
  int64_t num_panels;
  float* out;
  int64_t num_parts;

  // Divides the work into parts. Each thread gets the same number of parts.
  void divide(int64_t num_threads) {
    num_parts = (matrix.N * matrix.values.row_bytes + PART_BYTES - 1) / PART_BYTES;
    if (num_parts > 1) num_parts = (num_parts + num_threads - 1) / num_threads * num_threads;
  }

  void run(int64_t part) {
    int64_t step = matrix.is_interleaved ? BUNDLE_ROWS : LANES, count = (matrix.N + step - 1) / step;
    int64_t row = part * count / num_parts * step, end = (part + 1) * count / num_parts * step;
    end = smaller(end, matrix.N);
    if (matrix.is_interleaved && num_panels == 1 && panels->size <= MAX_IN_REGISTERS)
      multiply_whole_rows(row, end);
    else
      multiply_strips(row, end);
  }

  // Multiplies rows `row` to `end` of interleaved weights by a panel of at most MAX_IN_REGISTERS rows.
  void multiply_whole_rows(int64_t row, int64_t end) const {
#define CASE(M)                        \
  if constexpr (M <= MAX_IN_REGISTERS) \
    if (panels->size == M) return multiply_whole_rows_by<M>(row, end);
    FOR_EACH_PANEL_SIZE(CASE)
#undef CASE
  }

  template <int M>
  void multiply_whole_rows_by(int64_t row, int64_t end) const {
    float totals[BLOCKS<M> * M * LANES];
    for (; row < end; row += BLOCKS<M> * LANES) {
      ::multiply_whole_rows<M>(matrix, row, *panels, totals);
      for (int block = 0; block < BLOCKS<M>; block++)
        write(row + block * LANES, LANES, *panels, totals + block * M * LANES);
    }
  }

  // Multiplies rows `row` to `end` of the weights by all panels, one strip after the other.
  void multiply_strips(int64_t row, int64_t end) const {
    int64_t num_chunks = (num_panels + CHUNK_PANELS - 1) / CHUNK_PANELS;
    int64_t chunk = (num_panels + num_chunks - 1) / num_chunks;
    int segments = segments_in_strip();
    int64_t group_floats = (segments + 3) * LANES;  // `transpose_floats` writes up to two more groups
    int64_t tile_cells = round_up(segments * matrix.groups.segment_cells, 2) * LANES;
    int64_t floats = CHUNK_PANELS * MAX_PANEL * LANES + 2 * group_floats;
    int64_t bytes = floats * sizeof(float) + tile_cells * sizeof(Cell);
    auto* totals = (float*)aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!totals) abort();
    float* scales = totals + CHUNK_PANELS * MAX_PANEL * LANES;
    Strip strip = {&matrix, matrix.groups};
    strip.tile = (Cell*)(totals + floats);
    for (; row < end; row += LANES) {
      strip.row = row;
      strip.num_rows = smaller(LANES, matrix.N - strip.row);
      for (int64_t first = 0; first < num_panels; first += chunk) {
        int64_t count = smaller(num_panels - first, chunk);
        memset(totals, 0, count * MAX_PANEL * LANES * sizeof *totals);
        const ByteRows& values = matrix.values;
        strip.next_line = (const char*)values.begin + (strip.row + LANES) * values.row_bytes;
        int total = strip.groups.total_segments();
        for (strip.first = 0; strip.first < total; strip.first = strip.last) {
          strip.last = smaller(strip.first + segments, total);
          load_scales(strip, scales, scales + group_floats);
          multiply(*matrix.decoder, strip, panels + first, count, totals);
          int64_t cells = (int64_t)(strip.last - strip.first) * strip.groups.segment_cells;
          strip.next_line += cells * DECODER_BYTES * LANES / Decoder::CELLS;
        }
        for (int64_t i = 0; i < count; i++)
          write(row, strip.num_rows, panels[first + i], totals + i * MAX_PANEL * LANES);
      }
    }
    free(totals);
  }

  int segments_in_strip() const {
    const Groups& groups = matrix.groups;
    int inputs = groups.segment_cells * Cells::INPUTS, total = groups.total_segments();
    int most = TILE_INPUTS / inputs > 1 ? TILE_INPUTS / inputs : 1;
    if (!groups.has_whole_units) {  // choose a size so that each strip begins with a unit
      int period = 1;
      while (period * inputs % Decoder::INPUTS) period++;
      return (most / period > 1 ? most / period : 1) * period;
    }
    int num_strips = (total + most - 1) / most;
    return (total + num_strips - 1) / num_strips;
  }

  // Loads the scales and minima of the groups of a strip.
  void load_scales(Strip& strip, float* scales, float* mins) const {
    int first = strip.first / strip.groups.num_segments;
    int last = (strip.last - 1) / strip.groups.num_segments + 1;
    const Sections sections(matrix.groups.size);
    auto load = [&](float* to, const ByteRows& rows, ScaleKind kind) {
      if (matrix.is_interleaved)
        load_floats(to, GroupFloats(rows, strip.row, kind), first, last, sections);
      else if (kind == TWO_LEVELS)
        transpose_sections(to, rows, strip.row, strip.num_rows, first, last, sections);
      else
        transpose_floats(to, rows, strip.row, strip.num_rows, first, last, kind);
      return to;
    };
    strip.scales = load(scales, matrix.scales, matrix.scale_kind);
    if (matrix.mins.begin) strip.mins = load(mins, matrix.mins, matrix.min_kind);
  }

  static void multiply(
      const Decoder& decoder, const Strip& strip, const Panel<Cell>* panels, int64_t count, float* totals) {
    int64_t i = 1;
    if (!strip.is_whole())
      convert(decoder, strip), i = 0;
    else if (count == 1)
      multiply_only(decoder, strip, panels, totals);
    else
      multiply_first<PANEL_OF_MANY, true>(decoder, strip, panels, totals);
    for (; i < count; i++) multiply_next(strip, panels + i, totals + i * MAX_PANEL * LANES);
  }

  // Converts the units of a strip.
  static void convert(const Decoder& decoder, const Strip& strip) {
    if (strip.groups.has_whole_units) return convert_units(decoder, strip);
    Strip units = strip;  // a strip with a unit in each segment
    units.groups.size = Decoder::INPUTS;
    units.groups.cells = units.groups.segment_cells = Decoder::CELLS;
    units.first = strip.first * strip.groups.cells / Decoder::CELLS;
    units.last = strip.last * strip.groups.cells / Decoder::CELLS;
    convert_units(decoder, units);
  }

  static void multiply_only(
      const Decoder& decoder, const Strip& strip, const Panel<Cell>* panel, float* totals) {
#define CASE(M)                 \
  if constexpr (M <= MAX_PANEL) \
    if (panel->size == M) return multiply_first<M, false>(decoder, strip, panel, totals);
    FOR_EACH_PANEL_SIZE(CASE)
#undef CASE
  }

  // Converts the units of a strip and multiplies them by the first panel.
  template <int M, bool KEEPS>
  static void multiply_first(
      const Decoder& decoder, const Strip& strip, const Panel<Cell>* panel, float* totals) {
    if constexpr (KEEPS || M > MAX_IN_REGISTERS)
      if (strip.matrix->is_interleaved) return multiply_interleaved<M, KEEPS>(decoder, strip, panel, totals);
    multiply_units<M, KEEPS>(decoder, strip, panel, totals);
  }

  static void multiply_next(const Strip& strip, const Panel<Cell>* panel, float* totals) {
#define CASE(M)                 \
  if constexpr (M <= MAX_PANEL) \
    if (panel->size == M) return multiply_tile<M>(strip, panel, totals);
    FOR_EACH_PANEL_SIZE(CASE)
#undef CASE
  }

  void write(int64_t row, int num_rows, const Panel<Cell>& panel, const float* totals) const {
    for (int m = 0; m < panel.num_rows; m++, totals += LANES) {
      float* to = out + panel.places[m] * matrix.N + row;
      if (num_rows == LANES)
        store(to, load<Floats>(totals));
      else
        memcpy(to, totals, num_rows * sizeof *to);
    }
  }
};

}  // namespace
