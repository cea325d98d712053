/* Rows as they are stored -> what a model is given: a table of numbers looked up, images moved. See mpitrain/kernels/feed.py.

   `values` and out (n, c, h, w). Bytes and numbers of 16 bits are looked up in `table` (tables, 2^bits), of which channel j has row
   j, or all have the one row; other numbers are rounded. `moves` (n, 2), where given: out[i, j] is the pixel in row i + moves[0],
   column (mirrored ? w - 1 - j : j) + (moves[1] >> 1), mirrored where moves[1] is odd, and 0 outside of the image.
   Block (x, y) has a part x of sample y, and goes on by the size of the grid: nothing is divided but numbers of 32 bits. */
#include "eights.h"

enum { WIDE = 256 };

/* What is made of a number of `channel`. */
template <class T, class R> struct Looked {
    const T *table;
    uint32 step;                                           /* from the numbers of a channel to those of the next */
    __device__ __forceinline__ T operator()(R raw, uint32 channel) const { return table[channel * step + raw]; }
};
template <class T, class R> struct Rounded {
    __device__ __forceinline__ T operator()(R raw, uint32) const { T made; put(made, raw); return made; }
};

template <class R> union Run { R of[8]; uint2 part[sizeof(R)]; };

/* The pixels from `first` of a row on, of which a thread has `many`, 1 or 8: their loads depend on none of each other, so all are
   on their way at once. `from` is the row that they come from. */
template <int many, class T, class R, class F>
__device__ __forceinline__ void pixels(T *to, const R *from, uint32 channel, int first, int wide, int aside, bool aligned, F made) {
    const int step = aside & 1 ? -1 : 1, start = (aside & 1 ? wide - 1 - first : first) + (aside >> 1);
    Run<R> raw;
    Eight<T> found;
    if (many == 8 && aligned && !aside) {
#pragma unroll
        for (int k = 0; k < (int)sizeof(R); ++k) raw.part[k] = ((const uint2 *)(from + first))[k];
#pragma unroll
        for (int k = 0; k < many; ++k) found.of[k] = made(raw.of[k], channel);
    } else {
#pragma unroll
        for (int k = 0; k < many; ++k) {
            const int x = start + step * k;
            raw.of[k] = x >= 0 && x < wide ? from[x] : R(0);
        }
#pragma unroll
        for (int k = 0; k < many; ++k) {
            const int x = start + step * k;
            put(found.of[k], Sum<T>(0));
            if (x >= 0 && x < wide) found.of[k] = made(raw.of[k], channel);
        }
    }
    if (many == 8) {
#pragma unroll
        for (int k = 0; k < (int)(sizeof found / 16); ++k) ((uint4 *)to)[k] = ((const uint4 *)&found)[k];
    } else
        to[0] = found.of[0];
}

template <int many, class T, class R, class F>
__device__ __forceinline__ void placed(T *out, const R *values, const short *moves, int64 n, int64 c, int64 h, int64 w, F made) {
    const int high = (int)h, wide = (int)w;
    const uint32 across = (uint32)wide / many, count = (uint32)c * high * across;
    const int64 size = c * h * w;
    const bool aligned = is_aligned(values);
    for (int64 sample = blockIdx.y; sample < n; sample += gridDim.y) {
        const R *from = values + sample * size;
        T *to = out + sample * size;
        const int down = moves ? moves[2 * sample] : 0, aside = moves ? moves[2 * sample + 1] : 0;
        for (uint32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
            const uint32 line = i / across, channel = line / high;
            const int first = (int)(i - line * across) * many, y = (int)(line - channel * high) + down;
            const bool inside = y >= 0 && y < high;                  /* else of a row without pixels: all come from aside */
            pixels<many>(to + i * many, inside ? from + (int64)((int)line + down) * wide : from, channel, first, wide,
                         inside ? aside : 2 * wide, aligned, made);
        }
    }
}
template <class T, class R, class F>
__device__ __forceinline__ void by_size(T *out, const R *values, const short *moves, int64 n, int64 c, int64 h, int64 w, F made) {
    if (w % 8 == 0 && is_aligned(out))
        placed<8>(out, values, moves, n, c, h, w, made);
    else
        placed<1>(out, values, moves, n, c, h, w, made);
}

/* Small tables (`kept`) are looked up in shared memory, where numbers that are no neighbours cost little. */
template <class T, class R>
__device__ __forceinline__ void looked_up(T *out, const R *values, const T *table, const short *moves, int64 n, int64 c, int64 h,
                                          int64 w, int64 tables, int64 kept) {
    const uint32 size = 1u << 8 * sizeof(R), step = tables == 1 ? 0 : size;
    DYNAMIC_SHARED(T, own);
    if (kept) {
        for (uint32 i = threadIdx.x; i < (uint32)tables * size; i += blockDim.x) own[i] = table[i];
        __syncthreads();
    }
    by_size(out, values, moves, n, c, h, w, Looked<T, R>{kept ? own : table, step});
}

template <class T>
__device__ __forceinline__ void rows_of_bytes(T *out, const uint8 *values, const T *table, const short *moves, int64 n, int64 c,
                                              int64 h, int64 w, int64 tables, int64 kept) {
    looked_up(out, values, table, moves, n, c, h, w, tables, kept);
}
template <class T>
__device__ __forceinline__ void rows_of_shorts(T *out, const uint16 *values, const T *table, const short *moves, int64 n, int64 c,
                                               int64 h, int64 w, int64 tables, int64 kept) {
    looked_up(out, values, table, moves, n, c, h, w, tables, kept);
}
template <class T>
__device__ __forceinline__ void rows_of_numbers(T *out, const Sum<T> *values, const short *moves, int64 n, int64 c, int64 h,
                                                int64 w) {
    by_size(out, values, moves, n, c, h, w, Rounded<T, Sum<T>>{});
}
#define LOOKED(R, T) (T *__restrict__ out, const R *__restrict__ values, const T *__restrict__ table, \
                      const short *__restrict__ moves, int64 n, int64 c, int64 h, int64 w, int64 tables, int64 kept)
#define BYTES(T) LOOKED(uint8, T)
#define SHORTS(T) LOOKED(uint16, T)
#define NUMBERS(T) (T *__restrict__ out, const Sum<T> *__restrict__ values, const short *__restrict__ moves, int64 n, int64 c, \
                    int64 h, int64 w)
VERSIONS(rows_of_bytes, WIDE, BYTES, (out, values, table, moves, n, c, h, w, tables, kept))
VERSIONS(rows_of_shorts, WIDE, SHORTS, (out, values, table, moves, n, c, h, w, tables, kept))
VERSIONS(rows_of_numbers, WIDE, NUMBERS, (out, values, moves, n, c, h, w))
