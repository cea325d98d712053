/* Flash attention forward: softmax(scale q k') v; see kernels/flash_attention.py. Each width has a source of its own, so that
   only what a run uses is compiled.

   A block has one tile of queries of one head, meets the keys a tile at a time, and corrects the softmax so far where a larger
   score turns up (Dao et al., 2022; Milakov and Gimelshein, 2018). Each sum has one order: results have the same bits each time. A
   hidden key's weight is zero exactly, but is multiplied: this holds where values are finite. */
#pragma once
#include "attention.h"

template <class S> __device__ __forceinline__ S sum_of_16(S value) {
    for (int lanes = 8; lanes; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}
template <class S> __device__ __forceinline__ S largest_of_16(S value) {
    for (int lanes = 8; lanes; lanes >>= 1) value = larger(value, __shfl_xor_sync(0xffffffffu, value, lanes));
    return value;
}

template <class T, int WIDTH>
__device__ __forceinline__ void attend(Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out, Sum<T> *tops,
                                       Sum<T> *inverses, const Dropping<Sum<T>> &dropping, int64 first, int64 queries, int64 keys,
                                       int64 width, int64 values, bool causal, Sum<T> scale) {
    typedef Sum<T> S;
    enum { EACH = Tile<S>::EACH, SIDE = Tile<S>::SIDE };
    __shared__ __align__(16) S room[Room<S, WIDTH>::NUMBERS], weights[Room<S, WIDTH>::WEIGHTS];
    const int y = threadIdx.x / 16 * EACH, x = threadIdx.x % 16 * EACH;
    Sums<S, WIDTH> sums;
    S top[EACH], sum[EACH];
    sums.clear();
#pragma unroll
    for (int i = 0; i < EACH; ++i) { top[i] = lowest<S>(); sum[i] = 0; }
    const int64 end = causal ? min(first + SIDE, keys) : keys;
    for (int64 key = 0; key < end; key += SIDE) {
        S s[EACH][EACH] = {};
        const int64 count = min((int64)SIDE, keys - key);
        add_scores<T>(q, queries - first, {k.first + key * k.step, k.step}, count, width, room, s);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            S most = lowest<S>();
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const bool hidden = x + j >= count || (causal && key + x + j > first + y + i);
                s[i][j] = hidden ? lowest<S>() : s[i][j] * scale;
                most = larger(most, s[i][j]);
            }
            most = larger(top[i], largest_of_16(most));
            const S base = most == lowest<S>() ? (S)0 : most, factor = exponential(top[i] - base);
            top[i] = most;
            S added = 0;
#pragma unroll
            for (int j = 0; j < EACH; ++j) added += s[i][j] = exponential(s[i][j] - base);
            sum[i] = sum[i] * factor + sum_of_16(added);
            sums.multiply(i, factor);
            if (dropping.drops) {                            // after the sums: what is left is not normalised again
                S factors[EACH];
                dropping.factors(first + y + i, key + x, factors);
#pragma unroll
                for (int j = 0; j < EACH; ++j) s[i][j] = dropped(s[i][j], factors[j]);
            }
        }
        keep_turned(s, weights);
        sums.template add<T>(weights, {v.first + key * v.step, v.step}, count, values, room);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        sum[i] = sum[i] == 0 ? (S)0 : 1 / sum[i];
        if (threadIdx.x % 16 == 0 && first + y + i < queries) {
            tops[y + i] = top[i] == lowest<S>() ? (S)0 : top[i];
            inverses[y + i] = sum[i];
        }
    }
    sums.template write<T>(out, queries - first, values, sum);
}

#define FORWARD(T) (VIEW(const T, q), VIEW(const T, k), VIEW(const T, v), VIEW(T, out), Sum<T> *__restrict__ tops, \
    Sum<T> *__restrict__ inverses, const uint64 *__restrict__ rows, const uint64 *__restrict__ firsts, \
    const uint64 *__restrict__ stored, int64 batches, int64 heads, int64 queries, int64 keys, int64 width, int64 values, \
    int64 causal, int64 stream, int64 first_word, int64 head_words, int64 query_words, int64 least, double scale, \
    double kept_scale)

template <class T, int WIDTH> __device__ __forceinline__ void forward FORWARD(T) {
    typedef Sum<T> S;
    enum { SIDE = Tile<S>::SIDE };
    const int64 tiles = (queries + SIDE - 1) / SIDE, head = blockIdx.x / tiles, b = head / heads, h = head % heads;
    const int64 first = (tiles - 1 - blockIdx.x % tiles) * SIDE, row = head * queries + first;  // those that see most keys first
    const Rows<const T> of_q = ROWS(q);
    const Rows<T> of_out = ROWS(out);
    const Dropping<S> dropping = dropping_of<S>(rows, firsts, stored, stream, first_word, head_words, query_words, least,
                                                kept_scale, b, h);
    attend<T, WIDTH>({of_q.first + first * of_q.step, of_q.step}, ROWS(k), ROWS(v),
                     {of_out.first + first * of_out.step, of_out.step}, tops + row, inverses + row, dropping, first, queries, keys,
                     width, values, causal != 0, (S)scale);
}

#define ARGUMENTS (ON(q), ON(k), ON(v), ON(out), tops, inverses, rows, firsts, stored, batches, heads, queries, keys, width, \
    values, causal, stream, first_word, head_words, query_words, least, scale, kept_scale)
#define WIDE(WIDTH) \
    template <class T> __device__ __forceinline__ void attend_##WIDTH FORWARD(T) { forward<T, WIDTH> ARGUMENTS; } \
    VERSIONS(attend_##WIDTH, THREADS, FORWARD, ARGUMENTS)
