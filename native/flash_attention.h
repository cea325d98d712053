/* Attention by blocks, forward and backward, for one kind of numbers: no matrix of L x S weights is ever kept.

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
   whatever else is in the batch and whatever keys follow that it does not see, on every CPU with vectors as wide. A hidden key's
   weight is zero exactly, but is multiplied: this holds where values (and backward, keys, queries and gradients) are finite.

   Products take their factors as words of PAIR numbers, neighbours in what is summed over: one for float and double, two in
   flash_attention_bfloat16.c. */

#define WIDTH (VECTORS * LANES)                                    /* queries at a time */

#include "turn.h"
#include "flash_products.h"
#include "flash_words.h"
#include "flash_scores.h"
#include "flash_dropout.h"

#define AT(x) (x + b * n->x.batch + h * n->x.head)                 /* where head h of batch b begins in x */

/* ---- forward ---- */

INLINE V NAME(larger)(V x, V y) { return NAME(choose)(x > y, x, y); }

/* The largest, and the sum, of one vector in each of `rows` rows: four at a time, as each must wait for the one before. */
INLINE V NAME(largest)(const T *x, i64 rows, V most)
{
    V part[4] = {most, most, most, most};
    i64 r = 0;
    for (; r + 4 <= rows; r += 4)
        for (int p = 0; p < 4; p++) part[p] = NAME(larger)(*(const V *)(x + (r + p) * WIDTH), part[p]);
    for (; r < rows; r++) part[0] = NAME(larger)(*(const V *)(x + r * WIDTH), part[0]);
    return NAME(larger)(NAME(larger)(part[0], part[1]), NAME(larger)(part[2], part[3]));
}

INLINE V NAME(total)(const T *x, i64 rows)
{
    V part[4] = {0};
    i64 r = 0;
    for (; r + 4 <= rows; r += 4)
        for (int p = 0; p < 4; p++) part[p] += *(const V *)(x + (r + p) * WIDTH);
    for (int p = 0; p < 3; p++)                          /* so that row r is in part r % 4, whatever follows it */
        if (r + p < rows) part[p] += *(const V *)(x + (r + p) * WIDTH);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* Scores of vector v become weights above the largest so far; `factor` corrects what was summed before. */
static void NAME(weigh)(const NAME(place) *at, i64 v, T *s, T *top, T *sum, T *factor)
{
    i64 keys = NAME(seen)(at, v);
    T base[LANES];
    NAME(hide)(at, v, s, -INFINITY);
    V most = NAME(largest)(s, keys, *(V *)top);
    *(V *)base = NAME(choose)(most == -INFINITY, (V){0}, most);         /* each exp is zero then, or NaN */
    *(V *)factor = *(V *)top;
    *(V *)top = most;
    NAME(exps)(factor, 1, base);
    NAME(exps)(s, keys, base);
    *(V *)sum = *(V *)sum * *(V *)factor + NAME(total)(s, keys);
}

static void NAME(multiply_lanes)(T *x, i64 rows, const T *factor)
{
    for (i64 r = 0; r < rows; r++)
        for (i64 l = 0; l < WIDTH; l += LANES) *(V *)(x + r * WIDTH + l) *= *(const V *)(factor + l);
}

/* `queries` (WIDTH at most) of one head; x has all keys, the others begin with the first of the queries. */
static void NAME(forward_block)(const Shape *n, const NAME(keys) *x, const NAME(dropping) *dropping, i64 first, i64 queries,
                                const T *q, T *out, T *tops, T *inverses, T scale, T *work)
{
    T *room = work, *factors = room + BLOCK * WIDTH, *turned = factors + BLOCK * WIDTH;
    T *s = turned + n->width * WIDTH, *result = s + BLOCK * WIDTH;
    T top[WIDTH], sum[WIDTH] = {0}, factor[WIDTH] = {0};
    i64 vectors = (queries + LANES - 1) / LANES, keys = n->causal ? at_most(first + queries, n->keys) : n->keys;
    for (i64 l = 0; l < WIDTH; l++) top[l] = -INFINITY;
    NAME(turned)(q, n->q.row, queries, n->width, scale, turned);
    NAME(across)(turned, n->width, WIDTH, turned);
    for (i64 key = 0; key < keys; key += BLOCK) {
        NAME(place) at = {first, queries, vectors, key, at_most(BLOCK, keys - key), n->causal};
        NAME(scores)(&at, x->k.rows + key * x->k.row, x->k.row, n->width, turned, s);
        for (i64 u = 0; u < vectors; u++)
            NAME(weigh)(&at, u, s + u * LANES, top + u * LANES, sum + u * LANES, factor + u * LANES);
        if (dropping->scale != 0) {                      /* after the sums: what is left is not normalised again */
            NAME(draw)(dropping, &at, room, factors);
            for (i64 u = 0; u < vectors; u++) NAME(drop)(&at, u, factors + u * LANES, s + u * LANES);
        }
        if (key) NAME(multiply_lanes)(result, n->values, factor);
        NAME(across)(s, at.keys, WIDTH, s);
        NAME(gather)(&at, x->v.terms + key / PAIR * x->v.term, x->v.term, n->values, s, result);
    }
    for (i64 l = 0; l < WIDTH; l++) factor[l] = sum[l] == 0 ? 0 : 1 / sum[l];
    NAME(multiply_lanes)(result, n->values, factor);
    NAME(turned_back)(result, queries, n->values, out, n->out.row);
    for (i64 l = 0; l < queries; l++) { tops[l] = top[l] == -INFINITY ? 0 : top[l]; inverses[l] = factor[l]; }
}

/* Head h of batch b. */
#define DROPPING (NAME(dropping)){(u64)key, rows ? rows[b] : 0, (rows ? (i64)rows[n->batches + b] : 0) + h * n->head_words, \
                                  n->query_words, least, rows ? (T)kept_scale : 0}

/* out = softmax(scale q k') v; tops and inverses (B, H, L) are what backward wants of it. At least one key. Where `rows` is not
   NULL (a row for each of B, then the first word of each), weights whose word of the stream `key` is below `least` are dropped,
   and others multiplied by `kept_scale`. */
void NAME(forward)(T *tops, T *inverses, const T *q, const T *k, const T *v, T *out, const Shape *n, double scale, T *work,
                   const u64 *rows, i64 key, i64 least, double kept_scale)
{
    for (i64 b = 0; b < n->batches; b++) for (i64 h = 0; h < n->heads; h++) {
        T *room = work;
        NAME(keys) x = {NAME(factor)(AT(k), n->k.row, n->keys, n->width, n->queries > WIDTH, 1, 0, &room),
                        NAME(factor)(AT(v), n->v.row, n->keys, n->values, n->queries > WIDTH, 0, 1, &room)};
        NAME(dropping) dropping = DROPPING;
        for (i64 first = 0; first < n->queries; first += WIDTH) {
            i64 row = (b * n->heads + h) * n->queries + first;
            NAME(forward_block)(n, &x, &dropping, first, at_most(WIDTH, n->queries - first), AT(q) + first * n->q.row,
                                AT(out) + first * n->out.row, tops + row, inverses + row, (T)scale, room);
        }
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
    for (i64 j = 0; j < keys; j++) {
        V *weight = (V *)(s + j * WIDTH), *slope = (V *)(ds + j * WIDTH);
        *weight *= inverse;
        *slope = *weight * (*slope - mean) * scale;
    }
    NAME(hide)(at, v, s, 0);
    NAME(hide)(at, v, ds, 0);
}

/* One block of queries of a head, from the first of them on; of dq, dk and dv those that are wanted, dk and dv of all keys. */
typedef struct { i64 first, queries; const T *q, *out, *grad, *tops, *inverses; T *dq, *dk, *dv; } NAME(block);

/* sums[l] = sum over r of x[r, l] * y[r, l], for one vector. */
static void NAME(dots)(const T *x, const T *y, i64 rows, T *sums)
{
    V sum = {0};
    for (i64 r = 0; r < rows; r++) sum += *(const V *)(x + r * WIDTH) * *(const V *)(y + r * WIDTH);
    *(V *)sums = sum;
}

/* The mean over keys of the weights' gradients is the sum of grad * out. `turned` is room for the turned block of out. */
static void NAME(look_up)(const Shape *n, const NAME(block) *x, const T *turned_grad, T *turned, NAME(known) *known)
{
    memset(known, 0, sizeof *known);
    memcpy(known->top, x->tops, x->queries * sizeof(T));
    memcpy(known->inverse, x->inverses, x->queries * sizeof(T));
    NAME(turned)(x->out, n->out.row, x->queries, n->values, 1, turned);
    for (i64 l = 0; l < x->queries; l += LANES) NAME(dots)(turned_grad + l, turned + l, n->values, known->mean + l);
}

static void NAME(backward_block)(const Shape *n, const NAME(keys) *y, const NAME(dropping) *dropping, const NAME(block) *x,
                                 T scale, T *work)
{
    i64 wide = round_up(n->width, LANES), wide_values = round_up(n->values, LANES), queries = x->queries;
    T *room = work, *factors = room + BLOCK * WIDTH, *q_turned = factors + BLOCK * WIDTH, *grad_turned = q_turned + n->width * WIDTH;
    T *q = grad_turned + n->values * WIDTH, *grad = q + wide * WIDTH, *s = grad + wide_values * WIDTH, *ds = s + BLOCK * WIDTH, *dq = ds + BLOCK * WIDTH;
    i64 vectors = (queries + LANES - 1) / LANES, keys = n->causal ? at_most(x->first + queries, n->keys) : n->keys;
    int drops = dropping->scale != 0;
    NAME(known) known;
    NAME(padded)(x->q, n->q.row, queries, n->width, q);
    NAME(padded)(x->grad, n->grad.row, queries, n->values, grad);
    NAME(as_factors)(grad, queries * wide_values);       /* so that its mean is that of the products with it */
    NAME(turned)(q, wide, queries, n->width, scale, q_turned);
    NAME(turned)(grad, wide_values, queries, n->values, 1, grad_turned);
    NAME(look_up)(n, x, grad_turned, dq, &known);
    NAME(across)(q, queries, wide, q);
    NAME(across)(grad, queries, wide_values, grad);
    NAME(across)(q_turned, n->width, WIDTH, q_turned);
    NAME(across)(grad_turned, n->values, WIDTH, grad_turned);
    for (i64 key = 0; key < keys; key += BLOCK) {
        NAME(place) at = {x->first, queries, vectors, key, at_most(BLOCK, keys - key), n->causal};
        NAME(scores)(&at, y->k.rows + key * y->k.row, y->k.row, n->width, q_turned, s);
        NAME(scores)(&at, y->v.rows + key * y->v.row, y->v.row, n->values, grad_turned, ds);
        if (drops) {
            NAME(draw)(dropping, &at, room, factors);
            for (i64 u = 0; u < vectors; u++) NAME(drop)(&at, u, factors + u * LANES, ds + u * LANES);
        }
        for (i64 u = 0; u < vectors; u++) NAME(weigh_gradients)(&at, u, &known, scale, s + u * LANES, ds + u * LANES);
        for (i64 u = 0; u < vectors && drops; u++) NAME(drop)(&at, u, factors + u * LANES, s + u * LANES);
        T *terms = PAIR == 1 ? ds : room;
        NAME(across)(ds, at.keys, WIDTH, terms);
        NAME(along)(ds, at.keys, WIDTH);
        NAME(along)(s, at.keys, WIDTH);
        if (x->dq) NAME(gather)(&at, y->k.terms + key / PAIR * y->k.term, y->k.term, n->width, terms, dq);
        if (x->dk) NAME(scatter)(&at, ds, q, wide, x->dk + key * wide);
        if (x->dv) NAME(scatter)(&at, s, grad, wide_values, x->dv + key * wide_values);
    }
    if (x->dq) NAME(turned_back)(dq, queries, n->width, x->dq, n->dq.row);
}

/* Gradients of q, k and v, each where it is not NULL, from the gradient of `out` and what forward left; dropping as there. */
void NAME(backward)(const T *tops, const T *inverses, const T *q, const T *k, const T *v, const T *out, const T *grad, T *dq,
                    T *dk, T *dv, const Shape *n, double scale, T *work, const u64 *rows, i64 key, i64 least,
                    double kept_scale)
{
    i64 wide = round_up(n->width, LANES), wide_values = round_up(n->values, LANES);
    for (i64 b = 0; b < n->batches; b++) for (i64 h = 0; h < n->heads; h++) {
        T *room = work;
        NAME(keys) y = {NAME(factor)(AT(k), n->k.row, n->keys, n->width, 1, 1, dq != NULL, &room),
                        NAME(factor)(AT(v), n->v.row, n->keys, n->values, 1, 1, 0, &room)};
        T *sums_k = room, *sums_v = sums_k + n->keys * wide, *rest = sums_v + n->keys * wide_values;
        NAME(dropping) dropping = DROPPING;
        memset(room, 0, (rest - room) * sizeof(T));
        for (i64 first = 0; first < n->queries; first += WIDTH) {
            i64 row = (b * n->heads + h) * n->queries + first;
            NAME(block) x = {first, at_most(WIDTH, n->queries - first), AT(q) + first * n->q.row, AT(out) + first * n->out.row,
                             AT(grad) + first * n->grad.row, tops + row, inverses + row,
                             dq ? AT(dq) + first * n->dq.row : NULL, dk ? sums_k : NULL, dv ? sums_v : NULL};
            NAME(backward_block)(n, &y, &dropping, &x, (T)scale, rest);
        }
        if (dk) NAME(copy_back)(sums_k, wide, n->keys, n->width, AT(dk), n->dk.row);
        if (dv) NAME(copy_back)(sums_v, wide_values, n->keys, n->values, AT(dv), n->dv.row);
    }
}

#undef AT
#undef DROPPING
#undef EACH_SPAN
#undef WORDS
#undef WIDTH
