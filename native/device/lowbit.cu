/* Products of few rows with weights in few bits: y (M, N) = x (M, K) w' times scales + bias; see kernels/lowbit.py. What they cost is
   the reading of the weights, once for each ROWS rows of x.

   A warp has an output n: a thread reads 16 bytes of its weights at once, all that stand 16 x 32 bytes apart, and what they meet of
   each row. Sums are in the order of the threads, then over the warp: a row's bits do not depend on the others. */
#include "eights.h"

#undef KERNEL                                     /* a compiler that is not told how few blocks will do spills to make room for more */
#define KERNEL(NAME, THREADS, PARAMETERS) extern "C" __global__ void __launch_bounds__(THREADS, 4) NAME PARAMETERS

enum { THREADS = 128, ROWS = 4, BYTES = 16 };
union Sixteen { uint4 all; uint8 at[BYTES]; };
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

/* sum += weights x for 8 neighbours, of which `count` are there. */
template <class T> __device__ __forceinline__ Sum<T> add_8(const T *x, int64 count, bool aligned, const Sum<T> *weights, Sum<T> sum) {
    Sum<T> from[8];
    if (aligned && count >= 8) load_8(x, from);
    else load_some(x, from, count);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fused(weights[i], from[i], sum);
    return sum;
}

template <class T> __device__ __forceinline__ void write(const Sum<T> (&sums)[ROWS], Sum<T> scale, const T *bias, T *y, int64 first,
                                                         int64 m, int64 n, int64 output) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const Sum<T> sum = sum_of_warp(sums[r]);
        if (threadIdx.x % 32 == 0 && first + r < m) put(y[(first + r) * n + output], sum * scale + (bias ? of(bias[output]) : 0));
    }
}

#define INT8(T) (const T *__restrict__ x, const uint8 *__restrict__ w, const float *__restrict__ scale, \
    const T *__restrict__ bias, T *__restrict__ y, int64 m, int64 n, int64 k)
template <class T> __device__ __forceinline__ void lowbit_int8 INT8(T) {
    typedef Sum<T> S;
    const int64 output = blockIdx.x * (int64)(THREADS / 32) + threadIdx.x / 32, first = blockIdx.y * (int64)ROWS;
    if (output >= n) return;                                               // a whole warp
    const bool whole = k % BYTES == 0 && is_aligned(w), aligned = k % 8 == 0 && is_aligned(x);
    S sums[ROWS] = {};
    for (int64 from = threadIdx.x % 32 * BYTES; from < k; from += 32 * BYTES) {
        Sixteen raw;
        const uint8 *weights = w + output * k + from;
        if (whole) raw.all = *(const uint4 *)weights;
        else {
#pragma unroll
            for (int i = 0; i < BYTES; ++i) raw.at[i] = from + i < k ? weights[i] : 0;
        }
        S v[BYTES];
#pragma unroll
        for (int i = 0; i < BYTES; ++i) v[i] = (S)(signed char)raw.at[i];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) if (first + r < m) {
            const T *row = x + (first + r) * k + from;
            sums[r] = add_8(row, k - from, aligned, v, sums[r]);
            sums[r] = add_8(row + 8, k - from - 8, aligned, v + 8, sums[r]);
        }
    }
    write(sums, (S)scale[output], bias, y, first, m, n, output);
}
VERSIONS(lowbit_int8, THREADS, INT8, (x, w, scale, bias, y, m, n, k))

/* A group has 32 weights, from -8 on: number i in the low half of byte i, number 16 + i in the high one. */
#define INT4(T) (const T *__restrict__ x, const uint8 *__restrict__ w, const float16 *__restrict__ scale, \
    const T *__restrict__ bias, T *__restrict__ y, int64 m, int64 n, int64 k, int64 groups)
template <class T> __device__ __forceinline__ void lowbit_int4 INT4(T) {
    typedef Sum<T> S;
    const int64 output = blockIdx.x * (int64)(THREADS / 32) + threadIdx.x / 32, first = blockIdx.y * (int64)ROWS;
    if (output >= n) return;
    const bool whole = is_aligned(w), aligned = k % 8 == 0 && is_aligned(x);
    S sums[ROWS] = {};
    for (int64 group = threadIdx.x % 32; group < groups; group += 32) {
        Sixteen raw;
        const uint8 *weights = w + (output * groups + group) * BYTES;
        if (whole) raw.all = *(const uint4 *)weights;
        else {
#pragma unroll
            for (int i = 0; i < BYTES; ++i) raw.at[i] = weights[i];
        }
        const S scaled = (S)of(scale[output * groups + group]);
        const int64 from = group * 2 * BYTES;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            S v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = scaled * (S)((raw.at[part % 2 * 8 + i] >> part / 2 * 4 & 15) - 8);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) if (first + r < m)
                sums[r] = add_8(x + (first + r) * k + from + part * 8, k - from - part * 8, aligned, v, sums[r]);
        }
    }
    write(sums, (S)1, bias, y, first, m, n, output);
}
VERSIONS(lowbit_int4, THREADS, INT4, (x, w, scale, bias, y, m, n, k, groups))
