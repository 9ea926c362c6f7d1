// Inputs rounded to int8, to nearest even, as `model/network/eight_bit.py` does: each row with a scale of its own,
// or all with a stored one.
#pragma once
#include "ffi.h"

typedef struct {
  const void* inputs;   // [rows, depth]
  const float* stored;  // the scale of all rows; NULL: each has its own
  int8_t* narrow;       // [rows, depth]
  float* scales;        // [rows]; not a number, or infinite, if an input of the row is
  int32_t* sums;        // [rows], of the rounded inputs
  enum Kind kind;       // of the inputs
  int64_t rows, depth, rows_of_part;
} Rounding;

enum { ROWS_OF_ROUNDING = 16, LARGEST = 127 };
#define LEAST_RANGE 1e-30f

INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
INLINE float input_at(const void* inputs, int64_t index, const enum Kind kind) {
  return kind == FLOAT32 ? ((const float*)inputs)[index] : float_of((uint32_t)((const uint16_t*)inputs)[index] << 16);
}

// Rounds `count` numbers, with the scale of 1 / `*stored` if there is one. Returns their scale, and gives their sum.
INLINE float round_numbers(const void* inputs, int64_t first, int64_t count, const float* stored, int8_t* narrow,
                           int32_t* sum, const enum Kind kind) {
  uint32_t most = 0;  // as bits: what is not a number is larger than infinity
  for (int64_t i = first; i < first + count; i++) {
    uint32_t bits = bits_of(input_at(inputs, i, kind)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest = float_of(most);
  if (largest < LEAST_RANGE) largest = LEAST_RANGE;
  float factor = stored ? 1 / *stored : LARGEST / largest;
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  uint32_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    float x = input_at(inputs, first + i, kind) * factor;
    x = x < LARGEST ? x : LARGEST;
    x = x > -LARGEST ? x : -LARGEST;
    uint32_t rounded = bits_of(x + round) - bits_of(round);
    narrow[i] = (int8_t)rounded;
    total += rounded;
  }
  *sum = (int32_t)total;
  return !stored ? largest * (1.0f / LARGEST) : largest == largest ? *stored : largest;
}

INLINE float round_any(const void* inputs, int64_t first, int64_t count, const float* stored, int8_t* narrow,
                       int32_t* sum, enum Kind kind) {
  if (kind == BFLOAT16) return round_numbers(inputs, first, count, stored, narrow, sum, BFLOAT16);
  return round_numbers(inputs, first, count, stored, narrow, sum, FLOAT32);
}

static void round_part(const void* rounding, int64_t part) {
  const Rounding* r = rounding;
  int64_t first = part * r->rows_of_part, left = r->rows - first;
  int64_t end = first + (left < r->rows_of_part ? left : r->rows_of_part);
  for (int64_t row = first; row < end; row++) {
    int64_t at = row * r->depth;
    r->scales[row] = round_any(r->inputs, at, r->depth, r->stored, r->narrow + at, r->sums + row, r->kind);
  }
}

INLINE void round_all(XLA_FFI_CallFrame* frame, const Rounding* r) {
  in_parallel(frame, (r->rows + r->rows_of_part - 1) / r->rows_of_part, round_part, r);
}
