/* Eight numbers that lie side by side, in the format that they are computed in: as many as a byte of dropout's mask is about, and
   16 bytes of 16-bit numbers, the most that a thread loads at once. */
#pragma once
#include "device.h"

/* Whether loads of 16 bytes may be made there; where nothing is (0), it does not matter. */
template <class T> __device__ __forceinline__ bool is_aligned(const T *x) { return (uint64)x % 16 == 0; }

template <class T> struct alignas(16) Eight { T of[8]; };

/* From and to memory that is aligned to 16 bytes. */
template <class T> __device__ __forceinline__ void load_8(const T *from, Sum<T> *to) {
    Eight<T> raw;
#pragma unroll
    for (int i = 0; i < (int)(sizeof raw / 16); ++i) ((uint4 *)&raw)[i] = ((const uint4 *)from)[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = of(raw.of[i]);
}
template <class T> __device__ __forceinline__ void store_8(T *to, const Sum<T> *from) {
    Eight<T> raw;
#pragma unroll
    for (int i = 0; i < 8; ++i) put(raw.of[i], from[i]);
#pragma unroll
    for (int i = 0; i < (int)(sizeof raw / 16); ++i) ((uint4 *)to)[i] = ((uint4 *)&raw)[i];
}
/* From and to any memory, of which `count` of 8 numbers are there; others read as 0. */
template <class T> __device__ __forceinline__ void load_some(const T *from, Sum<T> *to, int64 count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = i < count ? of(from[i]) : Sum<T>(0);
}
template <class T> __device__ __forceinline__ void store_some(T *to, const Sum<T> *from, int64 count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) if (i < count) put(to[i], from[i]);
}
