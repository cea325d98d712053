/* Of attention by blocks: which keys of a block each query sees, and the products of all of them. Included once for each number
   type by flash_attention.c, after flash_products.h. */

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

/* c (keys, wide) += s b: b is the block of queries as they are; `wide` is a number of whole vectors. */
static void NAME(scatter)(const NAME(place) *at, const T *s, const T *b, i64 wide, T *c)
{
    EACH_SPAN(at)
        for (i64 j = 0; j < wide; j += WIDTH)
            NAME(product)(s + from * WIDTH + v * LANES, WIDTH, 1, b + v * LANES * wide + j, wide, at->queries - v * LANES,
                          c + from * wide + j, wide, to - from, j + WIDTH <= wide ? VECTORS : 1, 1);
}

INLINE V NAME(choose)(MASK where, V x, V y) { return (V)(((MASK)x & where) | ((MASK)y & ~where)); }

/* `value` for the queries (lanes) of vector v in x that come before a key: it is hidden from them. */
static void NAME(hide)(const NAME(place) *at, i64 v, T *x, T value)
{
    i64 first = at->first + v * LANES - at->key, keys = NAME(seen)(at, v);       /* the first query's own key */
    MASK lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    for (i64 j = at_least(first + 1, 0); j < keys && at->causal; j++)
        *(V *)(x + j * WIDTH) = NAME(choose)(lane < (INTEGER)(j - first), (V){0} + value, *(V *)(x + j * WIDTH));
}

/* x = exp(x - base), for one vector in each of `rows` rows; x <= base, or what comes of it is hidden. */
INLINE void NAME(exps)(T *x, i64 rows, const T *base)
{
    for (i64 r = 0; r < rows; r++, x += WIDTH)
        for (i64 l = 0; l < LANES; l++) x[l] = NAME(exp_of_negative)(x[l] - base[l]);
}

/* The keys of one head: k and v, and how far apart their rows are. */
typedef struct { const T *k, *v; i64 k_row, v_row; } NAME(keys);

/* The caller's, or in copies of their own, which pay where several blocks of queries go through them; `room` moves on. */
static NAME(keys) NAME(packed)(const Shape *n, const T *k, const T *v, int copy, T **room)
{
    if (!copy) return (NAME(keys)){k, v, n->k.row, n->v.row};
    i64 wide = round_up(n->width, LANES), wide_values = round_up(n->values, LANES);
    T *own_k = *room, *own_v = own_k + n->keys * wide;
    *room = own_v + n->keys * wide_values;
    NAME(padded)(k, n->k.row, n->keys, n->width, own_k);
    NAME(padded)(v, n->v.row, n->keys, n->values, own_v);
    return (NAME(keys)){own_k, own_v, wide, wide_values};
}
