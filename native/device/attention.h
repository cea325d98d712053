/* Attention by tiles of SIDE queries and SIDE keys, on a block of 256 threads: products of tiles, with sums in registers.

   Thread (y, x) of 16 x 16 has EACH x EACH numbers of a tile of scores, rows EACH y + i and columns EACH x + j, and of the SIDE
   rows of a result, WIDTH numbers each, rows EACH y + i and columns PACK (16 g + x) + c. What is multiplied lies in shared memory,
   turned so that a thread's EACH rows are neighbours:

       DEEP numbers of SIDE rows each, of both factors of the scores        room[d * LINE + row]
       weights, by what a product sums over                                 weights[column * LINE + row]
       STEP rows of the other factor of that product                        room[row * WIDTH + column]      */
#pragma once
#include "philox.h"

#ifdef ONE_BLOCK                                  /* on a multiprocessor, at least: a compiler that wants room for more spills */
#undef KERNEL
#define KERNEL(NAME, THREADS, PARAMETERS) extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME PARAMETERS
#endif

enum { THREADS = 256 };
template <class S> struct Tile { enum { EACH = 4, SIDE = 64, LINE = 68, DEEP = 32, STEP = 16 }; };
template <> struct Tile<double> { enum { EACH = 2, SIDE = 32, LINE = 34, DEEP = 16, STEP = 8 }; };

__host__ __device__ constexpr int larger_of(int a, int b) { return a > b ? a : b; }
template <class S, int WIDTH> struct Room {
    enum { NUMBERS = larger_of(2 * Tile<S>::DEEP * Tile<S>::LINE, Tile<S>::STEP * WIDTH), WEIGHTS = Tile<S>::SIDE * Tile<S>::LINE,
           PACK = WIDTH / 16 < 4 ? WIDTH / 16 : 4, GROUPS = WIDTH / 16 / PACK };
};

/* Numbers that are read at once. */
template <class S, int N> struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Pack { S of[N]; };

/* Rows of one head of one sample. */
template <class T> struct Rows { T *first; int64 step; };
template <class T> __device__ __forceinline__ Rows<T> rows_at(T *x, int64 batch, int64 head, int64 step, int64 b, int64 h) {
    return {x + b * batch + h * head, step};
}

/* A parameter that is given by strides (B, H, rows, width), the rows of head h of sample b in it, and what passes it on. */
#define VIEW(T, x) T *__restrict__ x, int64 x##_batch, int64 x##_head, int64 x##_row
#define ROWS(x) rows_at(x, x##_batch, x##_head, x##_row, b, h)
#define ON(x) x, x##_batch, x##_head, x##_row

__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }
template <class S> __device__ __forceinline__ S larger(S a, S b) { return b > a || b != b ? b : a; }       // NaN where one is NaN
template <class S> __device__ __forceinline__ S lowest() { return -(S)__uint_as_float(0x7f800000u); }

/* s += a b' for SIDE rows of a and of b, of which there are so many; zeros stand for the others. */
template <class T, class S, int EACH>
__device__ __forceinline__ void add_scores(Rows<const T> a, int64 a_rows, Rows<const T> b, int64 b_rows, int64 width, S *room,
                                           S (&s)[EACH][EACH]) {
    enum { SIDE = Tile<S>::SIDE, LINE = Tile<S>::LINE, DEEP = Tile<S>::DEEP };
    S *left = room, *right = room + DEEP * LINE;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
    for (int64 from = 0; from < width; from += DEEP) {
        __syncthreads();
#pragma unroll 2
        for (int i = threadIdx.x; i < SIDE * DEEP; i += THREADS) {
            const int row = i / DEEP, column = i % DEEP;
            const bool inside = from + column < width;
            left[column * LINE + row] = inside && row < a_rows ? of(a.first[row * a.step + from + column]) : (S)0;
            right[column * LINE + row] = inside && row < b_rows ? of(b.first[row * b.step + from + column]) : (S)0;
        }
        __syncthreads();
#pragma unroll (sizeof(S) == 8 ? 4 : 8)
        for (int d = 0; d < DEEP; ++d) {
            const Pack<S, EACH> p = *(const Pack<S, EACH> *)(left + d * LINE + y * EACH);
            const Pack<S, EACH> q = *(const Pack<S, EACH> *)(right + d * LINE + x * EACH);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < EACH; ++j) s[i][j] = fused(p.of[i], q.of[j], s[i][j]);
        }
    }
}

/* weights[column][row] = s. */
template <class S, int EACH> __device__ __forceinline__ void keep_turned(const S (&s)[EACH][EACH], S *weights) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        Pack<S, EACH> p;
#pragma unroll
        for (int i = 0; i < EACH; ++i) p.of[i] = s[i][j];
        *(Pack<S, EACH> *)(weights + (x * EACH + j) * Tile<S>::LINE + y * EACH) = p;
    }
}

template <class S, int WIDTH> struct Sums {
    enum { EACH = Tile<S>::EACH, PACK = Room<S, WIDTH>::PACK, GROUPS = Room<S, WIDTH>::GROUPS };
    S of[EACH][GROUPS][PACK];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < EACH; ++i) multiply(i, 0, true);
    }
    __device__ __forceinline__ void multiply(int i, S factor, bool clears = false) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int c = 0; c < PACK; ++c) of[i][g][c] = clears ? (S)0 : of[i][g][c] * factor;
    }

    /* += weights' x, over `count` rows of x. Weights of rows beyond are zeros. */
    template <class T> __device__ __forceinline__ void add(const S *weights, Rows<const T> x, int64 count, int64 width, S *room) {
        enum { LINE = Tile<S>::LINE, STEP = Tile<S>::STEP };
        const int y = threadIdx.x / 16, own = threadIdx.x % 16;
        for (int64 from = 0; from < count; from += STEP) {
            __syncthreads();
#pragma unroll 4
            for (int i = threadIdx.x; i < STEP * WIDTH; i += THREADS) {
                const int row = i / WIDTH, column = i % WIDTH;
                room[i] = from + row < count && column < width ? ::of(x.first[(from + row) * x.step + column]) : (S)0;
            }
            __syncthreads();
#pragma unroll 4
            for (int row = 0; row < STEP; ++row) {
                const Pack<S, EACH> p = *(const Pack<S, EACH> *)(weights + (from + row) * LINE + y * EACH);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    const Pack<S, PACK> v = *(const Pack<S, PACK> *)(room + row * WIDTH + (g * 16 + own) * PACK);
#pragma unroll
                    for (int i = 0; i < EACH; ++i)
#pragma unroll
                        for (int c = 0; c < PACK; ++c) of[i][g][c] = fused(p.of[i], v.of[c], of[i][g][c]);
                }
            }
        }
    }

    template <class T>
    __device__ __forceinline__ void write(Rows<T> to, int64 rows, int64 width, const S (&factors)[EACH]) const {
        const int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int c = 0; c < PACK; ++c) {
                    const int row = y * EACH + i, column = (g * 16 + x) * PACK + c;
                    if (row < rows && column < width) put(to.first[row * to.step + column], of[i][g][c] * factors[i]);
                }
    }
};

/* Which weights of one head of one sample are dropped: weight (query, key) by word place + query * words + key of a row in a
   stream, where that is below `least`; others are multiplied by `scale`. Nothing is dropped where `rows` is null. */
template <class S> struct Dropping {
    bool drops;
    uint64 key, row, place, words;
    int64 least;
    S scale;

    /* The factors of `N` neighbouring keys. */
    template <int N> __device__ __forceinline__ void factors(int64 query, int64 first, S (&made)[N]) const {
        const uint64 from = place + (uint64)query * words + (uint64)first;
        const uint32 skipped = (uint32)from & 3;
        const Words here = philox(key, row, from >> 2);
        Words next = here;
        if (skipped + N > 4) next = philox(key, row, (from >> 2) + 1);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const uint32 n = skipped + j, word = n < 4 ? word_of(here, n) : word_of(next, n & 3);
            made[j] = (int64)word >= least ? scale : (S)0;
        }
    }
};
template <class S>
__device__ __forceinline__ Dropping<S> dropping_of(const uint64 *rows, const uint64 *firsts, const uint64 *stored, int64 key,
                                                   int64 first, int64 head_words, int64 words, int64 least, double scale,
                                                   int64 b, int64 h) {
    if (!rows) return {false, 0, 0, 0, 0, 0, (S)1};
    return {true, key_of(stored, key), rows[b], (uint64)first + (firsts ? firsts[b] : 0) + (uint64)(h * head_words),
            (uint64)words, least, (S)scale};
}

/* What is dropped is 0, also where it was NaN. */
template <class S> __device__ __forceinline__ S dropped(S x, S factor) { return factor == 0 ? (S)0 : x * factor; }
