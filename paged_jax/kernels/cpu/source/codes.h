// Conversion of quantised weights in registers, with one row of weights in each lane of a vector.
//
// A lane contains a cell: one float32 number, or two bfloat16 or four int8 numbers for the processor's
// dot-product instructions. The scales of a group are one vector for LANES rows of weights, so that one
// instruction multiplies LANES sums by their scales.
#pragma once

#include "units.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_QUADS 1
#else
#define HAS_QUADS 0
#endif

// Rounds to the nearest bfloat16 number, ties to even.
inline Floats rounded(Floats x) {
  Ints bits = (Ints)x, upper = Ints{} + (int32_t)0xffff0000;
  Ints nearest = (bits + 0x7fff + (bits >> 16 & 1)) & upper, no_number = (bits | 0x400000) & upper;
  return (Floats)(x != x ? no_number : nearest);
}

inline uint16_t rounded_bits(float x) {
  float nearest = rounded(fill(x))[0];
  uint32_t bits;
  memcpy(&bits, &nearest, sizeof bits);
  return bits >> 16;
}

// Cells with one float32 number each.
struct Singles {
  using Cell = float;
  using Vector = Floats;
  using Sum = Floats;
  using Input = float;
  static constexpr int INPUTS = 1;           // in a cell
  static constexpr bool ROUNDS = false;      // whether inputs are rounded to bfloat16
  static constexpr bool HAS_SCALES = false;  // whether segments of inputs have scales

  // Returns a cell of the numbers number(0), number(1) and so on.
  template <class Numbers>
  static float cell(Numbers number) {
    return number(0);
  }

#if defined(__AVX512F__)
  // Returns LANES cells with inputs in their original order.
  static Bytes load_cells(const float* inputs) { return load<Bytes>(inputs); }
#endif

  // Adds the products of a vector of weights with one cell of x.
  static void add(Floats& total, Floats w, const float* x) {
#if defined(__AVX512F__)
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(total) : "v"(w), "m"(*x));
#else
    add_product(total, w, fill(*x));
#endif
  }
};

#if HAS_PAIRS
// Cells with two bfloat16 numbers each.
struct Pairs {
  using Cell = uint32_t;
  using Vector = Ints;
  using Sum = Floats;
  using Input = float;
  static constexpr int INPUTS = 2;
  static constexpr bool ROUNDS = true;
  static constexpr bool HAS_SCALES = false;

  template <class Numbers>
  static uint32_t cell(Numbers number) {
    return (uint32_t)rounded_bits(number(1)) << 16 | rounded_bits(number(0));
  }

  static Bytes load_cells(const float* inputs) {
    __m512 first = (__m512)load<Floats>(inputs), second = (__m512)load<Floats>(inputs + LANES);
    return (Bytes)_mm512_cvtne2ps_pbh(second, first);
  }

  // Sums the inputs of `count` cells of each of `size` rows.
  static void sum(float* to, const uint32_t* cells, int count, int size) {
    __mmask16 mask = (1 << size) - 1;
    __m512 total = {};
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int i = 0; i < count; i++, cells += size)
      total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_maskz_loadu_epi32(mask, cells), ones);
    _mm512_mask_storeu_ps(to, mask, total);
  }

  static void add(Floats& total, Ints w, const uint32_t* x) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(total) : "v"(w), "m"(*x));
  }
};
#endif

#if HAS_QUADS
// Cells with four int8 numbers each. Each segment of a row of x has a scale, so that its largest magnitude
// becomes 127. The dot-product instruction multiplies these numbers by numbers from 0 to 255, which are
// weights plus `Decoder::OFFSET`. To subtract the offset again, the sum of a segment starts at -OFFSET times
// the sum of its inputs.
struct Quads {
  using Cell = uint32_t;
  using Vector = Ints;
  using Sum = Ints;
  using Input = int8_t;
  static constexpr int INPUTS = 4;
  static constexpr bool ROUNDS = false;
  static constexpr bool HAS_SCALES = true;

  template <class Numbers>
  static uint32_t cell(Numbers number) {
    uint32_t bits = 0;
    for (int i = INPUTS - 1; i >= 0; i--) bits = bits << 8 | (uint8_t)number(i);
    return bits;
  }

  static Bytes load_cells(const int8_t* inputs) { return load<Bytes>(inputs); }

  // Rounds `count` inputs to int8 numbers, writes the sum of these numbers, and returns their scale. If an
  // input is infinite or NaN, the scale is not finite, because the bits of such magnitudes are the largest
  // integers.
  static float round(int8_t* to, const float* from, int count, int32_t* sum) {
    auto mask = [=](int i) { return (__mmask16)(count - i < LANES ? (1 << (count - i)) - 1 : -1); };
    Bytes peak = {}, total = {};
    for (int i = 0; i < count; i += LANES) {
      Bytes bits = _mm512_maskz_loadu_epi32(mask(i), from + i);
      peak = _mm512_max_epi32(peak, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    int32_t peak_bits = _mm512_reduce_max_epi32(peak);
    float largest;
    memcpy(&largest, &peak_bits, sizeof largest);
    __m512 factor = _mm512_set1_ps(largest < 1e-30f ? 0 : 127 / largest);  // 127 / largest stays finite
    for (int i = 0; i < count; i += LANES) {
      __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask(i), from + i), factor);
      Bytes whole = _mm512_max_epi32(_mm512_cvtps_epi32(scaled), _mm512_set1_epi32(-127));  // NaN gives -127
      total = _mm512_add_epi32(total, whole);
      _mm512_mask_cvtepi32_storeu_epi8(to + i, mask(i), whole);
    }
    *sum = _mm512_reduce_add_epi32(total);
    return largest / 127;
  }

  static void add(Ints& total, Ints w, const uint32_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(total) : "v"(w), "m"(*x));
  }
};
#endif

// Two vectors of pairs of bfloat16 numbers.
struct TwoPairs {
  Ints first, second;
};

#define INLINE __attribute__((always_inline)) inline
#define NOINLINE __attribute__((noinline))

// Each decoder below converts units. `transpose` prepares a unit; `arrange` prepares a unit of interleaved
// weights, which needs no transposition. `decode` then calls f(cell, vector) for the cells of the unit in order.
// Number `which` of a cell belongs to input `input(cell, which)` of the unit.
// Decoders to pairs can also convert a unit in STEPS steps: `pairs` returns the two cells of a step.

// 8-bit values. Their inputs are in the original order.
template <class Code, class Cells>
struct ByteDecoder {
  static constexpr int INPUTS = UNIT_BYTES;
  static constexpr int CELLS = INPUTS / Cells::INPUTS;
  static constexpr bool IS_PACKED = false;
  static int input(int cell, int which) { return cell * Cells::INPUTS + which; }
#if HAS_PAIRS
  Bytes lower[2], upper[2];  // lower and upper bytes of the bfloat16 numbers of 128 magnitudes

  explicit ByteDecoder(const float*) {
    uint8_t bytes[2][128];
    for (int i = 0; i < 128; i++) {
      uint16_t bits = rounded_bits(Code::magnitude(i));
      bytes[0][i] = bits, bytes[1][i] = bits >> 8;
    }
    memcpy(lower, bytes[0], sizeof lower);
    memcpy(upper, bytes[1], sizeof upper);
  }

  static Words transpose(const Unit& unit) { return unit.transpose_pairs(); }
  static INLINE Words arrange(Words words) {
    const Bytes places = _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100);
#pragma GCC unroll 4
    for (int i = 0; i < UNIT_WORDS; i++)
      words.each[i] = (Ints)_mm512_shuffle_epi8((Bytes)words.each[i], places);
    return words;
  }

  static constexpr int STEPS = UNIT_WORDS;
  INLINE TwoPairs pairs(const Words& words, int step) const {
    Bytes values = (Bytes)words.each[step], magnitudes = Code::magnitudes(values);
    Bytes low = _mm512_permutex2var_epi8(lower[0], magnitudes, lower[1]);
    Bytes high = _mm512_permutex2var_epi8(upper[0], magnitudes, upper[1]);
    high = Code::add_sign(high, values);
    return {(Ints)_mm512_unpacklo_epi8(low, high), (Ints)_mm512_unpackhi_epi8(low, high)};
  }

  template <class Function>
  INLINE void decode(const Words& words, Function f) const {
#pragma GCC unroll 4
    for (int step = 0; step < STEPS; step++) {
      TwoPairs two = pairs(words, step);
      call(f, 2 * step, two.first);
      call(f, 2 * step + 1, two.second);
    }
  }

  template <class Function>
  static INLINE void call(Function f, int pair, Ints numbers) {
    if constexpr (Cells::INPUTS == 2) {
      f(pair, numbers);
    } else {
      f(2 * pair, (Floats)(numbers << 16));
      f(2 * pair + 1, (Floats)(numbers & (int32_t)0xffff0000));
    }
  }
#else
  static Words transpose(const Unit& unit) { return unit.transpose(); }
  static Words arrange(const Words& words) { return words; }
  explicit ByteDecoder(const float*) {}

  template <class Function>
  INLINE void decode(const Words& words, Function f) const {
#pragma GCC unroll 4
    for (int i = 0; i < UNIT_WORDS; i++)
#pragma GCC unroll 4
      for (int byte = 0; byte < 4; byte++) f(4 * i + byte, Code::convert(words.each[i], byte));
  }
#endif
};

struct Int8Code {
  static float magnitude(int i) { return i; }
  static Floats convert(Ints words, int byte) {
    return __builtin_convertvector(words << (24 - 8 * byte) >> 24, Floats);
  }
#if HAS_PAIRS
  // _mm512_abs_epi8 and comparisons would occupy the vector units that multiply. These operations do not.
  static Bytes magnitudes(Bytes values) {
    return _mm512_min_epu8(values, _mm512_sub_epi8(Bytes{}, values));
  }
  // 67 is the upper byte of the bfloat16 number 128. The magnitude 128 has the same index in the table as 0,
  // so its upper byte is computed. For all other magnitudes, the upper byte is at least the magnitude - 61.
  static Bytes add_sign(Bytes upper, Bytes values) {
    upper = _mm512_max_epu8(upper, _mm512_subs_epu8(magnitudes(values), _mm512_set1_epi8(61)));
    return _mm512_ternarylogic_epi64(upper, values, _mm512_set1_epi8(-128), 0xf8);  // | (values & sign)
  }
#endif
};

struct Float8Code {
  static float magnitude(int i) {
    uint8_t bits[LANES] = {(uint8_t)i};
    return Float8::half(bits, 0)[0];
  }
  static Floats convert(Ints words, int byte) { return Float8::convert(words >> 8 * byte & 0xff); }
#if HAS_PAIRS
  static Bytes magnitudes(Bytes values) { return values; }  // the table ignores the sign
  static Bytes add_sign(Bytes upper, Bytes values) {
    return _mm512_ternarylogic_epi64(upper, values, _mm512_set1_epi8(-128), 0xf8);
  }
#endif
};

// 4-bit values are indices into a table of 16 numbers. The lower halves of the 16 bytes of a unit belong to
// inputs 0 to 15, the upper halves to inputs 16 to 31.
template <class Cells>
struct PackedDecoder;

template <>
struct PackedDecoder<Singles> {
  static constexpr int INPUTS = 2 * UNIT_BYTES;
  static constexpr int CELLS = INPUTS;
  static constexpr bool IS_PACKED = true;
  static int input(int cell, int) { return cell; }
  float numbers[16];

  explicit PackedDecoder(const float* table) { memcpy(numbers, table, sizeof numbers); }

  static Words transpose(const Unit& unit) { return unit.transpose(); }
  static Words arrange(const Words& words) { return words; }

  template <class Function>
  INLINE void decode(const Words& words, Function f) const {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
      for (int i = 0; i < UNIT_WORDS; i++)
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; byte++)
          f(16 * half + 4 * i + byte, look_up(words.each[i], 8 * byte + 4 * half));
  }

  // Looks up four bits of each lane, from bit `bit` on, in the table.
  INLINE Floats look_up(Ints words, int bit) const {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((Bytes)(words >> bit), (__m512)load<Floats>(numbers));
#elif defined(__AVX2__)
    __m256i index = (__m256i)(words >> bit);  // the lower 3 bits are used
    __m256 first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers), index);
    __m256 second = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8), index);
    return (Floats)_mm256_blendv_ps(first, second, (__m256)(words << (28 - bit)));  // by bit 3
#else
    Floats w;
    for (int i = 0; i < LANES; i++) w[i] = numbers[words[i] >> bit & 15];
    return w;
#endif
  }
};

#if HAS_PAIRS
template <>
struct PackedDecoder<Pairs> {
  static constexpr int INPUTS = 2 * UNIT_BYTES;
  static constexpr int CELLS = INPUTS / 2;
  static constexpr bool IS_PACKED = true;
  static int input(int cell, int which) {
    return cell / 8 * 16 + cell % 8 / 2 * 4 + 2 * which + cell % 2;
  }
  Bytes numbers;  // the table twice: the index has five bits, and the fifth bit belongs to the next value

  explicit PackedDecoder(const float* table) {
    uint16_t bits[32];
    for (int i = 0; i < 32; i++) bits[i] = rounded_bits(table[i % 16]);
    memcpy(&numbers, bits, sizeof numbers);
  }

  static Words transpose(const Unit& unit) { return unit.transpose(); }
  static Words arrange(const Words& words) { return words; }

  static constexpr int STEPS = 2 * UNIT_WORDS;
  INLINE TwoPairs pairs(const Words& words, int step) const {
    Bytes values = (Bytes)words.each[step % UNIT_WORDS];
    auto look_up = [&](int bit) {
      return (Ints)_mm512_permutexvar_epi16(_mm512_srli_epi16(values, bit), numbers);
    };
    int bit = step / UNIT_WORDS * 4;
    return {look_up(bit), look_up(bit + 8)};
  }

  template <class Function>
  INLINE void decode(const Words& words, Function f) const {
#pragma GCC unroll 8
    for (int step = 0; step < STEPS; step++) {
      TwoPairs two = pairs(words, step);
      f(2 * step, two.first);
      f(2 * step + 1, two.second);
    }
  }
};
#endif

#if HAS_QUADS
// Decoders to integers from 0 to 255. A value stands for the number STEP * (integer - OFFSET).

template <>
struct ByteDecoder<Int8Code, Quads> {
  static constexpr int INPUTS = UNIT_BYTES;
  static constexpr int CELLS = INPUTS / 4;
  static constexpr bool IS_PACKED = false;
  static constexpr int OFFSET = 128;
  static constexpr float STEP = 1;
  static int input(int cell, int which) { return 4 * cell + which; }

  explicit ByteDecoder(const float*) {}

  static Words transpose(const Unit& unit) { return unit.transpose(); }
  static Words arrange(const Words& words) { return words; }

  template <class Function>
  INLINE void decode(const Words& words, Function f) const {
#pragma GCC unroll 4
    for (int i = 0; i < CELLS; i++) f(i, words.each[i] ^ (int32_t)0x80808080);
  }
};

template <>
struct PackedDecoder<Quads> {
  static constexpr int INPUTS = 2 * UNIT_BYTES;
  static constexpr int CELLS = INPUTS / 4;
  static constexpr bool IS_PACKED = true;
  static constexpr int OFFSET = 16;
  static constexpr float STEP = 0.5f;  // the numbers of int4, uint4 and E2M1 are multiples of it
  static int input(int cell, int which) { return 4 * cell + which; }
  Bytes numbers;

  explicit PackedDecoder(const float* table) {
    uint8_t bytes[64];
    for (int i = 0; i < 64; i++) bytes[i] = (int)(table[i % 16] / STEP) + OFFSET;
    memcpy(&numbers, bytes, sizeof numbers);
  }

  static Words transpose(const Unit& unit) { return unit.transpose(); }
  static Words arrange(const Words& words) { return words; }

  template <class Function>
  INLINE void decode(const Words& words, Function f) const {
    const Ints mask = Ints{} + 0x0f0f0f0f;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
      for (int i = 0; i < UNIT_WORDS; i++)
        f(4 * half + i, (Ints)_mm512_shuffle_epi8(numbers, (Bytes)(words.each[i] >> 4 * half & mask)));
  }
};
#endif
