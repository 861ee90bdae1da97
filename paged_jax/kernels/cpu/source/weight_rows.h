// Rows of x by the rows of a weight, in parts that threads take: what `linear.cc` and
// `grouped_linear.cc` share.
//
// A part of the work is some rows of the weights, which are read from memory once and meet all rows of
// x, a few at a time. All of these blocks fetch the weights that come next, each some of them, so that
// memory is busy as long as arithmetic is.
#pragma once

#include "frame.h"
#include "products.h"

namespace {

using Type = ELEMENT;  // of the weights: the compiler is told which

template <class>
struct FormFor {
  using Form = InFloats<Type>;
};
#if defined(__AVX512BF16__)
template <>
struct FormFor<Bfloat16> {
  using Form = InBfloat16;
};
#endif
using Form = FormFor<Type>::Form;
constexpr bool IS_INT8 = sizeof(Form::Weight) == 1;
// Whether rows of x are rounded to bfloat16, so that all processors multiply the same numbers.
template <class>
constexpr bool ROUNDS = false;
template <>
constexpr bool ROUNDS<Bfloat16> = true;
// Rows of weights and of x that meet in registers: their sums fill most of what there are.
constexpr int ROWS = LANES == 16 ? 4 : 3;
constexpr int INPUTS = 4;
// With a single row of x the sums of one row of weights would wait for each other, and memory is read
// the faster the fewer rows are read at a time.
constexpr int ROWS_OF_ONE = LANES == 16 ? 2 : 4;
// How many rows of weights are fetched ahead.
constexpr int AHEAD = 8;
// Rows of x that weights meet before the next weights do: these rows stay in a cache.
constexpr int CHUNK = 16;
constexpr int64_t PART_BYTES = 64 * 1024;

// Lines of 64 bytes in a step of some rows of weights, for each of a few blocks.
constexpr int lines(int rows, int blocks) {
  return (rows * STEP * sizeof(Form::Weight) + 64 * blocks - 1) / (64 * blocks);
}

struct Product {
  const Form::Weight* w;
  const float* scales;  // of the rows of w; none for floats
  const Form::Input* const* x;  // its rows
  const int64_t* places;        // of these in the result
  float* out;
  int64_t N, M;
  int K;
  int64_t num_parts;

  // Parts of about PART_BYTES, as many for each thread.
  void divide(int64_t num_threads) {
    num_parts = (N * K * sizeof *w + PART_BYTES - 1) / PART_BYTES;
    if (num_parts > 1) num_parts = (num_parts + num_threads - 1) / num_threads * num_threads;
  }

  // Where a part begins among the rows of the weights. Parts differ by one block at most.
  int64_t first_row(int64_t part) const {
    constexpr int BLOCK = LANES == 16 ? 4 : 12;  // a multiple of ROWS and ROWS_OF_ONE
    int64_t row = part * ((N + BLOCK - 1) / BLOCK) / num_parts * BLOCK;
    return row < N ? row : N;
  }

  // Weights n to n + R, inputs m to m + M_.
  template <int R, int M_, int LINES>
  void block(int64_t n, int64_t m) const {
    const Form::Weight* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) rows[r] = w + (n + r) * K;
    float sums[M_][R];
    const char* next = (const char*)(w + (n + AHEAD) * K) + m / INPUTS * (K / STEP) * LINES * 64;
    multiply<Form, R, M_, LINES>(rows, x + m, K, sums, next);
    for (int j = 0; j < M_; j++)
      for (int r = 0; r < R; r++)
        out[places[m + j] * N + n + r] = IS_INT8 ? sums[j][r] * scales[n + r] : sums[j][r];
  }

  template <int R, int M_, int LINES>
  void rest(int64_t n, int64_t m, int64_t end) const {
    if (m + M_ == end) return block<R, M_, LINES>(n, m);
    if constexpr (M_ > 1) rest<R, M_ - 1, LINES>(n, m, end);
  }

  template <int R, int LINES>
  void blocks(int64_t n, int64_t m, int64_t end) const {
    for (; m + INPUTS < end; m += INPUTS) block<R, INPUTS, LINES>(n, m);
    rest<R, INPUTS, LINES>(n, m, end);
  }

  // Weights n to n + R, inputs m to `end`; the first to come to weights fetch the next ones.
  template <int R>
  void rows(int64_t n, int64_t m, int64_t end) const {
    if (m) return blocks<R, 0>(n, m, end);
    if (end <= INPUTS) return blocks<R, lines(R, 1)>(n, m, end);
    if (end <= 2 * INPUTS) return blocks<R, lines(R, 2)>(n, m, end);
    return blocks<R, lines(R, 3)>(n, m, end);
  }

  void run(int64_t part) {
    int64_t first = first_row(part), last = first_row(part + 1);
    for (int64_t m = 0; m < M; m += CHUNK) {
      int64_t n = first, end = m + CHUNK < M ? m + CHUNK : M;
      if (end - m == 1)
        for (; n + ROWS_OF_ONE <= last; n += ROWS_OF_ONE)
          block<ROWS_OF_ONE, 1, lines(ROWS_OF_ONE, 1)>(n, m);
      for (; n + ROWS <= last; n += ROWS) rows<ROWS>(n, m, end);
      for (; n < last; n++)
        for (int64_t i = m; i < end; i++) block<1, 1, 0>(n, i);
    }
  }
};

// To the nearest number of bfloat16, ties to even. Without a branch, so that many are made at once.
inline uint16_t rounded_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  uint32_t no_number = (bits >> 16) | 0x40, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return x != x ? no_number : nearest;
}

bool is_zero(const float* row, int count) {
  int i = 0;
  while (i < count && row[i] == 0) i++;
  return i == count;
}

// A row of x as the products want it: padded with zeros, rounded where the weights are bfloat16.
template <class Input>
void prepare(Input* to, const float* from, int count) {
  int padded = round_up(count, STEP);
  if constexpr (sizeof(Input) == sizeof(uint16_t)) {
    int i = 0;
    for (; i + STEP <= count; i += STEP)
      for (int j = 0; j < STEP; j++) to[i + j] = rounded_bits(from[i + j]);
    for (; i < padded; i++) to[i] = i < count ? rounded_bits(from[i]) : 0;
  } else {
    arrange<Type>(to, from, count, 1.0f);
    for (int i = 0; i < padded && ROUNDS<Type>; i++) {
      uint32_t bits = (uint32_t)rounded_bits(to[i]) << 16;
      memcpy(to + i, &bits, sizeof bits);
    }
  }
}

// Whether a row of x is as the products want it where it lies.
bool is_prepared(const float* row, int count) {
  constexpr bool IS_SAME = sizeof(Form::Input) == sizeof(float) && Type::IN_ORDER && !ROUNDS<Type>;
  return IS_SAME && count % STEP == 0 && (uintptr_t)row % 64 == 0;
}

// Rows of x so, without those of zeros, whose results are zeros: rows of a batch that are no token.
struct Inputs {
  Form::Input* prepared;
  const Form::Input** rows;
  int64_t* places;  // of each among the rows of x, and of the result
  int64_t count;

  // Room for as many rows, where no vector of theirs crosses a cache's lines. `release` it in any case.
  bool reserve(int64_t M, int K) {
    size_t lines = (M * round_up(K, STEP) * sizeof *prepared + 63) / 64;
    prepared = (Form::Input*)aligned_alloc(64, lines * 64);
    rows = (const Form::Input**)malloc(M * sizeof *rows);
    places = (int64_t*)malloc(M * sizeof *places);
    return prepared && rows && places;
  }

  void release() {
    free(prepared);
    free(rows);
    free(places);
  }

  // Adds rows `begin` to `end` of x to the inputs of a product, or zeros to its result.
  void add(Product& product, const float* x, int64_t begin, int64_t end) {
    int64_t first = count;
    for (int64_t place = begin; place < end; place++) {
      const float* row = x + place * product.K;
      if (is_zero(row, product.K)) {
        memset(product.out + place * product.N, 0, product.N * sizeof(float));
        continue;
      }
      if (is_prepared(row, product.K)) {
        rows[count] = (const Form::Input*)row;
      } else {
        Form::Input* to = prepared + count * round_up(product.K, STEP);
        prepare(to, row, product.K);
        rows[count] = to;
      }
      places[count++] = place;
    }
    product.x = rows + first;
    product.places = places + first;
    product.M = count - first;
  }
};

}  // namespace
