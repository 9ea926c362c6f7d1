// Products with a packed kernel: panels of 32 outputs, each stored as [in, 32], so that a panel is one stream, its
// outputs are whole vectors, and one loop serves any number of rows. In bfloat16 a panel is [in / 2, 32, 2]: two
// neighbouring inputs' weights are one word. What a row adds up, and in which order, does not depend on the other rows.
#include "ffi.h"

#define PANEL 32
#define GROUPS (PANEL / LANES)  // vectors of a panel's row
// Rows whose sums are in registers at once. Each is multiplied with the same weights.
#define MAX_ROWS ((VECTOR_REGISTERS == 32 ? 24 : 8) / GROUPS)
// Many rows are multiplied a block at a time, with a part of a panel at a time: both stay in a core's second cache.
#define ROWS_OF_BLOCK (8 * MAX_ROWS)
#define DEPTH_OF_BLOCK 512
#define PANELS_OF_PART 4

// An input is a word: a float, or with a kernel of bfloat16 two neighbouring numbers.
typedef uint32_t word __attribute__((may_alias));

typedef struct {
  const word* inputs;  // [rows, depth]
  const char* kernel;  // [panels, depth, PANEL], of what one input is multiplied with
  char* out;           // [rows, panels * PANEL]
  enum Kind kind, of_out;
  int64_t rows, depth, panels, panels_of_part;
} Product;

INLINE int64_t row_size_of(const enum Kind kind) { return PANEL * (kind == INT8 ? 1 : sizeof(word)); }

// sums [rows, PANEL] (+)= inputs [rows, depth] times so many rows of a panel. `continues`: adds to what is in `sums`.
INLINE void multiply_tile(const int rows, const word* inputs, int64_t stride, const char* panel, int64_t depth,
                          float* sums, int continues, const enum Kind kind) {
  floats own[MAX_ROWS][GROUPS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++)
    own[r][g] = continues ? *(floats*)(sums + r * PANEL + g * LANES) : all(0);
  for (int64_t d = 0; d < depth; d++) {
    const char* row = panel + d * row_size_of(kind);
    UNROLL for (int term = 0; term < (kind == BFLOAT16 ? TERMS_OF_PAIR : 1); term++) {
      floats weights[GROUPS];
      UNROLL for (int g = 0; g < GROUPS; g++)
        weights[g] = kind == BFLOAT16 ? term_of(((const words*)row)[g], term) : load(row, g * LANES, kind);
      UNROLL for (int r = 0; r < rows; r++) {
        words input = inputs[r * stride + d] - (words){0};
        floats factor = kind == BFLOAT16 ? term_of(input, term) : (floats)input;
        UNROLL for (int g = 0; g < GROUPS; g++)
          if (kind == BFLOAT16) own[r][g] = add_terms(own[r][g], factor, weights[g]);
          else own[r][g] += factor * weights[g];
      }
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++)
    *(floats*)(sums + r * PANEL + g * LANES) = own[r][g];
}

// The same for any number of rows up to MAX_ROWS.
INLINE void multiply_rows(int64_t rows, const word* inputs, int64_t stride, const char* panel, int64_t depth,
                          float* sums, int continues, const enum Kind kind) {
#define CASE(R) \
  case R: multiply_tile(R <= MAX_ROWS ? R : 1, inputs, stride, panel, depth, sums, continues, kind); break;
  switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) }
#undef CASE
}

INLINE void multiply_panel(const Product* p, int64_t panel, int64_t row, int64_t rows, const enum Kind kind) {
  float sums[ROWS_OF_BLOCK * PANEL];
  const char* weights = p->kernel + panel * p->depth * row_size_of(kind);
  int64_t passes = (rows + MAX_ROWS - 1) / MAX_ROWS, block = passes == 1 ? p->depth : DEPTH_OF_BLOCK;
  for (int64_t from = 0; from < p->depth; from += block) {
    int64_t depth = p->depth - from < block ? p->depth - from : block;
    for (int64_t pass = 0, done = 0; pass < passes; pass++) {
      int64_t count = (rows - done + passes - pass - 1) / (passes - pass);
      multiply_rows(count, p->inputs + (row + done) * p->depth + from, p->depth, weights + from * row_size_of(kind),
                    depth, sums + done * PANEL, from > 0, kind);
      done += count;
    }
  }
  for (int64_t r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++)
    store(p->out, ((row + r) * p->panels + panel) * PANEL + g * LANES, *(floats*)(sums + r * PANEL + g * LANES),
          p->of_out);
}

INLINE void multiply_part(const Product* p, int64_t part, const enum Kind kind) {
  int64_t first = part * p->panels_of_part, end = first + p->panels_of_part;
  for (int64_t row = 0; row < p->rows; row += ROWS_OF_BLOCK)
    for (int64_t panel = first; panel < end && panel < p->panels; panel++)
      multiply_panel(p, panel, row, p->rows - row < ROWS_OF_BLOCK ? p->rows - row : ROWS_OF_BLOCK, kind);
}

static void multiply(const void* product, int64_t part) {
  switch (((const Product*)product)->kind) {
    case FLOAT32: multiply_part(product, part, FLOAT32); break;
    case BFLOAT16: multiply_part(product, part, BFLOAT16); break;
    case INT8: multiply_part(product, part, INT8); break;
  }
}

// (inputs [T, in], kernel [out / PANEL, in, PANEL]) -> [T, out], which is of float32 or bfloat16. The inputs are of
// float32; with a kernel [out / PANEL, in / 2, PANEL * 2] of bfloat16, they are of bfloat16.
XLA_FFI_Error* pallas_serve_multiply(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *inputs = argument(frame, 0), *kernel = argument(frame, 1), *out = result(frame, 0);
  Product product = {
      .inputs = inputs->data,
      .kernel = kernel->data,
      .out = out->data,
      .kind = kind_of(kernel),
      .of_out = kind_of(out),
      .rows = inputs->dims[0],
      .depth = kernel->dims[1],
      .panels = kernel->dims[0],
      .panels_of_part = kernel->dims[0] >= 64 ? PANELS_OF_PART : 1,
  };
  in_parallel(frame, (product.panels + product.panels_of_part - 1) / product.panels_of_part, multiply, &product);
  return NULL;
}
