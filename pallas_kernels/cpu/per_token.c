// What a step computes of each token besides products and attention. A row is computed by itself, by the same
// instructions in the same order, so its bits do not depend on the other rows, or on the number of threads.
#include <math.h>

#include "ffi.h"

// Numbers of a row that are computed together: as many on every CPU, so that sums have the same order.
enum { BLOCK = 16, VECTORS = BLOCK / LANES, NUMBERS_OF_PART = 1 << 14 };

typedef struct {
  floats of[VECTORS];
} Block;
#define EACH_VECTOR UNROLL for (int v = 0; v < VECTORS; v++)

INLINE int64_t at_most_block(int64_t left) { return left < BLOCK ? left : BLOCK; }

// `count` numbers from the index on, as floats, and zeros behind them.
INLINE Block load_block(const void* from, int64_t index, int64_t count, const enum Kind kind) {
  char whole[BLOCK * sizeof(float)];
  if (count < BLOCK) {
    memset(whole, 0, sizeof whole);
    memcpy(whole, (const char*)from + index * size_of(kind), count * size_of(kind));
    from = whole;
    index = 0;
  }
  Block block;
  EACH_VECTOR block.of[v] = load(from, index + v * LANES, kind);
  return block;
}

// Stores the first `count` numbers from the index on.
INLINE void store_block(void* to, int64_t index, int64_t count, Block block, const enum Kind kind) {
  char whole[BLOCK * sizeof(float)];
  void* into = count < BLOCK ? whole : to;
  EACH_VECTOR store(into, (count < BLOCK ? 0 : index) + v * LANES, block.of[v], kind);
  if (count < BLOCK) memcpy((char*)to + index * size_of(kind), whole, count * size_of(kind));
}

INLINE float sum_of_block(Block block) {
  float s[BLOCK];
  memcpy(s, &block, sizeof s);
  for (int n = BLOCK / 2; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] += s[i + n];
  return s[0];
}

// Calls a function for every row. Rows of a part follow each other.
typedef struct {
  void (*do_row)(const void* arguments, int64_t row);
  const void* arguments;
  int64_t rows, rows_of_part;
} Rows;

static void do_rows(const void* all_rows, int64_t part) {
  const Rows* r = all_rows;
  int64_t first = part * r->rows_of_part, end = first + r->rows_of_part;
  for (int64_t row = first; row < end && row < r->rows; row++) r->do_row(r->arguments, row);
}

static void for_rows(XLA_FFI_CallFrame* frame, int64_t rows, int64_t width, void (*do_row)(const void*, int64_t),
                     const void* arguments) {
  int64_t fitting = width < NUMBERS_OF_PART ? NUMBERS_OF_PART / (width ? width : 1) : 1;
  Rows all_rows = {do_row, arguments, rows, fitting};
  in_parallel(frame, (rows + fitting - 1) / fitting, do_rows, &all_rows);
}

typedef struct {
  const void *inputs, *added, *scale;  // [T, D], [T, D] or NULL, [D]
  void *normed, *sums;                 // [T, D]; sums only if something is added
  enum Kind kind;                      // of all of these
  int64_t width;
  float epsilon;
} Norm;

INLINE void norm_row(const Norm* n, int64_t row, const enum Kind kind) {
  int64_t width = n->width, from = row * width;
  const void* inputs = n->added ? n->sums : n->inputs;
  Block squares = {0};
  for (int64_t i = 0; i < width; i += BLOCK) {
    int64_t count = at_most_block(width - i);
    Block x = load_block(n->inputs, from + i, count, kind);
    if (n->added) {
      Block added = load_block(n->added, from + i, count, kind);
      EACH_VECTOR x.of[v] = rounded_to(x.of[v] + added.of[v], kind);
      store_block(n->sums, from + i, count, x, kind);
    }
    EACH_VECTOR squares.of[v] = add_product(squares.of[v], x.of[v], x.of[v]);
  }
  float factor = 1 / __builtin_sqrtf(sum_of_block(squares) / (float)width + n->epsilon);
  for (int64_t i = 0; i < width; i += BLOCK) {
    int64_t count = at_most_block(width - i);
    Block x = load_block(inputs, from + i, count, kind), scale = load_block(n->scale, i, count, kind);
    EACH_VECTOR x.of[v] = rounded_to(x.of[v] * factor, kind) * scale.of[v];
    store_block(n->normed, from + i, count, x, kind);
  }
}

static void do_norm(const void* norm, int64_t row) {
  const Norm* n = norm;
  if (n->kind == BFLOAT16) norm_row(n, row, BFLOAT16);
  else norm_row(n, row, FLOAT32);
}

// (inputs [T, D], scale [D]) -> normed [T, D]; (inputs, scale, added [T, D]) -> (the norm of the sums, the sums [T, D]).
// All are of float32 or of bfloat16. Attribute: epsilon f32.
XLA_FFI_Error* pallas_serve_norm(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer* inputs = argument(frame, 0);
  int has_added = frame->args.size == 3;
  Norm norm = {
      .inputs = inputs->data,
      .scale = argument(frame, 1)->data,
      .added = has_added ? argument(frame, 2)->data : NULL,
      .normed = result(frame, 0)->data,
      .sums = has_added ? result(frame, 1)->data : NULL,
      .kind = kind_of(inputs),
      .width = inputs->dims[1],
      .epsilon = *(const float*)((const XLA_FFI_Scalar*)frame->attrs.attrs[0])->value,
  };
  for_rows(frame, inputs->dims[0], norm.width, do_norm, &norm);
  return NULL;
}

// TILE tokens are computed with TOGETHER rows or blocks at once: as many as a CPU has registers for. The sums of a token
// do not depend on it.
enum { MAX_PROJECTIONS = 3, MAX_RANK = 512, TOGETHER = 4, TILE = VECTORS == 1 ? 4 : 1, TOKENS_OF_GROUP = 8 };

typedef struct {
  const void* inputs;              // [T, D]
  const void* outputs;             // [T, E], E is the sum of the widths
  const void* a;                   // [P, S * rank, D]
  const void* b[MAX_PROJECTIONS];  // [S * rank, width]
  void* out;                       // [T, E]
  enum Kind kind;                  // of all of these
  const int32_t *slots, *tokens;   // [T] each: the tokens in the order of their slots
  const int32_t* groups;           // where each group of tokens of one slot begins, and the end of the last one
  int64_t num_projections, num_places, rank, depth, width, widths[MAX_PROJECTIONS];
} Adapters;

// A group's tokens take turns with each part of the adapter, which stays in a core's cache. The sums of a token have the
// same order in every group.
typedef struct {
  const int32_t* tokens;
  int64_t count, place;  // the first row of its slot
} Group;

INLINE int64_t token_of(Group g, int64_t t) { return g.tokens[t < g.count ? t : 0]; }

// reduced[t][n] = inputs of token t * row n of a, of `tile` tokens, for `rank` rows from `row` on. Past the last token and
// the last row, these are computed again.
INLINE void reduce(const Adapters* p, Group g, int64_t row, float reduced[][MAX_RANK], const int tile,
                   const enum Kind kind) {
  for (int64_t first = 0; first < p->rank; first += TOGETHER) {
    int64_t left = p->rank - first;
    Block sums[TILE][TOGETHER] = {0};
    for (int64_t i = 0; i < p->depth; i += BLOCK) {
      int64_t count = at_most_block(p->depth - i);
      Block x[TILE];
      UNROLL for (int t = 0; t < tile; t++) x[t] = load_block(p->inputs, token_of(g, t) * p->depth + i, count, kind);
      UNROLL for (int n = 0; n < TOGETHER; n++) {
        Block a = load_block(p->a, (row + first + (n < left ? n : 0)) * p->depth + i, count, kind);
        UNROLL for (int t = 0; t < tile; t++)
          EACH_VECTOR sums[t][n].of[v] = add_product(sums[t][n].of[v], x[t].of[v], a.of[v]);
      }
    }
    UNROLL for (int t = 0; t < tile; t++)
      UNROLL for (int n = 0; n < TOGETHER; n++) reduced[t][first + n] = sum_of_block(sums[t][n]);
  }
}

// Adds to `blocks` blocks of `tile` tokens' outputs, from b's column `from` on. The last one has `count` numbers.
INLINE void expand(const Adapters* p, Group g, const void* b, int64_t width, int64_t begin, int64_t from,
                   float reduced[][MAX_RANK], const int tile, const int blocks, int64_t count, const enum Kind kind) {
  Block sums[TILE][TOGETHER] = {0};
  for (int64_t n = 0; n < p->rank; n++)
    UNROLL for (int k = 0; k < blocks; k++) {
      Block row = load_block(b, (g.place + n) * width + from + k * BLOCK, k == blocks - 1 ? count : BLOCK, kind);
      UNROLL for (int t = 0; t < tile; t++)
        EACH_VECTOR sums[t][k].of[v] = add_product(sums[t][k].of[v], all(reduced[t][n]), row.of[v]);
    }
  UNROLL for (int t = 0; t < tile; t++) {
    int64_t to = token_of(g, t) * p->width + begin + from;
    if (t < g.count) UNROLL for (int k = 0; k < blocks; k++) {
      int64_t own = k == blocks - 1 ? count : BLOCK;
      Block y = load_block(p->outputs, to + k * BLOCK, own, kind);
      EACH_VECTOR y.of[v] += sums[t][k].of[v];
      store_block(p->out, to + k * BLOCK, own, y, kind);
    }
  }
}

// The first `tile` tokens of a group, or as many as it has.
INLINE void add_to_tile(const Adapters* p, Group g, int64_t projection, const int tile, const enum Kind kind) {
  float reduced[TILE][MAX_RANK];
  const void* b = p->b[projection];
  int64_t width = p->widths[projection], begin = 0, step = TOGETHER * BLOCK;
  for (int64_t n = 0; n < projection; n++) begin += p->widths[n];
  reduce(p, g, projection * p->num_places + g.place, reduced, tile, kind);
  for (int64_t i = 0; i < width; i += step) {
    if (i + step > width) step = BLOCK;
    if (step == BLOCK) expand(p, g, b, width, begin, i, reduced, tile, 1, at_most_block(width - i), kind);
    else expand(p, g, b, width, begin, i, reduced, tile, TOGETHER, BLOCK, kind);
  }
}

INLINE void add_to_group(const Adapters* p, Group g, int64_t projection, const enum Kind kind) {
  for (; g.count > 0; g.tokens += TILE, g.count -= TILE) {
    if (g.count == 1) add_to_tile(p, g, projection, 1, kind);
    else add_to_tile(p, g, projection, TILE, kind);
  }
}

static void do_adapters(const void* adapters, int64_t part) {
  const Adapters* p = adapters;
  int64_t group = part / p->num_projections, first = p->groups[group];
  const int32_t* tokens = p->tokens + first;
  Group g = {tokens, p->groups[group + 1] - first, (p->slots[*tokens] - 1) * p->rank};
  if (p->kind == BFLOAT16) add_to_group(p, g, part % p->num_projections, BFLOAT16);
  else add_to_group(p, g, part % p->num_projections, FLOAT32);
}

// Sorts the tokens that have an adapter by its slot. Returns the number of groups.
static int64_t group_tokens(const int32_t* slots, int64_t count, int64_t num_slots, int32_t* tokens, int32_t* groups) {
  int64_t placed = 0, num_groups = 0;
  for (int64_t slot = 1; slot <= num_slots; slot++) {
    int64_t begin = placed;
    for (int64_t t = 0; t < count; t++)
      if (slots[t] == slot) {
        if ((placed - begin) % TOKENS_OF_GROUP == 0) groups[num_groups++] = (int32_t)placed;
        tokens[placed++] = (int32_t)t;
      }
  }
  groups[num_groups] = (int32_t)placed;
  return num_groups;
}

// (inputs [T, D], outputs [T, E], slots i32[T], a [P, S * rank, D], for each of P projections b [S * rank, width]) ->
// (the outputs, in place, with b's rows times the inputs' products with a's rows of the token's slot, and what only this
// function uses, i32[2, T + 1]). Slots are from 1; 0 adds nothing. All numbers are of float32 or of bfloat16. Attribute:
// rank i32.
XLA_FFI_Error* pallas_serve_add_adapters(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *inputs = argument(frame, 0), *outputs = argument(frame, 1), *a = argument(frame, 3);
  int64_t count = inputs->dims[0];
  int32_t *tokens = result(frame, 1)->data, *groups = tokens + count + 1;
  Adapters adapters = {
      .inputs = inputs->data,
      .outputs = outputs->data,
      .a = a->data,
      .out = result(frame, 0)->data,
      .kind = kind_of(inputs),
      .slots = argument(frame, 2)->data,
      .tokens = tokens,
      .groups = groups,
      .num_projections = a->dims[0],
      .num_places = a->dims[1],
      .rank = *(const int32_t*)((const XLA_FFI_Scalar*)frame->attrs.attrs[0])->value,
      .depth = inputs->dims[1],
      .width = outputs->dims[1],
  };
  if (adapters.num_projections > MAX_PROJECTIONS || adapters.rank > MAX_RANK)
    return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "an adapter has too many projections or ranks");
  for (int64_t n = 0; n < adapters.num_projections; n++) {
    adapters.b[n] = argument(frame, 4 + (int)n)->data;
    adapters.widths[n] = argument(frame, 4 + (int)n)->dims[1];
  }
  int64_t num_groups = group_tokens(adapters.slots, count, adapters.num_places / adapters.rank, tokens, groups);
  in_parallel(frame, num_groups * adapters.num_projections, do_adapters, &adapters);
  return NULL;
}

typedef struct {
  const void* inputs;  // [T, 2 F]: gates, then what they multiply
  void* out;           // [T, F]
  enum Kind kind;
  int64_t width;
} Gate;

INLINE void gate_row(const Gate* g, int64_t row, const enum Kind kind) {
  for (int64_t i = 0; i < g->width; i += BLOCK) {
    int64_t count = at_most_block(g->width - i), from = 2 * row * g->width + i;
    Block gate = load_block(g->inputs, from, count, kind), up = load_block(g->inputs, from + g->width, count, kind);
    EACH_VECTOR {
      floats x = gate.of[v], low = (floats)((words)x | 0x80000000u);  // -|x|: its power cannot overflow
      floats power = (floats)((words)exponential(low) & (words)(low > all(-87.0f)));
      ints is_negative = x < all(0);
      floats share = (floats)((is_negative & (ints)power) | (~is_negative & (ints)all(1)));
      gate.of[v] = x * (share / (1 + power)) * up.of[v];
    }
    store_block(g->out, row * g->width + i, count, gate, kind);
  }
}

static void do_gate(const void* gate, int64_t row) {
  const Gate* g = gate;
  if (g->kind == BFLOAT16) gate_row(g, row, BFLOAT16);
  else gate_row(g, row, FLOAT32);
}

// (inputs [T, 2 F] of float32 or bfloat16) -> silu(the first F) * the others, [T, F] of the same type.
XLA_FFI_Error* pallas_serve_gate(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *inputs = argument(frame, 0), *out = result(frame, 0);
  Gate gate = {.inputs = inputs->data, .out = out->data, .kind = kind_of(inputs), .width = out->dims[1]};
  for_rows(frame, out->dims[0], inputs->dims[1], do_gate, &gate);
  return NULL;
}

typedef struct {
  const void* columns;              // [T, (N + 2 K) H]
  const float *cosines, *sines;     // [T, H / 2]
  void *queries, *keys, *values;    // [T, N, H], [T, K, H] twice
  enum Kind kind;                   // of columns and heads
  int64_t num_heads, num_kv_heads, head_dim;
} Rotation;

INLINE void rotate_head(const Rotation* r, int64_t row, int64_t from, void* heads, int64_t to, const enum Kind kind) {
  int64_t half = r->head_dim / 2;
  for (int64_t i = 0; i < half; i += BLOCK) {
    int64_t count = at_most_block(half - i);
    Block first = load_block(r->columns, from + i, count, kind);
    Block second = load_block(r->columns, from + half + i, count, kind);
    Block cosine = load_block(r->cosines, row * half + i, count, FLOAT32);
    Block sine = load_block(r->sines, row * half + i, count, FLOAT32), turned;
    EACH_VECTOR turned.of[v] = first.of[v] * cosine.of[v] - second.of[v] * sine.of[v];
    store_block(heads, to + i, count, turned, kind);
    EACH_VECTOR turned.of[v] = second.of[v] * cosine.of[v] + first.of[v] * sine.of[v];
    store_block(heads, to + half + i, count, turned, kind);
  }
}

INLINE void rotate_row(const Rotation* r, int64_t row, const enum Kind kind) {
  int64_t dim = r->head_dim, num_heads = r->num_heads, num_kv_heads = r->num_kv_heads;
  int64_t from = row * (num_heads + 2 * num_kv_heads) * dim, to = row * num_kv_heads * dim;
  for (int64_t head = 0; head < num_heads; head++, from += dim)
    rotate_head(r, row, from, r->queries, (row * num_heads + head) * dim, kind);
  for (int64_t head = 0; head < num_kv_heads; head++, from += dim)
    rotate_head(r, row, from, r->keys, to + head * dim, kind);
  int64_t size = size_of(kind);
  memcpy((char*)r->values + to * size, (const char*)r->columns + from * size, num_kv_heads * dim * size);
}

static void do_rotation(const void* rotation, int64_t row) {
  const Rotation* r = rotation;
  if (r->kind == BFLOAT16) rotate_row(r, row, BFLOAT16);
  else rotate_row(r, row, FLOAT32);
}

// (columns [T, (N + 2 K) H] of float32 or bfloat16, cosines and sines f32[T, H / 2]) -> (queries [T, N, H], keys and
// values [T, K, H]) of the same type. The pairs (i, i + H / 2) of queries and keys are turned.
XLA_FFI_Error* pallas_serve_rotate(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *columns = argument(frame, 0), *queries = result(frame, 0), *keys = result(frame, 1);
  Rotation rotation = {
      .columns = columns->data,
      .cosines = argument(frame, 1)->data,
      .sines = argument(frame, 2)->data,
      .queries = queries->data,
      .keys = keys->data,
      .values = result(frame, 2)->data,
      .kind = kind_of(columns),
      .num_heads = queries->dims[1],
      .num_kv_heads = keys->dims[1],
      .head_dim = queries->dims[2],
  };
  for_rows(frame, columns->dims[0], columns->dims[1], do_rotation, &rotation);
  return NULL;
}

enum { LOGITS_OF_CHUNK = 4096 };
typedef struct {
  const float* logits;     // [S, V]
  float *maxima, *masses;  // [S, chunks]: of each chunk, its greatest logit and the sum of e^(logit - greatest)
  int64_t width, chunks;
} Chunks;

// What is subtracted from logits. Of tokens that are all banned the greatest is -infinity, and their differences from it
// would not be numbers.
INLINE float base_of(float greatest) { return greatest == -INFINITY ? 0 : greatest; }

static void weigh_chunk(const void* all_chunks, int64_t part) {
  const Chunks* c = all_chunks;
  int64_t row = part / c->chunks, first = part % c->chunks * LOGITS_OF_CHUNK, left = c->width - first;
  int64_t count = left < LOGITS_OF_CHUNK ? left : LOGITS_OF_CHUNK;
  const float* logits = c->logits + row * c->width + first;
  float greatest = logits[0];
  Block most, masses = {0};
  EACH_VECTOR most.of[v] = all(greatest);
  int64_t whole = count - count % BLOCK;
  for (int64_t i = 0; i < whole; i += BLOCK)
    EACH_VECTOR most.of[v] = greater_of(load(logits, i + v * LANES, FLOAT32), most.of[v]);
  EACH_VECTOR greatest = greatest_of(most.of[v]) > greatest ? greatest_of(most.of[v]) : greatest;
  for (int64_t i = whole; i < count; i++) greatest = logits[i] > greatest ? logits[i] : greatest;

  float base = base_of(greatest);
  for (int64_t i = 0; i < whole; i += BLOCK)
    EACH_VECTOR masses.of[v] += exponential(load(logits, i + v * LANES, FLOAT32) - base);
  float mass = sum_of_block(masses);
  for (int64_t i = whole; i < count; i++) mass += exponential(all(logits[i] - base))[0];
  c->maxima[part] = greatest;
  c->masses[part] = mass;
}

// (logits f32[S, V]) -> (log of the sum of e^logit f32[S], and what only this function uses: f32[S, chunks] twice).
XLA_FFI_Error* pallas_serve_log_sum_exp(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *logits = argument(frame, 0), *maxima = result(frame, 1);
  Chunks c = {
      .logits = logits->data,
      .maxima = maxima->data,
      .masses = result(frame, 2)->data,
      .width = logits->dims[1],
      .chunks = maxima->dims[1],
  };
  in_parallel(frame, logits->dims[0] * c.chunks, weigh_chunk, &c);
  for (int64_t row = 0; row < logits->dims[0]; row++) {
    const float *most = c.maxima + row * c.chunks, *masses = c.masses + row * c.chunks;
    float greatest = most[0], mass = 0;
    for (int64_t i = 1; i < c.chunks; i++) greatest = most[i] > greatest ? most[i] : greatest;
    for (int64_t i = 0; i < c.chunks; i++) mass += masses[i] * exponential(all(most[i] - base_of(greatest)))[0];
    ((float*)result(frame, 0)->data)[row] = greatest + logf(mass);
  }
  return NULL;
}

typedef struct {
  const float *logits, *greatest, *temperatures;  // [S, V], [S], [S]
  float* weights;                                 // [S, V]
  int64_t width;
} Tempering;

static void do_tempering(const void* tempering, int64_t row) {
  const Tempering* t = tempering;
  for (int64_t i = 0; i < t->width; i += BLOCK) {
    int64_t count = at_most_block(t->width - i);
    Block x = load_block(t->logits, row * t->width + i, count, FLOAT32);
    EACH_VECTOR {
      x.of[v] = (x.of[v] - t->greatest[row]) / t->temperatures[row];
      x.of[v] = (floats)((words)exponential(x.of[v]) & (words)(x.of[v] > all(-87.0f)));  // a banned token: no weight
    }
    store_block(t->weights, row * t->width + i, count, x, FLOAT32);
  }
}

// (logits f32[S, V], the greatest of each row f32[S], temperatures f32[S]) -> e^((logit - greatest) / temperature),
// f32[S, V]; 0 below e^-87.
XLA_FFI_Error* pallas_serve_temper(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer* logits = argument(frame, 0);
  Tempering tempering = {
      .logits = logits->data,
      .greatest = argument(frame, 1)->data,
      .temperatures = argument(frame, 2)->data,
      .weights = result(frame, 0)->data,
      .width = logits->dims[1],
  };
  for_rows(frame, logits->dims[0], tempering.width, do_tempering, &tempering);
  return NULL;
}
