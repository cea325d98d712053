/* Products y (m, n) = x (m, k) w' + bias by a sparse w (n, k), for float and double, one thread.

   Two forms of w. Blocks of HEIGHT rows and a column: row g of blocks has blocks starts[g] .. starts[g + 1], each of HEIGHT
   values and its column. CSR: row j has values starts[j] .. starts[j + 1], and their columns. Within a row columns may come in any
   order; sums follow it.

   A number of y is a sum with fused multiply-adds in the order of its row: of CSR one after the other, of blocks in four sums, of
   which the first has blocks 0, 4, 8, ..., added as (0 + 1) + (2 + 3); the bias last. That does not depend on m, so a row of y has
   the same bits whatever batch it is part of. They return 2 where starts or columns are none. */

#include "tile.h"
#include "blocks.h"

#define HEIGHT 16                   /* rows of a block: a vector of AVX-512; part of the form */
#define CHAINS 4                    /* of sums: a multiply-add takes 4 cycles; part of the order */
#define STAYS (256 << 10)           /* bytes of values that meet all rows of x while they are in the L2 cache */
#define PANEL 64                    /* rows of x side by side, for CSR */

static int wrong(const i64 *starts, const int32_t *columns, i64 rows, i64 count, i64 k)
{
    int bad = starts[0] != 0 || starts[rows] != count;
    for (i64 r = 0; r < rows; r++) bad |= starts[r + 1] < starts[r];
    uint32_t most = 0;
    for (i64 i = 0; i < count; i++) most = (uint32_t)columns[i] > most ? (uint32_t)columns[i] : most;
    return bad || (count && most >= (uint64_t)k);
}

#define T float
#define INTEGER int32_t
#define LANES FLOATS
#define NAME(name) name##_float32
#include "sparse.h"
#undef T
#undef INTEGER
#undef LANES
#undef NAME

#define T double
#define INTEGER int64_t
#define LANES DOUBLES
#define NAME(name) name##_float64
#include "sparse.h"
