/* The body of product.c for one number type T. */

#define V NAME(vector)
#define MASK NAME(mask)
#define WIDTH (VECTORS * LANES)                                              /* columns of a panel of b */

typedef T V __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
typedef INTEGER MASK __attribute__((vector_size(VECTOR_BYTES)));

#include "turn.h"

/* ROWS rows of a: to[r * ROWS + i] = a[i * row + r * term], zero for rows that are not there. */
INLINE void NAME(pack_rows)(const T *a, i64 row, i64 term, i64 rows, i64 terms, T *to)
{
    i64 r = 0;
    if (rows == ROWS && row == 1)
        for (; r < terms; r++) memcpy(to + r * ROWS, a + r * term, ROWS * sizeof(T));
    if (rows == ROWS && term == 1 && ROWS <= LANES)
        for (; r + LANES <= terms; r += LANES) NAME(turn)(a + r, row, to + r * ROWS, LANES, ROWS <= LANES ? ROWS : 1);
    for (; r < terms; r++)
        for (i64 i = 0; i < ROWS; i++) to[r * ROWS + i] = i < rows ? a[i * row + r * term] : 0;
}

/* Columns of b in panels of WIDTH: to[(p * terms + r) * WIDTH + j] = b[r * term + (p * WIDTH + j) * column], zero past the
   last column. */
static void NAME(pack_columns)(const T *b, i64 term, i64 column, i64 terms, i64 columns, T *to)
{
    i64 whole = columns - columns % WIDTH, rest = columns - whole;
    T *last = to + whole * terms;
    if (column == 1) {
        for (i64 r = 0; r < terms; r++) {
            const T *from = b + r * term;
            for (i64 j = 0; j < whole; j += WIDTH) memcpy(to + j * terms + r * WIDTH, from + j, WIDTH * sizeof(T));
            if (rest) for (i64 j = 0; j < WIDTH; j++) last[r * WIDTH + j] = j < rest ? from[whole + j] : 0;
        }
        return;
    }
    for (i64 j = 0; j < columns; j += LANES) {
        T *panel = to + j / WIDTH * terms * WIDTH + j % WIDTH;
        i64 r = 0, there = columns - j < LANES ? columns - j : LANES;
        if (there == LANES && term == 1)
            for (; r + LANES <= terms; r += LANES) NAME(turn)(b + r + j * column, column, panel + r * WIDTH, WIDTH, LANES);
        for (; r < terms; r++)
            for (i64 i = 0; i < LANES; i++) panel[r * WIDTH + i] = i < there ? b[r * term + (j + i) * column] : 0;
    }
    i64 used = (rest + LANES - 1) / LANES * LANES;
    if (rest) for (i64 r = 0; r < terms; r++) for (i64 j = used; j < WIDTH; j++) last[r * WIDTH + j] = 0;
}

/* ROWS x (vectors * LANES) numbers of c: the products of one block of terms, added to what is there or not. Meanwhile the
   lines of b that will be packed next come nearer. */
INLINE void NAME(tile)(const T *restrict a, const T *restrict b, i64 terms, T *restrict c, i64 step, int add, const T *bias,
                       const int vectors, Ahead *ahead)
{
    V sum[ROWS][VECTORS] = {0};
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) __builtin_prefetch(c + i * step + v * LANES, 1, 3);
    for (i64 r = 0; r < terms;) {
        i64 stop = r + ahead->interval < terms ? r + ahead->interval : terms;
        fetch(ahead);
        for (; r < stop; r++, a += ROWS, b += WIDTH) {
            V right[VECTORS];
            for (int v = 0; v < vectors; v++) right[v] = *(const V *)(b + v * LANES);
            for (int i = 0; i < ROWS; i++)
                for (int v = 0; v < vectors; v++) sum[i][v] += a[i] * right[v];
        }
    }
    if (add) for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] += *(const V *)(c + i * step + v * LANES);
    if (bias) for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] += *(const V *)(bias + v * LANES);
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) *(V *)(c + i * step + v * LANES) = sum[i][v];
}

/* A tile that c holds a part of: computed beside it, and that part copied. */
static void NAME(edge)(const T *a, const T *b, i64 terms, T *c, i64 step, i64 rows, i64 columns, int add, const T *bias,
                       Ahead *ahead)
{
    T whole[ROWS * WIDTH] = {0}, added[WIDTH] = {0};
    if (add) for (i64 i = 0; i < rows; i++) memcpy(whole + i * WIDTH, c + i * step, columns * sizeof(T));
    if (bias) memcpy(added, bias, columns * sizeof(T));
    NAME(tile)(a, b, terms, whole, WIDTH, add, bias ? added : NULL, VECTORS, ahead);
    for (i64 i = 0; i < rows; i++) memcpy(c + i * step, whole + i * WIDTH, columns * sizeof(T));
}

/* Element (i, r) of a is a[i * a_row + r * a_term], (r, j) of b is b[r * b_term + j * b_column]; one step of each is 1. Rows
   of c are contiguous. `work` holds product_work_bytes() bytes from a cache line on. */
void NAME(product)(const T *a, const T *b, const T *bias, T *c, T *work, i64 m, i64 n, i64 k, i64 a_row, i64 a_term, i64 b_term,
                   i64 b_column)
{
    T *left = work, *right = work + TERMS * ROWS;
    for (i64 i = 0; i < m * n && k <= 0; i++) c[i] = bias ? bias[i % n] : 0;
    if (k <= 0) return;
    i64 most = PACKED_BYTES / (i64)sizeof(T) / (k < TERMS ? k : TERMS) / WIDTH * WIDTH;      /* columns packed at a time */
    for (i64 j0 = 0; j0 < n; j0 += most) for (i64 r0 = 0; r0 < k; r0 += TERMS) {
        i64 columns = n - j0 < most ? n - j0 : most, terms = k - r0 < TERMS ? k - r0 : TERMS;
        const T *added = bias && r0 + terms == k ? bias + j0 : NULL;
        NAME(pack_columns)(b + r0 * b_term + j0 * b_column, b_term, b_column, terms, columns, right);
        i64 r1 = r0 + terms < k ? r0 + terms : 0, j1 = r1 ? j0 : j0 + columns;       /* the next block */
        i64 next_columns = j1 < n ? (n - j1 < most ? n - j1 : most) : 0, next_terms = k - r1 < TERMS ? k - r1 : TERMS;
        i64 tiles = (m + ROWS - 1) / ROWS * ((columns + WIDTH - 1) / WIDTH);
        Ahead ahead = look_ahead(b + r1 * b_term + j1 * b_column, sizeof(T), b_column == 1 ? b_term : b_column,
                                 b_column == 1 ? next_terms : next_columns, b_column == 1 ? next_columns : next_terms,
                                 tiles * terms);
        for (i64 i = 0; i < m; i += ROWS) {
            i64 rows = m - i < ROWS ? m - i : ROWS, j = 0;
            T *to = c + i * n + j0;
            NAME(pack_rows)(a + i * a_row + r0 * a_term, a_row, a_term, rows, terms, left);
            if (rows == ROWS) {
                for (; j + WIDTH <= columns; j += WIDTH)
                    NAME(tile)(left, right + j * terms, terms, to + j, n, r0 > 0, added ? added + j : NULL, VECTORS, &ahead);
                if (columns - j == LANES) {
                    NAME(tile)(left, right + j * terms, terms, to + j, n, r0 > 0, added ? added + j : NULL, 1, &ahead);
                    j = columns;
                } else if (columns - j == 2 * LANES) {
                    NAME(tile)(left, right + j * terms, terms, to + j, n, r0 > 0, added ? added + j : NULL, 2, &ahead);
                    j = columns;
                }
            }
            for (; j < columns; j += WIDTH)
                NAME(edge)(left, right + j * terms, terms, to + j, n, rows, columns - j < WIDTH ? columns - j : WIDTH,
                           r0 > 0, added ? added + j : NULL, &ahead);
        }
    }
}

#undef V
#undef MASK
#undef WIDTH
