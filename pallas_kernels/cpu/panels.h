// Panels of 32 outputs: packed kernels are stored in them, and products go over them.
#pragma once
#include "vectors.h"

#define PANEL 32
#define GROUPS (PANEL / LANES)  // vectors of a panel's row
// Rows whose sums are in registers at once. Each is multiplied with the same weights.
#define MAX_ROWS ((VECTOR_REGISTERS == 32 ? 24 : 8) / GROUPS)
// Many rows are multiplied a block at a time, with a part of a panel at a time: both stay in a core's second cache.
#define ROWS_OF_BLOCK (8 * MAX_ROWS)

// Runs a call for `rows` rows, at most MAX_ROWS, with their number `R` as a constant: the sums are then in registers.
#define CASE_OF_ROWS(n, CALL)                \
  case n: {                                  \
    const int R = n <= MAX_ROWS ? n : 1;     \
    CALL;                                    \
  } break;
#define WITH_ROWS(rows, CALL)                                                                              \
  switch (rows) {                                                                                          \
    CASE_OF_ROWS(1, CALL) CASE_OF_ROWS(2, CALL) CASE_OF_ROWS(3, CALL) CASE_OF_ROWS(4, CALL)                \
    CASE_OF_ROWS(5, CALL) CASE_OF_ROWS(6, CALL) CASE_OF_ROWS(7, CALL) CASE_OF_ROWS(8, CALL)                \
    CASE_OF_ROWS(9, CALL) CASE_OF_ROWS(10, CALL) CASE_OF_ROWS(11, CALL) CASE_OF_ROWS(12, CALL)             \
  }

// An input is a word: a float, or two neighbouring bfloat16s, or four int8.
typedef uint32_t word __attribute__((may_alias));

// Panels are shared between threads a few at a time.
INLINE int64_t panels_of_part(int64_t panels) { return panels >= 64 ? 4 : 1; }
