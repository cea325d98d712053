/* Sums over the rows of a matrix, in two stages without atomics: of blocks of rows, then of these, each in a fixed order. Rows of
   x lie `step` numbers apart. */
#include "columns.h"

enum { ACROSS = 32 };

template <class T> __device__ __forceinline__ void row_partials(const T *x, int64 step, Sum<T> *partial, int64 rows,
                                                                int64 columns, int64 blocks) {
    const bool vectors = columns % 8 == 0 && step * sizeof(T) % 16 == 0 && is_aligned(x);
    for (int64 part = blockIdx.y; part < blocks; part += gridDim.y) {
        const int64 first = part * ROWS_A_BLOCK;
        add_rows(partial + part * columns, columns, first, min(first + ROWS_A_BLOCK, rows), vectors,
                 [=](int64 row, int64 column, Sum<T> *v) { load_8(x + row * step + column, v); },
                 [=](int64 row, int64 column) { return of(x[row * step + column]); });
    }
}
/* A block has ACROSS columns; each of its eight warps adds up every eighth row, and these are added in their order. */
template <class T> __device__ __forceinline__ void sum_partials(T *out, const Sum<T> *partial, int64 rows, int64 columns) {
    __shared__ Sum<T> parts[WARPS][ACROSS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 column = blockIdx.x * (int64)ACROSS + lane;
    Sum<T> sum = 0;
    if (column < columns) for (int64 row = warp; row < rows; row += WARPS) sum += partial[row * columns + column];
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= columns) return;
    for (int i = 1; i < WARPS; ++i) sum += parts[i][lane];
    put(out[column], sum);
}

#define ROW_PARTIALS(T) (const T *__restrict__ x, int64 step, Sum<T> *__restrict__ partial, int64 rows, int64 columns, \
                         int64 blocks)
#define SUM_PARTIALS(T) (T *__restrict__ out, const Sum<T> *__restrict__ partial, int64 rows, int64 columns)
VERSIONS(row_partials, WIDE, ROW_PARTIALS, (x, step, partial, rows, columns, blocks))
VERSIONS(sum_partials, WIDE, SUM_PARTIALS, (out, partial, rows, columns))
