// Products with a packed kernel: panels of 32 outputs, each stored as [in, 32], so that a panel is one stream, its
// outputs are whole vectors, and one loop serves any number of rows. In bfloat16 a panel is [in / 2, 32, 2]: two
// neighbouring inputs' weights are one word. What a row adds up, and in which order, does not depend on the other rows.
//
// In int8 there are two forms. The weights are widened to float32, or the inputs are rounded to int8, too: then a panel is
// [in / 4, 32, 4], four neighbouring inputs are one word, and sums are exact integers until they are scaled.
#include "dot.h"
#include "panels.h"
#include "rounding.h"

// More kinds of products: int8 on both sides, and bfloat16 that is widened to float32 before it is multiplied.
enum { QUADS = INT8 + 1, WIDENED };

// Rows whose sums are in registers at once. Each is multiplied with the same weights.
#define MAX_ROWS ((VECTOR_REGISTERS == 32 ? 24 : 12) / GROUPS)
// The other registers hold a row of weights. Where there are few of them, they hold the rows' inputs.
#define HOLDS_INPUTS (VECTOR_REGISTERS == 16)
// Many rows are multiplied a block at a time, with a part of a panel at a time, which stays in a core's second cache.
// Short vectors read it for few rows at once: it stays in the first one.
#define ROWS_OF_BLOCK 96
#define DEPTH_OF_BLOCK (LANES == 16 ? 512 : 128)
// From so many rows on, a panel of bfloat16 is widened once, where few rows are multiplied at a time.
#define ROWS_TO_WIDEN (HOLDS_INPUTS ? 16 : INT64_MAX)
// Rows of inputs that are a multiple of 4 KiB long push each other out of a core's first cache. A copy of them has gaps.
#define GAP 16  // words
#define CACHE_WAY 4096
#define ROWS_OF_COPY 16

typedef struct {
  const word* inputs;  // [rows, stride], of which `depth` are used
  const char* kernel;  // [panels, depth, PANEL], of what one input is multiplied with
  char* out;           // [rows, panels * PANEL]
  const Rounding* of_inputs;  // QUADS
  const float* scales;        // [panels * PANEL]; NULL: the sums are not multiplied
  int kind;
  enum Kind of_out;
  int64_t rows, depth, stride, panels, rows_of_part, panels_of_part;
} Product;

INLINE int64_t row_size_of(const int kind) {
  return PANEL * (kind == INT8 ? 1 : kind == WIDENED ? sizeof(uint16_t) : sizeof(word));
}

// Widening takes registers, too.
INLINE int64_t rows_at_once(const int kind) { return kind == BFLOAT16 && HOLDS_INPUTS ? 8 / GROUPS : MAX_ROWS; }

// What one multiplication takes of a vector of weights, and of a row's input.
INLINE floats weights_of(const char* row, int group, int term, const int kind) {
  if (kind == BFLOAT16) return term_of(((const words*)row)[group], term);
  return kind == QUADS ? ((const floats*)row)[group] : load(row, group * LANES, kind);
}
INLINE floats input_of(word input, int term, const int kind) {
  words copies = input - (words){0};
  return kind == BFLOAT16 ? term_of(copies, term) : (floats)copies;
}

INLINE floats add_any(floats sums, floats input, floats weights, const int kind) {
  if (kind == QUADS) return (floats)add_quads((words)sums, (words)weights, (words)input);
  if (kind == BFLOAT16) return add_terms(sums, input, weights);
#if defined(__AVX2__) && defined(__FMA__) && HOLDS_INPUTS
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(input), "x"(weights));  // GCC would move sums to other registers
  return sums;
#endif
  return add_product(sums, input, weights);
}

// sums [rows, PANEL] (+)= inputs [rows, depth] times so many rows of a panel. `continues`: adds to what is in `sums`.
INLINE void multiply_tile(const int rows, const word* inputs, int64_t stride, const char* panel, int64_t depth,
                          float* sums, int continues, const int kind) {
  floats own[MAX_ROWS][GROUPS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++)
    own[r][g] = continues ? *(floats*)(sums + r * PANEL + g * LANES) : all(0);
  for (int64_t d = 0; d < depth; d++) {
    const char* row = panel + d * row_size_of(kind);
    UNROLL for (int term = 0; term < (kind == BFLOAT16 ? TERMS_OF_PAIR : 1); term++) {
      floats held[HOLDS_INPUTS ? MAX_ROWS : GROUPS];
      UNROLL for (int i = 0; i < (HOLDS_INPUTS ? rows : GROUPS); i++)
        held[i] = HOLDS_INPUTS ? input_of(inputs[i * stride + d], term, kind) : weights_of(row, i, term, kind);
      UNROLL for (int k = 0; k < (HOLDS_INPUTS ? GROUPS : rows); k++) {
        floats one = HOLDS_INPUTS ? weights_of(row, k, term, kind) : input_of(inputs[k * stride + d], term, kind);
        UNROLL for (int i = 0; i < (HOLDS_INPUTS ? rows : GROUPS); i++)
          if (HOLDS_INPUTS) own[i][k] = add_any(own[i][k], held[i], one, kind);
          else own[k][i] = add_any(own[k][i], one, held[i], kind);
      }
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++)
    *(floats*)(sums + r * PANEL + g * LANES) = own[r][g];
}

// The same for any number of rows up to `rows_at_once`.
INLINE void multiply_rows(int64_t rows, const word* inputs, int64_t stride, const char* panel, int64_t depth,
                          float* sums, int continues, const int kind) {
  WITH_ROWS(rows, rows_at_once(kind), multiply_tile(R, inputs, stride, panel, depth, sums, continues, kind))
}

// LANES sums of a row, from an output on, as they are stored.
INLINE floats finished(const Product* p, floats sums, int64_t row, int64_t output, const int kind) {
  if (kind == QUADS) {
    words exact = (words)sums - WEIGHT_OFFSET * (uint32_t)p->of_inputs->sums[row];
    sums = __builtin_convertvector((ints)exact, floats);
  }
  if (p->scales) sums *= *(const floats*)(p->scales + output);
  if (kind == QUADS) sums *= p->of_inputs->scales[row];  // last, as inputs may be of any size
  return sums;
}

// So many rows of a panel of bfloat16, as float32. Not inlined: its mask would take a register from the products' sums.
static __attribute__((noinline)) const char* widened(const char* panel, int64_t depth, floats* to) {
  for (int64_t d = 0; d < depth; d++) UNROLL for (int g = 0; g < GROUPS; g++)
    to[d * GROUPS + g] = term_of(((const words*)panel)[d / 2 * GROUPS + g], d % 2);
  return (const char*)to;
}

INLINE void multiply_panel(const Product* p, int64_t panel, int64_t row, int64_t rows, const int kind) {
  float sums[ROWS_OF_BLOCK * PANEL];
  _Alignas(64) floats wide[DEPTH_OF_BLOCK * GROUPS];
  const char* weights = p->kernel + panel * p->depth * row_size_of(kind);
  int64_t passes = (rows + rows_at_once(kind) - 1) / rows_at_once(kind);
  int64_t block = passes == 1 && kind != WIDENED ? p->depth : DEPTH_OF_BLOCK;
  for (int64_t from = 0; from < p->depth; from += block) {
    int64_t depth = p->depth - from < block ? p->depth - from : block;
    const char* part = weights + from * row_size_of(kind);
    if (kind == WIDENED) part = widened(part, depth, wide);
    for (int64_t pass = 0, done = 0; pass < passes; pass++) {
      int64_t count = (rows - done + passes - pass - 1) / (passes - pass);
      multiply_rows(count, p->inputs + (row + done) * p->stride + from, p->stride, part, depth, sums + done * PANEL,
                    from > 0, kind == WIDENED ? FLOAT32 : kind);
      done += count;
    }
  }
  for (int64_t r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++) {
    int64_t output = panel * PANEL + g * LANES;
    floats result = finished(p, *(floats*)(sums + r * PANEL + g * LANES), row + r, output, kind);
    store(p->out, (row + r) * p->panels * PANEL + output, result, p->of_out);
  }
}

INLINE int64_t row_parts_of(const Product* p) { return (p->rows + p->rows_of_part - 1) / p->rows_of_part; }

INLINE void multiply_part(const Product* p, int64_t part, const int kind) {
  int64_t first = part / row_parts_of(p) * p->panels_of_part, end = first + p->panels_of_part;
  int64_t from = part % row_parts_of(p) * p->rows_of_part, to = from + p->rows_of_part;
  for (int64_t row = from; row < to && row < p->rows; row += ROWS_OF_BLOCK)
    for (int64_t panel = first; panel < end && panel < p->panels; panel++)
      multiply_panel(p, panel, row, p->rows - row < ROWS_OF_BLOCK ? p->rows - row : ROWS_OF_BLOCK, kind);
}

static void multiply(const void* product, int64_t part) {
  switch (((const Product*)product)->kind) {
    case FLOAT32: multiply_part(product, part, FLOAT32); break;
    case BFLOAT16: multiply_part(product, part, BFLOAT16); break;
    case INT8: multiply_part(product, part, INT8); break;
    case QUADS: multiply_part(product, part, QUADS); break;
    case WIDENED: multiply_part(product, part, WIDENED); break;
  }
}

// Few panels are shared between threads by blocks of rows, too.
INLINE Product product_of(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Buffer *inputs = argument(frame, 0), *kernel = argument(frame, 1), *out = result(frame, 0);
  int64_t at_once = panels_of_part(kernel->dims[0]), rows = num_rows_in_use(inputs);
  return (Product){
      .inputs = inputs->data,
      .kernel = kernel->data,
      .out = out->data,
      .kind = kind_of(kernel),
      .of_out = kind_of(out),
      .rows = rows,
      .depth = kernel->dims[1],
      .stride = kernel->dims[1],
      .panels = kernel->dims[0],
      .rows_of_part = at_once > 1 && rows ? rows : ROWS_OF_BLOCK,
      .panels_of_part = at_once,
  };
}

typedef struct {
  const word* from;  // [rows, depth]; to widen, [rows, depth / 2]
  word* to;          // [rows, depth + GAP]
  int64_t rows, depth;
  int widens;
} Copy;

static void copy_rows(const void* copy, int64_t part) {
  const Copy* c = copy;
  for (int64_t row = part * ROWS_OF_COPY; row < (part + 1) * ROWS_OF_COPY && row < c->rows; row++) {
    word* to = c->to + row * (c->depth + GAP);
    if (!c->widens) memcpy(to, c->from + row * c->depth, c->depth * sizeof(word));
    else
      for (int64_t d = 0; d < c->depth; d++) to[d] = (word)((const uint16_t*)c->from)[row * c->depth + d] << 16;
  }
}

// `room`: for a copy of the inputs, with gaps and perhaps widened, if they may need one; else it has no rows.
static void multiply_all(XLA_FFI_CallFrame* frame, Product* p, const XLA_FFI_Buffer* room) {
  int widens = p->kind == BFLOAT16 && p->rows >= ROWS_TO_WIDEN;
  if (widens) p->kind = WIDENED, p->depth *= 2, p->stride *= 2;
  if (widens || (room->dims[0] && p->depth * sizeof(word) % CACHE_WAY == 0)) {
    Copy copy = {p->inputs, room->data, p->rows, p->depth, widens};
    in_parallel(frame, (p->rows + ROWS_OF_COPY - 1) / ROWS_OF_COPY, copy_rows, &copy);
    p->inputs = room->data;
    p->stride += GAP;
  }
  int64_t panel_parts = (p->panels + p->panels_of_part - 1) / p->panels_of_part;
  in_parallel(frame, panel_parts * row_parts_of(p), multiply, p);
  zero_padding(frame, result(frame, 0), p->rows);
}

// (inputs [T, in], kernel [out / PANEL, in, PANEL], perhaps scales of its outputs f32[out]) -> (out [T, out] of float32 or
// bfloat16, and what only this function uses: the inputs with gaps, or [0]). The inputs are of float32; with a kernel
// [out / PANEL, in / 2, PANEL * 2] of bfloat16, they are of bfloat16, and their copies have room for float32.
XLA_FFI_Error* pallas_serve_multiply(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  Product product = product_of(frame);
  if (frame->args.size == 3) product.scales = argument(frame, 2)->data;
  multiply_all(frame, &product, result(frame, 1));
  return NULL;
}

// (inputs [T, in] of float32 or bfloat16, kernel i8[out / PANEL, in / 4, PANEL * 4], its scales f32[out], the scale of
// the inputs f32[1]; f32[0]: each row has its own) -> (out [T, out] of float32 or bfloat16, and what only this function
// uses: the rounded inputs i8[T, in], their scales f32[T] and sums i32[T], and the rounded inputs with gaps, or [0]).
XLA_FFI_Error* pallas_serve_multiply_rounded(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *inputs = argument(frame, 0), *stored = argument(frame, 3);
  Product product = product_of(frame);
  Rounding rounding = {
      .inputs = inputs->data,
      .stored = stored->dims[0] ? stored->data : NULL,
      .narrow = result(frame, 1)->data,
      .scales = result(frame, 2)->data,
      .sums = result(frame, 3)->data,
      .kind = kind_of(inputs),
      .rows = product.rows,
      .depth = inputs->dims[1],
      .rows_of_part = ROWS_OF_ROUNDING,
  };
  product.inputs = result(frame, 1)->data;
  product.kind = QUADS;
  product.of_inputs = &rounding;
  product.scales = argument(frame, 2)->data;
  round_all(frame, &rounding);
  multiply_all(frame, &product, result(frame, 4));
  return NULL;
}
