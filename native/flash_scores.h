/* Of attention by blocks: which keys of a block each query sees, and the products of all of them. Included once for each number
   type by flash_attention.h, after flash_words.h. */

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

/* scores = a b: a (keys, width) by rows, b the turned block. */
static void NAME(scores)(const NAME(place) *at, const T *a, i64 row, i64 width, const T *b, T *s)
{
    EACH_SPAN(at)
        NAME(product)(a + from * row, row, 1, b + v * LANES, WIDTH, WORDS(width), s + from * WIDTH + v * LANES, WIDTH, to - from,
                      at->vectors - v, 0);
}

/* c (width, WIDTH) += a' s, or = for the first keys: a (keys, width) by terms. */
static void NAME(gather)(const NAME(place) *at, const T *a, i64 row, i64 width, const T *s, T *c)
{
    EACH_SPAN(at)
        NAME(product)(a + from / PAIR * row, 1, row, s + from / PAIR * WIDTH + v * LANES, WIDTH, WORDS(to - from),
                      c + v * LANES, WIDTH, width, at->vectors - v, at->key > 0 || v > 0);
}

/* c (keys, wide) += s b: b is the block of queries as they are; `wide` is a number of whole vectors. */
static void NAME(scatter)(const NAME(place) *at, const T *s, const T *b, i64 wide, T *c)
{
    EACH_SPAN(at)
        for (i64 j = 0; j < wide; j += WIDTH)
            NAME(product)(s + (from * WIDTH + v * LANES) / PAIR, WIDTH / PAIR, 1, b + v * LANES / PAIR * wide + j, wide,
                          WORDS(at->queries - v * LANES), c + from * wide + j, wide, to - from, j + WIDTH <= wide ? VECTORS : 1, 1);
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
