/* Sums over the rows of a matrix, in two stages without atomics: of blocks of rows, then of these, each in a fixed order. Rows of
   x lie `step` numbers apart. */
#include "device.h"

enum { WIDE = 256, ROWS_A_BLOCK = 64 };

template <class T> __device__ __forceinline__ void row_partials(const T *x, int64 step, Sum<T> *partial, int64 rows,
                                                                int64 columns, int64 blocks) {
    const int64 column = blockIdx.x * (int64)WIDE + threadIdx.x;
    if (column >= columns) return;
    for (int64 part = blockIdx.y; part < blocks; part += gridDim.y) {
        Sum<T> sum = 0;
        const int64 first = part * ROWS_A_BLOCK, end = min(first + ROWS_A_BLOCK, rows);
        for (int64 row = first; row < end; ++row) sum += of(x[row * step + column]);
        partial[part * columns + column] = sum;
    }
}
template <class T> __device__ __forceinline__ void sum_partials(T *out, const Sum<T> *partial, int64 rows, int64 columns) {
    const int64 column = blockIdx.x * (int64)WIDE + threadIdx.x;
    if (column >= columns) return;
    Sum<T> sum = 0;
    for (int64 row = 0; row < rows; ++row) sum += partial[row * columns + column];
    put(out[column], sum);
}

#define ROW_PARTIALS(T) (const T *__restrict__ x, int64 step, Sum<T> *__restrict__ partial, int64 rows, int64 columns, \
                         int64 blocks)
#define SUM_PARTIALS(T) (T *__restrict__ out, const Sum<T> *__restrict__ partial, int64 rows, int64 columns)
VERSIONS(row_partials, WIDE, ROW_PARTIALS, (x, step, partial, rows, columns, blocks))
VERSIONS(sum_partials, WIDE, SUM_PARTIALS, (out, partial, rows, columns))
