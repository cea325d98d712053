/* Of attention by blocks: the factors of products, as words of PAIR numbers that are neighbours in what is summed over. Included
   once for each kind of numbers by flash_attention.h, after flash_products.h. Where PAIR is 1, arrays are words as they are. */

#define WORDS(n) (((n) + PAIR - 1) / PAIR)

#if PAIR == 2

/* Words of rows 2r and 2r + 1, or of the last row and zero: (rows, wide) becomes (WORDS(rows), wide). `to` may be x. */
static void NAME(across)(const T *x, i64 rows, i64 wide, T *to)
{
    for (i64 r = 0; r < rows; r += 2, x += 2 * wide, to += wide)
        for (i64 i = 0; i < wide; i += LANES)
            *(Words *)(to + i) = pairs_of(*(const Words *)(x + i), r + 1 < rows ? *(const Words *)(x + wide + i) : (Words){0});
}

/* n numbers, whole vectors, as products take them. */
static void NAME(as_factors)(T *x, i64 n)
{
    for (i64 i = 0; i < n; i += LANES) *(Words *)(x + i) = rounded(*(const Words *)(x + i)) & 0xffff0000;
}

/* Words of neighbours in a row, in place: (rows, wide) becomes (rows, WORDS(wide)); `wide` is a number of whole vectors. */
static void NAME(along)(T *x, i64 rows, i64 wide)
{
    T *to = x;
    for (i64 r = 0; r < rows; r++, x += wide) {
        i64 i = 0;
        for (; i + 2 * LANES <= wide; i += 2 * LANES, to += LANES) *(Words *)to = NAME(words)(x + i);
        for (; i < wide; i += 2, to++) { u32 word = pair_of(x[i], x[i + 1]); memcpy(to, &word, sizeof word); }
    }
}

#else

INLINE void NAME(across)(const T *x, i64 rows, i64 wide, T *to) { (void)x, (void)rows, (void)wide, (void)to; }
INLINE void NAME(as_factors)(T *x, i64 n) { (void)x, (void)n; }
INLINE void NAME(along)(T *x, i64 rows, i64 wide) { (void)x, (void)rows, (void)wide; }

#endif

/* Keys or values of one head as a factor whose terms are the numbers of a row, and as one whose terms are rows; how far apart
   rows of words are. */
typedef struct { const T *rows; i64 row; const T *terms; i64 term; } NAME(Factor);
typedef struct { NAME(Factor) k, v; } NAME(keys);

/* The caller's, or in copies of their own, which pay where several blocks of queries go through them; `room` moves on. */
static NAME(Factor) NAME(factor)(const T *x, i64 row, i64 keys, i64 width, int copy, int by_rows, int by_terms, T **room)
{
    i64 wide = round_up(width, LANES);
    T *own = *room, *words = own + keys * wide;
    if (PAIR == 1 && !copy) return (NAME(Factor)){x, row, x, row};
    NAME(padded)(x, row, keys, width, own);
    *room = words + (PAIR == 1 ? 0 : WORDS(keys) * wide);
    if (PAIR == 1) return (NAME(Factor)){own, wide, own, wide};
    if (by_terms) NAME(across)(own, keys, wide, words);
    if (by_rows) NAME(along)(own, keys, wide);
    return (NAME(Factor)){own, WORDS(wide), words, wide};
}
