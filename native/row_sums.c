/* Sums along contiguous rows x (R, n), for float and double. */

#include "row_order.h"

#define TERM(v, c) (v)

#define IN T
#define SOURCE "row_sums.h"
#include "both.h"

void row_sums_float32(const float *x, float *sums, i64 rows, i64 n) { rows_float32(x, 0, sums, rows, n); }

void row_sums_float64(const double *x, double *sums, i64 rows, i64 n) { rows_float64(x, 0, sums, rows, n); }
