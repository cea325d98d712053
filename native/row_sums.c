/* Sums along contiguous rows x (R, n), for float and double. */

#include "row_order.h"

#define TERM(v, c) (v)

#define T float
#define IN float
#define INTEGER int32_t
#define NAME(name) name##_float32
#include "row_sums.h"
#undef T
#undef IN
#undef INTEGER
#undef NAME

#define T double
#define IN double
#define INTEGER int64_t
#define NAME(name) name##_float64
#include "row_sums.h"

void row_sums_float32(const float *x, float *sums, i64 rows, i64 n) { rows_float32(x, 0, sums, rows, n); }

void row_sums_float64(const double *x, double *sums, i64 rows, i64 n) { rows_float64(x, 0, sums, rows, n); }
