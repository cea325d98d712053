/* Activations: values, values with slopes, gradients, and their sums over the rows. See mpitrain/kernels/pointwise.py. */
#include "device.h"

enum { WIDE = 256, ROWS_A_BLOCK = 64 };

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

template <class F, class T> __device__ __forceinline__ void values(const T *x, T *y, int64 n) {
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < n; i += (int64)gridDim.x * blockDim.x)
        put(y[i], F::value(of(x[i])));
}
/* slope may be x. */
template <class F, class T> __device__ __forceinline__ void values_and_slopes(const T *x, T *slope, T *y, int64 n) {
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < n; i += (int64)gridDim.x * blockDim.x) {
        const auto v = of(x[i]);
        put(y[i], F::value(v));
        put(slope[i], F::slope(v));
    }
}

struct SlopeGrad { template <class S> static __device__ S value(S kept, S grad) { return kept * grad; } };
struct ReluGrad { template <class S> static __device__ S value(S kept, S grad) { return kept <= 0 ? S(0) : grad; } };
struct TanhGrad { template <class S> static __device__ S value(S kept, S grad) { return (1 - kept * kept) * grad; } };
struct SigmoidGrad { template <class S> static __device__ S value(S kept, S grad) { return (1 - kept) * kept * grad; } };

/* result may be kept. Block (x, y) has columns x and rows y, and goes on by the size of the grid; partial (blocks of rows, columns), where given, gets the sums of
   their rows: the second stage, sums of these, is sum_partials. */
template <class F, class T>
__device__ __forceinline__ void gradients(const T *kept, const T *grad, T *result, Sum<T> *partial, int64 rows, int64 columns,
                                          int64 blocks) {
    const int64 column = blockIdx.x * (int64)WIDE + threadIdx.x;
    if (column >= columns) return;
    for (int64 part = blockIdx.y; part < blocks; part += gridDim.y) {
        Sum<T> sum = 0;
        const int64 first = part * ROWS_A_BLOCK, end = min(first + ROWS_A_BLOCK, rows);
        for (int64 row = first; row < end; ++row) {
            const int64 i = row * columns + column;
            const auto made = F::value(of(kept[i]), of(grad[i]));
            put(result[i], made);
            sum += made;
        }
        if (partial) partial[part * columns + column] = sum;
    }
}

#define VALUES(T) (const T *__restrict__ x, T *y, int64 n)
#define SLOPES(T) (const T *x, T *slope, T *__restrict__ y, int64 n)
#define GRADIENTS(T) (const T *kept, const T *__restrict__ grad, T *result, Sum<T> *partial, int64 rows, int64 columns, \
                      int64 blocks)
#define ACTIVATION(NAME, F) \
    template <class T> __device__ __forceinline__ void NAME(const T *x, T *y, int64 n) { values<F>(x, y, n); } \
    VERSIONS(NAME, WIDE, VALUES, (x, y, n))
#define AND_SLOPE(NAME, F) \
    template <class T> __device__ __forceinline__ void NAME(const T *x, T *slope, T *y, int64 n) { \
        values_and_slopes<F>(x, slope, y, n); } \
    VERSIONS(NAME, WIDE, SLOPES, (x, slope, y, n))
#define GRADIENT(NAME, F) \
    template <class T> __device__ __forceinline__ \
    void NAME(const T *kept, const T *grad, T *result, Sum<T> *partial, int64 rows, int64 columns, int64 blocks) { \
        gradients<F>(kept, grad, result, partial, rows, columns, blocks); } \
    VERSIONS(NAME, WIDE, GRADIENTS, (kept, grad, result, partial, rows, columns, blocks))

ACTIVATION(relu, Relu) ACTIVATION(tanh_of, Tanh) ACTIVATION(sigmoid, Sigmoid)
ACTIVATION(gelu, Gelu) ACTIVATION(gelu_tanh, GeluTanh) ACTIVATION(silu, Silu)
AND_SLOPE(gelu_and_slope, Gelu) AND_SLOPE(gelu_tanh_and_slope, GeluTanh) AND_SLOPE(silu_and_slope, Silu)
GRADIENT(slope_grad, SlopeGrad) GRADIENT(relu_grad, ReluGrad) GRADIENT(tanh_grad, TanhGrad) GRADIENT(sigmoid_grad, SigmoidGrad)
