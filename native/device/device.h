/* What the kernels of this folder share: number formats, sums over a warp and a block, how a kernel is declared.

   A source is compiled by NVRTC to device code; with ON_HOST, by a C++ compiler to a library that runs it on the CPU (on_host.h).
   Nothing of CUDA's headers is needed: NVRTC knows what is used here by itself. */
#pragma once
#ifdef ON_HOST
#include "on_host.h"
#else
#define DYNAMIC_SHARED(T, name) extern __shared__ __align__(16) unsigned char dynamic_shared[]; T *name = (T *)dynamic_shared
#endif

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

struct bfloat16 { uint16 bits; };
struct float16 { uint16 bits; };

/* The format in which numbers of T are computed with: float for 16 bits, T itself else. */
template <class T> struct Computed { typedef float Type; };
template <> struct Computed<double> { typedef double Type; };
template <class T> using Sum = typename Computed<T>::Type;

__device__ __forceinline__ float of(float x) { return x; }
__device__ __forceinline__ double of(double x) { return x; }
__device__ __forceinline__ float of(bfloat16 x) { return __uint_as_float((uint32)x.bits << 16); }
__device__ __forceinline__ float of(float16 x) {
#ifdef ON_HOST
    const uint32 sign = (uint32)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return __uint_as_float(sign | ((rest << 13) + (112u << 23)));
    const float small = (float)rest * 5.9604644775390625e-8f;                            // 2^-24: subnormal
    return sign ? -small : small;
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

/* To the nearest number of the format, ties to even; NaN stays NaN. */
__device__ __forceinline__ void put(float &to, float x) { to = x; }
__device__ __forceinline__ void put(double &to, double x) { to = x; }
__device__ __forceinline__ void put(bfloat16 &to, float x) {
#ifdef ON_HOST
    const uint32 bits = __float_as_uint(x);
    to.bits = x != x ? (uint16)(bits >> 16 | 0x40) : (uint16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#endif
}
__device__ __forceinline__ void put(float16 &to, float x) {
#ifdef ON_HOST
    const uint32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) { to.bits = (uint16)(sign | 0x7e00); return; }
    if (size >= 0x477ff000) { to.bits = (uint16)(sign | 0x7c00); return; }               // 65520 and more: infinity
    if (size >= 0x38800000) { to.bits = (uint16)(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13)); return; }
    const float scaled = __uint_as_float(size) * 16777216.0f;                            // in units of 2^-24
    to.bits = (uint16)(sign | (uint32)rintf(scaled));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#endif
}

/* exp, log, tanh, erf, sqrt in the format of the argument. */
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double tangent(double x) { return tanh(x); }
__device__ __forceinline__ float error_function(float x) { return erff(x); }
__device__ __forceinline__ double error_function(double x) { return erf(x); }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

template <class S> __device__ __forceinline__ S sum_of_warp(S value) {
    for (int lanes = 16; lanes; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}
template <class S> __device__ __forceinline__ S largest_of_warp(S value) {               // NaN where one is NaN
    for (int lanes = 16; lanes; lanes >>= 1) {
        const S other = __shfl_xor_sync(0xffffffffu, value, lanes);
        value = other > value || other != other ? other : value;
    }
    return value;
}
/* Over all threads of a block, of which there are whole warps; each thread gets it. In a fixed order. */
template <class S> __device__ __forceinline__ S sum_of_block(S value) {
    __shared__ S parts[32];
    value = sum_of_warp(value);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    S total = 0;
    for (unsigned i = 0; i < blockDim.x / 32; ++i) total += parts[i];
    __syncthreads();
    return total;
}
template <class S> __device__ __forceinline__ S largest_of_block(S value) {
    __shared__ S parts[32];
    value = largest_of_warp(value);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    S found = parts[0];
    for (unsigned i = 1; i < blockDim.x / 32; ++i) found = parts[i] > found || parts[i] != parts[i] ? parts[i] : found;
    __syncthreads();
    return found;
}

/* KERNEL(name, threads, (parameters)) { body }: a kernel for blocks of so many threads at most. Parameters are pointers, int64 and
   double alone, as the door checks them. VERSIONS(name, threads, parameters of T, arguments) makes the kernels name_float32,
   name_float64, name_bfloat16 and name_float16 of a device function template name<T>. */
#define KERNEL(NAME, THREADS, PARAMETERS) extern "C" __global__ void __launch_bounds__(THREADS) NAME PARAMETERS
#define VERSION(NAME, T, SUFFIX, THREADS, PARAMETERS, ARGUMENTS) \
    KERNEL(NAME##SUFFIX, THREADS, PARAMETERS(T)) { NAME<T> ARGUMENTS; }
#define VERSIONS(NAME, THREADS, PARAMETERS, ARGUMENTS) \
    VERSION(NAME, float, _float32, THREADS, PARAMETERS, ARGUMENTS) \
    VERSION(NAME, double, _float64, THREADS, PARAMETERS, ARGUMENTS) \
    VERSION(NAME, bfloat16, _bfloat16, THREADS, PARAMETERS, ARGUMENTS) \
    VERSION(NAME, float16, _float16, THREADS, PARAMETERS, ARGUMENTS)
