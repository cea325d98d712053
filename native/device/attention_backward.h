/* Flash attention backward: the weights are computed again from each query's largest score and inverse sum of exps, tile by tile.

   Two kernels, so that each sum has one thread and one order: a block has a tile of queries and goes over the keys for dq, or has
   a tile of keys and goes over the queries for dk and dv. Before them, row_dots (attention.cu) makes the sums of grad * out of each
   query: the means of the weights' gradients. */
#pragma once
#include "attention.h"

/* What backward knows of one query: its largest score, the inverse of its sum of exps, and the mean of its weights' gradients. */
template <class S> struct Known { S top, inverse, mean; };
template <class S>
__device__ __forceinline__ Known<S> known_of(const S *tops, const S *inverses, const S *means, int64 i, bool there) {
    return {there ? tops[i] : (S)0, there ? inverses[i] : (S)0, there ? means[i] : (S)0};
}

/* A score s becomes the weight, and the gradient of the dropped weight that of the unscaled score. */
template <class S>
__device__ __forceinline__ void weigh_gradient(const Known<S> &known, S scale, S factor, bool hidden, S &s, S &slope) {
    const S weight = hidden ? (S)0 : exponential(s * scale - known.top) * known.inverse;
    slope = hidden ? (S)0 : weight * (dropped(slope, factor) - known.mean) * scale;
    s = dropped(weight, factor);
}

#define BACKWARD(T, RESULTS) (VIEW(const T, q), VIEW(const T, k), VIEW(const T, v), VIEW(const T, grad), RESULTS, \
    const Sum<T> *__restrict__ tops, const Sum<T> *__restrict__ inverses, const Sum<T> *__restrict__ means, \
    const uint64 *__restrict__ rows, const uint64 *__restrict__ firsts, const uint64 *__restrict__ stored, int64 batches, \
    int64 heads, int64 queries, int64 keys, int64 width, int64 values, int64 causal, int64 stream, int64 first_word, \
    int64 head_words, int64 query_words, int64 least, double scale, double kept_scale)
#define AND ,
#define QUERIES(T) BACKWARD(T, VIEW(T, dq))
#define KEYS(T) BACKWARD(T, VIEW(T, dk) AND VIEW(T, dv))

template <class T, int WIDTH> __device__ __forceinline__ void query_gradients QUERIES(T) {
    typedef Sum<T> S;
    enum { EACH = Tile<S>::EACH, SIDE = Tile<S>::SIDE };
    __shared__ __align__(16) S room[Room<S, WIDTH>::NUMBERS], weights[Room<S, WIDTH>::WEIGHTS];
    const int64 tiles = (queries + SIDE - 1) / SIDE, head = blockIdx.x / tiles, b = head / heads, h = head % heads;
    const int64 first = (tiles - 1 - blockIdx.x % tiles) * SIDE, there = queries - first;
    const int y = threadIdx.x / 16 * EACH, x = threadIdx.x % 16 * EACH;
    const Rows<const T> of_q = ROWS(q), of_k = ROWS(k), of_v = ROWS(v), of_grad = ROWS(grad);
    const Rows<T> result = ROWS(dq);
    const Dropping<S> dropping = dropping_of<S>(rows, firsts, stored, stream, first_word, head_words, query_words, least,
                                                kept_scale, b, h);
    Known<S> known[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) known[i] = known_of(tops, inverses, means, head * queries + first + y + i, y + i < there);
    Sums<S, WIDTH> sums;
    sums.clear();
    const int64 end = causal ? min(first + SIDE, keys) : keys;
    for (int64 key = 0; key < end; key += SIDE) {
        S s[EACH][EACH] = {}, slopes[EACH][EACH] = {};
        const int64 count = min((int64)SIDE, keys - key);
        const Rows<const T> k_here = {of_k.first + key * of_k.step, of_k.step};
        add_scores<T>({of_q.first + first * of_q.step, of_q.step}, there, k_here, count, width, room, s);
        add_scores<T>({of_grad.first + first * of_grad.step, of_grad.step}, there, {of_v.first + key * of_v.step, of_v.step},
                      count, values, room, slopes);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            S factors[EACH];
#pragma unroll
            for (int j = 0; j < EACH; ++j) factors[j] = 1;
            if (dropping.drops) dropping.factors(first + y + i, key + x, factors);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const bool hidden = x + j >= count || (causal && key + x + j > first + y + i);
                weigh_gradient(known[i], (S)scale, factors[j], hidden, s[i][j], slopes[i][j]);
            }
        }
        keep_turned(slopes, weights);
        sums.template add<T>(weights, k_here, count, width, room);
    }
    S ones[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) ones[i] = 1;
    sums.template write<T>({result.first + first * result.step, result.step}, there, width, ones);
}

template <class T, int WIDTH> __device__ __forceinline__ void key_gradients KEYS(T) {
    typedef Sum<T> S;
    enum { EACH = Tile<S>::EACH, SIDE = Tile<S>::SIDE };
    __shared__ __align__(16) S room[Room<S, WIDTH>::NUMBERS], weights[Room<S, WIDTH>::WEIGHTS];
    const int64 tiles = (keys + SIDE - 1) / SIDE, head = blockIdx.x / tiles, b = head / heads, h = head % heads;
    const int64 first = blockIdx.x % tiles * SIDE, there = keys - first;
    const int y = threadIdx.x / 16 * EACH, x = threadIdx.x % 16 * EACH;
    const Rows<const T> of_q = ROWS(q), of_k = ROWS(k), of_v = ROWS(v), of_grad = ROWS(grad);
    const Dropping<S> dropping = dropping_of<S>(rows, firsts, stored, stream, first_word, head_words, query_words, least,
                                                kept_scale, b, h);
    Sums<S, WIDTH> k_sums, v_sums;
    k_sums.clear();
    v_sums.clear();
    for (int64 query = causal ? first : 0; query < queries; query += SIDE) {
        S s[EACH][EACH] = {}, slopes[EACH][EACH] = {};
        const int64 count = min((int64)SIDE, queries - query);
        const Rows<const T> q_here = {of_q.first + query * of_q.step, of_q.step};
        const Rows<const T> grad_here = {of_grad.first + query * of_grad.step, of_grad.step};
        add_scores<T>({of_k.first + first * of_k.step, of_k.step}, there, q_here, count, width, room, s);
        add_scores<T>({of_v.first + first * of_v.step, of_v.step}, there, grad_here, count, values, room, slopes);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const Known<S> known = known_of(tops, inverses, means, head * queries + query + x + j, x + j < count);
            S factors[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) factors[i] = 1;
            if (dropping.drops) dropping.factors(query + x + j, first + y, factors);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const bool hidden = x + j >= count || y + i >= there || (causal && first + y + i > query + x + j);
                weigh_gradient(known, (S)scale, factors[i], hidden, s[i][j], slopes[i][j]);
            }
        }
        if (dv) {
            keep_turned(s, weights);
            v_sums.template add<T>(weights, grad_here, count, values, room);
            __syncthreads();
        }
        if (dk) {
            keep_turned(slopes, weights);
            k_sums.template add<T>(weights, q_here, count, width, room);
        }
    }
    S ones[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) ones[i] = 1;
    const Rows<T> to_k = ROWS(dk), to_v = ROWS(dv);
    if (dk) k_sums.template write<T>({to_k.first + first * to_k.step, to_k.step}, there, width, ones);
    if (dv) v_sums.template write<T>({to_v.first + first * to_v.step, to_v.step}, there, values, ones);
}

#define GIVEN(...) (ON(q), ON(k), ON(v), ON(grad), __VA_ARGS__, tops, inverses, means, rows, firsts, stored, batches, heads, \
    queries, keys, width, values, causal, stream, first_word, head_words, query_words, least, scale, kept_scale)
#define OF_QUERIES GIVEN(ON(dq))
#define OF_KEYS GIVEN(ON(dk), ON(dv))
#define WIDE(WIDTH) \
    template <class T> \
    __device__ __forceinline__ void query_gradients_##WIDTH QUERIES(T) { query_gradients<T, WIDTH> OF_QUERIES; } \
    template <class T> \
    __device__ __forceinline__ void key_gradients_##WIDTH KEYS(T) { key_gradients<T, WIDTH> OF_KEYS; } \
    VERSIONS(query_gradients_##WIDTH, THREADS, QUERIES, OF_QUERIES) \
    VERSIONS(key_gradients_##WIDTH, THREADS, KEYS, OF_KEYS)
