/* Activations: values, values with slopes, gradients, and their sums over the rows. See mpitrain/kernels/pointwise.py. */
#include "columns.h"

template <class S> __device__ __forceinline__ S logistic(S x) {                          // without overflow on either side
    const S e = exponential(x < 0 ? x : -x);
    return (x < 0 ? e : S(1)) / (1 + e);
}

struct Relu { template <class S> static __device__ S value(S x) { return x > 0 || x != x ? x : S(0); } };
struct Tanh { template <class S> static __device__ S value(S x) { return tangent(x); } };
struct Sigmoid { template <class S> static __device__ S value(S x) { return logistic(x); } };
struct Gelu {
    template <class S> static __device__ S below(S x) { return S(0.5) * (1 + error_function(x * S(0.70710678118654752440))); }
    template <class S> static __device__ S value(S x) { return x * below(x); }
    template <class S> static __device__ S slope(S x) {
        return below(x) + x * exponential(S(-0.5) * x * x) * S(0.39894228040143267794);
    }
};
struct GeluTanh {
    template <class S> static __device__ S inner(S x) {
        return tangent(S(0.79788456080286535588) * (x + S(0.044715) * x * x * x));
    }
    template <class S> static __device__ S value(S x) { return S(0.5) * x * (1 + inner(x)); }
    template <class S> static __device__ S slope(S x) {
        const S t = inner(x);
        return S(0.5) * (1 + t) + S(0.5) * x * (1 - t * t) * S(0.79788456080286535588) * (1 + S(0.134145) * x * x);
    }
};
struct Silu {
    template <class S> static __device__ S value(S x) { return x * logistic(x); }
    template <class S> static __device__ S slope(S x) { const S s = logistic(x); return s * (1 + x * (1 - s)); }
};

/* eight(i) for the numbers i ... i + 7, as long as there are eight and `vectors` of 16 bytes can be loaded; one(i) for the rest.
   In float64 one alone: 8 numbers would want too many registers. */
template <class T, class Eight, class One>
__device__ __forceinline__ void each_eight(int64 n, bool vectors, Eight eight, One one) {
    const int64 thread = blockIdx.x * (int64)blockDim.x + threadIdx.x, threads = (int64)gridDim.x * blockDim.x;
    int64 done = 0;
    if constexpr (sizeof(T) < 8) if (vectors) {
        done = n / 8 * 8;
        for (int64 i = 8 * thread; i < done; i += 8 * threads) eight(i);
    }
    for (int64 i = done + thread; i < n; i += threads) one(i);
}

template <class F, class T> __device__ __forceinline__ void values(const T *x, T *y, int64 n) {
    each_eight<T>(n, is_aligned(x) && is_aligned(y), [=](int64 i) {
        Sum<T> v[8];
        load_8(x + i, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = F::value(v[j]);
        store_8(y + i, v);
    }, [=](int64 i) { put(y[i], F::value(of(x[i]))); });
}
/* slope may be x. */
template <class F, class T> __device__ __forceinline__ void values_and_slopes(const T *x, T *slope, T *y, int64 n) {
    each_eight<T>(n, is_aligned(x) && is_aligned(slope) && is_aligned(y), [=](int64 i) {
        Sum<T> v[8], made[8];
        load_8(x + i, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            made[j] = F::value(v[j]);
            v[j] = F::slope(v[j]);
        }
        store_8(y + i, made);
        store_8(slope + i, v);
    }, [=](int64 i) {
        const auto v = of(x[i]);
        put(y[i], F::value(v));
        put(slope[i], F::slope(v));
    });
}

struct SlopeGrad { template <class S> static __device__ S value(S kept, S grad) { return kept * grad; } };
struct ReluGrad { template <class S> static __device__ S value(S kept, S grad) { return kept <= 0 ? S(0) : grad; } };
struct TanhGrad { template <class S> static __device__ S value(S kept, S grad) { return (1 - kept * kept) * grad; } };
struct SigmoidGrad { template <class S> static __device__ S value(S kept, S grad) { return (1 - kept) * kept * grad; } };

/* result may be kept. Without `partial`, of rows columns numbers. With it, block (x, y) has columns x and rows y, and goes on by
   the size of the grid; partial (blocks of rows, columns) gets the sums of their rows: the second stage, sums of these, is
   sum_partials. */
template <class F, class T>
__device__ __forceinline__ void gradients(const T *kept, const T *grad, T *result, Sum<T> *partial, int64 rows, int64 columns,
                                          int64 blocks) {
    typedef Sum<T> S;
    const bool vectors = is_aligned(kept) && is_aligned(grad) && is_aligned(result);
    const auto eight = [=](int64 i, S *v) {
        S by[8];
        load_8(kept + i, v);
        load_8(grad + i, by);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = F::value(v[j], by[j]);
        store_8(result + i, v);
    };
    const auto one = [=](int64 i) {
        const S made = F::value(of(kept[i]), of(grad[i]));
        put(result[i], made);
        return made;
    };
    if (!partial) {
        each_eight<T>(rows * columns, vectors, [=](int64 i) { S v[8]; eight(i, v); }, one);
        return;
    }
    for (int64 part = blockIdx.y; part < blocks; part += gridDim.y) {
        const int64 first = part * ROWS_A_BLOCK;
        add_rows(partial + part * columns, columns, first, min(first + ROWS_A_BLOCK, rows), vectors && columns % 8 == 0,
                 [=](int64 row, int64 column, S *v) { eight(row * columns + column, v); },
                 [=](int64 row, int64 column) { return one(row * columns + column); });
    }
}

#define VALUES(T) (const T *__restrict__ x, T *y, int64 n)
#define SLOPES(T) (const T *x, T *slope, T *__restrict__ y, int64 n)
#define GRADIENTS(T) (const T *kept, const T *__restrict__ grad, T *result, Sum<T> *partial, int64 rows, int64 columns, \
                      int64 blocks)
/* As VERSIONS, so many blocks at once: the compiler aims at more otherwise, and gets there by spilling registers. */
#define SHARING(NAME, T, SUFFIX, BLOCKS, PARAMETERS, ARGUMENTS) \
    extern "C" __global__ void __launch_bounds__(WIDE, BLOCKS) NAME##SUFFIX PARAMETERS(T) { NAME<T> ARGUMENTS; }
#define SHARING_VERSIONS(NAME, BLOCKS, PARAMETERS, ARGUMENTS) \
    SHARING(NAME, float, _float32, BLOCKS, PARAMETERS, ARGUMENTS) SHARING(NAME, double, _float64, BLOCKS, PARAMETERS, ARGUMENTS) \
    SHARING(NAME, bfloat16, _bfloat16, BLOCKS, PARAMETERS, ARGUMENTS) \
    SHARING(NAME, float16, _float16, BLOCKS, PARAMETERS, ARGUMENTS)
#define ACTIVATION(NAME, F) \
    template <class T> __device__ __forceinline__ void NAME(const T *x, T *y, int64 n) { values<F>(x, y, n); } \
    SHARING_VERSIONS(NAME, 5, VALUES, (x, y, n))
#define AND_SLOPE(NAME, F) \
    template <class T> __device__ __forceinline__ void NAME(const T *x, T *slope, T *y, int64 n) { \
        values_and_slopes<F>(x, slope, y, n); } \
    SHARING_VERSIONS(NAME, 5, SLOPES, (x, slope, y, n))
#define GRADIENT(NAME, F) \
    template <class T> __device__ __forceinline__ \
    void NAME(const T *kept, const T *grad, T *result, Sum<T> *partial, int64 rows, int64 columns, int64 blocks) { \
        gradients<F>(kept, grad, result, partial, rows, columns, blocks); } \
    SHARING_VERSIONS(NAME, 4, GRADIENTS, (kept, grad, result, partial, rows, columns, blocks))

ACTIVATION(relu, Relu) ACTIVATION(tanh_of, Tanh) ACTIVATION(sigmoid, Sigmoid)
ACTIVATION(gelu, Gelu) ACTIVATION(gelu_tanh, GeluTanh) ACTIVATION(silu, Silu)
AND_SLOPE(gelu_and_slope, Gelu) AND_SLOPE(gelu_tanh_and_slope, GeluTanh) AND_SLOPE(silu_and_slope, Silu)
GRADIENT(slope_grad, SlopeGrad) GRADIENT(relu_grad, ReluGrad) GRADIENT(tanh_grad, TanhGrad) GRADIENT(sigmoid_grad, SigmoidGrad)
