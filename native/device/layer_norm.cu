/* Layer and RMS norm of the rows of a matrix, with what is added before, and dropped of that. See mpitrain/kernels/layer_norm.py.

   The mean square is made of the distances from a first mean, whose own error, the mean of these, corrects both: a row of equal
   numbers becomes 0. A row of 16-bit numbers that others are added to is rounded first, as it is kept for the gradient. */
#include "layer_norm.h"

template <class T> struct Rows {
    typedef Sum<T> S;
    const T *x, *added;
    T *total;
    const S *weight, *bias;
    T *y;
    S *means, *inverses;
    S eps, factor;
    int64 rows, columns;
    bool centred, whole, whole_weight;
    Dropping dropping;

    __device__ __forceinline__ void look() {
        whole = columns % 8 == 0 && is_aligned(x) && is_aligned(added) && is_aligned(total) && is_aligned(y);
        whole_weight = columns % 8 == 0 && is_aligned(weight) && is_aligned(bias);
    }
    /* v, 8 numbers of a row, become those of x + what is kept of `more`, which are written. */
    __device__ __forceinline__ void add(S *v, S *more, int64 row, int64 at) const {
        if (at >= columns) return;
        if (dropping.rows) {
            const uint32 kept = dropping.kept(row, at, columns);
            dropping.bits[(row * columns + at) / 8] = (uint8)kept;
            drop(more, kept, factor);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            T rounded;
            put(rounded, v[j] + more[j]);
            v[j] = of(rounded);
        }
        store_unit(total + row * columns, at, columns, whole, v);
    }
    /* 1 / the standard deviation, from the sums of squared and plain distances from a first mean; `wrong` is what that lacks. */
    __device__ __forceinline__ S inverse_of(S squares, S distances, S &wrong) const {
        wrong = centred ? distances / S(columns) : S(0);
        squares -= wrong * wrong * S(columns);
        squares = squares < 0 ? S(0) : squares;
        if (centred && squares - squares != 0) squares -= squares;                       /* squares beyond the format: NaN */
        return 1 / root(squares / S(columns) + eps);
    }
    /* y for 8 distances from the first mean. */
    __device__ __forceinline__ void write(const S *distances, S wrong, S inverse, int64 row, int64 at) const {
        S w[8], b[8], made[8];
        load_unit(weight, at, columns, whole_weight, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) b[j] = 0;
        if (bias) load_unit(bias, at, columns, whole_weight, b);
#pragma unroll
        for (int j = 0; j < 8; ++j) made[j] = multiply_add((distances[j] - wrong) * inverse, w[j], b[j]);
        store_unit(y + row * columns, at, columns, whole, made);
    }
};

template <int N, class T> __device__ __forceinline__ void row_norm(Rows<T> r, int group) {
    typedef Sum<T> S;
    r.look();
    const int lane = threadIdx.x & (group - 1);
    const int64 row = (int64)blockIdx.x * (blockDim.x / group) + threadIdx.x / group, start = row * r.columns;
    const bool here = row < r.rows;
    S v[N][8], sum = 0, unused = 0;
    load_row<N>(r.x + start, here, r.columns, lane, group, r.whole, v);
    if (r.added) {
        S more[N][8];
        load_row<N>(r.added + start, here, r.columns, lane, group, r.whole, more);
#pragma unroll
        for (int k = 0; k < N; ++k) if (here) r.add(v[k], more[k], row, 8 * ((int64)lane + k * group));
    }
#pragma unroll
    for (int k = 0; k < N; ++k)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[k][j];
    S mean = 0, squares = 0, distances = 0, wrong;
    if (r.centred) {
        sum_of_group(sum, unused, group);
        mean = sum / S(r.columns);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const int64 left = r.columns - 8 * ((int64)lane + k * group);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[k][j] = j < left ? v[k][j] - mean : S(0);
            distances += v[k][j];
            squares = multiply_add(v[k][j], v[k][j], squares);
        }
    }
    sum_of_group(squares, distances, group);
    if (!here) return;
    const S inverse = r.inverse_of(squares, distances, wrong);
    if (lane == 0) {
        r.means[row] = mean + wrong;
        r.inverses[row] = inverse;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const int64 at = 8 * ((int64)lane + k * group);
        if (at < r.columns) r.write(v[k], wrong, inverse, row, at);
    }
}

/* Rows of any length: a block has a row, which it reads three times. */
template <class T> __device__ __forceinline__ void long_rows(Rows<T> r, int group) {
    typedef Sum<T> S;
    r.look();
    const int64 row = blockIdx.x, first = 8 * (int64)threadIdx.x, step = 8 * (int64)group, start = row * r.columns;
    const T *kept = r.added ? r.total : r.x;
    S v[8], more[8], sum = 0, unused = 0, squares = 0, distances = 0, wrong;
#pragma unroll 1
    for (int64 at = first; at < r.columns; at += step) {
        load_unit(r.x + start, at, r.columns, r.whole, v);
        if (r.added) {
            load_unit(r.added + start, at, r.columns, r.whole, more);
            r.add(v, more, row, at);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[j];
    }
    sum_of_group(sum, unused, group);
    const S mean = r.centred ? sum / S(r.columns) : S(0);
#pragma unroll 1
    for (int64 at = first; at < r.columns; at += step) {
        load_unit(kept + start, at, r.columns, r.whole, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const S distance = at + j < r.columns ? v[j] - mean : S(0);
            distances += distance;
            squares = multiply_add(distance, distance, squares);
        }
    }
    sum_of_group(squares, distances, group);
    const S inverse = r.inverse_of(squares, distances, wrong);
    if (threadIdx.x == 0) {
        r.means[row] = mean + wrong;
        r.inverses[row] = inverse;
    }
#pragma unroll 1
    for (int64 at = first; at < r.columns; at += step) {
        load_unit(kept + start, at, r.columns, r.whole, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] -= mean;
        r.write(v, wrong, inverse, row, at);
    }
}

#define PARAMETERS(T) (const T *__restrict__ x, const T *__restrict__ added, T *__restrict__ total, \
    const Sum<T> *__restrict__ weight, const Sum<T> *__restrict__ bias, T *__restrict__ y, Sum<T> *__restrict__ means, \
    Sum<T> *__restrict__ inverses, double eps, int64 rows, int64 columns, int64 centred, const uint64 *__restrict__ samples, \
    const uint64 *__restrict__ firsts, uint8 *__restrict__ bits, const uint64 *__restrict__ stored, int64 key, int64 least, \
    int64 first, int64 parts, double scale, int64 group)
#define ROWS(T) Rows<T>{x, added, total, weight, bias, y, means, inverses, (Sum<T>)eps, (Sum<T>)scale, rows, columns, \
                        centred != 0, false, false, {samples, firsts, bits, key_of(stored, key), least, first, parts}}
#define BOUNDS MOST, 2                                                /* blocks a multiprocessor: 128 registers at most */
#define NORM(NAME, FUNCTION, T, SUFFIX) KERNEL(NAME##SUFFIX, BOUNDS, PARAMETERS(T)) { FUNCTION(ROWS(T), (int)group); }
#define NORMS(NAME, FUNCTION) \
    NORM(NAME, FUNCTION, float, _float32) NORM(NAME, FUNCTION, bfloat16, _bfloat16) NORM(NAME, FUNCTION, float16, _float16)
NORMS(row_norm_1, row_norm<1>)
NORMS(row_norm_2, row_norm<2>)
NORMS(row_norm_4, row_norm<4>)                                        /* of doubles two units at most fit */
NORMS(row_norm_long, long_rows)
NORM(row_norm_1, row_norm<1>, double, _float64)
NORM(row_norm_2, row_norm<2>, double, _float64)
NORM(row_norm_long, long_rows, double, _float64)
