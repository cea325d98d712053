/* V numbers that lie side by side: 16 bytes of them, which a thread loads at once, or one. */
#pragma once
#include "device.h"

template <class T> struct Widest { enum { COUNT = 16 / sizeof(T) }; };
template <class T, int V> union Lanes { uint4 all; T at[V]; };

/* From and to memory at a multiple of V from an array's begin; `aligned`: that is one of 16 bytes. */
template <int V, class T> __device__ __forceinline__ void load(const T *from, bool aligned, Sum<T> *to) {
    Lanes<T, V> raw;
    if (V > 1 && aligned) raw.all = *(const uint4 *)from;
    else {
#pragma unroll
        for (int i = 0; i < V; ++i) raw.at[i] = from[i];
    }
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = of(raw.at[i]);
}
template <int V, class T> __device__ __forceinline__ void store(T *to, bool aligned, const Sum<T> *from) {
    Lanes<T, V> raw;
#pragma unroll
    for (int i = 0; i < V; ++i) put(raw.at[i], from[i]);
    if (V > 1 && aligned) *(uint4 *)to = raw.all;
    else {
#pragma unroll
        for (int i = 0; i < V; ++i) to[i] = raw.at[i];
    }
}
template <class... P> __device__ __forceinline__ bool all_aligned(P... pointers) { return (((uint64)pointers | ...) & 15) == 0; }
