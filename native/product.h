/* The body of product.c for one number type T. */

#include "turn.h"

#define WIDTH (VECTORS * LANES)                                               /* columns of a panel of b */

/* Rows of a, at most ROWS: to[r * ROWS + i] = a[i * row + r * term]; the places of others are left as they are. */
INLINE void NAME(pack_rows)(const T *a, i64 row, i64 term, i64 rows, i64 terms, T *to)
{
    i64 r = 0;
    if (rows == ROWS && row == 1)
        for (; r < terms; r++) memcpy(to + r * ROWS, a + r * term, ROWS * sizeof(T));
    if (rows == ROWS && term == 1 && ROWS <= LANES)
        for (; r + LANES <= terms; r += LANES) NAME(turn)(a + r, row, to + r * ROWS, LANES, ROWS <= LANES ? ROWS : 1);
    for (; r < terms; r++)
        for (i64 i = 0; i < rows; i++) to[r * ROWS + i] = a[i * row + r * term];
}

/* Columns of b in panels of WIDTH: to[(p * terms + r) * WIDTH + j] = b[r * term + (p * WIDTH + j) * column], zero up to the next
   whole vector past the last column. */
static void NAME(pack_columns)(const T *b, i64 term, i64 column, i64 terms, i64 columns, T *to)
{
    i64 whole = columns - columns % WIDTH, rest = columns - whole, used = (rest + LANES - 1) / LANES * LANES;
    if (column == 1) {
        for (i64 r0 = 0; r0 < terms; r0 += SOME) {                        /* a page each, and each panel takes a long piece */
            i64 r1 = least(r0 + SOME, terms);
            for (i64 j = 0; j < whole; j += WIDTH)
                for (i64 r = r0; r < r1; r++) memcpy(to + j * terms + r * WIDTH, b + r * term + j, WIDTH * sizeof(T));
            for (i64 r = r0; r < r1; r++)
                for (i64 j = 0; j < used; j++) to[whole * terms + r * WIDTH + j] = j < rest ? b[r * term + whole + j] : 0;
        }
        return;
    }
    for (i64 j = 0; j < columns; j += LANES) {
        T *panel = to + j / WIDTH * terms * WIDTH + j % WIDTH;
        i64 r = 0, there = least(columns - j, LANES);
        if (there == LANES && term == 1)
            for (; r + LANES <= terms; r += LANES) NAME(turn)(b + r + j * column, column, panel + r * WIDTH, WIDTH, LANES);
        for (; r < terms; r++)
            for (i64 i = 0; i < LANES; i++) panel[r * WIDTH + i] = i < there ? b[r * term + (j + i) * column] : 0;
    }
}

/* What a tile multiplies: element (i, r) of a is a[r * ROWS + i], or where it is read in place a[i * row + r]; row r of a panel
   of b is b + r * WIDTH, or where the tile is to pack it still from + r * from_step. And what it brings nearer meanwhile. */
typedef struct { const T *a; i64 row; T *b; const T *from; i64 from_step, terms; Run run; } NAME(Factors);

/* rows x (vectors * LANES) numbers of c: the products of one block of terms, added to what is there or not. The first tile along
   a panel whose rows are contiguous is the one that packs it: its loads are needed anyhow, and stores are free beside them. Rows
   of a in place are found from two pointers and few multiples of `row`, so that all addresses stay in registers. */
INLINE void NAME(tile)(const NAME(Factors) *f, T *restrict c, i64 step, int add, const T *bias, const int rows, const int vectors,
                       const int in_place, const int packing)
{
    V sum[ROWS][VECTORS] = {0};
    const i64 row = in_place ? f->row : 1, term = in_place ? 1 : ROWS, from_step = packing ? f->from_step : WIDTH;
    const T *a = f->a, *half = f->a + 4 * row, *from = packing ? f->from : f->b;
    T *b = f->b;
    const char *far = f->run.at;
    i64 more = f->terms, far_step = f->run.step;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) __builtin_prefetch(c + i * step + v * LANES, 1, 3);
    do {                             /* at least once: a loop that may be left out makes GCC keep the sums in memory around it */
        const T *stop = b + least(more, GROUP) * WIDTH;
        __builtin_prefetch(far, 0, 2);
        __builtin_prefetch(far + far_step, 0, 2);
        far += 2 * far_step;
        more -= GROUP;
        do {
            V right[VECTORS];
            UNROLL for (int v = 0; v < vectors; v++) {
                right[v] = *(const V *)(from + v * LANES);
                if (packing) *(V *)(b + v * LANES) = right[v];
                if (v * VECTOR_BYTES % CACHE_LINE == 0) __builtin_prefetch(from + NEAR * from_step + v * LANES, 0, 3);
            }
            UNROLL for (int i = 0; i < rows; i++) {
                T left = in_place && i >= 4 ? half[(i - 4) * row] : a[i * row];
                UNROLL for (int v = 0; v < vectors; v++) sum[i][v] += left * right[v];
            }
            a += term, half += term, b += WIDTH, from += from_step;
        } while (b < stop);
    } while (more > 0);
    if (add) UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) sum[i][v] += *(const V *)(c + i * step + v * LANES);
    if (bias) UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) sum[i][v] += *(const V *)(bias + v * LANES);
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) *(V *)(c + i * step + v * LANES) = sum[i][v];
}

typedef void (*NAME(Tile))(const NAME(Factors) *, T *, i64, int, const T *);

#define TILE(name, rows, vectors, in_place, packing)                                                                            \
static __attribute__((noinline)) void NAME(name##_##vectors)(const NAME(Factors) *f, T *c, i64 step, int add, const T *bias)     \
{                                                                                                                               \
    NAME(tile)(f, c, step, add, bias, rows, vectors, in_place, packing);                                                        \
}
#define TILES(name, rows, in_place, packing)                                                                                    \
TILE(name, rows, 1, in_place, packing) TILE(name, rows, 2, in_place, packing) TILE(name, rows, 3, in_place, packing)             \
static const NAME(Tile) NAME(name)[VECTORS] = {NAME(name##_1), NAME(name##_2), NAME(name##_3)};      /* by their vectors */
TILES(row_tile, 1, 0, 0)
TILES(half_tile, ROWS / 2, 0, 0)
TILES(whole_tile, ROWS, 0, 0)
TILES(whole_packing, ROWS, 0, 1)
TILES(placed_tile, ROWS, 1, 0)
TILES(placed_packing, ROWS, 1, 1)

/* A tile whose last vector is not whole: computed beside c, and what c holds of it copied. */
static void NAME(edge)(NAME(Tile) tile, const NAME(Factors) *f, T *c, i64 step, i64 rows, i64 columns, int add, const T *bias)
{
    T whole[ROWS * WIDTH], added[WIDTH];
    if (add) for (i64 i = 0; i < rows; i++) memcpy(whole + i * WIDTH, c + i * step, columns * sizeof(T));
    if (bias) memcpy(added, bias, columns * sizeof(T));
    tile(f, whole, WIDTH, add, bias ? added : NULL);
    for (i64 i = 0; i < rows; i++) memcpy(c + i * step, whole + i * WIDTH, columns * sizeof(T));
}

/* What is done to numbers of c once they are there, to rows while the L1 cache has them: y = f(c), and where there is such a
   function the derivative of f is written to c. y may be c otherwise. */
typedef struct {
    int (*value)(const T *c, T *y, i64 n);
    int (*value_and_slope)(const T *c, T *slope, T *y, i64 n);
    T *y;
} NAME(Finish);

static void NAME(finish)(const NAME(Finish) *f, T *c, i64 first, i64 count)
{
    if (f->value_and_slope) f->value_and_slope(c + first, c + first, f->y + first, count);
    else f->value(c + first, f->y + first, count);
}

#include "turned_product.h"

/* The length of the blocks of b (k, n) along k and along n, but for the last ones. */
INLINE i64 NAME(block_terms)(i64 k) { return even_parts(k, TERMS, GROUP); }
INLINE i64 NAME(block_columns)(i64 k, i64 n)
{
    return even_parts(n, PACKED_BYTES / (i64)sizeof(T) / NAME(block_terms)(k) / WIDTH * WIDTH, WIDTH);
}

/* How many numbers `pack` writes. */
i64 NAME(packed_numbers)(i64 n, i64 k)
{
    i64 most = NAME(block_columns)(k, n), whole = n / most;
    return (whole * ((most + WIDTH - 1) / WIDTH) + (n - whole * most + WIDTH - 1) / WIDTH) * WIDTH * k;
}

/* All blocks of b (k, n), whose columns are the rows of w (n, k), packed one after another: what `multiply` takes as `ready`. */
void NAME(pack)(const T *w, T *to, i64 n, i64 k)
{
    i64 size = NAME(block_terms)(k), most = NAME(block_columns)(k, n);
    for (i64 j0 = 0; j0 < n; j0 += most) for (i64 r0 = 0; r0 < k; r0 += size) {
        i64 columns = least(n - j0, most), terms = least(k - r0, size);
        NAME(pack_columns)(w + r0 + j0 * k, 1, k, terms, columns, to);
        to += (columns + WIDTH - 1) / WIDTH * WIDTH * terms;
    }
}

/* Element (i, r) of a is a[i * a_row + r * a_term], (r, j) of b is b[r * b_term + j * b_column]; one step of each is 1. Rows
   of c are contiguous. `work` holds product_work_bytes() bytes from a cache line on. Where `ready` is not NULL it has the blocks
   of b, packed, and b is not looked at. */
static void NAME(multiply)(const T *a, const T *b, const T *ready, const T *bias, T *c, T *work, i64 m, i64 n, i64 k, i64 a_row,
                           i64 a_term, i64 b_term, i64 b_column, const NAME(Finish) *f_of_c)
{
    T *left = work, *right = ready ? (T *)ready : work + TERMS * ROWS;
    for (i64 i = 0; i < m * n && k <= 0; i++) c[i] = bias ? bias[i % n] : 0;
    if (k <= 0 && f_of_c) NAME(finish)(f_of_c, c, 0, m * n);
    if (k <= 0) return;
    if (!ready && NAME(turns)(m, n, k, b_term)) {
        NAME(multiply_turned)(a, b, bias, c, work, m, n, k, a_row, a_term, b_column);
        if (f_of_c) NAME(finish)(f_of_c, c, 0, m * n);
        return;
    }
    i64 size = NAME(block_terms)(k), most = NAME(block_columns)(k, n);
    for (i64 j0 = 0; j0 < n; j0 += most) for (i64 r0 = 0; r0 < k; r0 += size) {
        i64 columns = least(n - j0, most), terms = least(k - r0, size), rows;
        const T *added = bias && r0 + terms == k ? bias + j0 : NULL;
        i64 whole = (columns + WIDTH - 1) / WIDTH * WIDTH * terms;                   /* numbers of the block, packed */
        const T *block = ready ? right : b + r0 * b_term + j0 * b_column;
        i64 by_tiles = ready || b_column != 1 || m < ROWS ? 0 : columns % LANES ? columns / WIDTH * WIDTH : columns;
        if (!ready) NAME(pack_columns)(block + by_tiles * b_column, b_term, b_column, terms, columns - by_tiles,
                                       right + by_tiles * terms);
        i64 r1 = r0 + terms < k ? r0 + terms : 0, j1 = r1 ? j0 : j0 + columns;       /* the next block */
        i64 next_columns = j1 < n ? least(n - j1, most) : 0, next_terms = least(k - r1, size);
        const T *next = ready ? right + whole : b + r1 * b_term + j1 * b_column;
        Ahead of_b = ready ? look_ahead(next, 1, CACHE_LINE, (next_columns + WIDTH - 1) / WIDTH * WIDTH * next_terms * sizeof(T) / CACHE_LINE, 1)
                   : b_column == 1 ? look_ahead(next, sizeof(T), b_term, next_terms, next_columns)
                                   : look_ahead(next, sizeof(T), b_column, next_columns, next_terms);
        Ahead of_a = {0};
        for (i64 i = 0; i < m; i += rows) {
            const T *from = a + i * a_row + r0 * a_term;
            T *to = c + i * n + j0;
            rows = m - i >= ROWS ? ROWS : m - i >= ROWS / 2 ? ROWS / 2 : 1;
            int in_place = rows == ROWS && a_term == 1 && a_row * sizeof(T) % SAME_PLACES;
            const NAME(Tile) *tiles = in_place ? NAME(placed_tile) : rows == ROWS ? NAME(whole_tile) :
                                      rows == ROWS / 2 ? NAME(half_tile) : NAME(row_tile);
            const NAME(Tile) *packing = in_place ? NAME(placed_packing) : NAME(whole_packing);
            NAME(Factors) f = {in_place ? from : left, a_row, right, block, b_term, terms, {0}};
            if (!in_place) NAME(pack_rows)(from, a_row, a_term, rows, terms, left);
            if (a_row == 1 && (uintptr_t)from % CACHE_LINE < ROWS * sizeof(T))             /* the first rows of their lines */
                of_a = look_ahead(from + CACHE_LINE / sizeof(T), sizeof(T), a_term, terms, least(m - i - rows, 1));
            if (a_row == terms)
                of_a = look_ahead(from + rows * a_row, 1, CACHE_LINE, least(m - i - rows, ROWS) * terms * sizeof(T) / CACHE_LINE, 1);
            for (i64 j = 0; j < columns; j += WIDTH, f.b += terms * WIDTH, f.from += WIDTH) {
                i64 there = least(columns - j, WIDTH);
                NAME(Tile) tile = (i == 0 && j < by_tiles ? packing : tiles)[(there - 1) / LANES];
                f.run = take(of_a.columns > 0 ? &of_a : &of_b, terms / GROUP * 2);
                if (there % LANES == 0) tile(&f, to + j, n, r0 > 0, added ? added + j : NULL);
                else NAME(edge)(tile, &f, to + j, n, rows, there, r0 > 0, added ? added + j : NULL);
            }
            if (f_of_c && r0 + terms == k && columns == n) NAME(finish)(f_of_c, c, i * n, rows * n);
        }
        if (ready) right += whole;
    }
    if (f_of_c && most < n) NAME(finish)(f_of_c, c, 0, m * n);     /* pieces of rows took longer than a pass over all */
}

#undef V
#undef MASK
#undef WIDTH
#undef TILE
#undef TILES
