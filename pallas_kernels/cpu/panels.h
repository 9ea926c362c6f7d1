// Panels of 32 outputs: packed kernels are stored in them, and products go over them.
#pragma once
#include "vectors.h"

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
