// Vectors of floats, as wide as the registers of the target processor, and conversions to floats from the
// dtypes of weights and pools. They use GCC's vector extension, which Clang also supports.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
// Numbers are read in steps of two vectors, called halves.
constexpr int STEP = 2 * LANES;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

template <class Vector, class Element>
inline Vector load(const Element* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}

inline void store(float* to, Floats vector) { memcpy(to, &vector, sizeof vector); }

inline Floats fill(float x) { return x - Floats{}; }

// Adds x * y to a sum in a register. It is assembly, because compilers would reorder the sums of a block so
// that they no longer fit into the registers, which costs a third of the speed.
inline void add_product(Floats& sum, Floats x, Floats y) {
#if defined(__FMA__)
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
#else
  sum = sum + x * y;
#endif
}

// Computes x * scale + the numbers in memory, which the instruction reads itself. A compiler could load them
// into a register before it is needed.
inline void scale_and_add(Floats& x, Floats scale, const float* from) {
#if defined(__FMA__)
  asm("vfmadd213ps %2, %1, %0" : "+v"(x) : "v"(scale), "m"(*(const Floats*)from));
#else
  x = x * scale + load<Floats>(from);
#endif
}

typedef float Quarter __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif

inline Quarter add_quarters(Floats vector) {
  Quarter part[LANES / 4];
  memcpy(part, &vector, sizeof part);
#pragma GCC unroll 2
  for (int width = LANES / 8; width > 0; width /= 2)
#pragma GCC unroll 2
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

// Sums a vector in a fixed tree order. All other sums of vectors use the same order.
inline float sum(Floats vector) {
  Quarter part = add_quarters(vector);
  return (part[0] + part[2]) + (part[1] + part[3]);
}

inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

inline float largest(Floats vector) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)vector);
#else
  float each[LANES], peak = vector[0];
  store(each, vector);
  for (int i = 1; i < LANES; i++) peak = each[i] > peak ? each[i] : peak;
  return peak;
#endif
}

// Returns the sum of each of four vectors.
inline Quarter sum_four(Floats first, Floats second, Floats third, Floats fourth) {
  Quarter a = add_quarters(first), b = add_quarters(second);
  Quarter c = add_quarters(third), d = add_quarters(fourth);
  Quarter ab = SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7);
  Quarter cd = SHUFFLE(c, d, 0, 1, 4, 5) + SHUFFLE(c, d, 2, 3, 6, 7);
  return SHUFFLE(ab, cd, 0, 2, 4, 6) + SHUFFLE(ab, cd, 1, 3, 5, 7);
}

// Sums each vector of a block of up to 16: out[m][r] is the sum of vectors[r][m]. For short rows, these sums
// take as long as the products. Four vectors at a time are therefore shuffled together and added.
template <int R, int M>
inline void sum_block(const Floats (&vectors)[R][M], float* out) {
#if defined(__AVX512F__)
  static_assert(R * M <= 16);
  auto vector = [&](int place) {  // place in `out`
    return place < R * M ? (__m512)vectors[place % R][place / R] : __m512{};
  };
  __m512 row[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // add the halves of four vectors, then the quarters
    __m512 a = vector(i), b = vector(4 + i), c = vector(8 + i), d = vector(12 + i);
    __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
    row[i] = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
  }
  // Each quarter of a row is the partial sum of one vector. Add within quarters, as in `sum_four`.
  __m512 ab = _mm512_shuffle_ps(row[0], row[1], 0x44) + _mm512_shuffle_ps(row[0], row[1], 0xee);
  __m512 cd = _mm512_shuffle_ps(row[2], row[3], 0x44) + _mm512_shuffle_ps(row[2], row[3], 0xee);
  Floats sums = (Floats)(_mm512_shuffle_ps(ab, cd, 0x88) + _mm512_shuffle_ps(ab, cd, 0xdd));
  memcpy(out, &sums, R * M * sizeof *out);
#endif
}

// e**x with an error of 2 units in the last place; 0 below -87. x must be at most 88. Based on Cephes' expf.
inline Floats exponential(Floats x) {
  const Floats magic = fill(12582912.0f);  // 1.5 * 2**23: adding it rounds to a whole number
  Floats shifted = x * 1.44269504f + magic;
  Floats whole = shifted - magic;
  Floats r = x - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
  Floats y = fill(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  y = y * (Floats)(((Ints)shifted - (Ints)magic + 127) << 23);
  return x < -87.0f ? Floats{} : y;
}

// tanh(x) with an error of 3 units in the last place. Near 0, the difference from 1 would cancel, so the result
// is an odd polynomial there, whose coefficients minimise the largest relative error.
inline Floats hyperbolic_tangent(Floats x) {
  Floats square = x * x;
  Floats near = fill(1.724149095e-2f);
  near = near * square - 5.304549400e-2f;
  near = near * square + 1.332587895e-1f;
  near = near * square - 3.333314390e-1f;
  near = near * square * x + x;
  x = x > 10.0f ? fill(10.0f) : x;
  x = x < -10.0f ? fill(-10.0f) : x;
  Floats far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return square < 0.25f ? near : far;
}

// Each type below converts a step, STEP numbers in memory, to two vectors, its halves. If IN_ORDER is false,
// the vectors have another order than memory, and `arrange` puts the other factor of a product in the same
// order.

struct Float32 {
  using Element = float;
  static constexpr bool IN_ORDER = true;
  static Floats half(const float* from, int which) { return load<Floats>(from + which * LANES); }
};

// Reads two bfloat16 numbers as one integer. The even number is its lower half, and the odd number is its
// upper half.
struct Bfloat16 {
  using Element = uint16_t;
  static constexpr bool IN_ORDER = false;
  static Floats half(const uint16_t* from, int which) {
    Ints pairs = load<Ints>(from);
    return (Floats)(which ? pairs & (int32_t)0xffff0000 : pairs << 16);
  }
};

// Widens LANES small integers to 32 bits. GCC 12 would convert them one at a time.
template <class Small>
inline Ints widen(const Small* from) {
#if defined(__AVX2__)
  Ints wide;
  struct Lanes {
    Small each[LANES];
  };
  const Lanes& lanes = *(const Lanes*)from;
  if (sizeof(Small) == 2)
    asm("vpmovzxwd %1, %0" : "=v"(wide) : "m"(lanes));
  else if ((Small)-1 < 0)
    asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(lanes));
  else
    asm("vpmovzxbd %1, %0" : "=v"(wide) : "m"(lanes));
  return wide;
#else
  typedef Small Smalls __attribute__((vector_size(LANES * sizeof(Small))));
  return __builtin_convertvector(load<Smalls>(from), Ints);
#endif
}

struct Int8 {
  using Element = int8_t;
  static constexpr bool IN_ORDER = true;
  static Floats half(const int8_t* from, int which) {
    return __builtin_convertvector(widen(from + which * LANES), Floats);
  }
};

// float16 or float8_e4m3fn. float8_e4m3fn has no infinity, so its largest exponent is used for numbers.
template <class Unsigned, int EXPONENT, int MANTISSA, bool HAS_INFINITY>
struct SmallFloat {
  using Element = Unsigned;
  static constexpr bool IN_ORDER = true;
  static Floats half(const Unsigned* from, int which) { return convert(widen(from + which * LANES)); }
  static Floats convert(Ints bits) {
    constexpr int WIDTH = EXPONENT + MANTISSA, BIAS = (1 << (EXPONENT - 1)) - 1;
    Ints magnitude = bits & ((1 << WIDTH) - 1), exponent = magnitude >> MANTISSA;
    Ints normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23);
    // A subnormal number has no leading 1, and its exponent is too small by 1.
    constexpr float ONE = 1.0f / (float)(1 << BIAS);
    Ints subnormal = (Ints)(((Floats)normal - ONE) * 2.0f);
    Ints value = exponent == 0 ? subnormal : normal;
    if (HAS_INFINITY)
      value = exponent == (1 << EXPONENT) - 1 ? normal | 0x7f800000 : value;
    else
      value = magnitude == (1 << WIDTH) - 1 ? (Ints{} + 0x7fc00000) : value;
    return (Floats)(value | ((bits & (1 << WIDTH)) << (31 - WIDTH)));
  }
};
using Float8 = SmallFloat<uint8_t, 4, 3, false>;

#if defined(__F16C__)
// Uses the processor's conversion instruction.
struct Float16 {
  using Element = uint16_t;
  static constexpr bool IN_ORDER = true;
  static Floats half(const uint16_t* from, int which) {
    Floats wide;
    struct Lanes {
      uint16_t each[LANES];
    };
    asm("vcvtph2ps %1, %0" : "=v"(wide) : "m"(*(const Lanes*)(from + which * LANES)));
    return wide;
  }
};
#else
using Float16 = SmallFloat<uint16_t, 5, 10, true>;
#endif

#if defined(__AVX512F__)
// Returns the numbers at even (`first` is 0) or odd (1) positions of two consecutive vectors.
inline Floats every_second(Floats x, Floats y, int first) {
  const Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return (Floats)_mm512_permutex2var_ps((__m512)x, (__m512i)(even + first), (__m512)y);
}
#endif

// Multiplies numbers by `scale`, and writes them in the order of the halves of `Type`, padded with zeros to a
// multiple of STEP.
template <class Type>
inline void arrange(float* to, const float* from, int count, float scale) {
  int i = 0;
  for (; Type::IN_ORDER && i + STEP <= count; i += STEP)
    for (int half = 0; half < STEP; half += LANES)
      store(to + i + half, load<Floats>(from + i + half) * scale);
#if defined(__AVX512F__)
  for (; !Type::IN_ORDER && i + STEP <= count; i += STEP) {
    Floats x = load<Floats>(from + i) * scale, y = load<Floats>(from + i + LANES) * scale;
    for (int half = 0; half < 2; half++) store(to + i + half * LANES, every_second(x, y, half));
  }
#endif
  for (; i < count; i += STEP)
    for (int j = 0; j < STEP; j++) {
      int source = Type::IN_ORDER ? i + j : i + 2 * (j % LANES) + j / LANES;
      to[i + j] = source < count ? from[source] * scale : 0.0f;
    }
}

// Restores the order before `arrange`: writes the first `count` numbers, times `scale`, in their original order.
template <class Type>
inline void restore(float* to, const float* from, int count, float scale) {
  for (int i = 0; i < count; i += STEP)
    for (int j = 0; j < STEP; j++) {
      int target = Type::IN_ORDER ? i + j : i + 2 * (j % LANES) + j / LANES;
      if (target < count) to[target] = from[i + j] * scale;
    }
}

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
