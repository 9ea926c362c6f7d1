// Products with a packed kernel: panels of 32 outputs, each stored as [in, 32], so that a panel is one stream, its
// outputs are whole vectors, and one loop serves any number of rows. What a row adds up, and in which order, does not
// depend on the other rows.
#include "ffi.h"
#include "vectors.h"

#define PANEL 32
#define GROUPS (PANEL / LANES)  // vectors of a panel's row
// Sums of up to so many vectors are in registers at once: of many rows with one panel, or of few rows with several
// panels, which are then as many streams from memory.
#define SUMS (VECTOR_REGISTERS == 32 ? 24 : 8)
#define MAX_ROWS (SUMS / GROUPS)
#define MAX_PANELS 4
#define AHEAD 24  // rows of a panel
// Many rows are multiplied a block at a time, which stays in a core's second cache.
#define ROWS_OF_BLOCK (8 * MAX_ROWS)
#define DEPTH_OF_BLOCK 512

typedef struct {
  const float* inputs;  // [rows, depth]
  const char* kernel;   // [panels, depth, PANEL]
  float* out;           // [rows, panels * PANEL]
  enum Kind kind;       // of the kernel
  int64_t rows, depth, panels, panels_of_part;
} Product;

// out [rows, panels * PANEL] (+)= inputs [rows, depth] times as many rows of the panels, which are `panel_size` bytes
// each. `continues`: adds to what is in `out`.
INLINE void multiply_tile(const int rows, const int panels, const float* inputs, int64_t in_stride, const char* kernel,
                          int64_t panel_size, int64_t depth, float* out, int64_t out_stride, int continues,
                          const enum Kind kind) {
  floats sums[MAX_ROWS][MAX_PANELS * GROUPS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < panels * GROUPS; g++)
    sums[r][g] = continues ? *(floats*)(out + r * out_stride + g * LANES) : all(0);
  for (int64_t d = 0; d < depth; d++) {
    floats weights[MAX_PANELS * GROUPS];
    UNROLL for (int p = 0; p < panels; p++) {
      UNROLL for (int g = 0; g < GROUPS; g++)
        weights[p * GROUPS + g] = load(kernel + p * panel_size, d * PANEL + g * LANES, kind);
      if (kind != INT8) UNROLL for (int line = 0; line < PANEL * size_of(kind); line += 64)
        __builtin_prefetch(kernel + p * panel_size + (d + AHEAD) * PANEL * size_of(kind) + line);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      floats input = all(inputs[r * in_stride + d]);
      UNROLL for (int g = 0; g < panels * GROUPS; g++) sums[r][g] += input * weights[g];
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < panels * GROUPS; g++)
    *(floats*)(out + r * out_stride + g * LANES) = sums[r][g];
}

// The same for any number of rows up to MAX_ROWS, and one panel or MAX_PANELS.
INLINE void multiply_rows(int64_t rows, int64_t panels, const float* inputs, int64_t in_stride, const char* kernel,
                          int64_t panel_size, int64_t depth, float* out, int64_t out_stride, int continues,
                          const enum Kind kind) {
#define FITS(R, P) ((R) * (P) * GROUPS <= SUMS)
#define TILE(R, P) multiply_tile(R, P, inputs, in_stride, kernel + done * panel_size, panel_size, depth, out + done * PANEL, out_stride, continues, kind)
#define CASE(R)                                                               \
  case R:                                                                     \
    if (FITS(R, 4)) {                                                         \
      for (; done + 4 <= panels; done += 4) TILE(R, FITS(R, 4) ? 4 : 1);      \
    } else if (FITS(R, 2)) {                                                  \
      for (; done + 2 <= panels; done += 2) TILE(R, FITS(R, 2) ? 2 : 1);      \
    }                                                                         \
    for (; done < panels; done++) TILE(R <= MAX_ROWS ? R : 1, 1);             \
    break;
  int64_t done = 0;
  switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) }
#undef CASE
#undef TILE
#undef FITS
}

INLINE void multiply_part(const Product* p, int64_t part, const enum Kind kind) {
  int64_t row_size = PANEL * size_of(kind), panel_size = p->depth * row_size, first = part * p->panels_of_part;
  int64_t panels = p->panels - first < p->panels_of_part ? p->panels - first : p->panels_of_part;
  int64_t block = p->rows <= 2 * MAX_ROWS ? p->depth : DEPTH_OF_BLOCK, out_stride = p->panels * PANEL;
  for (int64_t row = 0; row < p->rows; row += ROWS_OF_BLOCK) {
    int64_t rows = p->rows - row < ROWS_OF_BLOCK ? p->rows - row : ROWS_OF_BLOCK;
    int64_t passes = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t from = 0; from < p->depth; from += block) {
      int64_t depth = p->depth - from < block ? p->depth - from : block;
      // A panel goes over all rows before the next one is read, unless all rows fit in one pass.
      int64_t at_once = passes == 1 ? panels : 1;
      for (int64_t panel = first; panel < first + panels; panel += at_once)
        for (int64_t pass = 0, done = 0; pass < passes; pass++) {
          int64_t count = (rows - done + passes - pass - 1) / (passes - pass);
          multiply_rows(count, at_once, p->inputs + (row + done) * p->depth + from, p->depth,
                        p->kernel + panel * panel_size + from * row_size, panel_size, depth,
                        p->out + (row + done) * out_stride + panel * PANEL, out_stride, from > 0, kind);
          done += count;
        }
    }
  }
}

static void multiply_float32(const void* product, int64_t part) { multiply_part(product, part, FLOAT32); }
static void multiply_int8(const void* product, int64_t part) { multiply_part(product, part, INT8); }

// (inputs f32[T, in], kernel [out / PANEL, in, PANEL] of float32 or int8) -> f32[T, out]
XLA_FFI_Error* pallas_serve_multiply(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *inputs = argument(frame, 0), *kernel = argument(frame, 1), *out = result(frame, 0);
  int is_float = kernel->dtype == XLA_FFI_DataType_F32;
  Product product = {
      .inputs = inputs->data,
      .kernel = kernel->data,
      .out = out->data,
      .kind = is_float ? FLOAT32 : INT8,
      .rows = inputs->dims[0],
      .depth = inputs->dims[1],
      .panels = kernel->dims[0],
      .panels_of_part = kernel->dims[0] >= 64 ? MAX_PANELS : 1,
  };
  int64_t parts = (product.panels + product.panels_of_part - 1) / product.panels_of_part;
  in_parallel(frame, parts, is_float ? multiply_float32 : multiply_int8, &product);
  return NULL;
}
