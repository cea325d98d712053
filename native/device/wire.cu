/* Numbers of 16 bits on the wire, sums in float32: see mpitrain/kernels/wire.py, whose bits these are. NaN is one for all.

   A thread takes four numbers at a time where arrays are aligned: 16 bytes of float32, 8 of what is packed. */
#include "device.h"

enum { WIDE = 256, LANES = 4 };

struct Brain {
    static __device__ __forceinline__ uint16 packed(float x) {
        const uint32 bits = __float_as_uint(x);
        return x != x ? 0x7fc0 : (uint16)((bits + (0x7fff + (bits >> 16 & 1))) >> 16);
    }
    static __device__ __forceinline__ float unpacked(uint16 x) { return __uint_as_float((uint32)x << 16); }
};
struct Half {
    static __device__ __forceinline__ uint16 packed(float x) {
        float16 made;
        put(made, x);
        return x != x ? 0x7e00 : made.bits;
    }
    static __device__ __forceinline__ float unpacked(uint16 x) {
        const uint32 rest = x & 0x7fff;                                                  /* a device has one NaN of its own */
        return rest > 0x7c00 ? __uint_as_float((uint32)(x & 0x8000) << 16 | 0x7f800000 | (rest & 0x3ff) << 13) : of(float16{x});
    }
};

/* What an operation reads and writes of x, which holds float32, and of `to`, which is packed; `other` is packed and only read. */
struct Pack {
    enum { READS_X = 1, READS_OTHER = 0, WRITES_X = 0, WRITES_TO = 1 };
    template <class F> static __device__ __forceinline__ void run(float &x, uint16, uint16 &to) { to = F::packed(x); }
};
struct Unpack {
    enum { READS_X = 0, READS_OTHER = 1, WRITES_X = 1, WRITES_TO = 0 };
    template <class F> static __device__ __forceinline__ void run(float &x, uint16 other, uint16 &) { x = F::unpacked(other); }
};
struct Round {
    enum { READS_X = 1, READS_OTHER = 0, WRITES_X = 1, WRITES_TO = 1 };
    template <class F> static __device__ __forceinline__ void run(float &x, uint16, uint16 &to) {
        to = F::packed(x);
        x = F::unpacked(to);
    }
};
struct Add {
    enum { READS_X = 1, READS_OTHER = 1, WRITES_X = 1, WRITES_TO = 0 };
    template <class F> static __device__ __forceinline__ void run(float &x, uint16 other, uint16 &) { x = F::unpacked(other) + x; }
};
struct AddPack {
    enum { READS_X = 1, READS_OTHER = 1, WRITES_X = 0, WRITES_TO = 1 };
    template <class F> static __device__ __forceinline__ void run(float &x, uint16 other, uint16 &to) {
        to = F::packed(F::unpacked(other) + x);
    }
};
struct AddRound {
    enum { READS_X = 1, READS_OTHER = 1, WRITES_X = 1, WRITES_TO = 1 };
    template <class F> static __device__ __forceinline__ void run(float &x, uint16 other, uint16 &to) {
        to = F::packed(F::unpacked(other) + x);
        x = F::unpacked(to);
    }
};

union Four { float4 whole; float x[LANES]; };
union Packed { uint2 whole; uint16 x[LANES]; };

template <class O, class F> __device__ __forceinline__ void each(float *x, const uint16 *other, uint16 *to, int64 n) {
    const bool aligned = (uint64)x % 16 == 0 && (uint64)other % 8 == 0 && (uint64)to % 8 == 0;
    const int64 first = blockIdx.x * (int64)WIDE + threadIdx.x, step = (int64)gridDim.x * WIDE, wide = aligned ? n / LANES : 0;
    for (int64 i = first; i < wide; i += step) {
        Four value;
        Packed read, made;
        if (O::READS_X) value.whole = ((const float4 *)x)[i];
        if (O::READS_OTHER) read.whole = ((const uint2 *)other)[i];
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) O::template run<F>(value.x[lane], O::READS_OTHER ? read.x[lane] : 0, made.x[lane]);
        if (O::WRITES_X) ((float4 *)x)[i] = value.whole;
        if (O::WRITES_TO) ((uint2 *)to)[i] = made.whole;
    }
    for (int64 i = wide * LANES + first; i < n; i += step) {
        float value = O::READS_X ? x[i] : 0.0f;
        uint16 made;
        O::template run<F>(value, O::READS_OTHER ? other[i] : 0, made);
        if (O::WRITES_X) x[i] = value;
        if (O::WRITES_TO) to[i] = made;
    }
}

#define FORMAT(F, SUFFIX) \
    KERNEL(pack_##SUFFIX, WIDE, (float *__restrict__ x, uint16 *__restrict__ to, int64 n)) { each<Pack, F>(x, nullptr, to, n); } \
    KERNEL(unpack_##SUFFIX, WIDE, (const uint16 *__restrict__ other, float *__restrict__ x, int64 n)) { \
        each<Unpack, F>(x, other, nullptr, n); } \
    KERNEL(round_##SUFFIX, WIDE, (float *__restrict__ x, uint16 *__restrict__ to, int64 n)) { each<Round, F>(x, nullptr, to, n); } \
    KERNEL(add_##SUFFIX, WIDE, (const uint16 *__restrict__ other, float *__restrict__ x, int64 n)) { \
        each<Add, F>(x, other, nullptr, n); } \
    KERNEL(add_pack_##SUFFIX, WIDE, (const uint16 *__restrict__ other, float *__restrict__ x, uint16 *__restrict__ to, int64 n)) { \
        each<AddPack, F>(x, other, to, n); } \
    KERNEL(add_round_##SUFFIX, WIDE, (const uint16 *__restrict__ other, float *__restrict__ x, uint16 *__restrict__ to, int64 n)) { \
        each<AddRound, F>(x, other, to, n); }
FORMAT(Brain, bfloat16)
FORMAT(Half, float16)
