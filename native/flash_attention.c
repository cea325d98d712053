/* Attention by blocks, forward and backward, for float and double: no matrix of L x S weights is ever kept.

   After Dao, Fu, Ermon, Rudra, Re, "FlashAttention", 2022, for one core: a block of queries meets the keys BLOCK at a time; the
   softmax so far is corrected when a larger score turns up (Milakov and Gimelshein, "Online normalizer calculation for softmax",
   2018); backward computes the scores anew. Only each query's largest score and the inverse of its sum of exps are kept (as
   one number, the logarithm of the sum, the digits of the sum would drown in a large score).

   Queries are the lanes of vectors: a block of scores is stored key by key,

       s[key * WIDTH + query]       (BLOCK, WIDTH)

   so largest scores, sums, and corrections are plain vectors, and every product of a step takes one factor as it lies in the
   caller's memory, number by number, and the other by vectors: k q', v g', v' p, k' ds from the turned block of queries or
   from s, p g and ds q from the queries as they are. Of a causal block, vectors of queries that see no key of a row are left out.

   Each sum has one order, by key, query or width, and is made of fused multiply-adds: a query's result has the same bits
   whatever else is in the batch and however wide vectors are, on every CPU that fuses. A hidden key's weight is zero exactly. */

#ifndef T

#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX512F__)
#pragma GCC target("prefer-vector-width=512")        /* also for the loops over lanes that GCC vectorises by itself */
#endif

#include "geometry.h"
#include "vector_math.h"
#include "vectors.h"

#define ROWS 8
#define VECTORS 2                    /* ROWS x VECTORS sums in registers */
#define BLOCK 64                     /* keys at a time: part of the order of the arithmetic, so the same everywhere */

/* What the functions look at, as an array of 64-bit integers; steps are in numbers, between batches, heads and positions. */
typedef struct { i64 batch, head, row; } Steps;
typedef struct {
    i64 batches, heads, queries, keys, width, values, causal;      /* q, k have `width` numbers a row, v `values` */
    Steps q, k, v, out, grad, dq, dk, dv;
} Shape;

static inline i64 round_up(i64 n, i64 step) { return (n + step - 1) / step * step; }

/* Room that one call needs, from a cache line on. */
i64 flash_attention_work_bytes(i64 width, i64 values)
{
    return (2 * (width + values + FLOATS) + at_least(width, values) + 2 * BLOCK) * VECTORS * VECTOR_BYTES;
}

#define T float
#define INTEGER int32_t
#define LANES FLOATS
#define NAME(name) name##_float32
#include "flash_attention.c"
#undef T
#undef INTEGER
#undef LANES
#undef NAME
#undef V
#undef MASK

#define T double
#define INTEGER int64_t
#define LANES DOUBLES
#define NAME(name) name##_float64
#include "flash_attention.c"

#else

#include "turn.h"

#define WIDTH (VECTORS * LANES)                                    /* queries at a time */

/* ---- products: the multiply-adds are fused here, and nowhere else ---- */

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif

/* c[i, j] (+)= sum over r of a[i * a_row + r * a_term] * b[r * b_term + j], for rows x (vectors * LANES) numbers of c. */
INLINE void NAME(tile)(const T *restrict a, i64 a_row, i64 a_term, const T *restrict b, i64 b_term, i64 terms, T *restrict c,
                       i64 c_row, int add, const int rows, const int vectors)
{
#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#endif
    V sum[ROWS][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] = add ? *(const V *)(c + i * c_row + v * LANES) : (V){0};
    for (i64 r = 0; r < terms; r++, a += a_term, b += b_term) {
        V right[VECTORS];
        for (int v = 0; v < vectors; v++) right[v] = *(const V *)(b + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++) sum[i][v] += a[i * a_row] * right[v];
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) *(V *)(c + i * c_row + v * LANES) = sum[i][v];
}

/* Tiles one below the other; the last rows in smaller ones. */
INLINE void NAME(column)(const T *a, i64 a_row, i64 a_term, const T *b, i64 b_term, i64 terms, T *c, i64 c_row, i64 rows,
                         int add, const int vectors)
{
    i64 i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        NAME(tile)(a + i * a_row, a_row, a_term, b, b_term, terms, c + i * c_row, c_row, add, ROWS, vectors);
    for (; i + 2 <= rows; i += 2)
        NAME(tile)(a + i * a_row, a_row, a_term, b, b_term, terms, c + i * c_row, c_row, add, 2, vectors);
    if (i < rows)
        NAME(tile)(a + i * a_row, a_row, a_term, b, b_term, terms, c + i * c_row, c_row, add, 1, vectors);
}

/* The product for `vectors` <= VECTORS, with one step of a known to be 1. */
static __attribute__((noinline)) void NAME(product)(const T *a, i64 a_row, i64 a_term, const T *b, i64 b_term, i64 terms, T *c,
                                                    i64 c_row, i64 rows, i64 vectors, int add)
{
    if (a_term == 1 && vectors == VECTORS) NAME(column)(a, a_row, 1, b, b_term, terms, c, c_row, rows, add, VECTORS);
    else if (a_term == 1) NAME(column)(a, a_row, 1, b, b_term, terms, c, c_row, rows, add, 1);
    else if (vectors == VECTORS) NAME(column)(a, 1, a_term, b, b_term, terms, c, c_row, rows, add, VECTORS);
    else NAME(column)(a, 1, a_term, b, b_term, terms, c, c_row, rows, add, 1);
}

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC pop_options
#endif

/* c (rows, columns) += a b in the caller's memory, where a row of c may end within a vector; b has whole vectors. */
static void NAME(add_product)(const T *a, i64 a_row, const T *b, i64 b_term, i64 terms, T *c, i64 c_row, i64 rows, i64 columns)
{
    i64 j = 0;
    for (; j + WIDTH <= columns; j += WIDTH) NAME(product)(a, a_row, 1, b + j, b_term, terms, c + j, c_row, rows, VECTORS, 1);
    for (; j + LANES <= columns; j += LANES) NAME(product)(a, a_row, 1, b + j, b_term, terms, c + j, c_row, rows, 1, 1);
    if (j == columns) return;
    for (i64 i = 0; i < rows; i += ROWS) {
        T edge[ROWS * LANES] = {0};
        i64 there = at_most(ROWS, rows - i), size = (columns - j) * sizeof(T);
        for (i64 r = 0; r < there; r++) memcpy(edge + r * LANES, c + (i + r) * c_row + j, size);
        NAME(product)(a + i * a_row, a_row, 1, b + j, b_term, terms, edge, LANES, there, 1, 1);
        for (i64 r = 0; r < there; r++) memcpy(c + (i + r) * c_row + j, edge + r * LANES, size);
    }
}

/* ---- blocks of queries, turned and as they are ---- */

/* to[r * WIDTH + i] = scale * x[i * row + r], for `rows` rows, and zero up to whole vectors of them. */
static void NAME(turned)(const T *x, i64 row, i64 rows, i64 width, T scale, T *to)
{
    i64 whole = rows / LANES * LANES, most = round_up(rows, LANES), r = 0;
    for (; r + LANES <= width; r += LANES)
        for (i64 i = 0; i < whole; i += LANES) NAME(turn)(x + i * row + r, row, to + r * WIDTH + i, WIDTH, LANES);
    for (i64 s = r; s < width; s++)
        for (i64 i = 0; i < whole; i++) to[s * WIDTH + i] = x[i * row + s];
    for (i64 s = 0; s < width && whole < most; s++)
        for (i64 i = whole; i < most; i++) to[s * WIDTH + i] = i < rows ? x[i * row + s] : 0;
    if (scale != 1) for (i64 i = 0; i < width * WIDTH; i++) to[i] *= scale;
}

/* x[i * row + r] = from[r * WIDTH + i]. */
static void NAME(turned_back)(const T *from, i64 rows, i64 width, T *x, i64 row)
{
    i64 whole = rows / LANES * LANES, r = 0;
    for (; r + LANES <= width; r += LANES)
        for (i64 i = 0; i < whole; i += LANES) NAME(turn)(from + r * WIDTH + i, WIDTH, x + i * row + r, row, LANES);
    for (i64 s = r; s < width; s++)
        for (i64 i = 0; i < whole; i++) x[i * row + s] = from[s * WIDTH + i];
    for (i64 i = whole; i < rows; i++)
        for (i64 s = 0; s < width; s++) x[i * row + s] = from[s * WIDTH + i];
}

/* Rows one after the other, with zeros up to whole vectors. */
static void NAME(padded)(const T *x, i64 row, i64 rows, i64 width, T *to)
{
    i64 wide = round_up(width, LANES);
    for (i64 i = 0; i < rows; i++, to += wide, x += row) {
        memcpy(to, x, width * sizeof(T));
        for (i64 r = width; r < wide; r++) to[r] = 0;
    }
}

/* Which of a block's keys the queries of vector v see: the first `keys`; of the last LANES of them, some lanes only. */
typedef struct { i64 first, queries, vectors, key, keys, causal; } NAME(place);

/* Keys [0, seen) of this block may be seen by some query of vector v. */
INLINE i64 NAME(seen)(const NAME(place) *at, i64 v)
{
    return at->causal ? clip(at->first + (v + 1) * LANES - at->key, 0, at->keys) : at->keys;
}

/* For v = 0, 1, ... the keys that vector v sees and the ones before it do not. */
#define EACH_SPAN(at) \
    for (i64 v = 0, from = 0, to = NAME(seen)(at, 0); v < (at)->vectors; v++, from = to, to = NAME(seen)(at, v)) if (from < to)

/* scores = a b: a (keys, width) in the caller's memory, b the turned block. */
static void NAME(scores)(const NAME(place) *at, const T *a, i64 row, i64 width, const T *b, T *s)
{
    EACH_SPAN(at)
        NAME(product)(a + from * row, row, 1, b + v * LANES, WIDTH, width, s + from * WIDTH + v * LANES, WIDTH, to - from,
                      at->vectors - v, 0);
}

/* c (width, WIDTH) += a' s, or = for the first keys: a (keys, width) in the caller's memory. */
static void NAME(gather)(const NAME(place) *at, const T *a, i64 row, i64 width, const T *s, T *c)
{
    EACH_SPAN(at)
        NAME(product)(a + from * row, 1, row, s + from * WIDTH + v * LANES, WIDTH, to - from, c + v * LANES, WIDTH, width,
                      at->vectors - v, at->key > 0 || v > 0);
}

/* c (keys, width) += s b in the caller's memory: b is the block of queries in whole vectors. */
static void NAME(scatter)(const NAME(place) *at, const T *s, const T *b, i64 width, T *c, i64 row)
{
    i64 wide = round_up(width, LANES);
    EACH_SPAN(at)
        NAME(add_product)(s + from * WIDTH + v * LANES, WIDTH, b + v * LANES * wide, wide, at->queries - v * LANES,
                          c + from * row, row, to - from, width);
}

INLINE V NAME(choose)(MASK where, V x, V y) { return (V)(((MASK)x & where) | ((MASK)y & ~where)); }

/* Queries (lanes) that come before key j of the block do not see it: `value` there. */
INLINE V NAME(hide)(const NAME(place) *at, i64 v, i64 j, V x, T value)
{
    i64 before = at->key + j - (at->first + v * LANES);
    if (!at->causal || before <= 0) return x;
    MASK lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    return NAME(choose)(lane < (INTEGER)before, (V){0} + value, x);
}

/* x = exp(x - base), for one vector in each of `rows` rows. */
INLINE void NAME(exps)(T *x, i64 rows, const T *base)
{
    for (i64 r = 0; r < rows; r++, x += WIDTH)
        for (i64 l = 0; l < LANES; l++) x[l] = NAME(exp)(x[l] - base[l]);
}

/* ---- forward ---- */

/* Scores of vector v become weights above the largest so far; `factor` corrects what was summed before. */
static void NAME(weigh)(const NAME(place) *at, i64 v, T *s, T *top, T *sum, T *factor)
{
    i64 keys = NAME(seen)(at, v);
    T base[LANES];
    V most = *(V *)top;
    for (i64 j = 0; j < keys; j++) {
        V x = *(V *)(s + j * WIDTH) = NAME(hide)(at, v, j, *(V *)(s + j * WIDTH), -INFINITY);
        most = NAME(choose)(x > most, x, most);
    }
    *(V *)base = NAME(choose)(most == -INFINITY, (V){0}, most);         /* each exp is zero then, or NaN */
    *(V *)factor = *(V *)top;
    *(V *)top = most;
    NAME(exps)(factor, 1, base);
    NAME(exps)(s, keys, base);
    V total = *(V *)sum * *(V *)factor;
    for (i64 j = 0; j < keys; j++) total += *(V *)(s + j * WIDTH);
    *(V *)sum = total;
}

static void NAME(multiply_lanes)(T *x, i64 rows, const T *factor)
{
    for (i64 r = 0; r < rows; r++)
        for (i64 l = 0; l < WIDTH; l += LANES) *(V *)(x + r * WIDTH + l) *= *(const V *)(factor + l);
}

/* `queries` (WIDTH at most) of one head; q, out, tops and inverses begin with the first of them. */
static void NAME(forward_block)(const Shape *n, i64 first, i64 queries, const T *q, const T *k, const T *v, T *out, T *tops,
                                T *inverses, T scale, T *work)
{
    T *turned = work, *s = turned + n->width * WIDTH, *result = s + BLOCK * WIDTH;
    T top[WIDTH], sum[WIDTH] = {0}, factor[WIDTH] = {0};
    i64 vectors = (queries + LANES - 1) / LANES, keys = n->causal ? at_most(first + queries, n->keys) : n->keys;
    for (i64 l = 0; l < WIDTH; l++) top[l] = -INFINITY;
    if (keys == 0) memset(result, 0, n->values * WIDTH * sizeof(T));
    NAME(turned)(q, n->q.row, queries, n->width, scale, turned);
    for (i64 key = 0; key < keys; key += BLOCK) {
        NAME(place) at = {first, queries, vectors, key, at_most(BLOCK, keys - key), n->causal};
        NAME(scores)(&at, k + key * n->k.row, n->k.row, n->width, turned, s);
        for (i64 u = 0; u < vectors; u++)
            NAME(weigh)(&at, u, s + u * LANES, top + u * LANES, sum + u * LANES, factor + u * LANES);
        if (key) NAME(multiply_lanes)(result, n->values, factor);
        NAME(gather)(&at, v + key * n->v.row, n->v.row, n->values, s, result);
    }
    for (i64 l = 0; l < WIDTH; l++) factor[l] = sum[l] == 0 ? 0 : 1 / sum[l];
    NAME(multiply_lanes)(result, n->values, factor);
    NAME(turned_back)(result, queries, n->values, out, n->out.row);
    for (i64 l = 0; l < queries; l++) { tops[l] = top[l] == -INFINITY ? 0 : top[l]; inverses[l] = factor[l]; }
}

/* out = softmax(scale q k') v; tops and inverses (B, H, L) are what backward wants of it. */
void NAME(forward)(T *tops, T *inverses, const T *q, const T *k, const T *v, T *out, const Shape *n, double scale, T *work)
{
    for (i64 b = 0; b < n->batches; b++) for (i64 h = 0; h < n->heads; h++) {
        i64 row = (b * n->heads + h) * n->queries;
        for (i64 first = 0; first < n->queries; first += WIDTH)
            NAME(forward_block)(n, first, at_most(WIDTH, n->queries - first),
                                q + b * n->q.batch + h * n->q.head + first * n->q.row, k + b * n->k.batch + h * n->k.head,
                                v + b * n->v.batch + h * n->v.head,
                                out + b * n->out.batch + h * n->out.head + first * n->out.row,
                                tops + row + first, inverses + row + first, (T)scale, work);
    }
}

/* ---- backward ---- */

/* Per query: its largest score, the inverse of its sum of exps, and the mean of the weights' gradients. */
typedef struct { T top[WIDTH], inverse[WIDTH], mean[WIDTH]; } NAME(known);

/* Scores s become weights, and their gradients ds those of the unscaled scores, in vector v. */
static void NAME(weigh_gradients)(const NAME(place) *at, i64 v, const NAME(known) *x, T scale, T *s, T *ds)
{
    i64 keys = NAME(seen)(at, v);
    V inverse = *(const V *)(x->inverse + v * LANES), mean = *(const V *)(x->mean + v * LANES);
    NAME(exps)(s, keys, x->top + v * LANES);
    for (i64 j = 0; j < keys; j++, s += WIDTH, ds += WIDTH) {
        V weight = *(V *)s * inverse, slope = weight * (*(V *)ds - mean) * scale;
        *(V *)s = NAME(hide)(at, v, j, weight, 0);
        *(V *)ds = NAME(hide)(at, v, j, slope, 0);
    }
}

/* What `backward_block` is handed of one head: all of k, v, dk, dv, the others from the first query on. */
typedef struct { const T *q, *k, *v, *out, *grad, *tops, *inverses; T *dq, *dk, *dv; } NAME(head);

/* sums[l] = sum over r of x[r, l] * y[r, l], for one vector. */
static void NAME(dots)(const T *x, const T *y, i64 rows, T *sums)
{
    V sum = {0};
    for (i64 r = 0; r < rows; r++) sum += *(const V *)(x + r * WIDTH) * *(const V *)(y + r * WIDTH);
    *(V *)sums = sum;
}

/* The mean over keys of the weights' gradients is the sum of grad * out. `turned` is room for the turned block of out. */
static void NAME(look_up)(const Shape *n, const NAME(head) *x, i64 queries, const T *turned_grad, T *turned, NAME(known) *known)
{
    memset(known, 0, sizeof *known);
    memcpy(known->top, x->tops, queries * sizeof(T));
    memcpy(known->inverse, x->inverses, queries * sizeof(T));
    NAME(turned)(x->out, n->out.row, queries, n->values, 1, turned);
    for (i64 l = 0; l < round_up(queries, LANES); l += LANES)
        NAME(dots)(turned_grad + l, turned + l, n->values, known->mean + l);
}

static void NAME(backward_block)(const Shape *n, const NAME(head) *x, i64 first, i64 queries, T scale, T *work)
{
    i64 wide = round_up(n->width, LANES), wide_values = round_up(n->values, LANES), widest = at_least(n->width, n->values);
    T *q_turned = work, *grad_turned = q_turned + n->width * WIDTH, *q = grad_turned + n->values * WIDTH;
    T *grad = q + wide * WIDTH, *dq = grad + wide_values * WIDTH, *s = dq + widest * WIDTH, *ds = s + BLOCK * WIDTH;
    i64 vectors = (queries + LANES - 1) / LANES, keys = n->causal ? at_most(first + queries, n->keys) : n->keys;
    NAME(known) known;
    NAME(turned)(x->q, n->q.row, queries, n->width, scale, q_turned);
    NAME(turned)(x->grad, n->grad.row, queries, n->values, 1, grad_turned);
    NAME(padded)(x->q, n->q.row, queries, n->width, q);
    NAME(padded)(x->grad, n->grad.row, queries, n->values, grad);
    NAME(look_up)(n, x, queries, grad_turned, dq, &known);
    if (keys == 0) memset(dq, 0, n->width * WIDTH * sizeof(T));
    for (i64 key = 0; key < keys; key += BLOCK) {
        NAME(place) at = {first, queries, vectors, key, at_most(BLOCK, keys - key), n->causal};
        const T *k = x->k + key * n->k.row, *v = x->v + key * n->v.row;
        NAME(scores)(&at, k, n->k.row, n->width, q_turned, s);
        NAME(scores)(&at, v, n->v.row, n->values, grad_turned, ds);
        for (i64 u = 0; u < vectors; u++) NAME(weigh_gradients)(&at, u, &known, scale, s + u * LANES, ds + u * LANES);
        if (x->dq) NAME(gather)(&at, k, n->k.row, n->width, ds, dq);
        if (x->dk) NAME(scatter)(&at, ds, q, n->width, x->dk + key * n->dk.row, n->dk.row);
        if (x->dv) NAME(scatter)(&at, s, grad, n->values, x->dv + key * n->dv.row, n->dv.row);
    }
    if (x->dq) NAME(turned_back)(dq, queries, n->width, x->dq, n->dq.row);
}

static void NAME(zero_rows)(T *x, i64 row, i64 rows, i64 width)
{
    for (i64 i = 0; i < rows; i++) memset(x + i * row, 0, width * sizeof(T));
}

INLINE i64 NAME(begin)(const Steps *x, i64 b, i64 h) { return b * x->batch + h * x->head; }

/* Gradients of q, k and v, each where it is not NULL, from the gradient of `out` and what forward left. */
void NAME(backward)(const T *tops, const T *inverses, const T *q, const T *k, const T *v, const T *out, const T *grad, T *dq,
                    T *dk, T *dv, const Shape *n, double scale, T *work)
{
    for (i64 b = 0; b < n->batches; b++) for (i64 h = 0; h < n->heads; h++) {
        i64 row = (b * n->heads + h) * n->queries;
        T *dk_head = dk ? dk + NAME(begin)(&n->dk, b, h) : NULL, *dv_head = dv ? dv + NAME(begin)(&n->dv, b, h) : NULL;
        if (dk) NAME(zero_rows)(dk_head, n->dk.row, n->keys, n->width);
        if (dv) NAME(zero_rows)(dv_head, n->dv.row, n->keys, n->values);
        for (i64 first = 0; first < n->queries; first += WIDTH) {
            NAME(head) x = {
                q + NAME(begin)(&n->q, b, h) + first * n->q.row, k + NAME(begin)(&n->k, b, h), v + NAME(begin)(&n->v, b, h),
                out + NAME(begin)(&n->out, b, h) + first * n->out.row,
                grad + NAME(begin)(&n->grad, b, h) + first * n->grad.row, tops + row + first, inverses + row + first,
                dq ? dq + NAME(begin)(&n->dq, b, h) + first * n->dq.row : NULL, dk_head, dv_head};
            NAME(backward_block)(n, &x, first, at_most(WIDTH, n->queries - first), (T)scale, work);
        }
    }
}

#undef WIDTH

#endif
