/* Products of tiles of 16-bit numbers on tensor cores: mma.sync.m16n8k16 of the PTX ISA (sm_80 and newer), with float32 sums.

   A warp multiplies 16 x 16 numbers by 16 x 8. With lane = 4 g + t, a lane has of the factors two neighbours in a register, and of
   the sums (16 x 8) four numbers:

       left[0]  row g      columns 2t, 2t+1           right[0]  rows 2t, 2t+1       column g
       left[1]  row g + 8  columns 2t, 2t+1           right[1]  rows 2t+8, 2t+9     column g
       left[2]  row g      columns 2t+8, 2t+9         sums[0], sums[1]  row g       columns 2t, 2t+1
       left[3]  row g + 8  columns 2t+8, 2t+9         sums[2], sums[3]  row g + 8   columns 2t, 2t+1

   so sums of two products beside each other are, as 16-bit numbers, the left factor of a next one. On a CPU each lane fetches what the
   others have, and adds in float32, one product after the other; tensor cores add in an order of their own. */
#pragma once
#include "device.h"

struct Left { uint32 of[4]; };
struct Right { uint32 of[2]; };

template <class T> __device__ __forceinline__ uint32 two(float first, float second) {
    T low, high;
    put(low, first);
    put(high, second);
    return (uint32)low.bits | (uint32)high.bits << 16;
}

#ifdef ON_HOST
template <class T> inline float half_of(uint32 pair, int which) { return of(T{(uint16)(pair >> 16 * which)}); }

template <class T> inline void multiply_add(const Left &left, const Right &right, float (&sums)[4]) {
    const int lane = threadIdx.x % 32;
    float a[2][16], b[16][2];
    for (int t = 0; t < 4; ++t)
        for (int part = 0; part < 4; ++part) {
            const uint32 pair = __shfl_sync(0xffffffffu, left.of[part], lane / 4 * 4 + t);
            for (int w = 0; w < 2; ++w) a[part % 2][part / 2 * 8 + 2 * t + w] = half_of<T>(pair, w);
        }
    for (int column = 0; column < 2; ++column)
        for (int t = 0; t < 4; ++t)
            for (int part = 0; part < 2; ++part) {
                const uint32 pair = __shfl_sync(0xffffffffu, right.of[part], (2 * (lane % 4) + column) * 4 + t);
                for (int w = 0; w < 2; ++w) b[part * 8 + 2 * t + w][column] = half_of<T>(pair, w);
            }
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) sums[i] += a[i / 2][k] * b[k][i % 2];
}
#else
template <class T> __device__ __forceinline__ void multiply_add(const Left &left, const Right &right, float (&sums)[4]);
#define MULTIPLY_ADD(T, FORMAT) \
    template <> __device__ __forceinline__ void multiply_add<T>(const Left &left, const Right &right, float (&sums)[4]) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." FORMAT "." FORMAT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
                     "{%0, %1, %2, %3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
                     : "r"(left.of[0]), "r"(left.of[1]), "r"(left.of[2]), "r"(left.of[3]), "r"(right.of[0]), "r"(right.of[1])); \
    }
MULTIPLY_ADD(bfloat16, "bf16")
MULTIPLY_ADD(float16, "f16")
#endif

/* Rows [row, row + 16) and columns [column, column + 16) of a tile in shared memory whose rows are LINE numbers apart. With LINE of
   8 more than a multiple of 64, or 8 or 24 or 40 more, the lanes meet different banks. */
template <int LINE, class T> __device__ __forceinline__ Left left_of(const T *tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    const T *at = tile + (row + lane / 4) * LINE + column + lane % 4 * 2;
    return {{*(const uint32 *)at, *(const uint32 *)(at + 8 * LINE), *(const uint32 *)(at + 8), *(const uint32 *)(at + 8 * LINE + 8)}};
}

/* The right factor whose column n is row + n of the tile, columns [column, column + 16): for products of rows with rows. */
template <int LINE, class T> __device__ __forceinline__ Right right_of_rows(const T *tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    const T *at = tile + (row + lane / 4) * LINE + column + lane % 4 * 2;
    return {{*(const uint32 *)at, *(const uint32 *)(at + 8)}};
}

/* The right factor as it lies: rows [row, row + 16), columns [column, column + 8). */
template <int LINE, class T> __device__ __forceinline__ Right right_of(const T *tile, int row, int column) {
    const int lane = threadIdx.x % 32;
#ifdef ON_HOST
    const T *at = tile + (row + lane % 4 * 2) * LINE + column + lane / 4;
    return {{(uint32)at[0].bits | (uint32)at[LINE].bits << 16, (uint32)at[8 * LINE].bits | (uint32)at[9 * LINE].bits << 16}};
#else
    Right made;
    const uint32 at = (uint32)__cvta_generic_to_shared(tile + (row + lane % 16) * LINE + column);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(made.of[0]), "=r"(made.of[1]) : "r"(at)
                 : "memory");
    return made;
#endif
}
