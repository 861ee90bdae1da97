// Dot products of a few weight rows with a few input rows, summed in registers.
#pragma once

#include "vectors.h"

// Multiplies weights of `Type` by float inputs, which are in the order of `arrange<Type>`.
template <class Type>
struct InFloats {
  using Weight = typename Type::Element;
  using Input = float;
  static constexpr int HALVES = 2;
  static Floats weights(const Weight* from, int half) { return Type::half(from, half); }
  static Floats inputs(const Input* from, int half) { return Float32::half(from, half); }
  static void add(Floats& total, Floats w, Floats x) { add_product(total, w, x); }
};

#if defined(__AVX512BF16__)
// Multiplies bfloat16 weights by bfloat16 inputs with the processor's dot-product instruction, STEP numbers
// at a time. The inputs are in their original order.
struct InBfloat16 {
  using Weight = uint16_t;
  using Input = uint16_t;
  static constexpr int HALVES = 1;
  static Ints weights(const Weight* from, int) { return load<Ints>(from); }
  static Ints inputs(const Input* from, int) { return load<Ints>(from); }
  static void add(Floats& total, Ints w, Ints x) {
    total = (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)w, (__m512bh)x);
  }
};
#endif

// Adds the next STEP products to each dot product of R weight rows with M input rows.
template <class Form, int R, int M>
inline void add_step(
    Floats total[R][M], const typename Form::Weight* const* w, const typename Form::Input* const* x) {
#pragma GCC unroll 2
  for (int half = 0; half < Form::HALVES; half++) {
    decltype(Form::weights(w[0], 0)) row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) row[r] = Form::weights(w[r], half);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      auto input = Form::inputs(x[m], half);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) Form::add(total[r][m], row[r], input);
    }
  }
}

// Computes out[m][r] = w[r] . x[m] for R weight rows and M input rows. Each dot product has its own
// accumulator. Its order of summation does not depend on R and M. In each step, LINES lines of 64 bytes are
// prefetched, starting at `next`.
template <class Form, int R, int M, int LINES = 0>
inline void multiply(
    const typename Form::Weight* const* w, const typename Form::Input* const* x, int count,
    float out[M][R], const char* next = nullptr) {
  using Weight = typename Form::Weight;
  // Prefetch into the second-level cache, because in the first level pending lines would delay the loads of
  // inputs. With one or two inputs and 16-bit weights, there are too few such loads to matter. (Measured on
  // Zen 4.)
  constexpr int LEVEL = sizeof(Weight) == 2 && M <= 2 ? 3 : 2;
  Floats total[R][M] = {};
  const Weight* row[R];
  const typename Form::Input* input[M];
  int i = 0;
  for (; i + STEP <= count; i += STEP) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) row[r] = w[r] + i;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) input[m] = x[m] + i;
#pragma GCC unroll 8
    for (int line = 0; line < LINES; line++, next += 64) __builtin_prefetch(next, 0, LEVEL);
    add_step<Form, R, M>(total, row, input);
  }
  if (i < count) {  // do not read past the end of a row
    Weight last[R][STEP] = {};
    for (int r = 0; r < R; r++) row[r] = (Weight*)memcpy(last[r], w[r] + i, (count - i) * sizeof(Weight));
    for (int m = 0; m < M; m++) input[m] = x[m] + i;
    add_step<Form, R, M>(total, row, input);
  }
  // With fewer dot products, `sum_block` would mostly add zeros.
  if constexpr (R * M > 8 && LANES == 16) return sum_block(total, &out[0][0]);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    int r = 0;
    if constexpr (R >= 4) {
      Quarter sums = sum_four(total[0][m], total[1][m], total[2][m], total[3][m]);
      for (; r < 4; r++) out[m][r] = sums[r];
    }
#pragma GCC unroll 8
    for (; r < R; r++) out[m][r] = sum(total[r][m]);
  }
}
