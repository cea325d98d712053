/* What attention by blocks has in common for all kinds of numbers: see flash_attention.h. */

#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX512F__)
#pragma GCC target("prefer-vector-width=512")        /* also for the loops over lanes that GCC vectorises by itself */
#endif

#include "geometry.h"
#include "philox.h"
#include "vector_math.h"
#include "vectors.h"

#define ROWS 8
#define VECTORS 2                    /* ROWS x VECTORS sums in registers */
#define BLOCK 64                     /* keys at a time: part of the order of the arithmetic, so the same everywhere */

/* What the functions look at, as an array of 64-bit integers; steps are in numbers, between batches, heads and positions. */
typedef struct { i64 batch, head, row; } Steps;
typedef struct {
    i64 batches, heads, queries, keys, width, values, causal;      /* q, k have `width` numbers a row, v `values` */
    i64 head_words, query_words;       /* of random words between heads, and between queries, where weights are dropped */
    Steps q, k, v, out, grad, dq, dk, dv;
} Shape;

static inline i64 round_up(i64 n, i64 step) { return (n + step - 1) / step * step; }
