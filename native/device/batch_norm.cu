/* Batch and group norm of x (N, C, L), by channel. See mpitrain/kernels/batch_norm.py.

   Who has which numbers, and in what order they are added up, channels.h says. Statistics are those of x - x[0, c, 0]
   (Welford's, merged as by Chan, Golub and LeVeque 1979), so a mean far from 0 takes nothing from the deviation. */
#include "channels.h"
#include "lanes.h"

template <class T> __device__ __forceinline__ Sum<T> pivot(const T *x, const Part &part, int64 n) {
    return part.has && n && part.length ? of(x[part.channel * part.length]) : Sum<T>(0);
}

/* partial (2, blocks, C): means and sums of squares of each block's numbers. */
template <class T, int V>
__device__ __forceinline__ void moments_of(const T *x, Sum<T> *partial, int64 n, int64 c, int64 l, int64 wide, int64 apart) {
    typedef Sum<T> S;
    enum { AT_ONCE = V == 1 ? 8 : 4 };
    Part part(V, n, c, l, wide, apart);
    const S first = pivot(x, part, n);
    const bool aligned = all_aligned(x);
    Moments<S> sum = {0, 0, 0};
    while (part.unit < part.end) {
        S values[AT_ONCE][V], total = 0, squares = 0;
        int count = 0;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (part.unit < part.end) { load<V>(x + part.address<V>(), aligned, values[k]); count = k + 1; part.step(); }
            else for (int i = 0; i < V; ++i) values[k][i] = first;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
            for (int i = 0; i < V; ++i) total += values[k][i] -= first;              // 0 of those that are not there
        const S numbers = S(count * V), mean = total / numbers;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
            for (int i = 0; i < V; ++i) { const S d = values[k][i] - mean; if (k < count) squares += d * d; }
        sum = joined(sum, Moments<S>{numbers, mean, squares});
    }
    sum = over_block(sum, part);
    keep_part(partial, part, sum.mean, sum.squares);
}
template <class T>
__device__ __forceinline__ void moments(const T *x, Sum<T> *partial, int64 n, int64 c, int64 l, int64 wide, int64 apart,
                                        int64 vector) {
    if (vector) moments_of<T, Widest<T>::COUNT>(x, partial, n, c, l, wide, apart);
    else moments_of<T, 1>(x, partial, n, c, l, wide, apart);
}

/* y, where it is wanted, and what belongs to a channel, from the `blocks` parts of `moments`; of y None, one block of a
   channel. `tally` (2 C + 1), where it is given, gets mean, variance (times `unbiased`) and 1 added, in float64: one number of a
   channel by one thread. */
template <class T, int V>
__device__ __forceinline__ void normalise_of(
        const T *x, const Sum<T> *weight, const Sum<T> *bias, const T *residual, const Sum<T> *partial, T *y, Sum<T> *means,
        Sum<T> *squares, Sum<T> *inverses, double *tally, double unbiased, double eps, int64 n, int64 c, int64 l, int64 blocks,
        int64 wide, int64 apart, int64 activation) {
    typedef Sum<T> S;
    Part part(V, n, c, l, wide, apart);
    const uint32 all = (uint32)n * part.units, each = (all + (uint32)blocks - 1) / (uint32)blocks;
    const Moments<S> sum = over_parts(Moments<S>{0, 0, 0}, partial, blocks, part, [&](uint32 i, S mean, S squares) {
        const uint32 begin = min(all, i * each), end = min(all, (i + 1) * each);
        return Moments<S>{S(end - begin) * V, mean, squares};
    });
    if (!part.has) return;
    const S first = pivot(x, part, n), variance = sum.squares / max(sum.count, S(1)), inverse = S(1) / root(variance + S(eps));
    if (blockIdx.y == 0 && part.row == 0) {
        means[part.channel] = first + sum.mean;
        squares[part.channel] = inverses ? variance : sum.squares;
        if (inverses) inverses[part.channel] = inverse;
        if (tally) {
            tally[part.channel] += (double)(first + sum.mean);
            tally[c + part.channel] += (double)(variance * S(unbiased));
            if (part.channel == 0) tally[2 * c] += 1;
        }
    }
    if (!y) return;
    const S scale = weight ? inverse * weight[part.channel] : inverse, shift = bias ? bias[part.channel] : S(0);
    const bool aligned = all_aligned(x, residual, y);
    while (part.unit < part.end) {
        S values[V], more[V];
        const int64 at = part.address<V>();
        load<V>(x + at, aligned, values);
        if (residual) load<V>(residual + at, aligned, more);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const S u = ((values[i] - first) - sum.mean) * scale + shift;
            values[i] = activated(residual ? u + more[i] : u, activation);
        }
        store<V>(y + at, aligned, values);
        part.step();
    }
}
template <class T>
__device__ __forceinline__ void normalise(
        const T *x, const Sum<T> *weight, const Sum<T> *bias, const T *residual, const Sum<T> *partial, T *y, Sum<T> *means,
        Sum<T> *squares, Sum<T> *inverses, double *tally, double unbiased, double eps, int64 n, int64 c, int64 l, int64 blocks,
        int64 wide, int64 apart, int64 vector, int64 activation) {
    if (vector) normalise_of<T, Widest<T>::COUNT>(x, weight, bias, residual, partial, y, means, squares, inverses, tally,
                                                  unbiased, eps, n, c, l, blocks, wide, apart, activation);
    else normalise_of<T, 1>(x, weight, bias, residual, partial, y, means, squares, inverses, tally, unbiased, eps, n, c, l,
                            blocks, wide, apart, activation);
}

/* Moves the running statistics of a layer, which is a block, to the mean of what was added up, and begins anew. Both flat arrays
   have `size` numbers of a layer from `start` on, then how many were added, beside how many steps there were: of those the
   statistics are the mean where momentum is 0. The host's rounding: see nn/statistics.py. */
template <class T>
__device__ __forceinline__ void move_running(T *values, double *sums, const double *momenta, const int64 *table) {
    typedef Sum<T> S;
    const int64 start = table[2 * blockIdx.x], size = table[2 * blockIdx.x + 1];
    const double count = sums[start + size];
    double momentum = momenta[blockIdx.x];
    S steps = 0;
    if (momentum == 0) {
        steps = of(values[start + size]) + S(1);
        momentum = 1.0 / (double)steps;
    }
    if (count == 0) return;                               /* the same for all threads */
    __syncthreads();
    for (int64 i = start + threadIdx.x; i < start + size; i += THREADS) {
        const S kept = S(1.0 - momentum) * of(values[i]);
        put(values[i], S((double)kept + momentum * (sums[i] / count)));
        sums[i] = 0;
    }
    if (threadIdx.x) return;
    sums[start + size] = 0;
    if (steps != 0) put(values[start + size], steps);
}

/* What is added up in backward, (2, blocks, C): the gradient before the activation, and its product with x - centre. That
   gradient is kept in `before` where it is given; the activation's input is y (of ReLU, its result), or computed anew. */
template <class T, int V>
__device__ __forceinline__ void sums_of(
        const T *grad, const T *x, const T *y, const Sum<T> *centre, const Sum<T> *weight, const Sum<T> *bias,
        const Sum<T> *inverse,
        T *before, Sum<T> *partial, int64 n, int64 c, int64 l, int64 wide, int64 apart, int64 activation) {
    typedef Sum<T> S;
    Part part(V, n, c, l, wide, apart);
    const int64 channel = part.has ? part.channel : 0;
    const S middle = centre[channel], shift = activation && bias ? bias[channel] : S(0);
    const S scale = !activation ? S(1) : weight ? inverse[channel] * weight[channel] : inverse[channel];
    const bool aligned = all_aligned(grad, x, y, before);
    Pair<S> sum = {0, 0};
#pragma unroll 1
    while (part.unit < part.end) {
        S g[V], values[V], u[V];
        const int64 at = part.address<V>();
        load<V>(grad + at, aligned, g);
        load<V>(x + at, aligned, values);
        if (y) load<V>(y + at, aligned, u);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const S d = values[i] - middle;
            if (activation) g[i] = passed(g[i], y ? u[i] : d * scale + shift, activation);
            sum.plain += g[i];
            sum.product += g[i] * d;
        }
        if (before) store<V>(before + at, aligned, g);
        part.step();
    }
    sum = over_block(sum, part);
    keep_part(partial, part, sum.plain, sum.product);
}
template <class T>
__device__ __forceinline__ void sums(
        const T *grad, const T *x, const T *y, const Sum<T> *centre, const Sum<T> *weight, const Sum<T> *bias,
        const Sum<T> *inverse,
        T *before, Sum<T> *partial, int64 n, int64 c, int64 l, int64 wide, int64 apart, int64 vector, int64 activation) {
    enum { V = sizeof(T) == 8 ? 1 : Widest<T>::COUNT };          // two of float64 would not fit in registers beside SiLU's exp
    if (vector) sums_of<T, V>(grad, x, y, centre, weight, bias, inverse, before, partial, n, c, l, wide, apart, activation);
    else sums_of<T, 1>(grad, x, y, centre, weight, bias, inverse, before, partial, n, c, l, wide, apart, activation);
}

/* The sums of a channel, and where they are wanted the gradients of x, weight and bias, from the `blocks` parts of `sums`. Of
   an activation, `grad` is the gradient after it, and its input is computed anew; without, the one before. */
template <class T, int V>
__device__ __forceinline__ void gradients_of(
        const T *grad, const T *x, const Sum<T> *centre, const Sum<T> *weight, const Sum<T> *bias, const Sum<T> *inverse,
        const Sum<T> *partial, T *result, Sum<T> *plain, Sum<T> *product, Sum<T> *of_weight, Sum<T> *of_bias, int64 n,
        int64 c, int64 l, int64 blocks, int64 wide, int64 apart, int64 activation) {
    typedef Sum<T> S;
    Part part(V, n, c, l, wide, apart);
    const Pair<S> sum = over_parts(Pair<S>{0, 0}, partial, blocks, part, [](uint32, S a, S b) { return Pair<S>{a, b}; });
    if (!part.has) return;
    const S back = inverse ? inverse[part.channel] : S(1);
    if (blockIdx.y == 0 && part.row == 0) {
        plain[part.channel] = sum.plain;
        product[part.channel] = sum.product;
        if (of_weight) of_weight[part.channel] = sum.product * back;
        if (of_bias) of_bias[part.channel] = sum.plain;
    }
    if (!result) return;
    const S middle = centre[part.channel], shift = bias ? bias[part.channel] : S(0);
    const S scale = weight ? back * weight[part.channel] : back, count = max(S(n) * S(l), S(1));
    const S slope = -scale * back * back * (sum.product / count), less = -scale * (sum.plain / count);
    const bool aligned = all_aligned(grad, x, result);
    while (part.unit < part.end) {
        S g[V], values[V];
        const int64 at = part.address<V>();
        load<V>(grad + at, aligned, g);
        load<V>(x + at, aligned, values);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const S d = values[i] - middle;
            if (activation) g[i] = passed(g[i], d * scale + shift, activation);
            values[i] = d * slope + scale * g[i] + less;
        }
        store<V>(result + at, aligned, values);
        part.step();
    }
}
template <class T>
__device__ __forceinline__ void gradients(
        const T *grad, const T *x, const Sum<T> *centre, const Sum<T> *weight, const Sum<T> *bias, const Sum<T> *inverse,
        const Sum<T> *partial, T *result, Sum<T> *plain, Sum<T> *product, Sum<T> *of_weight, Sum<T> *of_bias, int64 n,
        int64 c, int64 l, int64 blocks, int64 wide, int64 apart, int64 vector, int64 activation) {
    if (vector) gradients_of<T, Widest<T>::COUNT>(grad, x, centre, weight, bias, inverse, partial, result, plain, product,
                                                  of_weight, of_bias, n, c, l, blocks, wide, apart, activation);
    else gradients_of<T, 1>(grad, x, centre, weight, bias, inverse, partial, result, plain, product, of_weight, of_bias, n, c, l,
                            blocks, wide, apart, activation);
}

/* a grad + b (x - centre) + d; without a gradient b (x - centre) + d. */
template <class T, int V>
__device__ __forceinline__ void combine_of(const T *grad, const T *x, const Sum<T> *centre, const Sum<T> *a, const Sum<T> *b,
                                           const Sum<T> *d, T *result, int64 n, int64 c, int64 l, int64 wide, int64 apart) {
    typedef Sum<T> S;
    Part part(V, n, c, l, wide, apart);
    if (!part.has) return;
    const S middle = centre[part.channel], slope = b[part.channel], shift = d[part.channel], of_grad = a ? a[part.channel] : S(0);
    const bool aligned = all_aligned(grad, x, result);
    while (part.unit < part.end) {
        S g[V], values[V];
        const int64 at = part.address<V>();
        load<V>(x + at, aligned, values);
        if (grad) load<V>(grad + at, aligned, g);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const S scaled = (values[i] - middle) * slope;
            values[i] = (grad ? scaled + of_grad * g[i] : scaled) + shift;
        }
        store<V>(result + at, aligned, values);
        part.step();
    }
}
template <class T>
__device__ __forceinline__ void combine(const T *grad, const T *x, const Sum<T> *centre, const Sum<T> *a, const Sum<T> *b,
                                        const Sum<T> *d, T *result, int64 n, int64 c, int64 l, int64 wide, int64 apart,
                                                int64 vector) {
    if (vector) combine_of<T, Widest<T>::COUNT>(grad, x, centre, a, b, d, result, n, c, l, wide, apart);
    else combine_of<T, 1>(grad, x, centre, a, b, d, result, n, c, l, wide, apart);
}

#define IN(T) const T *__restrict__
#define OUT(T) T *__restrict__
#define SIZES int64 n, int64 c, int64 l, int64 blocks, int64 wide, int64 apart, int64 vector
#define MOMENTS(T) (IN(T) x, OUT(Sum<T>) partial, SIZES)
#define NORMALISE(T) (IN(T) x, IN(Sum<T>) weight, IN(Sum<T>) bias, IN(T) residual, IN(Sum<T>) partial, OUT(T) y, \
                      OUT(Sum<T>) means, OUT(Sum<T>) squares, OUT(Sum<T>) inverses, OUT(double) tally, double unbiased, double eps, \
                      SIZES, int64 activation)
#define SUMS(T) (IN(T) grad, IN(T) x, IN(T) y, IN(Sum<T>) centre, IN(Sum<T>) weight, IN(Sum<T>) bias, IN(Sum<T>) inverse, \
                 OUT(T) before, OUT(Sum<T>) partial, SIZES, int64 activation)
#define GRADIENTS(T) (IN(T) grad, IN(T) x, IN(Sum<T>) centre, IN(Sum<T>) weight, IN(Sum<T>) bias, IN(Sum<T>) inverse, \
                      IN(Sum<T>) partial, OUT(T) result, OUT(Sum<T>) plain, OUT(Sum<T>) product, OUT(Sum<T>) of_weight, \
                      OUT(Sum<T>) of_bias, SIZES, int64 activation)
#define MOVE_RUNNING(T) (T *values, double *sums, IN(double) momenta, IN(int64) table, int64, int64)
#define COMBINE(T) (IN(T) grad, IN(T) x, IN(Sum<T>) centre, IN(Sum<T>) a, IN(Sum<T>) b, IN(Sum<T>) d, OUT(T) result, SIZES)
VERSIONS(moments, THREADS, MOMENTS, (x, partial, n, c, l, wide, apart, vector))
VERSIONS(normalise, THREADS, NORMALISE, (x, weight, bias, residual, partial, y, means, squares, inverses, tally, unbiased, eps, n,
                                         c, l, blocks, wide, apart, vector, activation))
VERSIONS(sums, THREADS, SUMS, (grad, x, y, centre, weight, bias, inverse, before, partial, n, c, l, wide, apart, vector,
        activation))
VERSIONS(gradients, THREADS, GRADIENTS, (grad, x, centre, weight, bias, inverse, partial, result, plain, product, of_weight,
                                         of_bias, n, c, l, blocks, wide, apart, vector, activation))
VERSIONS(combine, THREADS, COMBINE, (grad, x, centre, a, b, d, result, n, c, l, wide, apart, vector))
VERSIONS(move_running, THREADS, MOVE_RUNNING, (values, sums, momenta, table))
