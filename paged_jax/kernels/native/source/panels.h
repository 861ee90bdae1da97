// Rows of x in the order in which blocks of quantised weights multiply them.
//
// A panel is a few rows of x. Its cells are stored one after the other, each for all rows:
//
//   cell 0 of rows 0 1 ... M-1 | cell 1 of rows 0 1 ... M-1 | ...
//
// The sums of the inputs of each group are stored in the same way. They are multiplied by the minima of the
// weights. The scales of segments of int8 numbers are stored in the same way too.
#pragma once

#include "codes.h"
#include "frame.h"

namespace {

// Division of the inputs into groups, which have one scale each, and of groups into segments, which have one
// sum each.
struct Groups {
  int num_inputs, size, count;
  int cells;             // number of cells of a group, including padding
  int segment_cells;     // number of cells of a segment; the last segment of a group may have fewer
  int num_segments;      // number of segments of a group
  bool has_whole_units;  // whether each segment consists of units

  template <class Decoder>
  static Groups divide(int num_inputs, int count) {
    constexpr int INPUTS = Decoder::INPUTS / Decoder::CELLS;  // in a cell
    // Segments of int8 numbers have scales. They are shorter, because short segments lose less precision.
    constexpr int SEGMENT_CELLS = (INPUTS == 4 ? 64 : 128) / INPUTS;
    Groups groups = {num_inputs, num_inputs / count, count};
    groups.has_whole_units = !Decoder::IS_PACKED || groups.size % Decoder::INPUTS == 0;
    int padded = groups.has_whole_units ? round_up(groups.size, Decoder::INPUTS) : groups.size;
    groups.cells = groups.segment_cells = padded / INPUTS;
    if (groups.has_whole_units && groups.cells > SEGMENT_CELLS) groups.segment_cells = SEGMENT_CELLS;
    groups.num_segments = (groups.cells + groups.segment_cells - 1) / groups.segment_cells;
    return groups;
  }

  int64_t total_cells() const { return (int64_t)count * cells; }
  int total_segments() const { return count * num_segments; }
};

constexpr int MAX_PANEL = LANES == 16 ? 16 : 8;
// Number of rows of a panel if there are more than MAX_PANEL rows. Their totals and sums fit into the
// registers.
constexpr int PANEL_OF_MANY = LANES == 16 ? 12 : 8;
// Panel sizes for which the kernels are compiled. Other panels are padded with rows of zeros.
constexpr int PANEL_SIZES[] = {1, 2, 3, 4, 6, 8, 12, 16};

inline int panel_size(int64_t rows) {
  for (int size : PANEL_SIZES)
    if (size >= rows) return size;
  return MAX_PANEL;
}

// Scale of a segment of a row of x, and initial sum of its products, see `Quads`.
struct Rounding {
  float scale;
  int32_t start;
};

template <class Cell>
struct Panel {
  const int64_t* places;  // index of each row in x and in the result
  Cell* cells;
  float* sums;
  Rounding* roundings;  // one for each segment of each row, if segments have scales
  int num_rows, size;   // `size` includes rows of zeros at the end
};

inline bool is_zero(const float* row, int count) {
  int i = 0;
  while (i < count && row[i] == 0) i++;
  return i == count;
}

// The rows of x, divided into panels. Rows of zeros, such as padding in a batch, are left out, because their
// results are zeros.
template <class Decoder, class Cells>
struct Panels {
  using Cell = typename Cells::Cell;
  using Input = typename Cells::Input;
  const float* x;
  const int32_t* order;  // input of each column of the weights, or null
  bool is_rounded, has_sums;  // whether x is rounded to bfloat16; whether sums are needed
  Groups groups;
  float* out;
  int64_t N;
  Panel<Cell>* panels;
  int64_t num_panels, num_rows, size;  // `size` includes rows of zeros in panels
  int64_t* places;
  Cell* cells;
  float* sums;
  Rounding* roundings;

  // Allocates memory for M rows that are added in `num_parts` calls of `add`. Call `release` even if it
  // returns false.
  bool reserve(int64_t M, int64_t num_parts) {
    int64_t max_size = M + 3 * num_parts;  // see PANEL_SIZES
    panels = (Panel<Cell>*)malloc((M / PANEL_OF_MANY + num_parts) * sizeof *panels);
    places = (int64_t*)malloc(M * sizeof *places);
    sums = (float*)malloc(max_size * groups.count * sizeof *sums);
    cells = (Cell*)aligned_alloc(64, (max_size * groups.total_cells() * sizeof *cells + 127) / 64 * 64);
    if (!Cells::HAS_SCALES) return panels && places && sums && cells;
    roundings = (Rounding*)malloc(max_size * groups.total_segments() * sizeof *roundings);
    return panels && places && sums && cells && roundings;
  }

  void release() {
    free(panels);
    free(places);
    free(sums);
    free(cells);
    free(roundings);
  }

  // Divides rows `begin` to `end` of x into panels, which `run` fills. Writes the results of rows of zeros.
  void add(int64_t begin, int64_t end) {
    int64_t first = num_rows;
    for (int64_t place = begin; place < end; place++)
      if (is_zero(x + place * groups.num_inputs, groups.num_inputs))
        memset(out + place * N, 0, N * sizeof *out);
      else
        places[num_rows++] = place;
    int64_t most = num_rows - first > MAX_PANEL ? PANEL_OF_MANY : MAX_PANEL;
    for (; first < num_rows; first += most) {
      Panel<Cell>& panel = panels[num_panels++];
      panel.num_rows = smaller(num_rows - first, most);
      panel.size = panel_size(panel.num_rows);
      panel.places = places + first;
      panel.cells = cells + size * groups.total_cells();
      panel.sums = sums + size * groups.count;
      if (Cells::HAS_SCALES) panel.roundings = roundings + size * groups.total_segments();
      size += panel.size;
    }
  }

  // Fills a panel with the cells, sums and scales of its rows.
  void run(int64_t index) {
    const Panel<Cell>& panel = panels[index];
    int64_t inputs = groups.total_cells() * Cells::INPUTS;  // with padding
    const float* rows[MAX_PANEL];
    float* copies = nullptr;
    if (must_copy()) {
      copies = (float*)aligned_alloc(64, (panel.num_rows * inputs * sizeof *copies + 63) / 64 * 64);
      if (!copies) abort();
    }
    for (int m = 0; m < panel.num_rows; m++) {
      rows[m] = copies ? copies + m * inputs : x + panel.places[m] * groups.num_inputs;
      if (copies) copy_row(copies + m * inputs, panel.places[m]);
    }
    if constexpr (Cells::HAS_SCALES) {
      write_rounded(panel, rows, inputs);
    } else {
      write_cells(panel, rows, inputs);
      if (has_sums) sum_groups(panel, rows);
    }
    free(copies);
  }

  // Rounds the segments of the rows to int8. Writes their cells, their scales, and the sums of groups.
  void write_rounded(const Panel<Cell>& panel, const float* const* rows, int64_t inputs) const {
    auto* rounded = (Input*)aligned_alloc(64, (panel.num_rows * inputs + 63) / 64 * 64);
    if (!rounded) abort();
    const Input* rounded_rows[MAX_PANEL];
    memset(panel.roundings, 0, panel.size * groups.total_segments() * sizeof(Rounding));
    memset(panel.sums, 0, panel.size * groups.count * sizeof(float));
    for (int m = 0; m < panel.num_rows; m++) {
      rounded_rows[m] = rounded + m * inputs;
      round_row(panel, m, rounded + m * inputs, rows[m]);
    }
    write_cells(panel, rounded_rows, inputs);
    free(rounded);
  }

  void round_row(const Panel<Cell>& panel, int m, Input* to, const float* from) const {
    Rounding* rounding = panel.roundings + m;
    float* group_sum = panel.sums + m;
    for (int group = 0; group < groups.count; group++, group_sum += panel.size)
      for (int left = groups.cells; left > 0; left -= groups.segment_cells, rounding += panel.size) {
        int count = smaller(left, groups.segment_cells) * Cells::INPUTS;
        int32_t sum;
        float scale = Cells::round(to, from, count, &sum);
        *rounding = {scale * Decoder::STEP, -Decoder::OFFSET * sum};
        *group_sum += scale * sum;
        to += count, from += count;
      }
  }

  // Returns whether rows must be copied, because their inputs are reordered, padded, or rounded before they
  // become cells.
  bool must_copy() const {
    return order || group_inputs() != groups.size || (is_rounded && !Cells::ROUNDS);
  }

  // Sums the inputs of each group, in an order that does not depend on the number of rows.
  void sum_groups(const Panel<Cell>& panel, const float* const* rows) const {
    float* to = panel.sums;
    for (int group = 0; group < groups.count; group++, to += panel.size)
      if constexpr (Cells::ROUNDS)
        Cells::sum(to, panel.cells + group * groups.cells * panel.size, groups.cells, panel.size);
      else
        for (int m = 0; m < panel.size; m++)
          to[m] = m < panel.num_rows ? sum_inputs(rows[m] + group * group_inputs()) : 0.0f;
  }

  float sum_inputs(const float* inputs) const {
    Floats total = {};
    int i = 0;
    for (; i + LANES <= groups.size; i += LANES) total += load<Floats>(inputs + i);
    float rest = 0;
    for (; i < groups.size; i++) rest += inputs[i];
    return ::sum(total) + rest;
  }

  int group_inputs() const { return groups.cells * Cells::INPUTS; }  // with padding

  // Copies a row of x in the order of the columns of the weights.
  void copy_row(float* to, int64_t place) const {
    const float* from = x + place * groups.num_inputs;
    for (int group = 0; group < groups.count; group++, to += group_inputs()) {
      int begin = group * groups.size, i = 0;
      if (order)
        for (; i < groups.size; i++) to[i] = from[order[begin + i]];
      else
        memcpy(to, from + begin, groups.size * sizeof *to);
      memset(to + groups.size, 0, (group_inputs() - groups.size) * sizeof *to);
      if (!is_rounded || Cells::ROUNDS) continue;
      for (i = 0; i + LANES <= groups.size; i += LANES) store(to + i, rounded(load<Floats>(to + i)));
      for (; i < groups.size; i++) to[i] = rounded(fill(to[i]))[0];
    }
  }

  // Writes the cells of the rows of a panel. Each row has `inputs` inputs, including padding.
  void write_cells(const Panel<Cell>& panel, const Input* const* rows, int64_t inputs) const {
    int64_t i = 0;
#if defined(__AVX512F__)
    i = write_vectors(panel, rows, inputs);
#endif
    for (; i < groups.total_cells(); i++)
      for (int m = 0; m < panel.size; m++)
        panel.cells[i * panel.size + m] = Cells::cell([=](int which) {
          int64_t input = i / Decoder::CELLS * Decoder::INPUTS + Decoder::input(i % Decoder::CELLS, which);
          return m < panel.num_rows ? rows[m][input] : (Input)0;
        });
  }

#if defined(__AVX512F__)
  // Writes LANES cells of all rows at a time. Returns the number of cells written per row.
  int64_t write_vectors(const Panel<Cell>& panel, const Input* const* rows, int64_t inputs) const {
    constexpr int STEP_INPUTS = LANES * Cells::INPUTS;
    uint16_t places[2 * LANES];  // of the inputs, in cells of two inputs
    for (int i = 0; i < 2 * LANES; i++) {
      int cell = i / 2 % Decoder::CELLS, unit = i / 2 / Decoder::CELLS;
      places[i] = unit * Decoder::INPUTS + Decoder::input(cell, i % 2);
    }
    Bytes order_in_step = load<Bytes>(places);
    Cell* to = panel.cells;
    int64_t begin = 0;
    alignas(64) Cell cells[LANES][LANES] = {};
    for (; begin + STEP_INPUTS <= inputs; begin += STEP_INPUTS, to += LANES * panel.size) {
      for (int m = 0; m < panel.num_rows; m++) {
        Bytes vector = Cells::load_cells(rows[m] + begin);
        if (Decoder::IS_PACKED && Cells::INPUTS == 2)
          vector = _mm512_permutexvar_epi16(order_in_step, vector);
        memcpy(panel.size == 1 ? to : cells[m], &vector, sizeof vector);
      }
      if (panel.size == 1) continue;
      for (int cell = 0; cell < LANES; cell += UNIT_WORDS) {
        Unit unit;
        unit.load((const uint8_t*)&cells[0][cell], sizeof cells[0]);
        Words words = unit.transpose();
        for (int i = 0; i < UNIT_WORDS; i++)
          _mm512_mask_storeu_epi32(
              to + (cell + i) * panel.size, (1 << panel.size) - 1, (Bytes)words.each[i]);
      }
    }
    return begin / Cells::INPUTS;
  }
#endif
};

}  // namespace
