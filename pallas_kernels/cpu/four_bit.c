// Products with a packed kernel in 4 bits. A panel's row has the weights of 32 outputs for 4 neighbouring inputs, a quad:
// a word for each of 16 outputs, with a byte for each input. The low half of a byte is of that output, the high half of
// the output 16 further on. A weight is stored as 0 to 15, which stands for -8 to 7.
//
// Inputs and groups go in blocks of 32 inputs, or of 16. A block's sums are exact integers if inputs are rounded to int8,
// each block with a scale of its own; else weights are widened to float32. They are then multiplied with the group's
// scale, and added up in float32, block by block. What a row adds up does not depend on the other rows.
#include "dot.h"
#include "panels.h"
#include "rounding.h"

enum {
  QUAD = 4,
  WORDS = 16 / LANES,    // vectors of a packed row
  MAX_BLOCK = 32,        // inputs
  DEPTH_OF_PART = 256,   // inputs that rows take turns with
  MAX_BLOCKS = DEPTH_OF_PART / 16,
  MIDDLE = 8,            // is stored for 0
};

// What a packed kernel has for each output and so many inputs.
typedef struct {
  const void* data;  // [panels, count, PANEL]; NULL: there are none
  XLA_FFI_DataType dtype;
  int64_t count;
  uint32_t inputs;
} Numbers;

typedef struct {
  const char* inputs;     // [rows, depth]: int8 or float32
  const uint8_t* kernel;  // [panels, depth / QUAD, 16 * QUAD]
  char* out;              // [rows, panels * PANEL]
  Numbers scale, offset, scale_unit, offset_unit;
  const float* input_scales;  // [rows, blocks]; NULL: the inputs are float32
  const void* input_sums;     // [rows, blocks]: int32 of int8, float32 of float32
  enum Kind of_out;
  int64_t rows, depth, panels, panels_of_part, block;
} FourBit;

// A part of a panel, as several rows are multiplied with it.
typedef struct {
  const char* weights;   // packed; or unpacked, as one word for each weight or quad
  const float* scales;   // [blocks, PANEL]
  const float* offsets;  // the same; NULL: there are none
  int64_t blocks, first_block;
} Part;

INLINE int64_t row_size_of(const int is_rounded, const int is_unpacked) {
  return !is_unpacked ? 16 * QUAD : PANEL * sizeof(float) * (is_rounded ? 1 : QUAD);
}

// Vectors of words with -8 to 7 as floats, of the lowest 4 bits of each word.
INLINE floats widened_lowest(words packed) {
#if defined(__AVX512F__)
  const floats values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return (floats)_mm512_permutexvar_ps((__m512i)packed, (__m512)values);
#else
  return (floats)((packed & 15) | 0x4b000000) - (0x1p23f + MIDDLE);
#endif
}

// A vector of a quad's row: the quads themselves, or those of one of its inputs as floats.
INLINE floats weights_of(const char* row, int input, int group, const int is_rounded, const int is_unpacked) {
  if (is_unpacked) return ((const floats*)row)[input * GROUPS + group];
  words both = ((const words*)row)[group % WORDS];
  int shift = group < WORDS ? 0 : 4;
  return is_rounded ? (floats)(both >> shift & 0x0f0f0f0f) : widened_lowest(both >> (8 * input + shift));
}

// sums [rows, PANEL] += rows of inputs, from one on, times a part of a panel.
INLINE void multiply_tile(const int rows, const FourBit* p, const Part* part, int64_t row, float* sums,
                          const int is_rounded, const int is_unpacked) {
  const int64_t size = is_rounded ? 1 : sizeof(float), blocks = p->depth / p->block;
  const int terms = is_rounded ? 1 : QUAD;
  const char* inputs = p->inputs + (row * p->depth + part->first_block * p->block) * size;
  const char* weights = part->weights;
  for (int64_t b = 0; b < part->blocks; b++) {
    floats own[MAX_ROWS][GROUPS];
    int64_t at = row * blocks + part->first_block + b;
    UNROLL for (int r = 0; r < rows; r++) {
      words start = {0};
      if (is_rounded && !SUMS_ARE_PAIRS) start -= MIDDLE * (uint32_t)((const int32_t*)p->input_sums)[at + r * blocks];
      UNROLL for (int g = 0; g < GROUPS; g++) own[r][g] = (floats)start;
    }
    for (int64_t quad = 0; quad < p->block / QUAD; quad++) {
      UNROLL for (int term = 0; term < terms; term++) {
        floats of_row[GROUPS];
        UNROLL for (int g = 0; g < GROUPS; g++) of_row[g] = weights_of(weights, term, g, is_rounded, is_unpacked);
        UNROLL for (int r = 0; r < rows; r++) {
          words input = ((const word*)(inputs + r * p->depth * size))[term] - (words){0};
          UNROLL for (int g = 0; g < GROUPS; g++)
            if (is_rounded) own[r][g] = (floats)add_small_quads((words)own[r][g], (words)of_row[g], input);
            else own[r][g] += (floats)input * of_row[g];
        }
      }
      inputs += QUAD * size;
      weights += row_size_of(is_rounded, is_unpacked);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      float of_inputs = 0, factor = is_rounded ? p->input_scales[at + r * blocks] : 1;
      words start = {0};
      if (is_rounded) {
        int32_t sum = ((const int32_t*)p->input_sums)[at + r * blocks];
        if (SUMS_ARE_PAIRS) start -= MIDDLE * (uint32_t)sum;
        if (part->offsets) of_inputs = (float)sum * factor;
      } else if (part->offsets) of_inputs = ((const float*)p->input_sums)[at + r * blocks];
      UNROLL for (int g = 0; g < GROUPS; g++) {
        floats* total = (floats*)(sums + r * PANEL + g * LANES);
        floats of_block = own[r][g];
        if (is_rounded) of_block = __builtin_convertvector((ints)(whole_sums((words)of_block) + start), floats) * factor;
        *total += of_block * ((const floats*)part->scales)[b * GROUPS + g];
        if (part->offsets) *total -= of_inputs * ((const floats*)part->offsets)[b * GROUPS + g];
      }
    }
  }
}

// LANES numbers of a panel's outputs, at an input.
INLINE floats numbers_at(const Numbers* n, int64_t panel, int64_t input, int group) {
  int64_t index = (panel * n->count + (uint32_t)input / n->inputs) * PANEL + group * LANES;
  switch (n->dtype) {
    case XLA_FFI_DataType_U8:
      return __builtin_convertvector(widened_bytes((const int8_t*)n->data + index) & 255, floats);
    case XLA_FFI_DataType_F16: return widened_float16s((const uint16_t*)n->data + index);
    case XLA_FFI_DataType_BF16: return load(n->data, index, BFLOAT16);
    default: return load(n->data, index, FLOAT32);
  }
}

// The scales of a part's blocks, and what is subtracted from its weights: offsets are of weights that begin at 0.
INLINE void widen_groups(const FourBit* p, int64_t panel, const Part* part, float* scales, float* offsets) {
  for (int64_t b = 0; b < part->blocks; b++) UNROLL for (int g = 0; g < GROUPS; g++) {
    int64_t input = (part->first_block + b) * p->block;
    floats scale = numbers_at(&p->scale, panel, input, g);
    if (p->scale_unit.data) scale *= numbers_at(&p->scale_unit, panel, input, g);
    ((floats*)scales)[b * GROUPS + g] = scale;
    if (!p->offset.data) continue;
    floats offset = numbers_at(&p->offset, panel, input, g), middle = scale * MIDDLE;
    if (p->offset_unit.data) offset *= numbers_at(&p->offset_unit, panel, input, g);
    else if (p->offset.dtype == XLA_FFI_DataType_U8) offset *= scale;
    ((floats*)offsets)[b * GROUPS + g] = offset - middle;
  }
}

INLINE void unpack(const char* packed, int64_t quads, char* unpacked, const int is_rounded) {
  for (int64_t quad = 0; quad < quads; quad++) UNROLL for (int term = 0; term < (is_rounded ? 1 : QUAD); term++)
    UNROLL for (int g = 0; g < GROUPS; g++) {
      floats* to = (floats*)(unpacked + quad * row_size_of(is_rounded, 1)) + term * GROUPS + g;
      *to = weights_of(packed + quad * row_size_of(is_rounded, 0), term, g, is_rounded, 0);
    }
}

// Several passes over rows share what is unpacked.
INLINE void multiply_panel(const FourBit* p, int64_t panel, int64_t row, int64_t rows, const int is_rounded) {
  float sums[ROWS_OF_BLOCK * PANEL], scales[MAX_BLOCKS * PANEL], offsets[MAX_BLOCKS * PANEL];
  char unpacked[DEPTH_OF_PART * PANEL * (is_rounded ? 1 : sizeof(float))];
  int64_t passes = (rows + MAX_ROWS - 1) / MAX_ROWS, all_blocks = p->depth / p->block;
  memset(sums, 0, rows * PANEL * sizeof *sums);
  for (int64_t from = 0; from < all_blocks; from += DEPTH_OF_PART / p->block) {
    Part part = {.scales = scales, .offsets = p->offset.data ? offsets : NULL, .first_block = from};
    part.blocks = all_blocks - from < DEPTH_OF_PART / p->block ? all_blocks - from : DEPTH_OF_PART / p->block;
    part.weights = (const char*)p->kernel + (panel * p->depth + from * p->block) / QUAD * row_size_of(is_rounded, 0);
    widen_groups(p, panel, &part, scales, offsets);
    if (passes == 1) {
      WITH_ROWS(rows, multiply_tile(R, p, &part, row, sums, is_rounded, 0))
      continue;
    }
    unpack(part.weights, part.blocks * p->block / QUAD, unpacked, is_rounded);
    part.weights = unpacked;
    for (int64_t pass = 0, done = 0; pass < passes; pass++) {
      int64_t count = (rows - done + passes - pass - 1) / (passes - pass);
      WITH_ROWS(count, multiply_tile(R, p, &part, row + done, sums + done * PANEL, is_rounded, 1))
      done += count;
    }
  }
  for (int64_t r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++) {
    int64_t at = (row + r) * p->panels * PANEL + panel * PANEL + g * LANES;
    store(p->out, at, *(floats*)(sums + r * PANEL + g * LANES), p->of_out);
  }
}

INLINE void multiply_part(const FourBit* p, int64_t part, const int is_rounded) {
  int64_t first = part * p->panels_of_part, end = first + p->panels_of_part;
  for (int64_t row = 0; row < p->rows; row += ROWS_OF_BLOCK)
    for (int64_t panel = first; panel < end && panel < p->panels; panel++)
      multiply_panel(p, panel, row, p->rows - row < ROWS_OF_BLOCK ? p->rows - row : ROWS_OF_BLOCK, is_rounded);
}

static void multiply(const void* product, int64_t part) {
  if (((const FourBit*)product)->input_scales) multiply_part(product, part, 1);
  else multiply_part(product, part, 0);
}

// Sums of the blocks of float32 inputs.
typedef struct {
  const float* inputs;  // [rows, depth]
  float* sums;          // [rows, depth / block]
  int64_t depth, block;
} Sums;

static void sum_row(const void* arguments, int64_t row) {
  const Sums* s = arguments;
  for (int64_t from = row * s->depth; from < (row + 1) * s->depth; from += s->block) {
    floats sum = {0};
    for (int64_t i = 0; i < s->block; i += LANES) sum += *(const floats*)(s->inputs + from + i);
    s->sums[from / s->block] = sum_of(sum);
  }
}

INLINE Numbers numbers_of(XLA_FFI_CallFrame* frame, int i, int64_t depth) {
  XLA_FFI_Buffer* numbers = argument(frame, i);
  if (numbers->rank != 3) return (Numbers){0};
  return (Numbers){numbers->data, numbers->dtype, numbers->dims[1], (uint32_t)(depth / numbers->dims[1])};
}

// (inputs [T, in], kernel u8[out / PANEL, in / QUAD, 16 * QUAD], scale [out / PANEL, groups, PANEL], its unit
// [out / PANEL, fewer groups, PANEL], offset, its unit) -> (out [T, out] of float32 or bfloat16, and what only this
// function uses: the sums of the inputs' blocks [T, blocks]). What is not given is [0]. Offsets are of weights that begin
// at 0. Of uint8, they are multiplied with their unit or else with the scale.
//
// Inputs of float32 or bfloat16 are rounded, if there are results for them: i8[T, in] and their scales f32[T, blocks]; the
// sums are then int32. Else inputs and sums are float32.
XLA_FFI_Error* pallas_serve_multiply_four_bit(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *inputs = argument(frame, 0), *kernel = argument(frame, 1), *out = result(frame, 0);
  int64_t rows = inputs->dims[0], depth = inputs->dims[1];
  FourBit product = {
      .inputs = inputs->data,
      .kernel = kernel->data,
      .out = out->data,
      .scale = numbers_of(frame, 2, depth),
      .scale_unit = numbers_of(frame, 3, depth),
      .offset = numbers_of(frame, 4, depth),
      .offset_unit = numbers_of(frame, 5, depth),
      .input_sums = result(frame, 1)->data,
      .of_out = kind_of(out),
      .rows = rows,
      .depth = depth,
      .panels = kernel->dims[0],
      .panels_of_part = panels_of_part(kernel->dims[0]),
      .block = depth / result(frame, 1)->dims[1],
  };
  if (frame->rets.size == 4) {
    int64_t blocks = depth / product.block;
    Rounding rounding = {  // of each block as a row
        .inputs = inputs->data,
        .sums = result(frame, 1)->data,
        .narrow = result(frame, 2)->data,
        .scales = result(frame, 3)->data,
        .kind = kind_of(inputs),
        .rows = rows * blocks,
        .depth = product.block,
        .rows_of_part = ROWS_OF_ROUNDING * blocks,
    };
    round_all(frame, &rounding);
    product.inputs = (const char*)rounding.narrow;
    product.input_scales = rounding.scales;
  } else if (product.offset.data) {
    Sums sums = {inputs->data, result(frame, 1)->data, depth, product.block};
    in_parallel(frame, rows, sum_row, &sums);
  }
  in_parallel(frame, (product.panels + product.panels_of_part - 1) / product.panels_of_part, multiply, &product);
  return NULL;
}
