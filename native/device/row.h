/* A row of a matrix by the threads of one block: vectors of 16 bytes where the arrays allow it, and the sum of exponentials of a
   softmax in one pass. */
#pragma once
#include "device.h"

template <class S> __device__ __forceinline__ S infinite() { return S(__uint_as_float(0x7f800000)); }
template <class S> __device__ __forceinline__ S not_a_number() { return S(__uint_as_float(0x7fc00000)); }

template <class T> struct __align__(16) Vector { enum { N = 16 / sizeof(T) }; T at[N]; };

/* f(i, a[i], b[i]) for each i < n < 2^31, in rows of which some may be missing (null); its results go to out, which may be a or
   b. A row that starts anywhere has single numbers up to the first whole vector, and after the last one. Rows that lie apart from
   each other by other than 16 bytes have single numbers only. BATCH vectors of each array (of float64, one) at once. */
template <int BATCH, class T, class F>
__device__ __forceinline__ void walk(const T *a, const T *b, T *out, int64 numbers, F f) {
    enum { N = Vector<T>::N, K = sizeof(T) == 8 ? 1 : BATCH };          // float64 would want too many registers
    const int threads = blockDim.x, thread = threadIdx.x, n = (int)numbers;
    const uint64 place = a ? (uint64)a : (uint64)out;
    const bool alike = (!b || ((uint64)b - place) % 16 == 0) && (!out || ((uint64)out - place) % 16 == 0);
    const int head = alike ? min(n, (int)((0 - place) % 16 / sizeof(T))) : n, vectors = (n - head) / N;
    const auto one = [&](int i) {
        const auto made = f(i, a ? of(a[i]) : Sum<T>(0), b ? of(b[i]) : Sum<T>(0));
        if (out) put(out[i], made);
    };
    for (int i = thread; i < head; i += threads) one(i);
    const Vector<T> *va = a ? (const Vector<T> *)(a + head) : nullptr, *vb = b ? (const Vector<T> *)(b + head) : nullptr;
    Vector<T> *to = out ? (Vector<T> *)(out + head) : nullptr;
    for (int j = thread; j < vectors; j += K * threads) {
        Vector<T> x[K], y[K];
#pragma unroll
        for (int k = 0; k < K; ++k) if (j + k * threads < vectors) {
            if (a) x[k] = va[j + k * threads];
            if (b) y[k] = vb[j + k * threads];
        }
#pragma unroll
        for (int k = 0; k < K; ++k) if (j + k * threads < vectors) {
            const int first = head + (j + k * threads) * N;
#pragma unroll
            for (int l = 0; l < N; ++l) {
                const auto made = f(first + l, a ? of(x[k].at[l]) : Sum<T>(0), b ? of(y[k].at[l]) : Sum<T>(0));
                if (out) put(x[k].at[l], made);
            }
            if (out) to[j + k * threads] = x[k];
        }
    }
    for (int i = head + vectors * N + thread; i < n; i += threads) one(i);
}

template <class T> __device__ __forceinline__ void clear(T *y, int64 n) {
    walk<1>((const T *)nullptr, (const T *)nullptr, y, n, [](int, Sum<T>, Sum<T>) { return Sum<T>(0); });
}

/* The largest of some numbers and the sum of exp(x - largest), in one pass (Milakov and Gimelshein, "Online normalizer
   calculation for softmax", 2018). NaN is passed over in `top`, and comes back in `total`, which is NaN where the largest is
   infinite, too. Where all numbers are -inf, `top` is, and `total` is 0. */
template <class S> struct Exponentials {
    S top = -infinite<S>(), total = 0;

    template <int N> __device__ __forceinline__ void add(const S (&x)[N]) {
        S most = top;
#pragma unroll
        for (int l = 0; l < N; ++l) most = x[l] > most ? x[l] : most;
        if (most > top) {
            total *= exponential(top - most);
            top = most;
        }
        const S base = top == -infinite<S>() ? S(0) : top;
#pragma unroll
        for (int l = 0; l < N; ++l) total += exponential(x[l] - base);
    }

    /* Over all threads of the block, in a fixed order. */
    __device__ __forceinline__ void join() {
        const S most = largest_of_block(top);
        total = sum_of_block(top == most ? total : total * exponential(top - most));
        top = most;
    }
};

/* The same of of(x[i]) * scale for each i < n < 2^31, by the threads of a block: several numbers at a time, which takes half as
   many operations as one by one. `beside`(a number) is called with each. */
template <class T, class F>
__device__ __forceinline__ Exponentials<Sum<T>> exponentials(const T *x, int64 numbers, Sum<T> scale, F beside) {
    typedef Sum<T> S;
    enum { N = Vector<T>::N, K = sizeof(T) == 8 ? 1 : 2 };
    const int threads = blockDim.x, thread = threadIdx.x, n = (int)numbers;
    const int head = min(n, (int)((0 - (uint64)x) % 16 / sizeof(T))), vectors = (n - head) / N, rest = n - head - vectors * N;
    Exponentials<S> found;
    for (int i = thread; i < head + rest; i += threads) {                // before the first vector, and after the last one
        const S v[1] = {of(x[i < head ? i : i + vectors * N]) * scale};
        beside(v[0]);
        found.add(v);
    }
    const Vector<T> *from = (const Vector<T> *)(x + head);
    for (int j = thread; j < vectors; j += K * threads) {
        Vector<T> got[K];
#pragma unroll
        for (int k = 0; k < K; ++k) if (j + k * threads < vectors) got[k] = from[j + k * threads];
#pragma unroll
        for (int k = 0; k < K; ++k) if (j + k * threads < vectors) {
            S v[N];
#pragma unroll
            for (int l = 0; l < N; ++l) {
                v[l] = of(got[k].at[l]) * scale;
                beside(v[l]);
            }
            found.add(v);
        }
    }
    found.join();
    return found;
}

/* VERSIONS (device.h) of a kernel whose blocks have ROW_THREADS threads at most. That four of them, of float64 two, share a
   processor is said, since the compiler aims at more otherwise, and gets there by spilling registers. */
enum { ROW_THREADS = 256 };
#define ROW_VERSION(NAME, T, SUFFIX, PARAMETERS, ARGUMENTS) \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, sizeof(T) == 8 ? 2 : 4) NAME##SUFFIX PARAMETERS(T) \
    { NAME<T> ARGUMENTS; }
#define ROW_VERSIONS(NAME, PARAMETERS, ARGUMENTS) \
    ROW_VERSION(NAME, float, _float32, PARAMETERS, ARGUMENTS) \
    ROW_VERSION(NAME, double, _float64, PARAMETERS, ARGUMENTS) \
    ROW_VERSION(NAME, bfloat16, _bfloat16, PARAMETERS, ARGUMENTS) \
    ROW_VERSION(NAME, float16, _float16, PARAMETERS, ARGUMENTS)
