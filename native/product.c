/* Matrix products c (m, n) = a (m, k) b (k, n) + bias (n; or NULL), for float and double, one thread.

   After Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34, 2008, with the loops in the
   order that serves layers: b is packed a block at a time, which stays in the L2 cache; then ROWS rows of a, packed or as they
   lie, go along the whole of it, so that c is written row by row. (Down the columns, each store met a page of its own: a
   weight's gradient took a fifth longer.) What passes through the L1 cache is asked for a few terms before it is needed, and
   what the L2 cache will need while tiles are computed.

   A number of c is the sum over blocks of terms, each summed in order with fused multiply-adds, and the bias last. Blocks are as
   few as they can be with at most TERMS terms each, and of equal length but for rounding. That does not depend on m, n, the
   layout of a and b, or the width of vectors: a row of the result has the same bits whatever batch it is part of, and on every
   CPU that fuses. */

#ifndef T

#include "pointwise.h"
#include "blocks.h"

/* Whether this was compiled for vectors and registers of the kind it was found to be faster with than BLAS. */
int product_is_fast(void) { return VECTOR_BYTES == 64; }

i64 product_work_bytes(void) { return TERMS * ROWS * sizeof(double) + PACKED_BYTES; }

#define SOURCE "product.c"
#include "both.h"

#else

#include "product.h"
#include "linear.h"
#include "few_rows.h"
#include "few_rows_packed.h"

#endif
