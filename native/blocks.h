/* What products by packed blocks have in common: the order of their sums, and what is brought nearer meanwhile. See product.c. */

#ifndef MPITRAIN_BLOCKS_H
#define MPITRAIN_BLOCKS_H

#include "tile.h"

#define TERMS 384                   /* like GROUP the same everywhere: part of the order of the sums */
#define PACKED_BYTES (512 << 10)    /* of b: in a 1 MiB L2 cache with what passes through */
#define GROUP 8                     /* terms for each two lines that the L2 cache will need; blocks are multiples of it */
#define NEAR 8                      /* terms from a line's way into the L1 cache to its use */
#define SOME 8                      /* rows of b copied side by side */
#define CACHE_LINE 64
#define SAME_PLACES 4096            /* rows so many bytes apart share their places in an L1 cache: they are packed */

#define UNROLL _Pragma("GCC unroll 16")

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

/* `all` in as few parts of at most `most` as can be, equal but for the last; whole numbers of `unit`. */
static i64 even_parts(i64 all, i64 most, i64 unit)
{
    if (all <= 0) return unit;
    i64 parts = (all + most - 1) / most, each = (all + parts - 1) / parts;
    return (each + unit - 1) / unit * unit;
}

/* Lines of memory to bring into the L2 cache: `columns` of them side by side in each of `rows` rows, `step` bytes apart; the next
   is in `row`. Each tile takes a run of them, down the rows. */
typedef struct { const char *column; i64 step, rows, row, columns; } Ahead;
typedef struct { const char *at; i64 step; } Run;

static Ahead look_ahead(const void *from, i64 size, i64 step, i64 rows, i64 length)
{
    return (Ahead){from, step * size, rows, 0, rows > 0 ? (length * size + CACHE_LINE - 1) / CACHE_LINE : 0};
}

static Run take(Ahead *a, i64 count)
{
    if (a->columns <= 0) return (Run){a->column, 0};
    Run run = {a->column + a->row * a->step, a->step};
    a->row += count;
    if (a->row >= a->rows) { a->row = 0; a->column += CACHE_LINE; a->columns--; }
    return run;
}

#endif
