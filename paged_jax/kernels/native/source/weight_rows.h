// Multiplication of rows of x by rows of a weight, for `linear.cc`.
//
// A part of the work is some rows of the weight. They are read from memory once, and are multiplied by all
// rows of x in blocks of a few rows. Each block prefetches some of the next weights, so that memory and the
// arithmetic units work at the same time.
#pragma once

#include <type_traits>

#include "frame.h"
#include "products.h"

namespace {

using Type = ELEMENT;  // dtype of the weights, a compiler option

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
// Element type of x: bfloat16 if the weights are bfloat16 (on all processors), else float32.
using Number = std::conditional_t<std::is_same_v<Type, Bfloat16>, uint16_t, float>;
// Number of rows of weights, and of x, in a block. Their sums fill most of the registers.
constexpr int ROWS = LANES == 16 ? 4 : 3;
constexpr int INPUTS = 4;
// Number of rows of weights in a block with a single row of x. Memory is read faster with fewer rows at a
// time. But with a single row of weights, each addition would wait for the previous one.
constexpr int ROWS_OF_ONE = LANES == 16 ? 2 : 4;
// Number of rows of weights between the rows in use and the prefetched rows.
constexpr int AHEAD = 8;
// Number of rows of x that are multiplied by all weights of a part before the next rows of x. They stay in a
// cache.
constexpr int CHUNK = 16;
constexpr int64_t PART_BYTES = 64 * 1024;

// Number of lines of 64 bytes that each of `blocks` blocks prefetches in a step, so that `rows` rows are
// prefetched.
constexpr int lines(int rows, int blocks) {
  return (rows * STEP * sizeof(Form::Weight) + 64 * blocks - 1) / (64 * blocks);
}

struct Product {
  const Form::Weight* w;
  const Form::Input* const* x;  // rows
  const int64_t* places;        // index of each row in the result
  float* out;
  int64_t N, M;
  int K;
  int64_t num_parts;

  // Divides the work into parts of about PART_BYTES. Each thread gets the same number of parts.
  void divide(int64_t num_threads) {
    num_parts = (N * K * sizeof *w + PART_BYTES - 1) / PART_BYTES;
    if (num_parts > 1) num_parts = (num_parts + num_threads - 1) / num_threads * num_threads;
  }

  // Returns the first row of the weights in a part. Sizes of parts differ by at most one block.
  int64_t first_row(int64_t part) const {
    constexpr int BLOCK = LANES == 16 ? 4 : 12;  // a multiple of ROWS and ROWS_OF_ONE
    int64_t row = part * ((N + BLOCK - 1) / BLOCK) / num_parts * BLOCK;
    return row < N ? row : N;
  }

  // Multiplies rows n to n + R of the weights by inputs m to m + M_.
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
        out[places[m + j] * N + n + r] = sums[j][r];
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

  // Multiplies rows n to n + R of the weights by inputs m to `end`. The first inputs prefetch weights.
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

inline bool is_zero(float number) { return number == 0; }
inline bool is_zero(uint16_t bits) { return (bits & 0x7fff) == 0; }  // of a bfloat16 number

bool is_zero(const Number* row, int count) {
  int i = 0;
  while (i < count && is_zero(row[i])) i++;
  return i == count;
}

// Whether x has the type of the inputs of `Form`, and so their order: only bfloat16 weights have another order.
constexpr bool IS_SAME = std::is_same_v<Form::Input, Number>;

// Copies a row of x in the order of `Form`, padded with zeros.
void prepare(Form::Input* to, const Number* from, int count) {
  if constexpr (sizeof(Number) == sizeof(float)) {
    arrange<Type>((float*)to, (const float*)from, count, 1.0f);
  } else {
    for (int i = 0; i < count; i += STEP) {
      Number step[STEP] = {};
      memcpy(step, from + i, (count - i < STEP ? count - i : STEP) * sizeof *step);
      if constexpr (IS_SAME)
        memcpy(to + i, step, sizeof step);
      else
        for (int half = 0; half < 2; half++)
          store((float*)to + i + half * LANES, Type::half((const Type::Element*)step, half));
    }
  }
}

// Returns whether a row of x can be used in place.
bool is_prepared(const Number* row, int count) {
  return IS_SAME && count % STEP == 0 && (uintptr_t)row % 64 == 0;
}

// Prepared rows of x. Rows of zeros, such as padding in a batch, are left out, because their results are
// zeros.
struct Inputs {
  Form::Input* prepared;
  const Form::Input** rows;
  int64_t* places;  // index of each row in x and in the result
  int64_t count;

  // Allocates memory for M rows, aligned to cache lines. Call `release` even if it returns false.
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

  // Makes rows `begin` to `end` of x the inputs of a product, and writes the results of rows of zeros.
  void add(Product& product, const Number* x, int64_t begin, int64_t end) {
    int64_t first = count;
    for (int64_t place = begin; place < end; place++) {
      const Number* row = x + place * product.K;
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
