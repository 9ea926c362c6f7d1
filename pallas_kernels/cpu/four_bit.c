// Products with a packed kernel in 4 bits. A panel's row has the weights of 32 outputs for 4 neighbouring inputs, a
// quad: a word for each of 16 outputs, with a byte for each input. The low half of a byte is of that output, the high
// half of the output 16 further on. A weight is stored as 0 to 15, which stands for -8 to 7.
//
// Inputs and groups go in blocks of 32 inputs. A block's sums are exact integers if inputs are rounded to int8, each
// block with a scale of its own; else weights are widened to float32. They are then multiplied with the group's scale,
// and added up in float32, block by block. What a row adds up does not depend on the other rows.
#include "dot.h"
#include "panels.h"
#include "rounding.h"

enum {
  QUAD = 4,
  BLOCK = 32,
  WORDS = 16 / LANES,  // vectors of a packed row
  BLOCKS_OF_PART = 8,  // that rows take turns with
  MIDDLE = 8,          // is stored for 0
  AHEAD = BLOCKS_OF_PART * BLOCK / QUAD * 16 * QUAD,  // bytes: the next part is read while this one is multiplied
};
// Rows whose sums are in registers at once. Each is multiplied with the same weights.
#define MAX_ROWS ((VECTOR_REGISTERS == 32 ? 16 : 8) / GROUPS)
#define ROWS_OF_BLOCK (8 * MAX_ROWS)  // that take turns with a part of a panel
// Whether several passes over rows share unpacked weights. AVX-512 unpacks them while it multiplies.
#define UNPACKS (LANES < 16)

// What a packed kernel has for each output and so many blocks of inputs.
typedef struct {
  const void* data;  // [panels, count, PANEL]; NULL: there are none
  XLA_FFI_DataType dtype;
  int64_t count;
  uint32_t blocks;
} Numbers;

typedef struct {
  const char* inputs;     // [rows, depth]: int8 or float32
  const uint8_t* kernel;  // [panels, depth / QUAD, 16 * QUAD]
  char* out;              // [rows, panels * PANEL]
  Numbers scale, offset, scale_unit, offset_unit;
  const float* input_scales;  // [rows, blocks]; NULL: the inputs are float32
  const int32_t* exact_sums;  // [rows, blocks], of the inputs that are int8
  const float* input_sums;    // [rows, blocks], of the inputs; only with offsets
  enum Kind of_out;
  int64_t rows, blocks, panels, panels_of_part;
} FourBit;

// A part of a panel, as several rows are multiplied with it.
typedef struct {
  const char* weights;  // packed; or unpacked, as one word for each weight or quad
  int64_t first, blocks;
  _Alignas(64) float scales[BLOCKS_OF_PART * PANEL], offsets[BLOCKS_OF_PART * PANEL];
} Part;

INLINE int64_t row_size_of(const int is_rounded, const int is_unpacked) {
  return !is_unpacked ? 16 * QUAD : PANEL * sizeof(float) * (is_rounded ? 1 : QUAD);
}

// The 4 bits of each word from a bit on, as floats from -8 to 7. AVX-512 looks them up; elsewhere they become the last
// digits of a number with a large exponent.
INLINE floats widened_bits(words packed, int from) {
#if defined(__AVX512F__)
  const floats values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return (floats)_mm512_permutexvar_ps((__m512i)(packed >> from), (__m512)values);
#else
  if (from > 16) packed >>= 16, from -= 16;
  words exponent = (words){0} + (0x4b000000u - ((uint32_t)from << 23));
  return (floats)((packed & 15u << from) | exponent) - (float)((1 << (23 - from)) + MIDDLE);
#endif
}

// A vector of a quad's row: the quads themselves, or those of one of its inputs as floats.
INLINE floats weights_of(const char* row, int input, int group, const int is_rounded, const int is_unpacked) {
  if (is_unpacked) return ((const floats*)row)[input * GROUPS + group];
  words both = ((const words*)row)[group % WORDS];
  int shift = group < WORDS ? 0 : 4;
  return is_rounded ? (floats)(both >> shift & 0x0f0f0f0f) : widened_bits(both, 8 * input + shift);
}

// sums [rows, PANEL] += rows of inputs, from one on, times a part of a panel.
INLINE void multiply_tile(const int rows, const FourBit* p, const Part* part, int64_t row, float* sums,
                          const int is_rounded, const int is_unpacked) {
  const int64_t size = is_rounded ? 1 : sizeof(float), blocks = p->blocks, stride = blocks * BLOCK * size;
  const char *inputs = p->inputs + (row * blocks + part->first) * BLOCK * size, *weights = part->weights;
  const int32_t* exact_sums = is_rounded ? p->exact_sums + row * blocks + part->first : NULL;
  const float* input_scales = is_rounded ? p->input_scales + row * blocks + part->first : NULL;
  for (int64_t b = 0; b < part->blocks; b++) {
    floats own[MAX_ROWS][GROUPS];
    UNROLL for (int r = 0; r < rows; r++) {
      words start = {0};
      if (is_rounded && !SUMS_ARE_PAIRS) start -= MIDDLE * (uint32_t)exact_sums[r * blocks + b];
      UNROLL for (int g = 0; g < GROUPS; g++) own[r][g] = (floats)start;
    }
    for (int quad = 0; quad < BLOCK / QUAD; quad++) {
      UNROLL for (int term = 0; term < (is_rounded ? 1 : QUAD); term++) {
        floats of_row[GROUPS];
        UNROLL for (int g = 0; g < GROUPS; g++) of_row[g] = weights_of(weights, term, g, is_rounded, is_unpacked);
        UNROLL for (int r = 0; r < rows; r++) {
          words input = ((const word*)(inputs + r * stride))[term] - (words){0};
          UNROLL for (int g = 0; g < GROUPS; g++)
            if (is_rounded) own[r][g] = (floats)add_small_quads((words)own[r][g], (words)of_row[g], input);
            else own[r][g] += (floats)input * of_row[g];
        }
      }
      if (!is_unpacked && rows > 4) __builtin_prefetch(weights + AHEAD);  // fewer rows wait for memory anyway
      inputs += QUAD * size;
      weights += row_size_of(is_rounded, is_unpacked);
    }
    __asm__ volatile("" ::: "memory");  // totals are in memory: GCC would move own sums out of registers for them
    floats scale[GROUPS];
    UNROLL for (int g = 0; g < GROUPS; g++) scale[g] = *(const floats*)(part->scales + b * PANEL + g * LANES);
    UNROLL for (int r = 0; r < rows; r++) {
      words start = {0};
      floats factor = all(1), *total = (floats*)(sums + r * PANEL);
      if (is_rounded) factor = all(input_scales[r * blocks + b]);
      if (is_rounded && SUMS_ARE_PAIRS) start -= MIDDLE * (uint32_t)exact_sums[r * blocks + b];
      UNROLL for (int g = 0; g < GROUPS; g++) {
        floats of_block = own[r][g];
        if (is_rounded)
          of_block = __builtin_convertvector((ints)(whole_sums((words)of_block) + start), floats) * factor;
        total[g] += of_block * scale[g];
      }
    }
  }
}

// The same for any number of rows up to MAX_ROWS, which is a constant in each case.
#define MULTIPLY_ROWS(name, is_rounded, is_unpacked)                                                         \
  static __attribute__((noinline)) void name(int64_t rows, const FourBit* p, const Part* part, int64_t row,  \
                                             float* sums) {                                                  \
    WITH_ROWS(rows, MAX_ROWS, multiply_tile(R, p, part, row, sums, is_rounded, is_unpacked))                 \
  }
MULTIPLY_ROWS(multiply_rounded_packed, 1, 0)
MULTIPLY_ROWS(multiply_rounded_unpacked, 1, 1)
MULTIPLY_ROWS(multiply_whole_packed, 0, 0)
MULTIPLY_ROWS(multiply_whole_unpacked, 0, 1)

// sums [rows, PANEL] -= the sums of the inputs' blocks times their offsets.
INLINE void subtract_offsets(const FourBit* p, const Part* part, int64_t row, int64_t rows, float* sums) {
  for (int64_t r = 0; r < rows; r++, sums += PANEL) {
    floats own[GROUPS];
    UNROLL for (int g = 0; g < GROUPS; g++) own[g] = ((const floats*)sums)[g];
    for (int64_t b = 0; b < part->blocks; b++) {
      floats of_inputs = all(p->input_sums[(row + r) * p->blocks + part->first + b]);
      UNROLL for (int g = 0; g < GROUPS; g++) own[g] -= of_inputs * ((const floats*)part->offsets)[b * GROUPS + g];
    }
    UNROLL for (int g = 0; g < GROUPS; g++) ((floats*)sums)[g] = own[g];
  }
}

// LANES numbers of a panel's outputs, for a block.
INLINE floats numbers_at(const Numbers* n, int64_t panel, int64_t block, int group) {
  int64_t index = (panel * n->count + (uint32_t)block / n->blocks) * PANEL + group * LANES;
  switch (n->dtype) {
    case XLA_FFI_DataType_U8:
      return __builtin_convertvector(widened_bytes((const int8_t*)n->data + index) & 255, floats);
    case XLA_FFI_DataType_F16: return widened_float16s((const uint16_t*)n->data + index);
    case XLA_FFI_DataType_BF16: return load(n->data, index, BFLOAT16);
    default: return load(n->data, index, FLOAT32);
  }
}

// The scales of a part's blocks, and what is subtracted from its weights. A kernel's offsets are of weights that begin
// at 0, and those of a part of weights that begin at -MIDDLE.
INLINE void widen_groups(const FourBit* p, int64_t panel, Part* part) {
  for (int64_t b = 0; b < part->blocks; b++) UNROLL for (int g = 0; g < GROUPS; g++) {
    int64_t block = part->first + b;
    floats scale = numbers_at(&p->scale, panel, block, g);
    if (p->scale_unit.data) scale *= numbers_at(&p->scale_unit, panel, block, g);
    ((floats*)part->scales)[b * GROUPS + g] = scale;
    if (!p->offset.data) continue;
    floats offset = numbers_at(&p->offset, panel, block, g), middle = scale * MIDDLE;
    if (p->offset_unit.data) offset *= numbers_at(&p->offset_unit, panel, block, g);
    else if (p->offset.dtype == XLA_FFI_DataType_U8) offset *= scale;
    ((floats*)part->offsets)[b * GROUPS + g] = offset - middle;
  }
}

INLINE void unpack(const char* packed, int64_t quads, char* unpacked, const int is_rounded) {
  for (int64_t quad = 0; quad < quads; quad++)
    for (int term = 0; term < (is_rounded ? 1 : QUAD); term++) UNROLL for (int g = 0; g < GROUPS; g++) {
      floats* to = (floats*)(unpacked + quad * row_size_of(is_rounded, 1)) + term * GROUPS + g;
      *to = weights_of(packed + quad * row_size_of(is_rounded, 0), term, g, is_rounded, 0);
    }
}

// Several passes over rows share what is unpacked.
INLINE void multiply_panel(const FourBit* p, int64_t panel, int64_t row, int64_t rows, const int is_rounded) {
  _Alignas(64) float sums[ROWS_OF_BLOCK * PANEL];
  _Alignas(64) char unpacked[BLOCKS_OF_PART * BLOCK * PANEL * (is_rounded ? 1 : sizeof(float))];
  int64_t passes = (rows + MAX_ROWS - 1) / MAX_ROWS;
  int is_unpacked = UNPACKS && passes > 1;
  memset(sums, 0, rows * PANEL * sizeof *sums);
  Part part;
  for (part.first = 0; part.first < p->blocks; part.first += BLOCKS_OF_PART) {
    int64_t left = p->blocks - part.first;
    part.blocks = left < BLOCKS_OF_PART ? left : BLOCKS_OF_PART;
    int64_t quads = part.blocks * (BLOCK / QUAD), first_quad = (panel * p->blocks + part.first) * (BLOCK / QUAD);
    part.weights = (const char*)p->kernel + first_quad * row_size_of(is_rounded, 0);
    widen_groups(p, panel, &part);
    if (is_unpacked) {
      unpack(part.weights, quads, unpacked, is_rounded);
      part.weights = unpacked;
    }
    for (int64_t pass = 0, done = 0; pass < passes; pass++) {
      int64_t count = (rows - done + passes - pass - 1) / (passes - pass);
      float* of_rows = sums + done * PANEL;
      if (is_rounded && is_unpacked) multiply_rounded_unpacked(count, p, &part, row + done, of_rows);
      else if (is_rounded) multiply_rounded_packed(count, p, &part, row + done, of_rows);
      else if (is_unpacked) multiply_whole_unpacked(count, p, &part, row + done, of_rows);
      else multiply_whole_packed(count, p, &part, row + done, of_rows);
      done += count;
    }
    if (p->offset.data) subtract_offsets(p, &part, row, rows, sums);
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

// Sums of the blocks of inputs.
typedef struct {
  const float* inputs;      // [rows, blocks, BLOCK]
  const Rounding* rounded;  // NULL: the inputs are not rounded
  float* sums;              // [rows, blocks]
  int64_t blocks;
} Sums;

static void sum_row(const void* arguments, int64_t row) {
  const Sums* s = arguments;
  for (int64_t block = row * s->blocks; block < (row + 1) * s->blocks; block++) {
    if (s->rounded) {
      s->sums[block] = (float)s->rounded->sums[block] * s->rounded->scales[block];
      continue;
    }
    floats sum = {0};
    for (int64_t i = 0; i < BLOCK; i += LANES) sum += *(const floats*)(s->inputs + block * BLOCK + i);
    s->sums[block] = sum_of(sum);
  }
}

INLINE Numbers numbers_of(XLA_FFI_CallFrame* frame, int i, int64_t blocks) {
  XLA_FFI_Buffer* numbers = argument(frame, i);
  if (numbers->rank != 3) return (Numbers){0};
  return (Numbers){numbers->data, numbers->dtype, numbers->dims[1], (uint32_t)(blocks / numbers->dims[1])};
}

// (inputs [T, in], kernel u8[out / PANEL, in / QUAD, 16 * QUAD], scale [out / PANEL, groups, PANEL], its unit
// [out / PANEL, fewer groups, PANEL], offset, its unit) -> (out [T, out] of float32 or bfloat16, and what only this
// function uses: the sums of the inputs' blocks f32[T, in / BLOCK]). What is not given is [0]. Offsets are of weights
// that begin at 0. Of uint8, they are multiplied with their unit or else with the scale.
//
// Inputs of float32 or bfloat16 are rounded, if there are results for them: i8[T, in], the blocks' scales
// f32[T, in / BLOCK] and their sums i32[T, in / BLOCK]. Else inputs are float32.
XLA_FFI_Error* pallas_serve_multiply_four_bit(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *inputs = argument(frame, 0), *kernel = argument(frame, 1), *out = result(frame, 0);
  int64_t rows = inputs->dims[0], blocks = inputs->dims[1] / BLOCK;
  FourBit product = {
      .inputs = inputs->data,
      .kernel = kernel->data,
      .out = out->data,
      .scale = numbers_of(frame, 2, blocks),
      .scale_unit = numbers_of(frame, 3, blocks),
      .offset = numbers_of(frame, 4, blocks),
      .offset_unit = numbers_of(frame, 5, blocks),
      .input_sums = result(frame, 1)->data,
      .of_out = kind_of(out),
      .rows = rows,
      .blocks = blocks,
      .panels = kernel->dims[0],
      .panels_of_part = panels_of_part(kernel->dims[0]),
  };
  Rounding rounding;
  if (frame->rets.size == 5) {
    rounding = (Rounding){  // of each block as a row
        .inputs = inputs->data,
        .narrow = result(frame, 2)->data,
        .scales = result(frame, 3)->data,
        .sums = result(frame, 4)->data,
        .kind = kind_of(inputs),
        .rows = rows * blocks,
        .depth = BLOCK,
        .rows_of_part = ROWS_OF_ROUNDING * blocks,
    };
    round_all(frame, &rounding);
    product.inputs = (const char*)rounding.narrow;
    product.input_scales = rounding.scales;
    product.exact_sums = rounding.sums;
  }
  if (product.offset.data) {
    Sums sums = {inputs->data, product.input_scales ? &rounding : NULL, result(frame, 1)->data, blocks};
    in_parallel(frame, rows, sum_row, &sums);
  }
  in_parallel(frame, (product.panels + product.panels_of_part - 1) / product.panels_of_part, multiply, &product);
  return NULL;
}
