/* few_rows.h's product for a w that `pack` has packed (product.h): it is one stream of memory from its front to its end. The sums
   are the same, and so are the bits. */

#define V NAME(vector)
#define SOON 8192                   /* bytes: beyond a page, where the CPU by itself stops; with 4096 it took 4 % longer */

/* `m` rows by `vectors` vectors of a panel of `terms` terms; `add`: to what y holds of the blocks before. */
INLINE void NAME(few_by_panel)(const T *x, const T *panel, T *y, i64 n, i64 k, i64 terms, i64 there, int add, const T *bias,
                               const int m, const int vectors)
{
    V sum[ROWS][VECTORS];
    UNROLL for (int i = 0; i < m; i++) UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = (V){0};
    _Pragma("GCC unroll 4") for (i64 r = 0; r < terms; r++, panel += VECTORS * LANES) {
        UNROLL for (int v = 0; v < vectors; v++) {
            const V right = *(const V *)(panel + v * LANES);
            if (v * VECTOR_BYTES % CACHE_LINE == 0) __builtin_prefetch((const char *)(panel + v * LANES) + SOON, 0, 0);
            UNROLL for (int i = 0; i < m; i++) sum[i][v] += x[i * k + r] * right;
        }
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        const i64 size = least(there - v * LANES, LANES) * (i64)sizeof(T);
        V added = {0};
        if (bias) memcpy(&added, bias + v * LANES, size);
        UNROLL for (int i = 0; i < m; i++) {
            V before = {0};
            T *to = y + i * n + v * LANES;
            if (add) {
                memcpy(&before, to, size);
                sum[i][v] += before;
            }
            if (bias) sum[i][v] += added;
            memcpy(to, &sum[i][v], size);
        }
    }
}

#define PANEL(rows, vectors)                                                                                                   \
    if (rows <= ROWS) NAME(few_by_panel)(x, panel, y, n, k, terms, there, add, bias, rows, vectors);                            \
    break;
#define OF(vectors)                                                                                                            \
static __attribute__((noinline)) void NAME(few_by_##vectors)(const T *x, const T *panel, T *y, i64 n, i64 k, i64 terms,         \
                                                             i64 there, int add, const T *bias, i64 m)                         \
{                                                                                                                              \
    switch (m) {                                                                                                               \
    case 1: PANEL(1, vectors) case 2: PANEL(2, vectors) case 3: PANEL(3, vectors) case 4: PANEL(4, vectors)                    \
    case 5: PANEL(5, vectors) case 6: PANEL(6, vectors) case 7: PANEL(7, vectors) case 8: PANEL(8, vectors)                    \
    }                                                                                                                          \
}
OF(1) OF(2) OF(3)
#undef OF
#undef PANEL

void NAME(few_rows_packed)(const T *x, const T *packed, const T *bias, T *y, i64 m, i64 n, i64 k)
{
    const i64 size = NAME(block_terms)(k), most = NAME(block_columns)(k, n), width = VECTORS * LANES;
    if (k <= 0) for (i64 i = 0; i < m * n; i++) y[i] = bias ? bias[i % n] : 0;
    for (i64 j0 = 0; j0 < n && k > 0; j0 += most) for (i64 r0 = 0; r0 < k; r0 += size) {
        const i64 columns = least(n - j0, most), terms = least(k - r0, size);
        for (i64 j = j0; j < j0 + columns; j += width, packed += width * terms) {
            const i64 there = least(j0 + columns - j, width), vectors = (there + LANES - 1) / LANES;
            const T *added = bias && r0 + terms == k ? bias + j : NULL;
            for (i64 i = 0; i < m; i += ROWS)
                (vectors == 1 ? NAME(few_by_1) : vectors == 2 ? NAME(few_by_2) : NAME(few_by_3))(
                    x + i * k + r0, packed, y + i * n + j, n, k, terms, there, r0 > 0, added, least(m - i, ROWS));
        }
    }
}

#undef V
#undef SOON
