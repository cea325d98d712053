/* Of attention by blocks: products of small matrices, and the caller's rows turned and as they are. Included once for each number
   type by flash_attention.h, which says how blocks lie in memory. */

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
        for (int v = 0; v < vectors; v++) sum[i][v] = (V){0};
    for (i64 r = 0; r < terms; r++, a += a_term, b += b_term) {
        V right[VECTORS];
        for (int v = 0; v < vectors; v++) right[v] = *(const V *)(b + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++) sum[i][v] = ADD_SCALED(sum[i][v], a[i * a_row], right[v]);
    }
    if (add) for (int i = 0; i < rows; i++)              /* first, it made GCC move every sum about in each turn of the loop */
        for (int v = 0; v < vectors; v++) sum[i][v] += *(const V *)(c + i * c_row + v * LANES);
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

/* ---- rows of the caller, turned and as they are ---- */

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

/* to[r] = x[r]: memcpy took longer to begin than to copy one of these short rows. */
INLINE void NAME(copy_row)(const T *x, i64 width, T *to)
{
    i64 r = 0;
    for (; r + LANES <= width; r += LANES) *(V *)(to + r) = *(const V *)(x + r);
    for (; r < width; r++) to[r] = x[r];
}

/* Rows one after the other, with zeros up to whole vectors: the caller's may each lie in a page of its own. */
static void NAME(padded)(const T *x, i64 row, i64 rows, i64 width, T *to)
{
    i64 wide = round_up(width, LANES);
    for (i64 i = 0; i < rows; i++, to += wide, x += row) {
        NAME(copy_row)(x, width, to);
        for (i64 r = width; r < wide; r++) to[r] = 0;
    }
}

/* x = `rows` of from, which has `wide` numbers a row. */
static void NAME(copy_back)(const T *from, i64 wide, i64 rows, i64 width, T *x, i64 row)
{
    for (i64 i = 0; i < rows; i++) NAME(copy_row)(from + i * wide, width, x + i * row);
}
