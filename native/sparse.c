/* Products by a sparse w (n, k), for float and double, one thread: y (m, n) = x (m, k) w' + bias, and gradients.

   Two forms of w. Blocks of HEIGHT rows and a column: row g of blocks has, in piece p of the columns, blocks starts[g * pieces + p]
   .. starts[g * pieces + p + 1], each of HEIGHT values and its column. CSR: row j has values starts[j * pieces + p] ..
   starts[j * pieces + p + 1], and their columns. Within a piece columns may come in any order, and sums follow it, but where
   blocks are read from a matrix or written to one: there they ascend. Pieces are the blocks of terms of product.c, so a number is
   the sum that product.c makes, without the terms of the zeros that are left out: with finite numbers, and columns that ascend,
   it has the same bits. That does not depend on m, so a row of y has the same bits whatever batch it is part of.

   Rows of x, and of gradients, are turned LANES at a time, so that what one column needs lies in a vector. They return 2 where
   starts or columns are none. */

#ifndef T

#include "tile.h"
#include "blocks.h"

#define HEIGHT 16                   /* rows of a block: a vector of AVX-512; part of the form */
#define STAYS (256 << 10)           /* bytes of values that meet all rows of x while they are in the L2 cache */
#define MOST_ROWS 128               /* rows of x turned at a time */
#define PANEL 64                    /* rows of x side by side, for CSR, and of gradients of x */
#define CHAINS 8                    /* of multiply-adds that do not wait for each other: two start a cycle and take four */
#define BESIDE 4                    /* blocks of a row of blocks whose sums go on side by side */

/* The pieces of k terms, and the terms of each but the last. */
static i64 piece_of(i64 k) { return even_parts(k, TERMS, GROUP); }
static i64 pieces_of(i64 k) { return k > 0 ? (k + piece_of(k) - 1) / piece_of(k) : 1; }

static int wrong(const i64 *starts, i64 n_starts, const int32_t *columns, i64 rows, i64 count, i64 k)
{
    if (n_starts != rows * pieces_of(k) + 1) return 1;
    int bad = starts[0] != 0 || starts[n_starts - 1] != count;
    for (i64 r = 0; r + 1 < n_starts; r++) bad |= starts[r + 1] < starts[r];
    uint32_t most = 0;
    for (i64 i = 0; i < count; i++) most = (uint32_t)columns[i] > most ? (uint32_t)columns[i] : most;
    return bad || (count && most >= (uint64_t)k);
}

/* Whether the columns of a row do not ascend, where `wrong` has found nothing. */
static int unordered(const i64 *starts, const int32_t *columns, i64 rows, i64 pieces)
{
    int bad = 0;
    for (i64 r = 0; r < rows; r++)
        for (i64 i = starts[r * pieces] + 1; i < starts[(r + 1) * pieces]; i++) bad |= columns[i] <= columns[i - 1];
    return bad;
}

#define SOURCE "sparse.c"
#include "both.h"

#else

#include "sparse.h"
#include "sparse_gradients.h"

#endif
