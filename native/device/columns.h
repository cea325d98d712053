/* Sums over rows of a matrix, of each column: of ROWS_A_BLOCK rows and WIDE columns by a block, in a fixed order. */
#pragma once
#include "eights.h"

enum { WIDE = 256, ROWS_A_BLOCK = 64, WARPS = WIDE / 32 };

/* partial[column] = the sum over the rows first ... end - 1. With `vectors`, `columns` divides by 8, and a thread has 8 columns
   of each eighth row: eight(row, column, v) puts their numbers into v, and the eight warps are added up in their order. Else,
   and in float64, it has one column of all rows: one(row, column) is its number. */
template <class S, class Eight, class One>
__device__ __forceinline__ void add_rows(S *partial, int64 columns, int64 first, int64 end, bool vectors, Eight eight, One one) {
    const int64 begin = blockIdx.x * (int64)WIDE, column = begin + threadIdx.x;
    S sum = 0;
    if constexpr (sizeof(S) == 4) if (vectors) {
        enum { APART = 36 };                                 // so that neither writing nor reading meets a bank of memory twice
        __shared__ S parts[WARPS][8 * APART];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int64 at = begin + 8 * lane;
        S sums[8] = {};
        if (at < columns) for (int64 row = first + warp; row < end; row += WARPS) {
            S v[8];
            eight(row, at, v);
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[j] += v[j];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) parts[warp][j * APART + lane] = sums[j];
        __syncthreads();
        for (int i = 0; i < WARPS; ++i) sum += parts[i][threadIdx.x % 8 * APART + threadIdx.x / 8];
        __syncthreads();
        if (column < columns) partial[column] = sum;
        return;
    }
    if (column >= columns) return;
    for (int64 row = first; row < end; ++row) sum += one(row, column);
    partial[column] = sum;
}
