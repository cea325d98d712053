/* The rows of attention: softmax of scaled scores, and its gradient, over matrices (length, n). Where `causal`, row i has columns
   0 ... i only, and the others are set to zero without being read. See mpitrain/kernels/attention.py. */
#include "row.h"

#define EACH_ROW(row, columns) \
    for (int64 row = blockIdx.x, columns; row < rows && (columns = causal ? min(row % length + 1, n) : n, true); row += gridDim.x)

/* y may be x. A row without any score above minus infinity becomes zeros. */
template <class T>
__device__ __forceinline__ void weights(const T *x, T *y, double scale, int64 rows, int64 length, int64 n, int64 causal) {
    typedef Sum<T> S;
    const S factor = S(scale);
    EACH_ROW(row, columns) {
        const T *from = x + row * n;
        T *to = y + row * n;
        Exponentials<S> found;
        walk<2>(from, (const T *)nullptr, (T *)nullptr, columns, [&](int, S v, S) { found.add(v * factor); return v; });
        found.join();
        const S top = found.top == -infinite<S>() ? S(0) : found.top, inverse = 1 / found.total;         // then every exp is 0, or NaN
        walk<2>(from, (const T *)nullptr, to, columns, [&](int, S v, S) { return exponential(v * factor - top) * inverse; });
        clear(to + columns, n - columns);
    }
}

/* dx = scale y (g - sum of y g); dx may be g. */
template <class T>
__device__ __forceinline__ void weights_gradient(const T *y, const T *g, T *dx, double scale, int64 rows, int64 length, int64 n,
                                                 int64 causal) {
    typedef Sum<T> S;
    const S factor = S(scale);
    EACH_ROW(row, columns) {
        S mean = 0;
        walk<1>(y + row * n, g + row * n, (T *)nullptr, columns, [&](int, S v, S by) { mean += v * by; return v; });
        mean = sum_of_block(mean);
        walk<1>(y + row * n, g + row * n, dx + row * n, columns, [&](int, S v, S by) { return (by - mean) * (v * factor); });
        clear(dx + row * n + columns, n - columns);
    }
}

#define WEIGHTS(T) (const T *x, T *y, double scale, int64 rows, int64 length, int64 n, int64 causal)
#define GRADIENT(T) (const T *y, const T *g, T *dx, double scale, int64 rows, int64 length, int64 n, int64 causal)
ROW_VERSIONS(weights, WEIGHTS, (x, y, scale, rows, length, n, causal))
ROW_VERSIONS(weights_gradient, GRADIENT, (y, g, dx, scale, rows, length, n, causal))
