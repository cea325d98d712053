/* A row of a matrix by the threads of one block: vectors of 16 bytes where the arrays allow it, and the sum of exponentials of a
   softmax in one pass. */
#pragma once
#include "device.h"

template <class S> __device__ __forceinline__ S infinite() { return S(__uint_as_float(0x7f800000)); }
template <class S> __device__ __forceinline__ S not_a_number() { return S(__uint_as_float(0x7fc00000)); }

template <class T> struct __align__(16) Vector { enum { N = 16 / sizeof(T) }; T at[N]; };

/* f(i, a[i], b[i]) for each i < n < 2^31, in rows of which some may be missing (null); its results go to out, which may be a or b.
   A row that starts anywhere has single numbers up to the first whole vector, and after the last one. Rows that lie differently to
   16 bytes have single numbers only. BATCH vectors of each array (of float64: one) are asked for at a time. */
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

/* The largest of some numbers and the sum of exp(x - largest), of numbers that come one by one (Milakov and Gimelshein, "Online
   normalizer calculation for softmax", 2018). NaN is passed over in `top`, and comes back in `total`. */
template <class S> struct Exponentials {
    S top = -infinite<S>(), total = 0;

    __device__ __forceinline__ void add(S x) {
        const S apart = x - top, e = exponential(x == top ? S(0) : apart > 0 ? -apart : apart);      // NaN stays NaN
        total = apart > 0 ? total * e + 1 : total + e;
        top = apart > 0 ? x : top;
    }

    /* Over all threads of the block, in a fixed order. Of numbers of which one is infinite, or NaN, the total is NaN; where all
       are -inf, top is. */
    __device__ __forceinline__ void join() {
        const S most = largest_of_block(top);
        total = sum_of_block(top == most ? total : total * exponential(top - most));
        top = most;
        if (most == infinite<S>()) total = not_a_number<S>();
    }
};

/* VERSIONS (device.h) of a kernel whose blocks have ROW_THREADS threads at most. That four of them, of float64 two, share a processor
   is said, since the compiler aims at more otherwise, and gets there by spilling registers. */
enum { ROW_THREADS = 256 };
#define ROW_VERSION(NAME, T, SUFFIX, PARAMETERS, ARGUMENTS) \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, sizeof(T) == 8 ? 2 : 4) NAME##SUFFIX PARAMETERS(T) \
    { NAME<T> ARGUMENTS; }
#define ROW_VERSIONS(NAME, PARAMETERS, ARGUMENTS) \
    ROW_VERSION(NAME, float, _float32, PARAMETERS, ARGUMENTS) \
    ROW_VERSION(NAME, double, _float64, PARAMETERS, ARGUMENTS) \
    ROW_VERSION(NAME, bfloat16, _bfloat16, PARAMETERS, ARGUMENTS) \
    ROW_VERSION(NAME, float16, _float16, PARAMETERS, ARGUMENTS)
