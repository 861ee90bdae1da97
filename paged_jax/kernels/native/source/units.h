// Units of weights: 16 or 20 bytes of each of LANES weight rows, and their transposition.
#pragma once

#include "vectors.h"

constexpr int UNIT_BYTES = 16;
constexpr int UNIT_WORDS = UNIT_BYTES / 4;

inline int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

// An array of values, scales or minima, with a row of bytes for each row of weights.
struct ByteRows {
  const uint8_t* begin;
  int64_t row_bytes;
  const uint8_t* end;  // of the array
};

// A transposed unit: each vector has four bytes of each row.
template <int COUNT>
struct WordsOf {
  Ints each[COUNT];
};
using Words = WordsOf<UNIT_WORDS>;

#if defined(__AVX512F__)
typedef __m512i Bytes;

// Loads 16 bytes of each of four rows. The first row starts at `from`, and rows are `stride` bytes apart. Loads
// with masks (BY_MASKS) need no shuffle instructions. Insertions need no registers for masks.
template <bool BY_MASKS>
inline Bytes load_quarters(const uint8_t* from, int64_t stride) {
  auto quarter = [=](int i) { return _mm_loadu_si128((const __m128i*)(from + i * stride)); };
  Bytes bytes = _mm512_castsi128_si512(quarter(0));
  if constexpr (BY_MASKS) {
    bytes = _mm512_mask_broadcast_i32x4(bytes, 0xf0, quarter(1));
    bytes = _mm512_mask_broadcast_i32x4(bytes, 0xf00, quarter(2));
    return _mm512_mask_broadcast_i32x4(bytes, 0xf000, quarter(3));
  }
  bytes = _mm512_inserti32x4(bytes, quarter(1), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(bytes, quarter(2), 2), quarter(3), 3);
}

// 16-byte lane i of rows[j] contains the bytes of row 4 i + j.
struct Unit {
  Bytes rows[4];

  template <bool BY_MASKS = false>
  void load(const uint8_t* from, int64_t stride) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) rows[i] = load_quarters<BY_MASKS>(from + i * stride, 4 * stride);
  }

  // Returns words of four bytes. Vector i has word i of each row.
  Words transpose() const {
    Bytes a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpacklo_epi32(rows[2], rows[3]);
    Bytes c = _mm512_unpackhi_epi32(rows[0], rows[1]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
    return {
        {(Ints)_mm512_unpacklo_epi64(a, b), (Ints)_mm512_unpackhi_epi64(a, b),
         (Ints)_mm512_unpacklo_epi64(c, d), (Ints)_mm512_unpackhi_epi64(c, d)}};
  }

  // Returns pairs of bytes. In vector i, the lower halves of the lanes contain pair 2 i of each row, and the
  // upper halves contain pair 2 i + 1.
  Words transpose_pairs() const {
    Bytes a = _mm512_unpacklo_epi16(rows[0], rows[1]), b = _mm512_unpacklo_epi16(rows[2], rows[3]);
    Bytes c = _mm512_unpackhi_epi16(rows[0], rows[1]), d = _mm512_unpackhi_epi16(rows[2], rows[3]);
    return {
        {(Ints)_mm512_unpacklo_epi32(a, b), (Ints)_mm512_unpackhi_epi32(a, b),
         (Ints)_mm512_unpacklo_epi32(c, d), (Ints)_mm512_unpackhi_epi32(c, d)}};
  }
};
#else
struct Unit {
  Words words;

  template <bool BY_MASKS = false>
  void load(const uint8_t* from, int64_t stride) {
    for (int row = 0; row < LANES; row++) {
      int32_t bytes[UNIT_WORDS];
      memcpy(bytes, from + row * stride, sizeof bytes);
      for (int i = 0; i < UNIT_WORDS; i++) words.each[i][row] = bytes[i];
    }
  }

  Words transpose() const { return words; }
};
#endif

// Loads bytes `offset` to `offset + UNIT_BYTES` of `num_rows` rows, from row `row` on. Rows from `num_rows`
// on, and bytes from `valid` on, are zeros.
inline Unit load_unit(const ByteRows& rows, int64_t row, int num_rows, int64_t offset, int valid) {
  Unit unit;
  const uint8_t* from = rows.begin + row * rows.row_bytes + offset;
  if (__builtin_expect(num_rows == LANES && valid == UNIT_BYTES, 1)) {
    unit.load(from, rows.row_bytes);
    return unit;
  }
  uint8_t copy[LANES][UNIT_BYTES] = {};
  for (int i = 0; i < num_rows; i++) memcpy(copy[i], from + i * rows.row_bytes, valid);
  unit.load(copy[0], UNIT_BYTES);
  return unit;
}

// Adds the fifth word of each row if COUNT is 5; otherwise returns `words`. The unit starts at `from` in the
// first row. Rows are `stride` bytes apart. Rows from `num_rows` on are zeros.
template <int COUNT>
inline WordsOf<COUNT> add_words(const Words& words, const uint8_t* from, int64_t stride, int num_rows) {
  if constexpr (COUNT == UNIT_WORDS) {
    return words;
  } else {
    static_assert(COUNT == UNIT_WORDS + 1, "one more word");
    from += UNIT_BYTES;
    WordsOf<COUNT> all = {{words.each[0], words.each[1], words.each[2], words.each[3]}};
#if defined(__AVX512F__)
    const Bytes places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    Bytes offsets = _mm512_mullo_epi32(places, _mm512_set1_epi32(stride));
    __mmask16 mask = (1 << num_rows) - 1;
    all.each[UNIT_WORDS] = (Ints)_mm512_mask_i32gather_epi32(Bytes{}, mask, offsets, from, 1);
#else
    int32_t last[LANES] = {};
    for (int i = 0; i < num_rows; i++) memcpy(last + i, from + i * stride, sizeof *last);
    all.each[UNIT_WORDS] = load<Ints>(last);
#endif
    return all;
  }
}

// Storage of scales and minima. See `Sections` for TWO_LEVELS.
enum ScaleKind : int32_t { FLOAT32, BFLOAT16, FLOAT16, TWO_LEVELS };

// Scales or minima of two levels. For each section of inputs, a row has an int8 number for each group, in words
// of four groups, and a word with a float32 factor. A group's scale is its number times the factor.
struct Sections {
  static constexpr int INPUTS = 256;  // in a section
  int log2_groups;                    // in a section

  explicit Sections(int group_size)
      : log2_groups(group_size < INPUTS ? __builtin_ctz(INPUTS / group_size) : 0) {}

  int num_groups() const { return 1 << log2_groups; }
  int num_words() const { return num_groups() / 4 + 1; }

  // Place of the scale of a group.
  struct Place {
    int number_word, factor_word;  // words with the number of the group, and with its factor
    int shift;                     // to move the number to the highest byte of its word

    Floats scales(Ints numbers, Floats factors) const {
      return __builtin_convertvector(numbers << shift >> 24, Floats) * factors;
    }
  };

  Place find(int group) const {
    int first = (group >> log2_groups) * num_words(), index = group & (num_groups() - 1);
    return {first + index / 4, first + num_words() - 1, 24 - index % 4 * 8};
  }
};

// Converts float16 numbers in the lower halves of 32-bit lanes. The upper halves must be zeros.
inline Floats widen_float16(Ints bits) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((Bytes)bits));
#else
  uint16_t narrow[LANES];
  for (int i = 0; i < LANES; i++) narrow[i] = bits[i];
  return Float16::half(narrow, 0);
#endif
}

// Loads at least `valid` bytes of each row, from byte `offset` on, and transposes them. Loads UNIT_BYTES if
// they end inside the array, because this is faster.
inline Words load_at_least(const ByteRows& rows, int64_t row, int num_rows, int64_t offset, int64_t valid) {
  const uint8_t* last_row = rows.begin + (row + LANES - 1) * rows.row_bytes;
  bool is_inside = valid >= UNIT_BYTES || last_row + offset + UNIT_BYTES <= rows.end;
  return load_unit(rows, row, num_rows, offset, is_inside ? UNIT_BYTES : valid).transpose();
}

// Converts groups `first` to `last` of scales of two levels to float32 [groups, LANES], for `num_rows` rows.
inline void transpose_sections(
    float* to, const ByteRows& rows, int64_t row, int num_rows, int first, int last,
    const Sections& sections) {
  constexpr int MAX_WORDS = Sections::INPUTS / 4 + 1;
  Ints words[MAX_WORDS + UNIT_WORDS];
  int loaded = -1;  // the factor's word of the loaded section
  for (int group = first; group < last; group++, to += LANES) {
    Sections::Place place = sections.find(group);
    int64_t before = place.factor_word - sections.num_words() + 1;
    if (place.factor_word != loaded) {
      loaded = place.factor_word;
      for (int i = 0; i < sections.num_words(); i += UNIT_WORDS) {
        Words unit = load_at_least(rows, row, num_rows, 4 * (before + i), 4 * (sections.num_words() - i));
        memcpy(words + i, unit.each, sizeof unit.each);
      }
    }
    store(to, place.scales(words[place.number_word - before], (Floats)words[loaded - before]));
  }
}

// Converts groups `first` to `last` of floats [rows, groups] to float32 [groups, LANES], for `num_rows`
// rows. Writes up to two groups after the last one.
inline void transpose_floats(
    float* to, const ByteRows& rows, int64_t row, int num_rows, int first, int last, ScaleKind kind) {
  int bytes = kind == FLOAT32 ? 4 : 2;
  for (int group = first; group < last;) {
    Words words = load_at_least(rows, row, num_rows, (int64_t)group * bytes, (int64_t)(last - group) * bytes);
#pragma GCC unroll 4
    for (int i = 0; i < UNIT_WORDS && group < last; i++, group += 4 / bytes, to += 4 / bytes * LANES) {
      Ints word = words.each[i], upper = word & (int32_t)0xffff0000;
      if (kind == FLOAT32) {
        store(to, (Floats)word);
      } else if (kind == BFLOAT16) {
        store(to, (Floats)(word << 16));
        store(to + LANES, (Floats)upper);
      } else {
        store(to, widen_float16(word & 0xffff));
        store(to + LANES, widen_float16(upper >> 16 & 0xffff));
      }
    }
  }
}
