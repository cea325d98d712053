/* Products of matrices, for what no library serves: out = alpha x y + beta out (+ bias), for a batch of matrices that lie
   `..._step` apart. A block makes a tile of 64 x 64 numbers of out from tiles of x and y in shared memory, a thread 4 x 4 of them. Terms are
   added one after the other, so that bits depend on the row and the column alone. */
#include "device.h"

enum { TILE = 64, TERMS = 16, EACH = 4, THREADS_A_SIDE = TILE / EACH, THREADS = THREADS_A_SIDE * THREADS_A_SIDE };

__device__ __forceinline__ float fused(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double fused(double x, double y, double z) { return fma(x, y, z); }

/* A tile of TILE lines of TERMS terms each, zeros beyond the edges; neighbouring threads read neighbouring numbers. */
template <class T> __device__ __forceinline__ void read_tile(Sum<T> (*to)[TILE + 1], const T *from, int64 first, int64 lines,
        int64 term, int64 terms, int64 line_step, int64 term_step) {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE * TERMS; i += THREADS) {
        const int line = term_step == 1 ? i / TERMS : i % TILE, at = term_step == 1 ? i % TERMS : i / TILE;
        const bool inside = first + line < lines && term + at < terms;
        to[at][line] = inside ? of(from[(first + line) * line_step + (term + at) * term_step]) : 0;
    }
}

template <class T, class R> __device__ __forceinline__ void product_of(const T *x, const T *y, const R *bias, R *out, int64 m,
        int64 n, int64 k, int64 batch, int64 x_row, int64 x_term, int64 x_step, int64 y_term, int64 y_column, int64 y_step,
        double alpha, double beta) {
    typedef Sum<T> S;
    __shared__ S left[TERMS][TILE + 1], right[TERMS][TILE + 1];
    const int64 across = (n + TILE - 1) / TILE, row = blockIdx.x / across * TILE, column = blockIdx.x % across * TILE;
    const int i0 = threadIdx.x / THREADS_A_SIDE, j0 = threadIdx.x % THREADS_A_SIDE;
    for (int64 b = blockIdx.z; b < batch; b += gridDim.z) {
        S sums[EACH][EACH] = {};
        for (int64 term = 0; term < k; term += TERMS) {
            read_tile(left, x + b * x_step, row, m, term, k, x_row, x_term);
            read_tile(right, y + b * y_step, column, n, term, k, y_column, y_term);
            __syncthreads();
#pragma unroll 4
            for (int at = 0; at < TERMS; ++at) {
                S these[EACH], those[EACH];
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    these[i] = left[at][i0 + i * THREADS_A_SIDE];
                    those[i] = right[at][j0 + i * THREADS_A_SIDE];
                }
#pragma unroll
                for (int i = 0; i < EACH; ++i)
#pragma unroll
                    for (int j = 0; j < EACH; ++j) sums[i][j] = fused(these[i], those[j], sums[i][j]);
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int64 to_row = row + i0 + i * THREADS_A_SIDE, to = column + j0 + j * THREADS_A_SIDE;
                if (to_row >= m || to >= n) continue;
                R *at = out + (b * m + to_row) * n + to;
                S value = (S)alpha * sums[i][j];
                if (beta != 0) value = fused((S)beta, of(*at), value);
                if (bias) value += of(bias[to]);
                put(*at, value);
            }
    }
}

#define SIZES int64 m, int64 n, int64 k, int64 batch, int64 x_row, int64 x_term, int64 x_step, int64 y_term, int64 y_column, \
    int64 y_step, double alpha, double beta
#define PRODUCT(T) (const T *__restrict__ x, const T *__restrict__ y, const T *__restrict__ bias, T *__restrict__ out, SIZES)
#define WIDE_PRODUCT(T) (const T *__restrict__ x, const T *__restrict__ y, const Sum<T> *__restrict__ bias, \
    Sum<T> *__restrict__ out, SIZES)
#define GIVEN (x, y, bias, out, m, n, k, batch, x_row, x_term, x_step, y_term, y_column, y_step, alpha, beta)

template <class T> __device__ __forceinline__ void product PRODUCT(T) { product_of GIVEN; }
/* The same with the result and the bias in the format of the sums. */
template <class T> __device__ __forceinline__ void wide_product WIDE_PRODUCT(T) { product_of GIVEN; }
VERSIONS(product, THREADS, PRODUCT, GIVEN)
VERSIONS(wide_product, THREADS, WIDE_PRODUCT, GIVEN)
