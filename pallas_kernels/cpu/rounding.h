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

INLINE void round_row(const Rounding* r, int64_t row, const int64_t depth, const enum Kind kind) {
  const char* inputs = (const char*)r->inputs + row * depth * size_of(kind);
  int8_t* narrow = r->narrow + row * depth;
  uint32_t most = 0;  // as bits: what is not a number is larger than infinity
  for (int64_t i = 0; i < depth; i++) {
    uint32_t bits = bits_of(input_at(inputs, i, kind)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest = float_of(most);
  if (largest < LEAST_RANGE) largest = LEAST_RANGE;
  float factor = r->stored ? 1 / *r->stored : LARGEST / largest;
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  uint32_t sum = 0;
  for (int64_t i = 0; i < depth; i++) {
    float x = input_at(inputs, i, kind) * factor;
    x = x < LARGEST ? x : LARGEST;
    x = x > -LARGEST ? x : -LARGEST;
    uint32_t rounded = bits_of(x + round) - bits_of(round);
    narrow[i] = (int8_t)rounded;
    sum += rounded;
  }
  r->sums[row] = (int32_t)sum;
  r->scales[row] = !r->stored ? largest * (1.0f / LARGEST) : largest == largest ? *r->stored : largest;
}

// `depth`: that of the rows. Short rows are rounded faster if it is a constant.
INLINE void round_rows(const Rounding* r, int64_t first, int64_t end, const int64_t depth) {
  for (int64_t row = first; row < end; row++) switch (r->kind) {
      case BFLOAT16: round_row(r, row, depth, BFLOAT16); break;
      default: round_row(r, row, depth, FLOAT32);
    }
}

static void round_part(const void* rounding, int64_t part) {
  const Rounding* r = rounding;
  int64_t first = part * r->rows_of_part, left = r->rows - first;
  int64_t end = first + (left < r->rows_of_part ? left : r->rows_of_part);
  if (r->depth == 32) round_rows(r, first, end, 32);
  else round_rows(r, first, end, r->depth);
}

static void round_all(XLA_FFI_CallFrame* frame, const Rounding* r) {
  in_parallel(frame, (r->rows + r->rows_of_part - 1) / r->rows_of_part, round_part, r);
}
