/* The sum of the parts that ranks have of an array, where their arrays lie in the memory of one GPU: read from all, written to all.

   Ranks are added in the order of the fixed binary tree, ((0 + 1) + (2 + 3)) + 4, which is that of the host's direct all-reduce.
   All loads of a thread are on their way before the first addition. An element is read and written by one thread of one rank. */
#include "lanes.h"

enum { WIDE = 256, MOST = 8 };                            /* MOST ranks; kernels/device/shared_sum.py */

template <class T, int V> __device__ __forceinline__ void sum_at(T *const *parts, int64 ranks, int64 at, bool aligned) {
    Sum<T> x[MOST][V];
#pragma unroll
    for (int rank = 0; rank < MOST; ++rank) if (rank < ranks) load<V>(parts[rank] + at, aligned, x[rank]);
#pragma unroll
    for (int step = 1; step < MOST; step *= 2) {
#pragma unroll
        for (int rank = 0; rank + step < MOST; rank += 2 * step) if (rank + step < ranks) {
#pragma unroll
            for (int i = 0; i < V; ++i) x[rank][i] += x[rank + step][i];
        }
    }
#pragma unroll
    for (int rank = 0; rank < MOST; ++rank) if (rank < ranks) store<V>(parts[rank] + at, aligned, x[0]);
}

/* a .. h: the addresses of the ranks' parts, 0 where there is no such rank. This rank's is that of `own`, which says the format. */
template <class T> __device__ __forceinline__ void sum_of_ranks(T *own, int64 ranks, int64 n, int64 a, int64 b, int64 c, int64 d,
                                                                int64 e, int64 f, int64 g, int64 h) {
    T *const parts[MOST] = {(T *)a, (T *)b, (T *)c, (T *)d, (T *)e, (T *)f, (T *)g, (T *)h};
    const bool aligned = all_aligned(a, b, c, d, e, f, g, h);
    const int V = Widest<T>::COUNT;
    const int64 wide = aligned ? n / V : 0;
    const int64 first = (int64)blockIdx.x * blockDim.x + threadIdx.x, all = (int64)gridDim.x * blockDim.x;
    for (int64 i = first; i < wide; i += all) sum_at<T, V>(parts, ranks, i * V, true);
    for (int64 i = wide * V + first; i < n; i += all) sum_at<T, 1>(parts, ranks, i, false);
}
#define PARAMETERS(T) (T *own, int64 ranks, int64 n, int64 a, int64 b, int64 c, int64 d, int64 e, int64 f, int64 g, int64 h)
VERSIONS(sum_of_ranks, WIDE, PARAMETERS, (own, ranks, n, a, b, c, d, e, f, g, h))
