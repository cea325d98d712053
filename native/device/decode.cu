/* Attention of one new position of each text to the positions before it, whose keys and values are kept ("flash decoding", Dao et
   al., 2023); see kernels/cached_attention.py. Letters: B rows, H heads of keys, G heads of queries for each, D width, C positions.

   The positions of a text are cut into pieces, of a size that follows from C alone. A block has one piece of one head of keys:

       qkv    (B, H G D + 2 H D)     block (b, h, piece)     partial sums (B, H, G, pieces, D)     join     out (B, H G D)
       cache  (S, H, C, D)         ---------------------->   and largest scores, sums of exps     ------>

   `lanes` threads have a key, 8 numbers of it each, and with it the queries of AT_ONCE heads; those of a block take keys in turn,
   each with a softmax of its own, and these are put together in a fixed order. So a text's bits depend on the text alone, not on
   its company; pieces that begin behind its position end at once. */
#include "eights.h"

enum { THREADS = 128 };
template <class S> __device__ __forceinline__ S lowest() { return -(S)__uint_as_float(0x7f800000u); }
template <class S> __device__ __forceinline__ S larger(S a, S b) { return b > a || b != b ? b : a; }       // NaN where one is NaN
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

/* How many keys a thread loads before it computes with the first, and as many values, 8 numbers of each: fewer with several queries,
   whose sums want registers. */
template <class T, int AT_ONCE> struct Ahead { enum { ALONE = sizeof(T) == 2 ? 4 : sizeof(T) == 4 ? 2 : 1,
                                                      KEYS = AT_ONCE == 1 || ALONE == 1 ? (int)ALONE : ALONE / 2 }; };

/* Some of 8 numbers of a row, as they lie: 16 bytes at once where rows are aligned. */
template <class T> __device__ __forceinline__ void fetch(const T *from, Eight<T> &to, bool aligned, int count) {
    if (aligned && count == 8) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof to / 16); ++i) ((uint4 *)&to)[i] = ((const uint4 *)from)[i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) if (i < count) to.of[i] = from[i];
            else put(to.of[i], Sum<T>(0));
    }
}

#define ATTEND(T) (const T *__restrict__ qkv, T *keys, T *values, Sum<T> *__restrict__ partial, Sum<T> *__restrict__ tops, \
    Sum<T> *__restrict__ sums, const int64 *__restrict__ slots, const int64 *__restrict__ at, int64 rows, int64 heads, \
    int64 groups, int64 width, int64 n_slots, int64 capacity, int64 pieces, int64 piece, int64 lanes, double scale)

/* What `count` of AT_ONCE queries make of the keys [first, end) of a head; results at `to` of the block's first query. */
template <class T, int AT_ONCE>
__device__ __forceinline__ void some_queries(const T *queries, int count, const T *own_key, const T *own_value, const T *keys,
                                             const T *values, int64 first, int64 end, int64 own, int width, int lanes,
                                             bool aligned, Sum<T> scale, Sum<T> *partial, Sum<T> *tops, Sum<T> *sums,
                                             int64 pieces) {
    typedef Sum<T> S;
    enum { KEYS = Ahead<T, AT_ONCE>::KEYS };
    __shared__ S parts[THREADS * 8], part_tops[THREADS / 8], part_sums[THREADS / 8];
    const int lane = threadIdx.x % lanes, team = threadIdx.x / lanes, teams = THREADS / lanes;
    const int numbers = max(0, min(8, width - lane * 8));
    S q[AT_ONCE][8], sum[AT_ONCE], top[AT_ONCE], made[AT_ONCE][8];
#pragma unroll
    for (int g = 0; g < AT_ONCE; ++g) {
        load_some(queries + (int64)(g < count ? g : 0) * width + lane * 8, q[g], (int64)numbers);
        sum[g] = 0;
        top[g] = lowest<S>();
#pragma unroll
        for (int i = 0; i < 8; ++i) made[g][i] = 0;
    }
    for (int64 at = first; at < end; at += KEYS * teams) {              // all threads go round alike: they meet in shuffles
        Eight<T> k[KEYS], v[KEYS];
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const int64 key = min(at + i * teams + team, end - 1), place = key * width + lane * 8;
            fetch(key == own ? own_key + lane * 8 : keys + place, k[i], aligned, numbers);
            fetch(key == own ? own_value + lane * 8 : values + place, v[i], aligned, numbers);
        }
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const bool inside = at + i * teams + team < end;
#pragma unroll
            for (int g = 0; g < AT_ONCE; ++g) {
                S score = 0;
#pragma unroll
                for (int j = 0; j < 8; ++j) score = fused(q[g][j], of(k[i].of[j]), score);
                for (int step = lanes / 2; step; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
                if (!inside) continue;
                score *= scale;
                const S most = larger(top[g], score), base = most == lowest<S>() ? (S)0 : most;
                const S factor = exponential(top[g] - base), weight = exponential(score - base);
                top[g] = most;
                sum[g] = sum[g] * factor + weight;
#pragma unroll
                for (int j = 0; j < 8; ++j) made[g][j] = fused(weight, of(v[i].of[j]), made[g][j] * factor);
            }
        }
    }
#pragma unroll
    for (int g = 0; g < AT_ONCE; ++g) {
        if (g >= count) break;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 8; ++j) parts[threadIdx.x * 8 + j] = made[g][j];
        if (lane == 0) { part_tops[team] = top[g]; part_sums[team] = sum[g]; }
        __syncthreads();
        S most = lowest<S>(), total = 0;
        for (int i = 0; i < teams; ++i) most = larger(most, part_tops[i]);
        const S base = most == lowest<S>() ? (S)0 : most;
        for (int i = 0; i < teams; ++i) total += part_sums[i] * exponential(part_tops[i] - base);
        for (int column = threadIdx.x; column < width; column += THREADS) {
            S found = 0;
            for (int i = 0; i < teams; ++i) found += parts[i * lanes * 8 + column] * exponential(part_tops[i] - base);
            partial[g * pieces * width + column] = found;
        }
        if (threadIdx.x == 0) { tops[g * pieces] = most; sums[g * pieces] = total; }
    }
}

template <class T> __device__ __forceinline__ void attend_piece ATTEND(T) {
    enum { AT_ONCE = sizeof(T) == 8 ? 2 : 4 };
    const int64 head = blockIdx.x / pieces, number = blockIdx.x % pieces, b = head / heads, h = head % heads;
    const int64 own = at[b], slot = slots[b], first = number * piece, end = min(own + 1, first + piece);
    if (slot < 0 || slot >= n_slots || own < 0 || own >= capacity || first > own) return;
    const T *row = qkv + b * heads * (groups + 2) * width, *queries = row + h * groups * width;
    const T *own_key = row + (heads * groups + h) * width, *own_value = own_key + heads * width;
    const int64 place = (slot * heads + h) * capacity * width, to = head * groups * pieces + number;
    const bool aligned = width % 8 == 0 && is_aligned(qkv) && is_aligned(keys) && is_aligned(values);
    for (int64 g = 0; g < groups;) {
        const T *from = queries + g * width;
        const int64 there = to + g * pieces, count = min(groups - g, (int64)AT_ONCE);
        if (count == 1)
            some_queries<T, 1>(from, 1, own_key, own_value, keys + place, values + place, first, end, own, (int)width, (int)lanes,
                               aligned, (Sum<T>)scale, partial + there * width, tops + there, sums + there, pieces);
        else
            some_queries<T, AT_ONCE>(from, (int)count, own_key, own_value, keys + place, values + place, first, end, own,
                                     (int)width, (int)lanes, aligned, (Sum<T>)scale, partial + there * width, tops + there,
                                     sums + there, pieces);
        g += count;
    }
    if (end == own + 1)                                                  // nobody reads it there in this launch
        for (int i = threadIdx.x; i < width; i += THREADS) {
            keys[place + own * width + i] = own_key[i];
            values[place + own * width + i] = own_value[i];
        }
}
VERSIONS(attend_piece, THREADS, ATTEND, (qkv, keys, values, partial, tops, sums, slots, at, rows, heads, groups, width, n_slots, \
    capacity, pieces, piece, lanes, scale))

/* A row's query from its pieces, one after the other; a block has one. NaN where there is no such slot or position. */
#define JOIN(T) (T *__restrict__ out, const Sum<T> *__restrict__ partial, const Sum<T> *__restrict__ tops, \
    const Sum<T> *__restrict__ sums, const int64 *__restrict__ slots, const int64 *__restrict__ at, int64 rows, int64 heads, \
    int64 groups, int64 width, int64 n_slots, int64 capacity, int64 pieces, int64 piece)
template <class T> __device__ __forceinline__ void join_pieces JOIN(T) {
    typedef Sum<T> S;
    const int64 query = blockIdx.x, b = query / (heads * groups), own = at[b], slot = slots[b], first = query * pieces;
    const bool fits = slot >= 0 && slot < n_slots && own >= 0 && own < capacity;
    const int64 end = fits ? first + own / piece + 1 : first;
    S most = lowest<S>(), total = 0;
    for (int64 i = first; i < end; ++i) most = larger(most, tops[i]);
    const S base = most == lowest<S>() ? (S)0 : most;
    for (int64 i = first; i < end; ++i) total += sums[i] * exponential(tops[i] - base);
    const S inverse = !fits ? (S)__uint_as_float(0x7fc00000u) : total == 0 ? (S)0 : 1 / total;
    for (int64 column = threadIdx.x; column < width; column += THREADS) {
        S found = 0;
        for (int64 i = first; i < end; ++i) found += partial[i * width + column] * exponential(tops[i] - base);
        put(out[query * width + column], found * inverse);
    }
}
VERSIONS(join_pieces, THREADS, JOIN, (out, partial, tops, sums, slots, at, rows, heads, groups, width, n_slots, capacity, pieces, \
    piece))
