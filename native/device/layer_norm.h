/* What the kernels of layer and RMS norm share: rows held in registers by groups of threads, and sums over a group.

   A group of `group` threads, a power of two, has a row: up to 32 of a warp, or a whole block. Each thread holds N units of 8
   numbers, unit `lane` + k `group` for k < N, so that the row is read once; a warp reads neighbouring units. */
#pragma once
#include "eights.h"
#include "philox.h"

enum { MOST = 256 };                                                  /* threads of a block */

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

/* a and b become their sums over the group; all threads of the block come here. */
template <class S> __device__ __forceinline__ void sum_of_group(S &a, S &b, int group) {
    for (int lanes = (group < 32 ? group : 32) / 2; lanes; lanes >>= 1) {
        a += __shfl_xor_sync(0xffffffffu, a, lanes);
        b += __shfl_xor_sync(0xffffffffu, b, lanes);
    }
    if (group <= 32) return;
    __shared__ S parts[2][MOST / 32];
    if (threadIdx.x % 32 == 0) {
        parts[0][threadIdx.x / 32] = a;
        parts[1][threadIdx.x / 32] = b;
    }
    __syncthreads();
    a = b = 0;
    for (int i = 0; i < group / 32; ++i) {
        a += parts[0][i];
        b += parts[1][i];
    }
    __syncthreads();
}

/* 8 numbers of a row of `columns`, from `at` on; `whole` says that there are 8, or none, and that they are aligned. */
template <class T> __device__ __forceinline__ void load_unit(const T *row, int64 at, int64 columns, bool whole, Sum<T> *to) {
    if (whole && at < columns) load_8(row + at, to); else load_some(row + at, to, columns - at);
}
template <class T> __device__ __forceinline__ void store_unit(T *row, int64 at, int64 columns, bool whole, const Sum<T> *from) {
    if (!whole) store_some(row + at, from, columns - at); else if (at < columns) store_8(row + at, from);
}
/* What a thread holds of a row; 0 where nothing is, and in all of a row that is not `here`. All loads are under way at once. */
template <int N, class T> __device__ __forceinline__
void load_row(const T *row, bool here, int64 columns, int lane, int group, bool whole, Sum<T> (*to)[8]) {
    if (whole) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const int64 at = 8 * ((int64)lane + k * group);
            if (here && at < columns) load_8(row + at, to[k]);
            else {
#pragma unroll
                for (int j = 0; j < 8; ++j) to[k][j] = 0;
            }
        }
    } else {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const int64 at = 8 * ((int64)lane + k * group);
            load_some(row + at, to[k], here ? columns - at : 0);
        }
    }
}

/* What of something is dropped before it is added: `parts` rows are a sample's, whose words begin at firsts[sample], or at
   `first` of each; see Dropping in mpitrain/kernels/dropout.py. Without `rows`, nothing is. */
struct Dropping {
    const uint64 *rows, *firsts;
    uint8 *bits;
    uint64 key;
    int64 least, first, parts;

    /* Which of the 8 numbers of a row of `columns` from `at` on are kept. Columns come in eights. */
    __device__ __forceinline__ uint32 kept(int64 row, int64 at, int64 columns) const {
        const int64 sample = row >> 32 || parts >> 32 ? row / parts : (uint32)row / (uint32)parts;
        const uint64 from = (firsts ? firsts[sample] : (uint64)first) + (uint64)((row - sample * parts) * columns + at);
        return kept_of_8(key, rows[sample], from, (uint64)least);
    }
};
template <class S> __device__ __forceinline__ void drop(S *v, uint32 kept, S factor) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = (kept >> j & 1 ? v[j] : S(0)) * factor;           /* a dropped NaN is gone */
}
