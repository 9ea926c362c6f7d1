// Products with a packed kernel in 4 or 6 bits. A panel's row has the weights of 32 outputs for 4 neighbouring inputs, a
// quad: a word for each of 16 outputs, with a byte for each input. The low half of a byte is of that output, the high
// half of the output 16 further on. A weight is stored as 0 to 15, which stands for -8 to 7.
//
// In 6 bits, 0 to 63 stands for -32 to 31. The rows have the lower 4 bits of it. The upper 2 bits are in rows of their
// own, each for 4 quads: a word for each of the 32 outputs. Of its bytes, bits 2 k and 2 k + 1 are those of quad k.
//
// Inputs go in parts of 256, and parts in steps of 16 to 256 inputs that share their scales and offsets. A step's sums
// are exact integers if inputs are rounded to int8, each part with a scale of its own; else weights are widened to
// float32. A step's sums are multiplied with the weights' scales, and added up in float32; those of a part, with the
// scale of its inputs. What a row adds up does not depend on the other rows. What a part needs besides its weights is
// widened before, since one row waits for that as long as for its products.
//
// Where sums are pairs of int16, an instruction multiplies both with whole scales and adds them: then a part's sums are
// exact, too.
#include "dot.h"
#include "panels.h"
#include "rounding.h"

enum {
  QUAD = 4,
  PART = 256,                           // inputs
  PACKED = 16 * QUAD,                   // bytes of a panel's row
  QUADS_OF_HIGH = 4,                    // whose upper bits share a row
  STEPS = PART / QUAD / QUADS_OF_HIGH,  // of a part, at most
  STEP_OF_PAIRS = 32,                   // inputs at most, if sums are pairs: those of 4 bits are below 2^15
  STEP_OF_SIX_PAIRS = 16,
  WORDS = 16 / LANES,                   // vectors of a panel's row
  AHEAD = PART / QUAD * PACKED,         // bytes: the next part is read while this one is multiplied
  SECOND_CACHE = 1 << 20,               // bytes, about
};
// Rows whose sums are in registers at once. Each is multiplied with the same weights. AVX-512 has registers for the sums
// of a part, too.
#define MAX_ROWS (LANES == 16 ? 7 : VECTOR_REGISTERS / 2 / GROUPS)
#define ROWS_OF_BLOCK (16 * MAX_ROWS)  // that take turns with a part of a panel
// Passes over rows that are worth unpacking weights for all of them. AVX-512 unpacks 4 bits while it multiplies.
#define PASSES_TO_UNPACK(bits, is_rounded) \
  (LANES < 16 ? (bits == 4 && is_rounded ? 6 : 2) : bits == 6 ? 4 : INT64_MAX)

// What a packed kernel has for each output and so many inputs.
typedef struct {
  const void* data;  // [panels, count, PANEL]; NULL: there are none
  XLA_FFI_DataType dtype;
  int64_t count;
  uint32_t group;
} Numbers;

typedef struct {
  const void* inputs;     // [rows, depth]
  const uint8_t* kernel;  // [panels, depth / QUAD, PACKED]
  const uint8_t* high;    // [panels, depth / QUAD / QUADS_OF_HIGH, 2 * PACKED]; NULL: weights have 4 bits
  char* out;              // [rows, panels * PANEL]
  Numbers scale, offset, scale_unit, offset_unit;
  int8_t* narrow;       // [parts, rows, PART], the rounded inputs; NULL: the inputs are float32, and not rounded
  float* input_scales;  // [parts, rows]
  int32_t* starts;      // [parts, rows, PART / step]: what the steps' exact sums, or pairs, begin with
  float* input_sums;    // [parts, rows, PART / step], before they are scaled; only with offsets
  int are_paired;       // offsets and input_sums, as int16: their products are whole, in units of a part
  int are_whole;        // scales, as pairs of the same int16, in units of a part
  int are_many;         // outputs, for the second cache
  enum Kind of_inputs, of_out;
  int64_t rows, depth, step, panels, panels_of_part;
} FourBit;

// A part of a panel, as several rows are multiplied with it.
typedef struct {
  const char* weights;  // packed; or unpacked, as one word for each weight or quad
  const char* high;
  int64_t index, depth, steps;
  _Alignas(64) float scales[STEPS * PANEL], offsets[STEPS * PANEL];  // or words of two int16
  _Alignas(64) float scale_unit[PANEL], offset_unit[PANEL];
} Part;

INLINE int64_t row_size_of(const int is_rounded, const int is_unpacked) {
  return !is_unpacked ? PACKED : PANEL * sizeof(float) * (is_rounded ? 1 : QUAD);
}

// What is stored for a weight of 0.
INLINE int middle_of(const int bits) { return 1 << (bits - 1); }

// So many bits of each word, from a bit on, as the weights that they stand for. They become the last digits of a number
// with a large exponent. AVX-512 looks 4 bits up.
INLINE floats widened_bits(words packed, int from, const int bits) {
#if defined(__AVX512F__)
  const floats values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  if (bits == 4) return (floats)_mm512_permutexvar_ps((__m512i)(packed >> from), (__m512)values);
#endif
  if (from > 16) packed >>= 16, from -= 16;
  words exponent = (words){0} + (0x4b000000u - ((uint32_t)from << 23)), mask = (words){0} + (((1u << bits) - 1) << from);
  return (floats)((packed & mask) | exponent) - (float)((1 << (23 - from)) + middle_of(bits));
}

// A vector of a quad's row: the quads themselves, or those of one of its inputs as floats. `place`: the quad's, of those
// that share a row of upper bits.
INLINE floats weights_of(const char* row, const char* high, int place, int input, int group, const int bits,
                         const int is_rounded, const int is_unpacked) {
  if (is_unpacked) return ((const floats*)row)[input * GROUPS + group];
  words both = ((const words*)row)[group % WORDS];
  int shift = group < WORDS ? 0 : 4;
  if (bits == 4 && !is_rounded) return widened_bits(both, 8 * input + shift, bits);
  words quads = both >> shift & 0x0f0f0f0f;
  if (bits == 6) {
    words upper = ((const words*)high)[group];
    quads |= (place < 2 ? upper << (4 - 2 * place) : upper >> (2 * place - 4)) & 0x30303030;
  }
  return is_rounded ? (floats)quads : widened_bits(quads, 8 * input, bits);
}

// What is added to a part's products: less the sums of the steps' inputs times their offsets.
INLINE void add_offsets(const int rows, const FourBit* p, const Part* part, int64_t row, floats (*totals)[GROUPS]) {
  const int64_t first = (part->index * p->rows + row) * (PART / p->step), steps = PART / p->step;
  floats own[MAX_ROWS][GROUPS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++) own[r][g] = all(0);
  if (p->are_paired) {
    words exact[MAX_ROWS][GROUPS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++) exact[r][g] = (words){0};
    const word* sums = (const word*)((const int16_t*)p->input_sums + first);
    for (int64_t s = 0; s < part->steps / 2; s++) UNROLL for (int r = 0; r < rows; r++) {
      words of_inputs = sums[r * steps / 2 + s] - (words){0};
      UNROLL for (int g = 0; g < GROUPS; g++)
        exact[r][g] = add_pairs(exact[r][g], ((const words*)part->offsets)[s * GROUPS + g], of_inputs);
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++)
      own[r][g] = -__builtin_convertvector((ints)exact[r][g], floats) * ((const floats*)part->offset_unit)[g];
  } else if (p->offset.data) {
    for (int64_t s = 0; s < part->steps; s++) UNROLL for (int r = 0; r < rows; r++) {
      floats of_inputs = all(-p->input_sums[first + r * steps + s]);
      UNROLL for (int g = 0; g < GROUPS; g++)
        own[r][g] = add_product(own[r][g], of_inputs, ((const floats*)part->offsets)[s * GROUPS + g]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++) totals[r][g] = own[r][g];
}

// sums [rows, PANEL] += rows of inputs, from one on, times a part of a panel.
INLINE void multiply_tile(const int rows, const FourBit* p, const Part* part, int64_t row, float* sums,
                          const int bits, const int is_rounded, const int is_unpacked) {
  const int are_whole = is_rounded && SUMS_ARE_PAIRS && p->are_whole;
  const int at_once = bits == 4 || is_unpacked ? 1 : QUADS_OF_HIGH;  // quads
  const int64_t size = is_rounded ? 1 : sizeof(float), stride = is_rounded ? PART : p->depth * size;
  const int64_t from = part->index * p->rows + row, steps = PART / p->step, quads = p->step / QUAD;
  const char *inputs = (const char*)p->inputs + (row * p->depth + part->index * PART) * size;
  const char *weights = part->weights, *high = part->high;
  if (is_rounded) inputs = (const char*)p->narrow + from * PART;
  const char* next = inputs + rows * stride;  // rows
  _Alignas(64) floats totals[MAX_ROWS][GROUPS], added[MAX_ROWS][GROUPS];
  add_offsets(rows, p, part, row, added);
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++)
    totals[r][g] = are_whole ? all(0) : added[r][g];
  for (int64_t s = 0; s < part->steps; s++) {
    floats own[MAX_ROWS][GROUPS];
    words exact[MAX_ROWS][GROUPS];
    UNROLL for (int r = 0; r < rows; r++) {
      words start = {0};
      if (is_rounded) start += (uint32_t)p->starts[(from + r) * steps + s];
      UNROLL for (int g = 0; g < GROUPS; g++) exact[r][g] = start, own[r][g] = all(0);
    }
    for (int64_t quad = 0; quad < quads; quad += at_once) {
      UNROLL for (int place = 0; place < at_once; place++) {
        UNROLL for (int term = 0; term < (is_rounded ? 1 : QUAD); term++) {
          floats of_row[GROUPS];
          UNROLL for (int g = 0; g < GROUPS; g++)
            of_row[g] = weights_of(weights, high, place, term, g, bits, is_rounded, is_unpacked);
          UNROLL for (int r = 0; r < rows; r++) {
            words input = ((const word*)(inputs + r * stride))[term] - (words){0};
            UNROLL for (int g = 0; g < GROUPS; g++)
              if (!is_rounded) own[r][g] = add_product(own[r][g], (floats)input, of_row[g]);
              else exact[r][g] = add_positive_quads(exact[r][g], (words)of_row[g], input);
          }
        }
        if (!is_unpacked && rows > 2) __builtin_prefetch(weights + AHEAD);  // fewer rows wait for memory anyway
        if (is_rounded && rows > 4) __builtin_prefetch(next), next += rows * QUAD;
        inputs += QUAD * size;
        weights += row_size_of(is_rounded, is_unpacked);
      }
      if (at_once > 1) high += 2 * PACKED;
    }
    // Totals are in memory: for them, GCC would move own sums out of registers.
    if (LANES < 16 && rows > 1) __asm__ volatile("" ::"r"(totals) : "memory");
    floats scale[GROUPS];
    UNROLL for (int g = 0; g < GROUPS; g++) scale[g] = ((const floats*)part->scales)[s * GROUPS + g];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++) {
      if (are_whole) totals[r][g] = (floats)add_pairs((words)totals[r][g], exact[r][g], (words)scale[g]);
      else {
        floats of_step = is_rounded ? __builtin_convertvector((ints)whole_sums(exact[r][g]), floats) : own[r][g];
        totals[r][g] = add_product(totals[r][g], of_step, scale[g]);
      }
    }
  }
  if (are_whole) UNROLL for (int r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++) {
    floats whole = __builtin_convertvector((ints)totals[r][g], floats);
    totals[r][g] = add_product(added[r][g], whole, ((const floats*)part->scale_unit)[g]);
  }
  UNROLL for (int r = 0; r < rows; r++) {
    floats factor = all(is_rounded ? p->input_scales[from + r] : 1);
    floats* to = (floats*)sums + r * GROUPS;
    UNROLL for (int g = 0; g < GROUPS; g++) to[g] = add_product(to[g], totals[r][g], factor);
  }
}

// The same for any number of rows up to MAX_ROWS, which is a constant in each case.
typedef void Multiply(int64_t rows, const FourBit*, const Part*, int64_t row, float* sums);
#define MULTIPLY_ROWS(name, bits, is_rounded, is_unpacked)                                                   \
  static __attribute__((noinline)) void name(int64_t rows, const FourBit* p, const Part* part, int64_t row,  \
                                             float* sums) {                                                  \
    WITH_ROWS(rows, MAX_ROWS, multiply_tile(R, p, part, row, sums, bits, is_rounded, is_unpacked))           \
  }
MULTIPLY_ROWS(multiply_rounded_4_bits, 4, 1, 0)
MULTIPLY_ROWS(multiply_rounded_6_bits, 6, 1, 0)
MULTIPLY_ROWS(multiply_whole_4_bits, 4, 0, 0)
MULTIPLY_ROWS(multiply_whole_6_bits, 6, 0, 0)
MULTIPLY_ROWS(multiply_rounded_unpacked_4_bits, 4, 1, 1)
MULTIPLY_ROWS(multiply_rounded_unpacked_6_bits, 6, 1, 1)
MULTIPLY_ROWS(multiply_whole_unpacked, 6, 0, 1)

INLINE Multiply* multiply_of(const int bits, const int is_rounded, const int is_unpacked) {
  if (!is_rounded && is_unpacked) return multiply_whole_unpacked;
  if (!is_rounded) return bits == 4 ? multiply_whole_4_bits : multiply_whole_6_bits;
  if (bits == 4) return is_unpacked ? multiply_rounded_unpacked_4_bits : multiply_rounded_4_bits;
  return is_unpacked ? multiply_rounded_unpacked_6_bits : multiply_rounded_6_bits;
}

INLINE int is_whole(XLA_FFI_DataType dtype) { return dtype == XLA_FFI_DataType_U8 || dtype == XLA_FFI_DataType_S8; }

INLINE ints whole_at(const void* from, int64_t index, const XLA_FFI_DataType dtype) {
  ints whole = widened_bytes((const int8_t*)from + index);
  if (dtype == XLA_FFI_DataType_U8) whole &= 255;
  return whole;
}

// Where the numbers of a part's steps are. Mostly each step has its own, or all have the same.
typedef struct {
  const Numbers* numbers;
  int64_t start, input, step;  // the panel's numbers, the part's first input, and the inputs of a step
  int64_t first, next;         // where those of the first step are, and how far it is to the next one's
  int is_regular;
} Place;

INLINE Place place_of(const Numbers* n, int64_t panel, const Part* part, int64_t step) {
  int64_t start = panel * n->count, input = part->index * PART, next = n->group == step ? PANEL : 0;
  int64_t first = (start + (uint32_t)input / n->group) * PANEL;
  return (Place){n, start, input, step, first, next, next || n->group % PART == 0};
}

INLINE int64_t index_of(const Place* place, int64_t s) {
  if (place->is_regular) return place->first + s * place->next;
  return (place->start + (uint32_t)(place->input + s * place->step) / place->numbers->group) * PANEL;
}

// The numbers of a part's steps, as floats [steps, PANEL], times those of units: of each step, or of all.
typedef struct {
  const floats* of;  // NULL: there are none
  int64_t next;      // vectors from a step's to the next one's
} Units;

INLINE void widen_all(const Numbers* n, int64_t panel, const Part* part, int64_t step, Units units, floats* to,
                      const XLA_FFI_DataType dtype) {
  Place place = place_of(n, panel, part, step);
  for (int64_t s = 0; s < part->steps; s++) UNROLL for (int g = 0; g < GROUPS; g++) {
    int64_t index = index_of(&place, s) + g * LANES;
    floats own;
    if (dtype == XLA_FFI_DataType_F16) own = widened_float16s((const uint16_t*)n->data + index);
    else if (dtype == XLA_FFI_DataType_BF16) own = load(n->data, index, BFLOAT16);
    else if (dtype == XLA_FFI_DataType_F32) own = load(n->data, index, FLOAT32);
    else own = __builtin_convertvector(whole_at(n->data, index, dtype), floats);
    if (units.of) own *= units.of[s * units.next + g];
    to[s * GROUPS + g] = own;
  }
}

INLINE void widen(const Numbers* n, int64_t panel, const Part* part, int64_t step, Units units, void* to) {
  switch (n->dtype) {
    case XLA_FFI_DataType_S8: return widen_all(n, panel, part, step, units, to, XLA_FFI_DataType_S8);
    case XLA_FFI_DataType_U8: return widen_all(n, panel, part, step, units, to, XLA_FFI_DataType_U8);
    case XLA_FFI_DataType_F16: return widen_all(n, panel, part, step, units, to, XLA_FFI_DataType_F16);
    case XLA_FFI_DataType_BF16: return widen_all(n, panel, part, step, units, to, XLA_FFI_DataType_BF16);
    default: return widen_all(n, panel, part, step, units, to, XLA_FFI_DataType_F32);
  }
}

// Units of groups: `room` is for those of a part.
INLINE Units units_of(const Numbers* n, int64_t panel, const Part* part, int64_t step, floats* room) {
  if (!n->data) return (Units){0};
  Part asked = {.index = part->index, .steps = n->group % PART ? part->steps : 1};
  widen(n, panel, &asked, step, (Units){0}, room);
  return (Units){room, n->group % PART ? GROUPS : 0};
}

// Two vectors of whole numbers as the int16 of a vector's words.
INLINE words paired(const void* first, const void* second, const XLA_FFI_DataType dtype) {
#if defined(__AVX2__) && LANES == 8
  __m128i both = _mm_unpacklo_epi8(_mm_loadl_epi64(first), _mm_loadl_epi64(second));
  return (words)(dtype == XLA_FFI_DataType_U8 ? _mm256_cvtepu8_epi16(both) : _mm256_cvtepi8_epi16(both));
#else
  return ((words)whole_at(first, 0, dtype) & 0xffff) | (words)whole_at(second, 0, dtype) << 16;
#endif
}

// The whole numbers of each two steps in pairs; or those of each step, each with itself.
INLINE void pair_all(const Numbers* n, int64_t panel, const Part* part, int64_t step, const int together, words* to,
                     const XLA_FFI_DataType dtype) {
  Place place = place_of(n, panel, part, step);
  for (int64_t s = 0; s < part->steps; s += together) {
    const int8_t *first = (const int8_t*)n->data + index_of(&place, s), *second = first;
    if (together == 2) second = (const int8_t*)n->data + index_of(&place, s + 1);
    UNROLL for (int g = 0; g < GROUPS; g++) *to++ = paired(first + g * LANES, second + g * LANES, dtype);
  }
}

INLINE void pair(const Numbers* n, int64_t panel, const Part* part, int64_t step, const int together, words* to) {
  if (n->dtype == XLA_FFI_DataType_U8) pair_all(n, panel, part, step, together, to, XLA_FFI_DataType_U8);
  else pair_all(n, panel, part, step, together, to, XLA_FFI_DataType_S8);
}

// The scales of a part's steps, and what is subtracted from its weights. A kernel's offsets are of weights that begin
// at 0, and so are pairs of them. Others become those of weights whose middle is 0.
INLINE void widen_groups(const FourBit* p, int64_t panel, Part* part, const int bits) {
  floats *scales = (floats*)part->scales, *offsets = (floats*)part->offsets, room[STEPS * GROUPS];
  if (SUMS_ARE_PAIRS && p->are_whole) {
    units_of(&p->scale_unit, panel, part, p->step, (floats*)part->scale_unit);
    pair(&p->scale, panel, part, p->step, 1, (words*)scales);
  } else {
    widen(&p->scale, panel, part, p->step, units_of(&p->scale_unit, panel, part, p->step, room), scales);
  }
  if (!p->offset.data) return;
  if (p->are_paired) {
    units_of(&p->offset_unit, panel, part, p->step, (floats*)part->offset_unit);
    return pair(&p->offset, panel, part, p->step, 2, (words*)offsets);
  }
  Units units = units_of(&p->offset_unit, panel, part, p->step, room);
  if (!units.of && is_whole(p->offset.dtype)) units = (Units){scales, GROUPS};
  widen(&p->offset, panel, part, p->step, units, offsets);
  for (int64_t i = 0; i < part->steps * GROUPS; i++) offsets[i] -= scales[i] * (float)middle_of(bits);
}

INLINE void unpack(const Part* part, char* unpacked, const int bits, const int is_rounded) {
  for (int64_t quad = 0; quad < part->depth / QUAD; quad++) {
    const char *row = part->weights + quad * PACKED, *high = part->high;
    if (bits == 6) high += quad / QUADS_OF_HIGH * 2 * PACKED;
    for (int term = 0; term < (is_rounded ? 1 : QUAD); term++) UNROLL for (int g = 0; g < GROUPS; g++) {
      floats* to = (floats*)(unpacked + quad * row_size_of(is_rounded, 1)) + term * GROUPS + g;
      *to = weights_of(row, high, quad % QUADS_OF_HIGH, term, g, bits, is_rounded, 0);
    }
  }
}

// Several passes over rows share what is unpacked.
INLINE void multiply_panel(const FourBit* p, int64_t panel, int64_t row, int64_t rows, const int bits,
                           const int is_rounded) {
  _Alignas(64) float sums[ROWS_OF_BLOCK * PANEL];
  _Alignas(64) char unpacked[PART * PANEL * (is_rounded ? 1 : sizeof(float))];
  int64_t passes = (rows + MAX_ROWS - 1) / MAX_ROWS;
  int is_unpacked = passes >= PASSES_TO_UNPACK(bits, is_rounded);
  Multiply* multiply_rows = multiply_of(bits, is_rounded, is_unpacked);
  memset(sums, 0, rows * PANEL * sizeof *sums);
  Part part;
  for (part.index = 0; part.index * PART < p->depth; part.index++) {
    int64_t first = part.index * PART, left = p->depth - first;
    part.depth = left < PART ? left : PART;
    part.steps = part.depth / p->step;
    int64_t quad = (panel * p->depth + first) / QUAD;
    part.weights = (const char*)p->kernel + quad * PACKED;
    part.high = bits == 4 ? NULL : (const char*)p->high + quad / QUADS_OF_HIGH * 2 * PACKED;
    widen_groups(p, panel, &part, bits);
    if (is_unpacked) {
      unpack(&part, unpacked, bits, is_rounded);
      part.weights = unpacked;
    }
    for (int64_t pass = 0, done = 0; pass < passes; pass++) {
      int64_t left = rows - done, count = left < MAX_ROWS ? left : MAX_ROWS;
      multiply_rows(count, p, &part, row + done, sums + done * PANEL);
      done += count;
    }
  }
  for (int64_t r = 0; r < rows; r++) UNROLL for (int g = 0; g < GROUPS; g++) {
    int64_t at = (row + r) * p->panels * PANEL + panel * PANEL + g * LANES;
    floats own = *(floats*)(sums + r * PANEL + g * LANES);
    if (p->are_many) store_past_caches(p->out, at, own, p->of_out);
    else store(p->out, at, own, p->of_out);
  }
}

INLINE void multiply_part(const FourBit* p, int64_t part, const int bits, const int is_rounded) {
  int64_t first = part * p->panels_of_part, end = first + p->panels_of_part;
  for (int64_t row = 0; row < p->rows; row += ROWS_OF_BLOCK) {
    int64_t left = p->rows - row, rows = left < ROWS_OF_BLOCK ? left : ROWS_OF_BLOCK;
    for (int64_t panel = first; panel < end && panel < p->panels; panel++)
      multiply_panel(p, panel, row, rows, bits, is_rounded);
  }
}

static void multiply(const void* product, int64_t part) {
  const FourBit* p = product;
  if (p->narrow) p->high ? multiply_part(p, part, 6, 1) : multiply_part(p, part, 4, 1);
  else p->high ? multiply_part(p, part, 6, 0) : multiply_part(p, part, 4, 0);
  if (p->are_many) finish_stores();
}

// Rounds a row's inputs, and sums them step by step.
static void prepare_row(const void* product, int64_t row) {
  const FourBit* p = product;
  for (int64_t part = 0; part * PART < p->depth; part++) {
    int64_t first = row * p->depth + part * PART, left = p->depth - part * PART, count = left < PART ? left : PART;
    int64_t at = part * p->rows + row, first_step = at * (PART / p->step);
    int8_t* narrow = p->narrow ? p->narrow + at * PART : NULL;
    int32_t sum, middle = p->are_paired ? 0 : middle_of(p->high ? 6 : 4);
    if (narrow) p->input_scales[at] = round_any(p->inputs, first, count, NULL, narrow, &sum, p->of_inputs);
    for (int64_t s = 0; s < count / p->step; s++) {
      if (narrow) {
        int32_t first_two = 0, last_two = 0;  // of each quad
        for (int64_t i = s * p->step; i < (s + 1) * p->step; i += QUAD)
          first_two += narrow[i] + narrow[i + 1], last_two += narrow[i + 2] + narrow[i + 3];
        sum = first_two + last_two;
        p->starts[first_step + s] = -middle * sum;
        if (SUMS_ARE_PAIRS) p->starts[first_step + s] = (-middle * first_two & 0xffff) | -middle * last_two * 65536;
        if (p->are_paired) ((int16_t*)p->input_sums)[first_step + s] = (int16_t)sum;
        else p->input_sums[first_step + s] = (float)sum;
        continue;
      }
      floats own = {0};
      for (int64_t i = 0; i < p->step; i += LANES) own += load(p->inputs, first + s * p->step + i, FLOAT32);
      p->input_sums[first_step + s] = sum_of(own);
    }
  }
}

INLINE Numbers numbers_of(XLA_FFI_CallFrame* frame, int i, int64_t depth) {
  XLA_FFI_Buffer* numbers = argument(frame, i);
  if (numbers->rank != 3) return (Numbers){0};
  return (Numbers){numbers->data, numbers->dtype, numbers->dims[1], (uint32_t)(depth / numbers->dims[1])};
}

// The inputs of a step: a power of two that divides PART and the groups.
INLINE int64_t step_of(const FourBit* p) {
  int64_t most = !p->narrow || !SUMS_ARE_PAIRS ? PART : p->high ? STEP_OF_SIX_PAIRS : STEP_OF_PAIRS;
  int64_t bits = most | p->scale.group | (p->offset.data ? p->offset.group : 0);
  return bits & -bits;
}

// Whether numbers are whole, in units of whole parts.
INLINE int are_of_parts(const Numbers* numbers, const Numbers* unit) {
  return unit->data && unit->group % PART == 0 && is_whole(numbers->dtype);
}

// Whether offsets are whole, for inputs whose sums are whole, too. Steps come in pairs. Pairs of sums have no room for
// weights of 6 bits whose middle is not 0.
INLINE int are_paired(const FourBit* p) {
  int is_possible = p->narrow && !(SUMS_ARE_PAIRS && p->high) && are_of_parts(&p->offset, &p->offset_unit);
  return is_possible && PART / p->step % 2 == 0 && p->depth / p->step % 2 == 0;
}

INLINE int are_whole(const FourBit* p) {
  int is_possible = SUMS_ARE_PAIRS && p->narrow && are_of_parts(&p->scale, &p->scale_unit);
  return is_possible && (p->are_paired || !p->offset.data);
}

// (inputs [T, in], kernel u8[out / PANEL, in / QUAD, PACKED], scale [out / PANEL, groups, PANEL], its unit
// [out / PANEL, fewer groups, PANEL], offset, its unit, the upper bits of 6 u8[out / PANEL, in / 16, 2 * PACKED]) ->
// (out [T, out] of float32 or bfloat16, and what only this function uses: the sums of the steps' inputs
// f32[parts, T, STEPS]; in 4 bits there is room for half of it). What is not given is [0]. Offsets are of weights that
// begin at 0. Of uint8 or int8, they are multiplied with their unit or else with the scale.
//
// Inputs of float32 or bfloat16 are rounded, if there are results for them: i8[parts, T, PART], the parts' scales
// f32[parts, T], and what the steps' sums begin with, i32[parts, T, STEPS]. Else inputs are float32.
XLA_FFI_Error* pallas_serve_multiply_four_bit(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *inputs = argument(frame, 0), *kernel = argument(frame, 1), *out = result(frame, 0);
  const XLA_FFI_Buffer* high = argument(frame, 6);
  int64_t depth = inputs->dims[1];
  FourBit product = {
      .inputs = inputs->data,
      .kernel = kernel->data,
      .high = high->rank == 3 ? high->data : NULL,
      .out = out->data,
      .scale = numbers_of(frame, 2, depth),
      .scale_unit = numbers_of(frame, 3, depth),
      .offset = numbers_of(frame, 4, depth),
      .offset_unit = numbers_of(frame, 5, depth),
      .input_sums = result(frame, 1)->data,
      .of_inputs = kind_of(inputs),
      .of_out = kind_of(out),
      .rows = num_rows_in_use(inputs),
      .depth = depth,
      .panels = kernel->dims[0],
      .panels_of_part = panels_of_part(kernel->dims[0]),
  };
  if (frame->rets.size == 5) {
    product.narrow = result(frame, 2)->data;
    product.input_scales = result(frame, 3)->data;
    product.starts = result(frame, 4)->data;
  }
  product.step = step_of(&product);
  product.are_paired = are_paired(&product);
  product.are_whole = are_whole(&product);
  product.are_many = product.rows * product.panels * PANEL * size_of(product.of_out) > SECOND_CACHE;
  if (product.narrow || product.offset.data) in_parallel(frame, product.rows, prepare_row, &product);
  in_parallel(frame, (product.panels + product.panels_of_part - 1) / product.panels_of_part, multiply, &product);
  zero_padding(frame, out, product.rows);
  return NULL;
}
