// Ragged paged attention on a CPU: appends a step's K/V to their pages, then attends over the pages, in place.
//
// A page of one KV head holds pieces of 16 tokens. A piece of K is stored as [head_dim, 16], so that scores are sums of
// whole vectors; a piece of V as [16, head_dim]. A part of the work is one KV head of one tile: up to 16 tokens of one
// row, with all their query heads. It goes over the row's K/V in blocks of 64 tokens with an online softmax. What a
// query adds up, and in which order, depends on its own row only, not on the tile or on other rows.
//
// In bfloat16 a block is copied first, so that two numbers that are multiplied and added together are one word, and its
// weights are rounded to bfloat16. Other pages are widened to float32 as they are read.
#include "ffi.h"

enum {
  PIECE = 16,
  BLOCK = 64,
  PIECES = BLOCK / PIECE,
  PAIR_OF_KEYS = 2 * PIECE * sizeof(uint16_t),  // bytes
  VECTORS_OF_PIECE = PIECE / LANES,
  TILE_TOKENS = 16,
  TILE_QUERIES = 64,  // query heads of a tile's tokens: the rows of its two products
  MAX_HEAD_DIM = 256,
  SPAN = 4,           // vectors of sums of each row of a product that are in registers at once
  PIECES_AT_ONCE = SPAN / VECTORS_OF_PIECE,
};
#if VECTOR_REGISTERS == 32
#define ROWS_AT_ONCE 6
#else
#define ROWS_AT_ONCE 2
#endif
#define MASKED -1e30f  // below every score, but finite

typedef struct {
  const void* queries;            // [T, N, H]
  const void *keys, *values;      // [T, K, H], the step's
  char* pages;                    // [2, P, K, page, H]
  const int32_t* table;           // [S, pages_per_row]
  const int32_t *lens, *starts;   // [S], [S + 1]
  void* out;                      // [T, N, H], of the queries' kind
  const int32_t* tile_ends;       // [num_rows], tiles of the rows up to and including this one
  enum Kind of_queries, of_pages;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, page_size, num_pages, pages_per_row, num_rows, first_page;
  int64_t tokens_of_tile;
  float scale;
} Attention;

// The keys of a page and head; its values are `values_after` bytes further on.
INLINE char* keys_of(const Attention* a, int64_t page, int64_t head) {
  int64_t size = a->page_size * a->head_dim * size_of(a->of_pages);
  return a->pages + ((page + a->first_page) * a->num_kv_heads + head) * size;
}
INLINE int64_t values_after(const Attention* a) {
  return a->num_pages * a->num_kv_heads * a->page_size * a->head_dim * size_of(a->of_pages);
}

// The keys' piece that holds a position of a row; past the row's last token, that of the null page.
INLINE const char* piece_at(const Attention* a, int64_t row, int64_t head, int64_t position, int64_t len) {
  int64_t page = position < len ? a->table[row * a->pages_per_row + position / a->page_size] : 0;
  return keys_of(a, page, head) + position % a->page_size * a->head_dim * size_of(a->of_pages);
}

INLINE void append_token(const Attention* a, int64_t token, int64_t row, int64_t head, const int64_t size) {
  int64_t position = a->lens[row] - (a->starts[row + 1] - token), lane = position % PIECE, dim = a->head_dim;
  char* keys = (char*)piece_at(a, row, head, position - lane, a->lens[row]);
  const char* key = (const char*)a->keys + (token * a->num_kv_heads + head) * dim * size;
  for (int64_t d = 0; d < dim; d++) memcpy(keys + (d * PIECE + lane) * size, key + d * size, size);
  const char* value = (const char*)a->values + (token * a->num_kv_heads + head) * dim * size;
  memcpy(keys + values_after(a) + lane * dim * size, value, dim * size);
}

static void append_head(const void* arguments, int64_t head) {
  const Attention* a = arguments;
  for (int64_t row = 0; row < a->num_rows; row++)
    for (int64_t token = a->starts[row]; token < a->starts[row + 1]; token++) switch (a->of_pages) {
        case FLOAT32: append_token(a, token, row, head, 4); break;
        case BFLOAT16: append_token(a, token, row, head, 2); break;
        case INT8: append_token(a, token, row, head, 1); break;
      }
}

// Into the second cache: what is ahead of a step of many rows is more than the first holds.
INLINE void read_ahead(const char* from) { __builtin_prefetch(from, 0, 2); }

// scores [rows, BLOCK] of queries [rows, dim] and the keys of a block's first pieces. Reads their values ahead.
INLINE void score(const int rows, const int at_once, const float* queries, int64_t dim, const char* const* pieces,
                  int64_t num_pieces, int64_t to_values, float* scores, const int reads_ahead, const enum Kind kind) {
  const int vectors = at_once * VECTORS_OF_PIECE;
  for (int64_t first = 0; first < num_pieces; first += at_once) {
    floats sums[ROWS_AT_ONCE][SPAN];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = all(0);
    for (int64_t d = 0; d < dim; d++) {
      floats keys[SPAN];
      UNROLL for (int v = 0; v < vectors; v++)
        keys[v] = load(pieces[first + v / VECTORS_OF_PIECE], d * PIECE + v % VECTORS_OF_PIECE * LANES, kind);
      if (reads_ahead) UNROLL for (int p = 0; p < at_once; p++)
        read_ahead(pieces[first + p] + to_values + d * PIECE * size_of(kind));
      UNROLL for (int r = 0; r < rows; r++) {
        floats query = all(queries[r * dim + d]);
        UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = add_product(sums[r][v], query, keys[v]);
      }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++)
      *(floats*)(scores + r * BLOCK + first * PIECE + v * LANES) = sums[r][v];
  }
}

// sums [rows, dim] += weights [rows, BLOCK] times the block's first `count` values, for `vectors` vectors of dims from
// `from` on. Reads the keys of the next block ahead.
INLINE void weigh_dims(const int rows, const int vectors, const float* weights, const char* const* pieces,
                       const char* const* next, int64_t to_values, float* sums, int64_t dim, int64_t from, int64_t count,
                       const int reads_ahead, const enum Kind kind) {
  floats own[ROWS_AT_ONCE][SPAN];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++)
    own[r][v] = *(floats*)(sums + r * dim + from + v * LANES);
  for (int64_t i = 0; i < count; i++) {
    int64_t at = i % PIECE * dim + from;
    floats values[SPAN];
    UNROLL for (int v = 0; v < vectors; v++)
      values[v] = load(pieces[i / PIECE] + to_values, at + v * LANES, kind);
    if (reads_ahead) UNROLL for (int line = 0; line < vectors * LANES * size_of(kind); line += 64)
      read_ahead(next[i / PIECE] + at * size_of(kind) + line);
    UNROLL for (int r = 0; r < rows; r++) {
      floats weight = all(weights[r * BLOCK + i]);
      UNROLL for (int v = 0; v < vectors; v++) own[r][v] = add_product(own[r][v], weight, values[v]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++)
    *(floats*)(sums + r * dim + from + v * LANES) = own[r][v];
}

INLINE void weigh(const int rows, const float* weights, const char* const* pieces, const char* const* next,
                  int64_t to_values, float* sums, int64_t dim, int64_t count, const int reads_ahead,
                  const enum Kind kind) {
  int64_t from = 0;
  for (; from + SPAN * LANES <= dim; from += SPAN * LANES)
    weigh_dims(rows, SPAN, weights, pieces, next, to_values, sums, dim, from, count, reads_ahead, kind);
  for (; from < dim; from += LANES)
    weigh_dims(rows, 1, weights, pieces, next, to_values, sums, dim, from, count, reads_ahead, kind);
}

// LANES numbers of two rows of bfloat16s as words: each has one of both.
INLINE words paired(const uint16_t* even, const uint16_t* odd) {
#if defined(__AVX512BW__)
  const words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  __m256i low = _mm256_loadu_si256((const __m256i_u*)even), high = _mm256_loadu_si256((const __m256i_u*)odd);
  __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  return (words)_mm512_permutexvar_epi16((__m512i)(lanes | (lanes + LANES) << 16), both);
#else
  return widened_halves(even) | widened_halves(odd) << 16;
#endif
}

// The keys of a block's first pieces in pairs of dims: [dim / 2, BLOCK].
INLINE void pair_keys(const char* const* pieces, int64_t num_pieces, int64_t dim, word* keys) {
  for (int64_t piece = 0; piece < num_pieces; piece++)
    for (int64_t d = 0; d < dim; d += 2) UNROLL for (int i = 0; i < PIECE; i += LANES) {
      const uint16_t* even = (const uint16_t*)pieces[piece] + d * PIECE + i;
      *(words*)(keys + d / 2 * BLOCK + piece * PIECE + i) = paired(even, even + PIECE);
    }
}

// The block's first `count` values in pairs of tokens: [BLOCK / 2, dim]. What the last one is paired with is 0.
INLINE void pair_values(const char* const* pieces, int64_t to_values, int64_t count, int64_t dim, word* values) {
  for (int64_t i = 0; i < count; i += 2)
    for (int64_t d = 0; d < dim; d += LANES) {
      const uint16_t* even = (const uint16_t*)(pieces[i / PIECE] + to_values) + i % PIECE * dim + d;
      *(words*)(values + i / 2 * dim + d) = i + 1 < count ? paired(even, even + dim) : widened_halves(even);
    }
}

// A product of pairs. In each step of its depth it reads so many bytes of a block's pieces ahead.
typedef struct {
  const word* inputs;        // [rows, stride], the first `depth` of each row: pairs of dims, or of tokens' weights
  const word* pairs;         // [depth, width]
  float* sums;               // [rows, width]
  const char* const* ahead;  // from `offset_ahead` on
  int64_t stride, depth, width, bytes_ahead, offset_ahead;
} Pairs;

// `continues`: adds to what is in `sums`. Of the width it does `vectors` vectors from `from` on.
INLINE void multiply_vectors(const Pairs* p, const int rows, const int vectors, int64_t from, const int continues) {
  floats own[ROWS_AT_ONCE][SPAN];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++)
    own[r][v] = continues ? *(floats*)(p->sums + r * p->width + from + v * LANES) : all(0);
  for (int64_t d = 0; d < p->depth; d++) {
    if (p->bytes_ahead) UNROLL for (int piece = 0; piece < PIECES; piece++)
      read_ahead(p->ahead[piece] + p->offset_ahead + d * p->bytes_ahead + from);
    UNROLL for (int term = 0; term < TERMS_OF_PAIR; term++) {
      floats factors[SPAN];
      UNROLL for (int v = 0; v < vectors; v++)
        factors[v] = term_of(*(words*)(p->pairs + d * p->width + from + v * LANES), term);
      UNROLL for (int r = 0; r < rows; r++) {
        floats input = term_of(p->inputs[r * p->stride + d] - (words){0}, term);
        UNROLL for (int v = 0; v < vectors; v++) own[r][v] = add_terms(own[r][v], input, factors[v]);
      }
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++)
    *(floats*)(p->sums + r * p->width + from + v * LANES) = own[r][v];
}

// The same for the width up to `end`.
INLINE void multiply_pairs(const Pairs* p, const int rows, int64_t end, const int continues) {
  int64_t from = 0;
  for (; from + SPAN * LANES <= end; from += SPAN * LANES) multiply_vectors(p, rows, SPAN, from, continues);
  for (; from < end; from += LANES) multiply_vectors(p, rows, 1, from, continues);
}

// Runs a call for `left` rows, at most ROWS_AT_ONCE, with their number `R` as a constant: the sums are then in registers.
#define CASE(n, CALL) \
  case n: {           \
    const int R = n;  \
    CALL;             \
  } break;
#if VECTOR_REGISTERS == 32
#define OF_ROWS(left, CALL) \
  switch (left) { CASE(1, CALL) CASE(2, CALL) CASE(3, CALL) CASE(4, CALL) CASE(5, CALL) CASE(6, CALL) }
#else
#define OF_ROWS(left, CALL) \
  switch (left) { CASE(1, CALL) CASE(2, CALL) }
#endif

// One step of the online softmax of one query: its scores become weights, in bfloat16 if the block is `paired`. `count` of
// the block's tokens are visible.
INLINE void soften(const Attention* a, float* scores, int64_t count, float* sums, float* maximum, float* total,
                   const int paired) {
  if (paired)
    for (int i = 0; i < BLOCK; i += LANES) *(floats*)(scores + i) *= a->scale;
  for (int64_t i = count < 0 ? 0 : count; i < BLOCK; i++) scores[i] = MASKED;
  floats greatest = *(floats*)scores;
  for (int i = LANES; i < BLOCK; i += LANES) greatest = greater_of(*(floats*)(scores + i), greatest);
  float now = greatest_of(greatest), before = *maximum;
  if (now < before) now = before;
  for (int i = 0; i < BLOCK; i += LANES) *(floats*)(scores + i) = exponential(*(floats*)(scores + i) - now);
  for (int64_t i = count < 0 ? 0 : count; i < BLOCK; i++) scores[i] = 0;
  floats added = *(floats*)scores;
  for (int i = LANES; i < BLOCK; i += LANES) added += *(floats*)(scores + i);
  if (now != before) {
    floats shrink = exponential(all(before) - now);
    *total *= shrink[0];
    for (int64_t d = 0; d < a->head_dim; d += LANES) *(floats*)(sums + d) *= shrink;
  }
  *total += sum_of(added);
  *maximum = now;
  if (paired)
    for (int i = 0; i < BLOCK; i += LANES) store(scores, i, *(floats*)(scores + i), BFLOAT16);
}

INLINE void attend_tile(const Attention* a, int64_t row, int64_t first, int64_t head, const enum Kind kind) {
  float queries[TILE_QUERIES * MAX_HEAD_DIM], sums[TILE_QUERIES * MAX_HEAD_DIM], scores[TILE_QUERIES * BLOCK];
  float maxima[TILE_QUERIES], totals[TILE_QUERIES];
  const int paired = kind == BFLOAT16;
  word keys[paired ? MAX_HEAD_DIM / 2 * BLOCK : 1], values[paired ? BLOCK / 2 * MAX_HEAD_DIM : 1];
  int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads, end = a->starts[row + 1], len = a->lens[row];
  int64_t tokens = end - first < a->tokens_of_tile ? end - first : a->tokens_of_tile, rows = tokens * group;
  int64_t position = len - (end - first), visible = position + tokens, to_values = values_after(a);

  for (int64_t r = 0; r < rows; r++) {
    int64_t at = ((first + r / group) * a->num_heads + head * group + r % group) * dim;
    if (paired) memcpy(queries + r * dim, (const uint16_t*)a->queries + at, dim * sizeof(uint16_t));
    else for (int64_t d = 0; d < dim; d += LANES)
      *(floats*)(queries + r * dim + d) = load(a->queries, at + d, a->of_queries) * a->scale;
    maxima[r] = MASKED;
    totals[r] = 0;
  }
  memset(sums, 0, rows * dim * sizeof *sums);

  for (int64_t from = 0; from < visible; from += BLOCK) {
    int64_t count = visible - from < BLOCK ? visible - from : BLOCK, num_pieces = (count + PIECE - 1) / PIECE;
    const char *pieces[PIECES], *next[PIECES];
    for (int p = 0; p < PIECES; p++) {
      pieces[p] = piece_at(a, row, head, from + p * PIECE, visible);
      next[p] = piece_at(a, row, head, from + BLOCK + p * PIECE, visible);
    }
    if (paired) pair_keys(pieces, num_pieces, dim, keys);
    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
      int64_t left = rows - r < ROWS_AT_ONCE ? rows - r : ROWS_AT_ONCE;
      const float* of_rows = queries + r * dim;
      float* to = scores + r * BLOCK;
      if (paired) {
        Pairs pairs = {.inputs = (const word*)of_rows, .stride = dim, .depth = dim / 2, .pairs = keys, .width = BLOCK,
                       .sums = to, .ahead = pieces, .offset_ahead = to_values, .bytes_ahead = r == 0 ? PAIR_OF_KEYS : 0};
        OF_ROWS(left, multiply_pairs(&pairs, R, num_pieces * PIECE, 0))
      } else if (num_pieces == PIECES) {
        OF_ROWS(left, score(R, PIECES_AT_ONCE, of_rows, dim, pieces, PIECES, to_values, to, r == 0, kind))
      } else {
        OF_ROWS(left, score(R, 1, of_rows, dim, pieces, num_pieces, to_values, to, r == 0, kind))
      }
    }
    for (int64_t r = 0; r < rows; r++)
      soften(a, scores + r * BLOCK, position + r / group + 1 - from, sums + r * dim, maxima + r, totals + r, paired);
    if (paired) pair_values(pieces, to_values, count, dim, values);
    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
      int64_t left = rows - r < ROWS_AT_ONCE ? rows - r : ROWS_AT_ONCE;
      const float* weights = scores + r * BLOCK;
      float* to = sums + r * dim;
      if (paired) {
        Pairs pairs = {.inputs = (const word*)weights, .stride = BLOCK, .depth = (count + 1) / 2, .pairs = values,
                       .width = dim, .sums = to, .ahead = next, .bytes_ahead = r == 0 ? dim : 0};
        OF_ROWS(left, multiply_pairs(&pairs, R, dim, 1))
      } else {
        OF_ROWS(left, weigh(R, weights, pieces, next, to_values, to, dim, count, r == 0, kind))
      }
    }
  }

  for (int64_t r = 0; r < rows; r++) {
    int64_t at = ((first + r / group) * a->num_heads + head * group + r % group) * dim;
    for (int64_t d = 0; d < dim; d += LANES)
      store(a->out, at + d, *(floats*)(sums + r * dim + d) / totals[r], a->of_queries);
  }
}

static void attend_part(const void* arguments, int64_t part) {
  const Attention* a = arguments;
  int64_t tile = part / a->num_kv_heads, head = part % a->num_kv_heads, low = 0, high = a->num_rows - 1;
  while (low < high) {  // the first row whose tiles end after this one
    int64_t middle = (low + high) / 2;
    if (a->tile_ends[middle] > tile) high = middle; else low = middle + 1;
  }
  int64_t first = a->starts[low] + (tile - (low ? a->tile_ends[low - 1] : 0)) * a->tokens_of_tile;
  switch (a->of_pages) {
    case FLOAT32: attend_tile(a, low, first, head, FLOAT32); break;
    case BFLOAT16: attend_tile(a, low, first, head, BFLOAT16); break;
    case INT8: attend_tile(a, low, first, head, INT8); break;
  }
}

// What would read or write outside of the buffers, in words; NULL if nothing does.
static const char* fault_of(const Attention* a, int64_t num_slots) {
  if (a->num_rows < 0 || a->num_rows > num_slots) return "attention: num_rows is not within the rows of the step";
  for (int64_t row = 0; row < a->num_rows; row++) {
    int64_t start = a->starts[row], end = a->starts[row + 1], len = a->lens[row];
    if (start < 0 || end < start || end > a->num_tokens) return "attention: query_starts are not in order, or too large";
    if (len < end - start) return "attention: a row has more queries than tokens";
    if (len > a->pages_per_row * a->page_size) return "attention: a sequence is longer than its page table";
    for (int64_t i = 0; i * a->page_size < len; i++) {
      int64_t page = a->table[row * a->pages_per_row + i] + a->first_page;
      if (page < 0 || page >= a->num_pages) return "attention: a page table holds a page that does not exist";
    }
  }
  return NULL;
}

// (queries [T, N, H], keys, values [T, K, H], pages [2, P, K, page, H], table i32[S, n], lens i32[S], starts i32[S + 1],
// num_rows i32[], first_page i32[]) -> (out [T, N, H] in the queries' type, pages), which is the argument. Attribute: scale
// f32.
XLA_FFI_Error* pallas_serve_attend(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  XLA_FFI_Buffer *queries = argument(frame, 0), *pages = result(frame, 1), *table = argument(frame, 4);
  Attention a = {
      .queries = queries->data,
      .keys = argument(frame, 1)->data,
      .values = argument(frame, 2)->data,
      .pages = pages->data,
      .table = table->data,
      .lens = argument(frame, 5)->data,
      .starts = argument(frame, 6)->data,
      .out = result(frame, 0)->data,
      .of_queries = kind_of(queries),
      .of_pages = kind_of(pages),
      .num_tokens = queries->dims[0],
      .num_heads = queries->dims[1],
      .num_kv_heads = pages->dims[2],
      .head_dim = queries->dims[2],
      .page_size = pages->dims[3],
      .num_pages = pages->dims[1],
      .pages_per_row = table->dims[1],
      .num_rows = number(frame, 7),
      .first_page = number(frame, 8),
      .scale = *(const float*)((const XLA_FFI_Scalar*)frame->attrs.attrs[0])->value,
  };
  if (argument(frame, 3)->data != pages->data)
    return failure(frame, XLA_FFI_Error_Code_INTERNAL, "attention: the pages were not donated");
  const char* fault = fault_of(&a, table->dims[0]);
  if (fault) return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, fault);

  int64_t fitting = TILE_QUERIES / (a.num_heads / a.num_kv_heads), num_tiles = 0;
  a.tokens_of_tile = fitting < TILE_TOKENS ? fitting : TILE_TOKENS;
  int32_t* tile_ends = malloc((a.num_rows + 1) * sizeof *tile_ends);
  if (!tile_ends) return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "attention: out of memory");
  for (int64_t row = 0; row < a.num_rows; row++) {
    num_tiles += (a.starts[row + 1] - a.starts[row] + a.tokens_of_tile - 1) / a.tokens_of_tile;
    tile_ends[row] = (int32_t)num_tiles;
  }
  a.tile_ends = tile_ends;
  int64_t real = a.num_rows ? a.starts[a.num_rows] : 0, size = a.num_heads * a.head_dim * size_of(a.of_queries);
  memset((char*)a.out + real * size, 0, (a.num_tokens - real) * size);
  in_parallel(frame, a.num_kv_heads, append_head, &a);
  in_parallel(frame, num_tiles * a.num_kv_heads, attend_part, &a);
  free(tile_ends);
  return NULL;
}
