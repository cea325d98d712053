/* Softmax and cross-entropy, each row of a matrix (rows, n) by one block. See mpitrain/kernels/rows.py. */
#include "row.h"

#define EACH_ROW(row) for (int64 row = blockIdx.x; row < rows; row += gridDim.x)

template <class T> __device__ __forceinline__ void softmax(const T *x, T *y, int64 rows, int64 n) {
    typedef Sum<T> S;
    EACH_ROW(row) {
        const Exponentials<S> found = exponentials(x + row * n, n, S(1), [](S) {});
        const S inverse = 1 / found.total;
        walk<2>(x + row * n, (const T *)nullptr, y + row * n, n,
             [&](int, S v, S) { return exponential(v - found.top) * inverse; });
    }
}

template <class T> __device__ __forceinline__ void log_softmax(const T *x, T *y, int64 rows, int64 n) {
    typedef Sum<T> S;
    EACH_ROW(row) {
        const Exponentials<S> found = exponentials(x + row * n, n, S(1), [](S) {});
        const S rest = logarithm(found.total);
        walk<2>(x + row * n, (const T *)nullptr, y + row * n, n, [&](int, S v, S) { return (v - found.top) - rest; });
    }
}

template <class T> __device__ __forceinline__ void softmax_grad(const T *y, const T *g, T *dx, int64 rows, int64 n) {
    typedef Sum<T> S;
    EACH_ROW(row) {
        S dot = 0;
        walk<1>(y + row * n, g + row * n, (T *)nullptr, n, [&](int, S v, S by) { dot += v * by; return v; });
        dot = sum_of_block(dot);
        walk<1>(y + row * n, g + row * n, dx + row * n, n, [&](int, S v, S by) { return (by - dot) * v; });
    }
}

template <class T> __device__ __forceinline__ void log_softmax_grad(const T *y, const T *g, T *dx, int64 rows, int64 n) {
    typedef Sum<T> S;
    EACH_ROW(row) {
        S sum = 0;
        walk<2>(g + row * n, (const T *)nullptr, (T *)nullptr, n, [&](int, S by, S) { sum += by; return by; });
        sum = sum_of_block(sum);
        walk<1>(y + row * n, g + row * n, dx + row * n, n, [&](int, S v, S by) { return by - exponential(v) * sum; });
    }
}

/* losses = log sum exp(x) - (1 - smoothing) x[label] - smoothing mean(x), from x less the largest of its row: the digits of the
   rest would drown in that. tops and totals, where given, get that largest and the sum of exp(x - largest). The loss of a label
   that is not in 0 ... n - 1 is NaN; that of `ignored`, where `ignoring`, 0, and its row is not read. Rows of x lie `step` numbers
   apart: what is between them is not read. */
template <class T>
__device__ __forceinline__ void cross_entropy(const T *x, int64 step, const int64 *labels, Sum<T> *losses, Sum<T> *tops,
                                              Sum<T> *totals, double smoothing, int64 ignoring, int64 ignored, int64 rows,
                                              int64 n) {
    typedef Sum<T> S;
    EACH_ROW(row) {
        const int64 label = labels[row];
        if (ignoring && label == ignored) {
            if (threadIdx.x == 0) losses[row] = 0;
            continue;
        }
        const T *line = x + row * step;
        const S first = of(line[0]), base = first - first == 0 ? first : S(0);      // near the others: the mean keeps its digits
        S sum = 0;
        const Exponentials<S> found = smoothing != 0 ? exponentials(line, n, S(1), [&](S v) { sum += v - base; })
                                                     : exponentials(line, n, S(1), [](S) {});
        if (smoothing != 0) sum = sum_of_block(sum);
        if (threadIdx.x) continue;
        const bool known = 0 <= label && label < n;
        S loss = logarithm(found.total) - S(1 - smoothing) * (of(line[known ? label : 0]) - found.top);
        if (smoothing != 0) loss -= S(smoothing) * (sum / S(n) + (base - found.top));
        losses[row] = known ? loss : not_a_number<S>();
        if (tops) { tops[row] = found.top; totals[row] = found.total; }
    }
}

/* The gradient of the losses times *scale, from the same arguments; dx may be x. It is NaN where the loss is. */
template <class T>
__device__ __forceinline__ void cross_entropy_grad(const T *x, int64 step, T *dx, int64 to_step, const int64 *labels,
                                                   const Sum<T> *tops, const Sum<T> *totals, const Sum<T> *scale,
                                                   double smoothing, int64 ignoring, int64 ignored, int64 rows, int64 n) {
    typedef Sum<T> S;
    const S factor = *scale, uniform = S(smoothing / double(n)) * factor, own = S(1 - smoothing) * factor;
    EACH_ROW(row) {
        const int64 label = labels[row];
        T *to = dx + row * to_step;
        if (ignoring && label == ignored) {
            clear(to, n);
            continue;
        }
        const S top = tops[row], share = 0 <= label && label < n ? factor / totals[row] : not_a_number<S>();
        walk<2>(x + row * step, (const T *)nullptr, to, n, [&](int i, S v, S) {
            const S by = exponential(v - top) * share - uniform;
            return i == label ? by - own : by;
        });
    }
}

#define ONE(T) (const T *x, T *y, int64 rows, int64 n)
#define TWO(T) (const T *y, const T *g, T *dx, int64 rows, int64 n)
#define LOSS(T) (const T *__restrict__ x, int64 step, const int64 *__restrict__ labels, Sum<T> *__restrict__ losses, \
                 Sum<T> *__restrict__ tops, Sum<T> *__restrict__ totals, double smoothing, int64 ignoring, int64 ignored, \
                 int64 rows, int64 n)
#define LOSS_GRAD(T) (const T *x, int64 step, T *dx, int64 to_step, const int64 *__restrict__ labels, \
                      const Sum<T> *__restrict__ tops, const Sum<T> *__restrict__ totals, const Sum<T> *__restrict__ scale, \
                      double smoothing, int64 ignoring, int64 ignored, int64 rows, int64 n)
ROW_VERSIONS(softmax, ONE, (x, y, rows, n))
ROW_VERSIONS(log_softmax, ONE, (x, y, rows, n))
ROW_VERSIONS(softmax_grad, TWO, (y, g, dx, rows, n))
ROW_VERSIONS(log_softmax_grad, TWO, (y, g, dx, rows, n))
ROW_VERSIONS(cross_entropy, LOSS, (x, step, labels, losses, tops, totals, smoothing, ignoring, ignored, rows, n))
ROW_VERSIONS(cross_entropy_grad, LOSS_GRAD, (x, step, dx, to_step, labels, tops, totals, scale, smoothing, ignoring, ignored, \
                                             rows, n))
