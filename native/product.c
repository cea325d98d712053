/* Matrix products c (m, n) = a (m, k) b (k, n) + bias (n; or NULL), for float and double, one thread.

   After Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34, 2008, with the loops in the
   order that serves layers: b is packed a block at a time, which stays in the L2 cache; then ROWS rows of a, which
   stay in the L1 cache, go along the whole of it, so that c is written row by row. (Down the columns, each store met a
   page of its own: a weight's gradient took a fifth longer.)

   A number of c is the sum over blocks of TERMS terms, each summed in order with fused multiply-adds, and the bias last.
   That does not depend on m, n, the layout of a and b, or the width of vectors: a row of the result has the same bits
   whatever batch it is part of, and on every CPU that fuses. */

#include "tile.h"

#define TERMS 256                   /* the same everywhere: it is part of the order of the sums */
#define PACKED_BYTES (528 << 10)    /* of b: in a 1 MiB L2 cache with what passes through */

/* Lines of memory to bring into the L2 cache, one at a time: `rows` rows, `step` bytes apart. */
typedef struct { const char *row; i64 step, lines, line, left, interval; } Ahead;

static Ahead look_ahead(const void *from, i64 size, i64 step, i64 rows, i64 length, i64 terms)
{
    i64 lines = (length * size + 63) / 64, all = rows * lines;
    return (Ahead){from, step * size, lines, 0, all, all ? (terms + all - 1) / all : INT64_MAX / 2};
}

INLINE void fetch(Ahead *a)
{
    if (a->left <= 0) return;
    __builtin_prefetch(a->row + 64 * a->line, 0, 2);
    a->left--;
    if (++a->line == a->lines) { a->line = 0; a->row += a->step; }
}

i64 product_work_bytes(void) { return TERMS * ROWS * sizeof(double) + PACKED_BYTES; }

#define T float
#define INTEGER int32_t
#define LANES FLOATS
#define NAME(name) name##_float32
#include "product.h"
#undef T
#undef INTEGER
#undef LANES
#undef NAME

#define T double
#define INTEGER int64_t
#define LANES DOUBLES
#define NAME(name) name##_float64
#include "product.h"
