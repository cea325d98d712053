/* Gradients of layer and RMS norm by row, and their sums over rows. See mpitrain/kernels/layer_norm.py.

   Sums over rows are made without atomics, in an order that depends on sizes alone: blocks that stay go over rows, each with sums
   of its own in registers, and `column_totals` adds up those of the blocks. */
#include "layer_norm.h"

enum { MOST_ROWS_A_SUM = 64, TOTAL_WARPS = 32 };

template <class T> struct Gradients {
    typedef Sum<T> S;
    const T *grad, *x;
    const S *weight;
    const T *around;
    const S *means, *inverses;
    T *dx;
    S *partial;                                                       /* (2, blocks, columns): of grad z, and of grad */
    const uint8 *bits;
    T *dropped;
    S factor;
    int64 rows, columns;
    bool centred, whole, whole_weight;

    __device__ __forceinline__ void look() {
        whole = columns % 8 == 0 && is_aligned(grad) && is_aligned(x) && is_aligned(around) && is_aligned(dx)
                && is_aligned(dropped);
        whole_weight = columns % 8 == 0 && is_aligned(weight);
    }
    /* g becomes the gradient of the normalised numbers z, and what it adds to the row's sums is added. */
    __device__ __forceinline__ void weigh(S *g, const S *z, int64 at, S &slope, S &shift) const {
        S w[8];
        load_unit(weight, at, columns, whole_weight, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            g[j] *= w[j];
            slope = multiply_add(g[j], z[j], slope);
            shift += g[j];
        }
    }
    __device__ __forceinline__ void write(const S *g, const S *z, S slope, S shift, S inverse, int64 row, int64 at) const {
        S more[8], made[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) more[j] = 0;
        if (around) load_unit(around + row * columns, at, columns, whole, more);
#pragma unroll
        for (int j = 0; j < 8; ++j) made[j] = multiply_add(multiply_add(-slope, z[j], g[j] - shift), inverse, more[j]);
        store_unit(dx + row * columns, at, columns, whole, made);
        if (!bits) return;
        drop(made, bits[(row * columns + at) / 8], factor);
        store_unit(dropped + row * columns, at, columns, whole, made);
    }
};

/* The sums of a block's groups of up to 32 threads, which have the same columns, become those of the block: first of the groups
   of a warp, then of the warps one after the other. */
template <int N, class S>
__device__ __forceinline__ void write_sums(S (*sums)[8], S *to, int64 columns, int lane, int group) {
    __shared__ S totals[8][32 * N];
    const int warp = threadIdx.x / 32;
    for (int lanes = group; lanes < 32; lanes <<= 1) {
#pragma unroll
        for (int k = 0; k < N; ++k)
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[k][j] += __shfl_xor_sync(0xffffffffu, sums[k][j], lanes);
    }
    for (int turn = 0; turn < (int)blockDim.x / 32; ++turn) {
        if (turn == warp && (int)threadIdx.x % 32 < group) {
#pragma unroll
            for (int k = 0; k < N; ++k)
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    S &total = totals[j][lane + k * group];
                    total = turn ? total + sums[k][j] : sums[k][j];
                }
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < columns; i += blockDim.x) to[i] = totals[i % 8][i / 8];
    __syncthreads();
}

template <int N, class T> __device__ __forceinline__ void row_gradients(Gradients<T> r, int group) {
    typedef Sum<T> S;
    r.look();
    const int lane = threadIdx.x & (group - 1), each = blockDim.x / group;
    S products[N][8], plain[N][8];
#pragma unroll
    for (int k = 0; k < N; ++k)
#pragma unroll
        for (int j = 0; j < 8; ++j) products[k][j] = plain[k][j] = 0;
#pragma unroll 1
    for (int64 first = (int64)blockIdx.x * each; first < r.rows; first += (int64)gridDim.x * each) {
        const int64 row = first + threadIdx.x / group;
        const bool here = row < r.rows;
        S g[N][8], z[N][8];
        load_row<N>(r.grad + row * r.columns, here, r.columns, lane, group, r.whole, g);
        load_row<N>(r.x + row * r.columns, here, r.columns, lane, group, r.whole, z);
        const S mean = here ? r.means[row] : S(0), inverse = here ? r.inverses[row] : S(0);
#pragma unroll
        for (int k = 0; k < N; ++k)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                z[k][j] = (z[k][j] - mean) * inverse;
                products[k][j] = multiply_add(g[k][j], z[k][j], products[k][j]);
                plain[k][j] += g[k][j];
            }
        if (!r.dx) continue;
        S slope = 0, shift = 0;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const int64 at = 8 * ((int64)lane + k * group);
            if (here && at < r.columns) r.weigh(g[k], z[k], at, slope, shift);
        }
        sum_of_group(slope, shift, group);
        slope /= S(r.columns);
        shift = r.centred ? shift / S(r.columns) : S(0);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const int64 at = 8 * ((int64)lane + k * group);
            if (here && at < r.columns) r.write(g[k], z[k], slope, shift, inverse, row, at);
        }
    }
    if (!r.partial) return;
    S *by_product = r.partial + blockIdx.x * r.columns, *by_grad = by_product + gridDim.x * r.columns;
    if (group <= 32) {
        write_sums<N>(products, by_product, r.columns, lane, group);
        write_sums<N>(plain, by_grad, r.columns, lane, group);
        return;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const int64 at = 8 * ((int64)lane + k * group);
        store_some(by_product + at, products[k], r.columns - at);
        store_some(by_grad + at, plain[k], r.columns - at);
    }
}

/* Gradients of rows of any length: a block has a row, which it reads twice. */
template <class T> __device__ __forceinline__ void long_rows(Gradients<T> r, int group) {
    typedef Sum<T> S;
    r.look();
    const int64 row = blockIdx.x, step = 8 * (int64)group, start = row * r.columns;
    const S mean = r.means[row], inverse = r.inverses[row];
    S slope = 0, shift = 0;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll 1
        for (int64 at = 8 * (int64)threadIdx.x; at < r.columns; at += step) {
            S g[8], z[8], of_unit = 0, plain = 0;
            load_unit(r.grad + start, at, r.columns, r.whole, g);
            load_unit(r.x + start, at, r.columns, r.whole, z);
#pragma unroll
            for (int j = 0; j < 8; ++j) z[j] = (z[j] - mean) * inverse;
            r.weigh(g, z, at, of_unit, plain);
            if (turn) {
                r.write(g, z, slope, shift, inverse, row, at);
            } else {
                slope += of_unit;
                shift += plain;
            }
        }
        if (turn) return;
        sum_of_group(slope, shift, group);
        slope /= S(r.columns);
        shift = r.centred ? shift / S(r.columns) : S(0);
    }
}
/* The sums of long rows: block (x, y) has columns x and MOST_ROWS_A_SUM rows y. */
template <class T> __device__ __forceinline__ void long_sums(Gradients<T> r, int group) {
    typedef Sum<T> S;
    const int64 column = blockIdx.x * (int64)group + threadIdx.x, first = blockIdx.y * (int64)MOST_ROWS_A_SUM;
    if (column >= r.columns) return;
    const int64 end = min(first + MOST_ROWS_A_SUM, r.rows);
    S product = 0, plain = 0;
    for (int64 row = first; row < end; ++row) {
        const int64 at = row * r.columns + column;
        const S g = of(r.grad[at]), z = (of(r.x[at]) - r.means[row]) * r.inverses[row];
        product = multiply_add(g, z, product);
        plain += g;
    }
    r.partial[blockIdx.y * r.columns + column] = product;
    r.partial[(gridDim.y + blockIdx.y) * r.columns + column] = plain;
}

/* Sums over the rows of partial (2, rows, columns): block (x, 0) makes 32 of `products`, (x, 1) of `plain`. Warp w adds rows w,
   w + TOTAL_WARPS, ..., and the first adds up the warps'. */
template <class S> __device__ __forceinline__
void column_totals(const S *partial, S *products, S *plain, int64 rows, int64 columns) {
    __shared__ S parts[TOTAL_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 column = blockIdx.x * (int64)32 + lane;
    S sum = 0;
    if (column < columns) {
#pragma unroll 4
        for (int64 row = warp; row < rows; row += TOTAL_WARPS) sum += partial[(blockIdx.y * rows + row) * columns + column];
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= columns) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < TOTAL_WARPS; ++i) sum += parts[i][lane];
    (blockIdx.y ? plain : products)[column] = sum;
}

#define PARAMETERS(T) (const T *__restrict__ grad, const T *__restrict__ x, const Sum<T> *__restrict__ weight, \
    const T *__restrict__ around, const Sum<T> *__restrict__ means, const Sum<T> *__restrict__ inverses, T *__restrict__ dx, \
    Sum<T> *__restrict__ partial, const uint8 *__restrict__ bits, T *__restrict__ dropped, double scale, int64 rows, \
    int64 columns, int64 blocks, int64 centred, int64 group)
#define ROWS(T) Gradients<T>{grad, x, weight, around, means, inverses, dx, partial, bits, dropped, (Sum<T>)scale, rows, columns, \
                             centred != 0, false, false}
#define BOUNDS MOST, 1                                                /* blocks a multiprocessor: as many registers as it likes */
#define GRADIENTS(NAME, FUNCTION, T, SUFFIX) KERNEL(NAME##SUFFIX, BOUNDS, PARAMETERS(T)) { FUNCTION(ROWS(T), (int)group); }
#define ALL(NAME, FUNCTION) \
    GRADIENTS(NAME, FUNCTION, float, _float32) GRADIENTS(NAME, FUNCTION, bfloat16, _bfloat16) \
    GRADIENTS(NAME, FUNCTION, float16, _float16)
ALL(row_gradients_1, row_gradients<1>)
ALL(row_gradients_2, row_gradients<2>)
ALL(row_gradients_4, row_gradients<4>)                                /* of doubles two units at most fit */
ALL(row_gradients_long, long_rows)
ALL(row_gradients_sums, long_sums)
GRADIENTS(row_gradients_1, row_gradients<1>, double, _float64)
GRADIENTS(row_gradients_2, row_gradients<2>, double, _float64)
GRADIENTS(row_gradients_long, long_rows, double, _float64)
GRADIENTS(row_gradients_sums, long_sums, double, _float64)

#define TOTALS(S, SUFFIX) KERNEL(column_totals##SUFFIX, 32 * TOTAL_WARPS, (const S *__restrict__ partial, \
    S *__restrict__ products, S *__restrict__ plain, int64 rows, int64 columns)) { \
    column_totals(partial, products, plain, rows, columns); }
TOTALS(float, _float32)
TOTALS(double, _float64)
