// Sums of products of int8 with int8, exact in int32, by the instructions that this CPU has for them.
#pragma once
#include "vectors.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Of a word, the even or the odd two of its four int8, as int16.
typedef int16_t shorts __attribute__((vector_size(LANES * sizeof(int32_t)), may_alias));
INLINE shorts even_of(words quads) { return (shorts)quads << 8 >> 8; }
INLINE shorts odd_of(words quads) { return (shorts)quads >> 8; }

// sums + the two products of each word's int16, which are exact.
INLINE words add_pairs(words sums, words a, words b) {
#if defined(__AVX512VNNI__)
  return (words)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sums + (words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (words)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sums + (words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX__)
  return sums + (words)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return sums + (words)(((ints)a << 16 >> 16) * ((ints)b << 16 >> 16) + ((ints)a >> 16) * ((ints)b >> 16));
#endif
}

// sums + the four products of each word's int8. x86's instruction wants unsigned numbers on one side: 128 is then added
// to every weight, and the sums are too large by WEIGHT_OFFSET times the inputs.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define WEIGHT_OFFSET 128
INLINE words add_positive_quads(words sums, words weights, words inputs) {
#if defined(__AVX512VNNI__)
  return (words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#else
  return (words)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)inputs);
#endif
}
INLINE words add_quads(words sums, words weights, words inputs) {
  return add_positive_quads(sums, weights ^ 0x80808080u, inputs);
}
#else
#define WEIGHT_OFFSET 0
#if defined(__ARM_FEATURE_DOTPROD)
INLINE words add_quads(words sums, words weights, words inputs) {
  return (words)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)inputs);
}
#elif defined(__aarch64__)
INLINE words add_quads(words sums, words weights, words inputs) {
  int8x16_t a = (int8x16_t)weights, b = (int8x16_t)inputs;
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b))), high = vpaddlq_s16(vmull_high_s8(a, b));
  return sums + (words)vpaddq_s32(low, high);
}
#else
// x86's product of pairs of int8 saturates.
INLINE words add_quads(words sums, words weights, words inputs) {
  sums = add_pairs(sums, (words)even_of(weights), (words)even_of(inputs));
  return add_pairs(sums, (words)odd_of(weights), (words)odd_of(inputs));
}
#endif
#endif

// The same with weights of 0 to 63 (`add_positive_quads`). Where a CPU multiplies unsigned with signed int8 and adds pairs
// of products only, sums are pairs of int16, modulo 2^16, until they are `whole_sums`.
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
#define SUMS_ARE_PAIRS 1
#define PAIRS(a, b) _mm512_maddubs_epi16((__m512i)(a), (__m512i)(b))
#define ADD_PAIRS(a, b) (words)_mm512_add_epi16((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define SUMS_ARE_PAIRS 1
#define PAIRS(a, b) _mm256_maddubs_epi16((__m256i)(a), (__m256i)(b))
#define ADD_PAIRS(a, b) (words)_mm256_add_epi16((__m256i)(a), (__m256i)(b))
#else
#define SUMS_ARE_PAIRS 0
#endif
#if SUMS_ARE_PAIRS
INLINE words whole_sums(words pairs) { return add_pairs((words){0}, pairs, (words){0} + 0x10001u); }
INLINE words add_positive_quads(words sums, words weights, words inputs) {
  return ADD_PAIRS(sums, PAIRS(weights, inputs));
}
#else
INLINE words whole_sums(words sums) { return sums; }
#if WEIGHT_OFFSET == 0
INLINE words add_positive_quads(words sums, words weights, words inputs) { return add_quads(sums, weights, inputs); }
#endif
#endif
