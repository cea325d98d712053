/* Rotary positions: pairs of numbers of a row turned by its position; bits are those of the expression of
   mpitrain/kernels/rotary.py. */
#include "eights.h"

enum { WIDE = 256 };

/* Row r of x takes row r / (length between) % (tables / length) * length + r % length of cos and sin (tables, half). A thread
   turns 8 pairs, or copies 8 numbers beyond them. */
struct Rows {
    int64 columns, half, tables, length, between;
    bool small;                                                       /* numbers of 32 bits say where everything is */

    __device__ __forceinline__ int64 over(int64 a, int64 b) const { return small ? (int64)((uint32)a / (uint32)b) : a / b; }
    __device__ __forceinline__ int64 table_of(int64 row) const {
        const int64 text = over(row, length), texts = over(tables, length), own = over(text, between);
        return (own - over(own, texts) * texts) * length + row - text * length;
    }
};

/* 8 pairs from `at` on, which lie side by side, or `half` apart. */
template <class T> __device__ __forceinline__
void load_pairs(const T *row, int64 at, int64 half, bool interleaved, bool vectors, Sum<T> *a, Sum<T> *b) {
    const int64 left = half - at;
    if (!interleaved) {
        if (vectors) { load_8(row + at, a); load_8(row + half + at, b); return; }
        load_some(row + at, a, left);
        load_some(row + half + at, b, left);
        return;
    }
    Sum<T> all[16];
    if (vectors) { load_8(row + 2 * at, all); load_8(row + 2 * at + 8, all + 8); }
    else { load_some(row + 2 * at, all, 2 * left); load_some(row + 2 * at + 8, all + 8, 2 * left - 8); }
#pragma unroll
    for (int j = 0; j < 8; ++j) { a[j] = all[2 * j]; b[j] = all[2 * j + 1]; }
}
template <class T> __device__ __forceinline__
void store_pairs(T *row, int64 at, int64 half, bool interleaved, bool vectors, const Sum<T> *a, const Sum<T> *b) {
    const int64 left = half - at;
    if (!interleaved) {
        if (vectors) { store_8(row + at, a); store_8(row + half + at, b); return; }
        store_some(row + at, a, left);
        store_some(row + half + at, b, left);
        return;
    }
    Sum<T> all[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) { all[2 * j] = a[j]; all[2 * j + 1] = b[j]; }
    if (vectors) { store_8(row + 2 * at, all); store_8(row + 2 * at + 8, all + 8); }
    else { store_some(row + 2 * at, all, 2 * left); store_some(row + 2 * at + 8, all + 8, 2 * left - 8); }
}

template <class T> __device__ __forceinline__
void rotary(const T *x, const Sum<T> *cosines, const Sum<T> *sines, T *y, Rows r, int64 rows, bool interleaved,
            double backwards) {
    const int64 turning = (r.half + 7) / 8, units = turning + (r.columns - 2 * r.half + 7) / 8, n = rows * units;
    const bool vectors = r.columns % 8 == 0 && r.half % 8 == 0 && is_aligned(x) && is_aligned(y) && is_aligned(cosines)
                         && is_aligned(sines);
    const Sum<T> sign = (Sum<T>)backwards;
    r.small = n <= 0xffffffffll && r.tables <= 0xffffffffll && r.between <= 0xffffffffll;
    for (int64 i = blockIdx.x * (int64)WIDE + threadIdx.x; i < n; i += (int64)gridDim.x * WIDE) {
        const int64 row = r.over(i, units), unit = i - row * units;
        const T *from = x + row * r.columns;
        T *to = y + row * r.columns;
        Sum<T> a[8], b[8], c[8], s[8];
        if (unit >= turning) {
            const int64 at = 2 * r.half + 8 * (unit - turning);
            if (vectors) { load_8(from + at, a); store_8(to + at, a); }
            else { load_some(from + at, a, r.columns - at); store_some(to + at, a, r.columns - at); }
            continue;
        }
        const int64 at = 8 * unit, turn = r.table_of(row) * r.half + at;
        load_pairs(from, at, r.half, interleaved, vectors, a, b);
        if (vectors) { load_8(cosines + turn, c); load_8(sines + turn, s); }
        else { load_some(cosines + turn, c, r.half - at); load_some(sines + turn, s, r.half - at); }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const Sum<T> first = a[j], sine = sign * s[j];
            a[j] = first * c[j] - b[j] * sine;
            b[j] = b[j] * c[j] + first * sine;
        }
        store_pairs(to, at, r.half, interleaved, vectors, a, b);
    }
}

#define ROTARY(T) (const T *__restrict__ x, const Sum<T> *__restrict__ cosines, const Sum<T> *__restrict__ sines, \
                   T *__restrict__ y, int64 rows, int64 columns, int64 half, int64 tables, int64 length, int64 between, \
                   int64 interleaved, double sign)
VERSIONS(rotary, WIDE, ROTARY, (x, cosines, sines, y, Rows{columns, half, tables, length, between, false}, rows, \
                                interleaved != 0, sign))
