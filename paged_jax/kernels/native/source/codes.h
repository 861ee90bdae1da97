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
  static constexpr int WORDS = UNIT_WORDS;
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

// Values of BITS bits (4 or 5) are indices into a table of numbers. A unit has 32 inputs. Input
// 16 * half + 4 * word + byte has its lower four bits in a half of byte `byte` of word `word`. Its fifth bit is
// bit 4 * half + word of byte `byte` of the last word.
template <class Cells, int BITS>
struct PackedDecoder;

template <int BITS>
struct PackedDecoder<Singles, BITS> {
  static constexpr int INPUTS = 32;
  static constexpr int CELLS = INPUTS;
  static constexpr int WORDS = BITS;
  static constexpr bool IS_PACKED = true;
  static int input(int cell, int) { return cell; }
  float numbers[16];

  explicit PackedDecoder(const float* table) { memcpy(numbers, table, sizeof numbers); }

  static Words transpose(const Unit& unit) { return unit.transpose(); }
  static WordsOf<WORDS> arrange(const WordsOf<WORDS>& words) { return words; }

  template <class Function>
  INLINE void decode(const WordsOf<WORDS>& words, Function f) const {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; byte++)
          f(16 * half + 4 * i + byte, number(words, half, i, byte));
  }

  INLINE Floats number(const WordsOf<WORDS>& words, int half, int i, int byte) const {
    if constexpr (BITS == 4) {
      return look_up(words.each[i], 8 * byte + 4 * half);
    } else {  // the numbers are consecutive integers
      Ints low = words.each[i] >> (8 * byte + 4 * half) & 15;
      Ints fifth = words.each[4] >> (8 * byte + 4 * half + i) & 1;
      return __builtin_convertvector(low | fifth << 4, Floats) + fill(numbers[0]);
    }
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

#if defined(__AVX512BW__)
// Returns the values of word `i` and half `half` of a unit, one in each byte. Bits above the lowest BITS are
// undefined.
template <int BITS>
INLINE Bytes value_bytes(const WordsOf<BITS>& words, int half, int i) {
  Bytes low = _mm512_srli_epi16((Bytes)words.each[i], 4 * half);
  if constexpr (BITS == 4) return low;
  Bytes fifth = (Bytes)words.each[BITS - 1];
  fifth = half ? _mm512_srli_epi16(fifth, i) : _mm512_slli_epi16(fifth, 4 - i);
  // Take four bits from `low`, and the others from `fifth`.
  return _mm512_ternarylogic_epi64(_mm512_set1_epi8(15), low, fifth, 0xca);
}
#endif

#if HAS_PAIRS
template <int BITS>
struct PackedDecoder<Pairs, BITS> {
  static constexpr int INPUTS = 32;
  static constexpr int CELLS = INPUTS / 2;
  static constexpr int WORDS = BITS;
  static constexpr bool IS_PACKED = true;
  static int input(int cell, int which) {
    return cell / 8 * 16 + cell % 8 / 2 * 4 + 2 * which + cell % 2;
  }
  // Table of 32 numbers, because a look-up uses five bits. With 4-bit values, the fifth bit belongs to another
  // value, so the table contains the 16 numbers twice.
  Bytes numbers;

  explicit PackedDecoder(const float* table) {
    uint16_t bits[32];
    for (int i = 0; i < 32; i++) bits[i] = rounded_bits(table[i % (1 << BITS)]);
    memcpy(&numbers, bits, sizeof numbers);
  }

  static Words transpose(const Unit& unit) { return unit.transpose(); }
  static WordsOf<WORDS> arrange(const WordsOf<WORDS>& words) { return words; }

  static constexpr int STEPS = 8;
  INLINE TwoPairs pairs(const WordsOf<WORDS>& words, int step) const {
    Bytes values = value_bytes<BITS>(words, step / 4, step % 4);
    if constexpr (BITS == 4) {  // shift the words themselves, so that no shift waits for another
      Bytes word = (Bytes)words.each[step % 4];
      return {look_up(values), look_up(_mm512_srli_epi16(word, step / 4 * 4 + 8))};
    }
    return {look_up(values), look_up(_mm512_srli_epi16(values, 8))};
  }

  INLINE Ints look_up(Bytes values) const { return (Ints)_mm512_permutexvar_epi16(values, numbers); }

  template <class Function>
  INLINE void decode(const WordsOf<WORDS>& words, Function f) const {
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
  static constexpr int WORDS = UNIT_WORDS;
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

template <int BITS>
struct PackedDecoder<Quads, BITS> {
  static constexpr int INPUTS = 32;
  static constexpr int CELLS = INPUTS / 4;
  static constexpr int WORDS = BITS;
  static constexpr bool IS_PACKED = true;
  // The numbers of int4, uint4 and E2M1 are multiples of 1/2. The kernel is not used for other 4-bit codes.
  // The numbers of 5-bit codes are consecutive integers.
  static constexpr int OFFSET = BITS == 4 ? 16 : 32;
  static constexpr float STEP = BITS == 4 ? 0.5f : 1;
  static int input(int cell, int which) { return 4 * cell + which; }
  Bytes integers;  // 4 bits: the integers of the 16 values; 5 bits: the integer of value 0 in each byte

  explicit PackedDecoder(const float* table) {
    uint8_t bytes[64];
    for (int i = 0; i < 64; i++) bytes[i] = (int)(table[BITS == 4 ? i % 16 : 0] / STEP) + OFFSET;
    memcpy(&integers, bytes, sizeof integers);
  }

  static Words transpose(const Unit& unit) { return unit.transpose(); }
  static WordsOf<WORDS> arrange(const WordsOf<WORDS>& words) { return words; }

  template <class Function>
  INLINE void decode(const WordsOf<WORDS>& words, Function f) const {
    const Bytes mask = _mm512_set1_epi8((1 << BITS) - 1);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        Bytes values = value_bytes<BITS>(words, half, i) & mask;
        f(4 * half + i,
          (Ints)(BITS == 4 ? _mm512_shuffle_epi8(integers, values) : _mm512_add_epi8(integers, values)));
      }
  }
};
#endif
