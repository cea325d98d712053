/* Dropout of the rows of a matrix, with Philox words made where they are used and masks kept as bits. The masks have the bits of
   native/random.c, and so have the numbers in float32 and float64. See mpitrain/kernels/dropout.py. */
#include "eights.h"
#include "philox.h"

enum { WIDE = 256 };

/* The place of a byte of a mask, of `bytes` in each row. */
struct Place { int64 row, byte; };
__device__ __forceinline__ Place place_of(int64 i, int64 bytes, bool small) {
    if (small) {                                                                         /* division of 64 bits is slow */
        const uint32 row = (uint32)i / (uint32)bytes;
        return {row, (uint32)i - row * (uint32)bytes};
    }
    const int64 row = i / bytes;
    return {row, i - row * bytes};
}

/* A thread makes 8 numbers and a byte of `bits` (rows, ceil(width / 8)) at a time. Number j of row r has word `first` + j of row
   rows[r] of the stream, firsts[r] + j where these are given. */
template <class T> __device__ __forceinline__
void dropout(const T *x, const uint64 *rows, const uint64 *firsts, const T *added, T *y, uint8 *bits, const uint64 *stored,
             int64 key, int64 least, int64 first, double scale, int64 height, int64 width) {
    const int64 bytes = (width + 7) / 8, n = height * bytes;
    const bool small = n <= 0xffffffffll, vectors = width % 8 == 0 && is_aligned(x) && is_aligned(added) && is_aligned(y);
    const Sum<T> factor = (Sum<T>)scale;
    const uint64 stream = key_of(stored, key);
    for (int64 i = blockIdx.x * (int64)WIDE + threadIdx.x; i < n; i += (int64)gridDim.x * WIDE) {
        const Place place = place_of(i, bytes, small);
        const int64 at = place.row * width + 8 * place.byte, count = width - 8 * place.byte;
        Sum<T> v[8], more[8];
        if (vectors) load_8(x + at, v); else load_some(x + at, v, count);
        if (added) { if (vectors) load_8(added + at, more); else load_some(added + at, more, count); }
        const uint64 from = (firsts ? firsts[place.row] : (uint64)first) + 8 * (uint64)place.byte;
        uint32 kept = kept_of_8(stream, rows[place.row], from, (uint64)least);
        if (count < 8) kept &= (1u << count) - 1;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = (kept >> j & 1 ? v[j] : Sum<T>(0)) * factor;                          /* a dropped NaN is gone */
            if (added) v[j] += more[j];
        }
        if (vectors) store_8(y + at, v); else store_some(y + at, v, count);
        bits[i] = (uint8)kept;
    }
}
template <class T> __device__ __forceinline__
void dropout_grad(const T *grad, const uint8 *bits, T *dx, double scale, int64 height, int64 width) {
    const int64 bytes = (width + 7) / 8, n = height * bytes;
    const bool small = n <= 0xffffffffll, vectors = width % 8 == 0 && is_aligned(grad) && is_aligned(dx);
    const Sum<T> factor = (Sum<T>)scale;
    for (int64 i = blockIdx.x * (int64)WIDE + threadIdx.x; i < n; i += (int64)gridDim.x * WIDE) {
        Sum<T> v[8];
        const uint32 kept = bits[i];
        const Place place = vectors ? Place{0, i} : place_of(i, bytes, small);           /* the rows are one */
        const int64 at = place.row * width + 8 * place.byte, count = width - 8 * place.byte;
        if (vectors) load_8(grad + at, v); else load_some(grad + at, v, count);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = (kept >> j & 1 ? v[j] : Sum<T>(0)) * factor;
        if (vectors) store_8(dx + at, v); else store_some(dx + at, v, count);
    }
}

#define DROPOUT(T) (const T *__restrict__ x, const uint64 *__restrict__ rows, const uint64 *__restrict__ firsts, \
                    const T *__restrict__ added, T *__restrict__ y, uint8 *__restrict__ bits, \
                    const uint64 *__restrict__ stored, int64 key, int64 least, int64 first, double scale, \
                    int64 height, int64 width)
#define DROPOUT_GRAD(T) (const T *__restrict__ grad, const uint8 *__restrict__ bits, T *__restrict__ dx, double scale, \
                         int64 height, int64 width)
#define BOUNDS WIDE, 3                                                /* blocks a multiprocessor: 85 registers at most */
#define DROP(T, SUFFIX) KERNEL(dropout##SUFFIX, BOUNDS, DROPOUT(T)) { \
    dropout<T>(x, rows, firsts, added, y, bits, stored, key, least, first, scale, height, width); \
}
DROP(float, _float32) DROP(double, _float64) DROP(bfloat16, _bfloat16) DROP(float16, _float16)
VERSIONS(dropout_grad, WIDE, DROPOUT_GRAD, (grad, bits, dx, scale, height, width))
