/* Of attention, what is done once for each query: sums of products of two rows, and the join of two results. A warp has a query. */
#include "attention.h"

template <class T>
__device__ __forceinline__ void row_dots(VIEW(const T, x), VIEW(const T, y), Sum<T> *dots, int64 batches, int64 heads, int64 queries,
                                         int64 values) {
    const int64 i = blockIdx.x * (int64)(THREADS / 32) + threadIdx.x / 32, b = i / queries / heads, h = i / queries % heads;
    if (i >= batches * heads * queries) return;
    const Rows<const T> left = ROWS(x), right = ROWS(y);
    Sum<T> sum = 0;
    for (int64 j = threadIdx.x % 32; j < values; j += 32)
        sum = fused(of(left.first[i % queries * left.step + j]), of(right.first[i % queries * right.step + j]), sum);
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) dots[i] = sum;
}
#define ROW_DOTS(T) (VIEW(const T, x), VIEW(const T, y), Sum<T> *__restrict__ dots, int64 batches, int64 heads, int64 queries, \
    int64 values)
VERSIONS(row_dots, THREADS, ROW_DOTS, (x, x_batch, x_head, x_row, y, y_batch, y_head, y_row, dots, batches, heads, queries, values))

/* The sum of a query's exps above `top`, from its sum above a largest score of its own; 0 where it met no key. */
template <class S> __device__ __forceinline__ S share(S inverse, S largest, S top) {
    return inverse == 0 ? (S)0 : exponential(largest - top) / inverse;
}

/* Attention to some keys and attention to others become attention to all of them; a warp has a query. */
template <class T>
__device__ __forceinline__ void join(VIEW(T, out), VIEW(const T, other), Sum<T> *tops, Sum<T> *inverses, const Sum<T> *other_tops,
                                     const Sum<T> *other_inverses, int64 batches, int64 heads, int64 queries, int64 values) {
    typedef Sum<T> S;
    const int64 i = blockIdx.x * (int64)(THREADS / 32) + threadIdx.x / 32, b = i / queries / heads, h = i / queries % heads;
    if (i >= batches * heads * queries) return;
    const S top_here = tops[i], inverse_here = inverses[i], top_there = other_tops[i], inverse_there = other_inverses[i];
    const S low = lowest<S>(), most = larger(inverse_here == 0 ? low : top_here, inverse_there == 0 ? low : top_there);
    const S top = most == low ? (S)0 : most;                 // a query that met no key at all stays zeros
    const S before = share(inverse_here, top_here, top), added = share(inverse_there, top_there, top), total = before + added;
    const S inverse = total == 0 ? (S)0 : 1 / total;
    const Rows<T> mine = ROWS(out);
    const Rows<const T> theirs = ROWS(other);
    for (int64 j = threadIdx.x % 32; j < values; j += 32) {
        T &to = mine.first[i % queries * mine.step + j];
        put(to, of(to) * (before * inverse) + of(theirs.first[i % queries * theirs.step + j]) * (added * inverse));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) { tops[i] = top; inverses[i] = inverse; }
}
#define JOIN(T) (VIEW(T, out), VIEW(const T, other), Sum<T> *__restrict__ tops, Sum<T> *__restrict__ inverses, \
    const Sum<T> *__restrict__ other_tops, const Sum<T> *__restrict__ other_inverses, int64 batches, int64 heads, int64 queries, \
    int64 values)
VERSIONS(join, THREADS, JOIN, (out, out_batch, out_head, out_row, other, other_batch, other_head, other_row, tops, inverses, other_tops,
                               other_inverses, batches, heads, queries, values))
