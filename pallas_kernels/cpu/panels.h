// Panels of 32 outputs: packed kernels are stored in them, and products go over them.
#pragma once
#include "ffi.h"

#define PANEL 32
#define GROUPS (PANEL / LANES)  // vectors of a panel's row

// Runs a call for `rows` rows, at most `most`, with their number `R` as a constant: so that sums are in registers.
#define CASE(n, most, CALL)          \
  case n: {                          \
    const int R = n <= most ? n : 1; \
    CALL;                            \
  } break;
#define WITH_ROWS(rows, most, CALL)                                                                \
  switch (rows) {                                                                                  \
    CASE(1, most, CALL) CASE(2, most, CALL) CASE(3, most, CALL) CASE(4, most, CALL)                \
    CASE(5, most, CALL) CASE(6, most, CALL) CASE(7, most, CALL) CASE(8, most, CALL)                \
    CASE(9, most, CALL) CASE(10, most, CALL) CASE(11, most, CALL) CASE(12, most, CALL)             \
  }

// Panels are shared between threads a few at a time.
INLINE int64_t panels_of_part(int64_t panels) { return panels >= 64 ? 4 : 1; }

// Rows of zeros, or of -0, at the end of [rows, width] floats are padding. There is at least one row that is not: a start
// runs steps of nothing but padding, which read all weights.
static inline int64_t num_rows_in_use(const XLA_FFI_Buffer* x) {
  int64_t rows = x->dims[0], width = x->dims[1];
  for (; rows > 1; rows--) {
    int64_t first = (rows - 1) * width;
    uint32_t bits = 0;
    if (kind_of(x) == FLOAT32)
      for (int64_t i = first; i < first + width; i++) bits |= ((const word*)x->data)[i] << 1;
    else
      for (int64_t i = first; i < first + width; i++) bits |= (uint32_t)(((const uint16_t*)x->data)[i] & 0x7fff);
    if (bits) break;
  }
  return rows;
}

typedef struct {
  char* data;
  int64_t row_size;
} Padding;

static void zero_row(const void* padding, int64_t row) {
  const Padding* p = padding;
  memset(p->data + row * p->row_size, 0, p->row_size);
}

// Zeros the rows of padding behind those in use.
static inline void zero_padding(XLA_FFI_CallFrame* frame, const XLA_FFI_Buffer* x, int64_t rows_in_use) {
  int64_t row_size = x->dims[1] * size_of(kind_of(x));
  Padding padding = {(char*)x->data + rows_in_use * row_size, row_size};
  in_parallel(frame, x->dims[0] - rows_in_use, zero_row, &padding);
}
