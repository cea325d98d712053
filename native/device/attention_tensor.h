/* Flash attention of 16-bit numbers on tensor cores, forward and backward, without dropping; sums, weights before they are rounded, and
   what is kept are float32. As attention_forward.h and attention_backward.h, with other tiles:

   A block has 64 rows (queries; keys, for their gradients), of which each of its 4 warps has 16, and goes over the other side COUNT
   rows at a time. Tiles of WIDTH numbers lie in shared memory, their rows LINE numbers apart. In forward, values of a tile arrive
   while its scores are made, and the next keys while the values are used. */
#pragma once
#include "attention.h"
#include "tensor_cores.h"

enum { BLOCK = 128, SIDE = 64 };
template <int WIDTH> struct Shape { enum { LINE = WIDTH + 8, STEPS = WIDTH / 16, COLUMNS = WIDTH / 8 }; };

/* 16 bytes from global to shared memory, or zeros; they are there after a wait. */
__device__ __forceinline__ void copy_16(void *to, const void *from, bool there) {
#ifdef ON_HOST
    if (there) memcpy(to, from, 16);
    else memset(to, 0, 16);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((uint32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
#endif
}
/* What was copied since the last commit arrives together; wait<N> leaves N such groups on their way. */
__device__ __forceinline__ void commit() {
#ifndef ON_HOST
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N> __device__ __forceinline__ void wait() {
#ifndef ON_HOST
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
    __syncthreads();
}

/* The first `count` of ROWS_HERE rows, and zeros. */
template <int WIDTH, int ROWS_HERE, class T>
__device__ __forceinline__ void fetch(T *tile, Rows<const T> x, int64 count, int64 width) {
    const bool whole = (uint64)x.first % 16 == 0 && x.step % 8 == 0 && width % 8 == 0;
#pragma unroll 2
    for (int i = threadIdx.x; i < ROWS_HERE * (WIDTH / 8); i += BLOCK) {
        const int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
        const T *from = x.first + row * x.step + column;
        T *to = tile + row * Shape<WIDTH>::LINE + column;
        if (whole) {
            const bool there = row < count && column < width;
            copy_16(to, there ? from : x.first, there);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) to[j].bits = row < count && column + j < width ? from[j].bits : 0;
        }
    }
}
template <class T> __device__ __forceinline__ Rows<const T> from_row(Rows<const T> x, int64 row) {
    return {x.first + row * x.step, x.step};
}

/* 2^x */
__device__ __forceinline__ float power(float x) {
#ifdef ON_HOST
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
#define PER_BIT 1.44269504088896340736f                      /* 1 / log 2: exp(x) = 2^(x PER_BIT) */

template <int N> __device__ __forceinline__ void clear(float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] = 0;
}

/* s = a b': a has the warp's 16 rows, b the 8 N rows of a tile. */
template <int WIDTH, int N, class T, class A> __device__ __forceinline__ void scores(A a, const T *b, float (&s)[N][4]) {
    clear(s);
#pragma unroll
    for (int d = 0; d < Shape<WIDTH>::STEPS; ++d) {
        const Left left = a(d);
#pragma unroll
        for (int n = 0; n < N; ++n) multiply_add<T>(left, right_of_rows<Shape<WIDTH>::LINE>(b, 8 * n, 16 * d), s[n]);
    }
}
/* sums += s x, for the 8 N rows of a tile x. */
template <int WIDTH, int N, class T> __device__ __forceinline__ void gather(const float (&s)[N][4], const T *x,
                                                                          float (&sums)[Shape<WIDTH>::COLUMNS][4]) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        const Left left = {{two<T>(s[n][0], s[n][1]), two<T>(s[n][2], s[n][3]), two<T>(s[n + 1][0], s[n + 1][1]),
                            two<T>(s[n + 1][2], s[n + 1][3])}};
#pragma unroll
        for (int e = 0; e < Shape<WIDTH>::COLUMNS; ++e)
            multiply_add<T>(left, right_of<Shape<WIDTH>::LINE>(x, 8 * n, 8 * e), sums[e]);
    }
}
/* The warp's rows of a result, times a factor for row g and one for row g + 8. */
template <int N, class T>
__device__ __forceinline__ void write(Rows<T> to, int64 count, int64 width, const float (&sums)[N][4], float low, float high) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const bool pairs = (uint64)to.first % 4 == 0 && to.step % 2 == 0 && width % 2 == 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int column = 8 * n + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            if (row + 4 * i >= count || column >= width) continue;
            const float factor = i ? high : low, first = sums[n][i] * factor, second = sums[n][i + 1] * factor;
            T *at = to.first + (row + 4 * i) * to.step + column;
            if (pairs) *(uint32 *)at = two<T>(first, second);
            else {
                put(at[0], first);
                if (column + 1 < width) put(at[1], second);
            }
        }
    }
}

#define SIZES int64 batches, int64 heads, int64 queries, int64 keys, int64 width, int64 values, int64 causal, double scale
#define ATTEND(T) (VIEW(const T, q), VIEW(const T, k), VIEW(const T, v), VIEW(T, out), float *__restrict__ tops, \
    float *__restrict__ inverses, SIZES)
template <class T, int WIDTH> __device__ __forceinline__ void tensor_attend ATTEND(T) {
    enum { LINE = Shape<WIDTH>::LINE, STEPS = Shape<WIDTH>::STEPS, COLUMNS = Shape<WIDTH>::COLUMNS, N = SIDE / 8 };
    __shared__ __align__(16) T k_tile[SIDE * LINE], v_tile[SIDE * LINE];
    const int64 tiles = (queries + SIDE - 1) / SIDE, head = blockIdx.x / tiles, b = head / heads, h = head % heads;
    const int64 first = (tiles - 1 - blockIdx.x % tiles) * SIDE;                         // those that see most keys first
    const int warp = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Rows<const T> of_q = ROWS(q), of_k = ROWS(k), of_v = ROWS(v);
    const Rows<T> of_out = ROWS(out);
    Left own[STEPS];
    fetch<WIDTH, SIDE>(k_tile, from_row(of_q, first), queries - first, width);
    commit();
    wait<0>();
#pragma unroll
    for (int d = 0; d < STEPS; ++d) own[d] = left_of<LINE>(k_tile, warp, 16 * d);
    __syncthreads();
    float sums[COLUMNS][4], top[2] = {lowest<float>(), lowest<float>()}, sum[2] = {0, 0};
    clear(sums);
    const float factor = (float)scale * PER_BIT;
    const int64 end = causal ? min(first + SIDE, keys) : keys;
    fetch<WIDTH, SIDE>(k_tile, of_k, keys, width);
    commit();
    for (int64 key = 0; key < end; key += SIDE) {
        fetch<WIDTH, SIDE>(v_tile, from_row(of_v, key), keys - key, values);
        commit();
        wait<1>();
        float s[N][4];
        scores<WIDTH>([&](int d) { return own[d]; }, k_tile, s);
        __syncthreads();
        if (key + SIDE < end) fetch<WIDTH, SIDE>(k_tile, from_row(of_k, key + SIDE), keys - key - SIDE, width);
        commit();
        const bool hides = key + SIDE > keys || (causal && key + SIDE > first + warp + 1);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            float most = lowest<float>();
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 2 * part; i < 2 * part + 2; ++i) {
                    const int64 at = key + 8 * n + 2 * t + i % 2;
                    s[n][i] *= factor;
                    if (hides && (at >= keys || (causal && at > first + warp + g + 8 * part))) s[n][i] = lowest<float>();
                    most = larger(most, s[n][i]);
                }
            most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
            most = larger(top[part], most);
            const float base = most == lowest<float>() ? 0.0f : most, before = power(top[part] - base);
            top[part] = most;
            float added = 0;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 2 * part; i < 2 * part + 2; ++i) added += s[n][i] = power(s[n][i] - base);
            added += __shfl_xor_sync(0xffffffffu, added, 1);
            added += __shfl_xor_sync(0xffffffffu, added, 2);
            sum[part] = fmaf(sum[part], before, added);
#pragma unroll
            for (int e = 0; e < COLUMNS; ++e) { sums[e][2 * part] *= before; sums[e][2 * part + 1] *= before; }
        }
        wait<1>();
        gather<WIDTH>(s, v_tile, sums);
        __syncthreads();
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const int64 row = first + warp + g + 8 * part;
        sum[part] = sum[part] == 0 ? 0.0f : 1 / sum[part];
        if (t || row >= queries) continue;
        tops[head * queries + row] = top[part] == lowest<float>() ? 0.0f : top[part] / PER_BIT;
        inverses[head * queries + row] = sum[part];
    }
    write(Rows<T>{of_out.first + first * of_out.step, of_out.step}, queries - first, values, sums, sum[0], sum[1]);
}

#define KNOWN const float *__restrict__ tops, const float *__restrict__ inverses, const float *__restrict__ means
#define OF_QUERIES(T) (VIEW(const T, q), VIEW(const T, k), VIEW(const T, v), VIEW(const T, grad), VIEW(T, dq), KNOWN, SIZES)
#define OF_KEYS(T) (VIEW(const T, q), VIEW(const T, k), VIEW(const T, v), VIEW(const T, grad), VIEW(T, dk), VIEW(T, dv), KNOWN, SIZES)

/* A score becomes the weight, and the gradient of the weight that of the unscaled score. */
__device__ __forceinline__ void weigh(float factor, float scale, float top, float inverse, float mean, bool hidden, float &s,
                                      float &slope) {
    s = hidden ? 0.0f : power(s * factor - top * PER_BIT) * inverse;
    slope = hidden ? 0.0f : s * (slope - mean) * scale;
}

template <class T, int WIDTH> __device__ __forceinline__ void tensor_query_gradients OF_QUERIES(T) {
    enum { LINE = Shape<WIDTH>::LINE, STEPS = Shape<WIDTH>::STEPS, COUNT = WIDTH == 64 ? 64 : 32, N = COUNT / 8 };
    __shared__ __align__(16) T k_tile[SIDE * LINE], v_tile[SIDE * LINE];
    const int64 tiles = (queries + SIDE - 1) / SIDE, head = blockIdx.x / tiles, b = head / heads, h = head % heads;
    const int64 first = (tiles - 1 - blockIdx.x % tiles) * SIDE;
    const int warp = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Rows<const T> of_q = ROWS(q), of_k = ROWS(k), of_v = ROWS(v), of_grad = ROWS(grad);
    const Rows<T> to = ROWS(dq);
    Left own[STEPS], own_grad[STEPS];
    fetch<WIDTH, SIDE>(k_tile, from_row(of_q, first), queries - first, width);
    fetch<WIDTH, SIDE>(v_tile, from_row(of_grad, first), queries - first, values);
    commit();
    wait<0>();
#pragma unroll
    for (int d = 0; d < STEPS; ++d) {
        own[d] = left_of<LINE>(k_tile, warp, 16 * d);
        own_grad[d] = left_of<LINE>(v_tile, warp, 16 * d);
    }
    float top[2], inverse[2], mean[2], sums[Shape<WIDTH>::COLUMNS][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const int64 row = first + warp + g + 8 * part, i = head * queries + row;
        top[part] = row < queries ? tops[i] : 0.0f;
        inverse[part] = row < queries ? inverses[i] : 0.0f;
        mean[part] = row < queries ? means[i] : 0.0f;
    }
    clear(sums);
    const int64 end = causal ? min(first + SIDE, keys) : keys;
    for (int64 key = 0; key < end; key += COUNT) {
        __syncthreads();
        fetch<WIDTH, COUNT>(k_tile, from_row(of_k, key), keys - key, width);
        fetch<WIDTH, COUNT>(v_tile, from_row(of_v, key), keys - key, values);
        commit();
        wait<0>();
        float s[N][4], slopes[N][4];
        scores<WIDTH>([&](int d) { return own[d]; }, k_tile, s);
        scores<WIDTH>([&](int d) { return own_grad[d]; }, v_tile, slopes);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int64 at = key + 8 * n + 2 * t + i % 2;
                weigh((float)scale * PER_BIT, (float)scale, top[i / 2], inverse[i / 2], mean[i / 2],
                      at >= keys || (causal && at > first + warp + g + i / 2 * 8), s[n][i], slopes[n][i]);
            }
        gather<WIDTH>(slopes, k_tile, sums);
    }
    write(Rows<T>{to.first + first * to.step, to.step}, queries - first, width, sums, 1, 1);
}

template <class T, int WIDTH> __device__ __forceinline__ void tensor_key_gradients OF_KEYS(T) {
    enum { LINE = Shape<WIDTH>::LINE, COUNT = WIDTH == 64 ? 64 : 16, N = COUNT / 8 };
    __shared__ __align__(16) T k_tile[SIDE * LINE], v_tile[SIDE * LINE], q_tile[COUNT * LINE], grad_tile[COUNT * LINE];
    const int64 tiles = (keys + SIDE - 1) / SIDE, head = blockIdx.x / tiles, b = head / heads, h = head % heads;
    const int64 first = blockIdx.x % tiles * SIDE;
    const int warp = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Rows<const T> of_q = ROWS(q), of_k = ROWS(k), of_v = ROWS(v), of_grad = ROWS(grad);
    const Rows<T> to_k = ROWS(dk), to_v = ROWS(dv);
    float k_sums[Shape<WIDTH>::COLUMNS][4], v_sums[Shape<WIDTH>::COLUMNS][4];
    clear(k_sums);
    clear(v_sums);
    fetch<WIDTH, SIDE>(k_tile, from_row(of_k, first), keys - first, width);
    fetch<WIDTH, SIDE>(v_tile, from_row(of_v, first), keys - first, values);
    for (int64 query = causal ? first : 0; query < queries; query += COUNT) {
        __syncthreads();
        fetch<WIDTH, COUNT>(q_tile, from_row(of_q, query), queries - query, width);
        fetch<WIDTH, COUNT>(grad_tile, from_row(of_grad, query), queries - query, values);
        commit();
        wait<0>();
        float s[N][4], slopes[N][4];
        scores<WIDTH>([&](int d) { return left_of<LINE>(k_tile, warp, 16 * d); }, q_tile, s);
        scores<WIDTH>([&](int d) { return left_of<LINE>(v_tile, warp, 16 * d); }, grad_tile, slopes);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int64 at = query + 8 * n + 2 * t + odd, i = head * queries + at;
                const bool there = at < queries;
                const float top = there ? tops[i] : 0.0f, inverse = there ? inverses[i] : 0.0f, mean = there ? means[i] : 0.0f;
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const int64 key = first + warp + g + 8 * part;
                    weigh((float)scale * PER_BIT, (float)scale, top, inverse, mean, !there || key >= keys || (causal && key > at),
                          s[n][2 * part + odd], slopes[n][2 * part + odd]);
                }
            }
        if (dv) gather<WIDTH>(s, grad_tile, v_sums);
        if (dk) gather<WIDTH>(slopes, q_tile, k_sums);
    }
    wait<0>();                                               // where no query sees these keys, too
    if (dk) write(Rows<T>{to_k.first + first * to_k.step, to_k.step}, keys - first, width, k_sums, 1, 1);
    if (dv) write(Rows<T>{to_v.first + first * to_v.step, to_v.step}, keys - first, values, v_sums, 1, 1);
}

#define ON(x) x, x##_batch, x##_head, x##_row
#define GIVEN_SIZES batches, heads, queries, keys, width, values, causal, scale
#define TO_ATTEND (ON(q), ON(k), ON(v), ON(out), tops, inverses, GIVEN_SIZES)
#define TO_QUERIES (ON(q), ON(k), ON(v), ON(grad), ON(dq), tops, inverses, means, GIVEN_SIZES)
#define TO_KEYS (ON(q), ON(k), ON(v), ON(grad), ON(dk), ON(dv), tops, inverses, means, GIVEN_SIZES)
#define WIDE_OF(NAME, WIDTH, PARAMETERS, ARGUMENTS) \
    KERNEL(NAME##_##WIDTH##_bfloat16, BLOCK, PARAMETERS(bfloat16)) { NAME<bfloat16, WIDTH> ARGUMENTS; } \
    KERNEL(NAME##_##WIDTH##_float16, BLOCK, PARAMETERS(float16)) { NAME<float16, WIDTH> ARGUMENTS; }
#define WIDE(WIDTH) \
    WIDE_OF(tensor_attend, WIDTH, ATTEND, TO_ATTEND) \
    WIDE_OF(tensor_query_gradients, WIDTH, OF_QUERIES, TO_QUERIES) \
    WIDE_OF(tensor_key_gradients, WIDTH, OF_KEYS, TO_KEYS)
