// Float vectors of this CPU's width, in the vector extensions of GCC and clang: AVX-512, AVX2 or NEON by -march=native.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define VECTOR_REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define VECTOR_REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define VECTOR_REGISTERS 32
#else
#define LANES 4
#define VECTOR_REGISTERS 16
#endif

// Unaligned: buffers of XLA are aligned, but rows within them need not be.
#define VECTOR(type) __attribute__((vector_size(LANES * sizeof(type)), aligned(sizeof(type)), may_alias))
typedef float floats VECTOR(float);
typedef int32_t ints VECTOR(int32_t);
typedef uint32_t words VECTOR(uint32_t);
typedef uint16_t halves VECTOR(uint16_t);
typedef int8_t bytes VECTOR(int8_t);

// An input is a word: a float, or two neighbouring bfloat16s, or four int8.
typedef uint32_t word __attribute__((may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum Kind { FLOAT32, BFLOAT16, INT8 };  // of stored numbers

INLINE int64_t size_of(const enum Kind kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

// LANES numbers, widened. GCC 12 converts vectors of int8 one number at a time, so x86's own instructions are named.
INLINE words widened_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u*)from));
#elif defined(__AVX2__)
  return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u*)from));
#else
  return __builtin_convertvector(*(const halves*)from, words);
#endif
}
INLINE halves narrowed(words from) {
#if defined(__AVX512F__)
  return (halves)_mm512_cvtepi32_epi16((__m512i)from);
#else
  return __builtin_convertvector(from, halves);
#endif
}
INLINE ints widened_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u*)from));
#elif defined(__AVX2__)
  return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i_u*)from));
#else
  return __builtin_convertvector(*(const bytes*)from, ints);
#endif
}

INLINE floats widened_float16s(const uint16_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u*)from));
#elif defined(__F16C__)
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u*)from));
#elif defined(__aarch64__)
  return (floats)vcvt_f32_f16((float16x4_t)vld1_u16(from));
#else
  // The exponent grows by 112, and by as much again if it is that of infinity. One that is 0 has no leading bit.
  words bits = widened_halves(from), sign = (bits & 0x8000) << 16, wide = (bits & 0x7fff) << 13;
  words exponent = wide & 0xf800000, is_large = (words)(exponent == 0xf800000), is_small = (words)(exponent == 0);
  wide += 0x38000000 + (is_large & 0x38000000) + (is_small & 0x800000);
  floats small = (floats)wide - 0x1p-14f;
  return (floats)(sign | (is_small & (words)small) | (~is_small & wide));
#endif
}

// LANES numbers from the index on, as floats.
INLINE floats load(const void* from, int64_t index, const enum Kind kind) {
  if (kind == FLOAT32) return *(const floats*)((const float*)from + index);
  if (kind == BFLOAT16) return (floats)(widened_halves((const uint16_t*)from + index) << 16);
  return __builtin_convertvector(widened_bytes((const int8_t*)from + index), floats);
}

// Bfloat16s in the upper halves of words, rounded to nearest, ties to even; a NaN stays one.
INLINE words bfloat16_of(floats x) {
  words bits = (words)x, rounded = bits + 0x7fff + (bits >> 16 & 1), is_nan = (words)(x != x);
  return (is_nan & (bits | 0x400000)) | (~is_nan & rounded);
}

// The nearest numbers that can be stored as float32 or bfloat16.
INLINE floats rounded_to(floats x, const enum Kind kind) {
  return kind == FLOAT32 ? x : (floats)(bfloat16_of(x) & 0xffff0000u);
}

// Stores LANES floats from the index on, as float32 or bfloat16.
INLINE void store(void* to, int64_t index, floats x, const enum Kind kind) {
  if (kind == FLOAT32) *(floats*)((float*)to + index) = x;
  else *(halves*)((uint16_t*)to + index) = narrowed(bfloat16_of(x) >> 16);
}

// The same past the caches, where x86 can, to an address that is a multiple of the size: for rows that are far apart, whose
// lines would push each other out. Other threads see it after `finish_stores`.
INLINE void store_past_caches(void* to, int64_t index, floats x, const enum Kind kind) {
#if defined(__AVX512F__)
  if (kind == FLOAT32) _mm512_stream_ps((float*)to + index, (__m512)x);
  else _mm256_stream_si256((__m256i*)((uint16_t*)to + index), (__m256i)narrowed(bfloat16_of(x) >> 16));
#elif defined(__AVX2__)
  if (kind == FLOAT32) _mm256_stream_ps((float*)to + index, (__m256)x);
  else _mm_stream_si128((__m128i*)((uint16_t*)to + index), (__m128i)narrowed(bfloat16_of(x) >> 16));
#else
  store(to, index, x, kind);
#endif
}
INLINE void finish_stores(void) {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// sums + a * b, rounded once where the CPU can. The compiler fuses nothing by itself (`library.FLAGS`): GCC would do so in
// some of the loops that different numbers of rows run through, and a row's bits would depend on their number.
INLINE floats add_product(floats sums, floats a, floats b) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#elif defined(__aarch64__)
  return (floats)vfmaq_f32((float32x4_t)sums, (float32x4_t)a, (float32x4_t)b);
#else
  return sums + a * b;
#endif
}

// Words hold two neighbouring bfloat16s. A term of a pair is what one multiplication takes of it: the pair itself if the
// CPU adds products of pairs, else one of its numbers as a float.
#if defined(__AVX512BF16__)
#define TERMS_OF_PAIR 1
INLINE floats term_of(words pairs, int term) { return (void)term, (floats)pairs; }
INLINE floats add_terms(floats sums, floats a, floats b) {
  return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}
#else
#define TERMS_OF_PAIR 2
INLINE floats term_of(words pairs, int term) {
  if (term == 0) return (floats)(pairs << 16);
  return (floats)(pairs & 0xffff0000u);
}
INLINE floats add_terms(floats sums, floats a, floats b) { return add_product(sums, a, b); }
#endif

INLINE floats all(float x) { return x - (floats){0}; }

INLINE floats greater_of(floats a, floats b) {
  ints is_greater = a > b;
  return (floats)((is_greater & (ints)a) | (~is_greater & (ints)b));
}

// Of all lanes: halves of what is left are added until one is. AVX-512's instructions do the same, without the stack.
INLINE float sum_of(floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s[LANES];
  memcpy(s, &v, sizeof s);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] += s[i + n];
  return s[0];
#endif
}

INLINE float greatest_of(floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float greatest = v[0];
  for (int i = 1; i < LANES; i++) greatest = v[i] > greatest ? v[i] : greatest;
  return greatest;
#endif
}

// e^x for x <= 0, within 2e-7 of it; below -87 it is e^-87. A NaN stays one.
// x = n ln 2 + f ln 2 with |f| <= 1/2: 2^f is a polynomial, and n is added to the exponent.
INLINE floats exponential(floats x) {
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  ints is_low = x < all(-87.0f);
  x = (floats)((is_low & (ints)all(-87.0f)) | (~is_low & (ints)x));
  floats t = x * 1.44269504f, rounded = t + round, f = t - (rounded - round);
  const float factors[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
  floats p = all(1.5403530e-4f);
  UNROLL for (int i = 0; i < 6; i++) p = add_product(all(factors[i]), p, f);
  return (floats)((words)p + (((words)rounded - 0x4b400000u) << 23));
}
