/* Channels of x (N, C, L) by the blocks of a grid, what is added up of each, and the activations after a norm.

   Block (i, j) has channels i wide ... (i + 1) wide - 1, and of their units (V numbers of a plane, side by side) the part j
   of those that `gridDim.y` blocks share. Threads of a channel stand `apart`: 1 where they go along a plane, wide where
   planes are so small that neighbours have the next channel's. What a channel adds up is added within a thread, over the
   block, and over the blocks by all that read it, each time in the same order. */
#pragma once
#include "device.h"

enum { THREADS = 256, RELU = 1, RELU6 = 2, HARDSWISH = 3, SILU = 4 };

struct Part {
    int64 channel, channels, length;
    uint32 row, rows, apart, end, units, unit, image, place;
    bool has;

    __device__ __forceinline__ Part(int V, int64 n, int64 c, int64 l, int64 wide, int64 apart_by) {
        const uint32 t = threadIdx.x, w = (uint32)wide;
        apart = (uint32)apart_by;
        rows = THREADS / w;
        row = apart == 1 ? t % rows : t / w;
        channel = blockIdx.x * wide + (apart == 1 ? t / rows : t % w);
        has = channel < c;
        channels = c;
        length = l;
        units = (uint32)(l / V);
        const uint32 all = (uint32)n * units, each = (all + gridDim.y - 1) / gridDim.y;
        unit = blockIdx.y * each + row;
        end = has ? min(all, (blockIdx.y + 1) * each) : 0;
        image = units ? unit / units : 0;
        place = unit - image * units;
    }
    template <int V> __device__ __forceinline__ int64 address() const {
        return (image * channels + channel) * length + (int64)place * V;
    }
    __device__ __forceinline__ void step() {
        unit += rows;
        place += rows;
        if (place >= units) {
            const uint32 more = place / units;
            image += more;
            place -= more * units;
        }
    }
};

template <class S> struct Moments { S count, mean, squares; };
template <class S> __device__ __forceinline__ Moments<S> joined(Moments<S> a, Moments<S> b) {
    const S count = a.count + b.count;
    if (b.count == 0) return a;
    const S delta = b.mean - a.mean, share = b.count / count;
    return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * (a.count * share)};
}
template <class S> struct Pair { S plain, product; };
template <class S> __device__ __forceinline__ Pair<S> joined(Pair<S> a, Pair<S> b) {
    return {a.plain + b.plain, a.product + b.product};
}
/* Of all threads of a channel; each gets it. */
template <class V> __device__ __forceinline__ V over_block(V value, const Part &part) {
    __shared__ unsigned char memory[THREADS * sizeof(V)] __attribute__((aligned(16)));
    V *parts = (V *)memory;
    parts[threadIdx.x] = value;
    __syncthreads();
    for (uint32 half = part.rows / 2; half; half /= 2) {
        if (part.row < half) parts[threadIdx.x] = joined(parts[threadIdx.x], parts[threadIdx.x + half * part.apart]);
        __syncthreads();
    }
    value = parts[threadIdx.x - part.row * part.apart];
    __syncthreads();
    return value;
}

/* partial (2, blocks, C): two numbers of what this block has of each channel. */
template <class S> __device__ __forceinline__ void keep_part(S *partial, const Part &part, S a, S b) {
    if (!part.has || part.row) return;
    partial[blockIdx.y * part.channels + part.channel] = a;
    partial[(gridDim.y + (int64)blockIdx.y) * part.channels + part.channel] = b;
}
/* All parts of a channel, joined to `sum` in their order; f(i, a, b) is the one that block i has kept. Each thread gets it. */
template <class V, class S, class F>
__device__ __forceinline__ V over_parts(V sum, const S *partial, int64 blocks, const Part &part, F f) {
    for (uint32 i = part.row; part.has && i < (uint32)blocks; i += part.rows)
        sum = joined(sum, f(i, partial[i * part.channels + part.channel], partial[(blocks + i) * part.channels + part.channel]));
    return over_block(sum, part);
}

template <class S> __device__ __forceinline__ S activated(S u, int64 activation) {
    if (activation == RELU) return u > 0 || u != u ? u : S(0);
    if (activation == RELU6) return u != u ? u : min(max(u, S(0)), S(6));
    if (activation == HARDSWISH) return u * min(max(u + S(3), S(0)), S(6)) * S(1.0 / 6);
    if (activation == SILU) return u * (S(1) / (S(1) + exponential(-u)));
    return u;
}
template <class S> __device__ __forceinline__ S passed(S grad, S u, int64 activation) {
    if (activation == RELU) return u <= 0 ? S(0) : grad;
    if (activation == RELU6) return u <= 0 || u >= 6 ? S(0) : grad;
    if (activation == HARDSWISH) return u <= -3 ? S(0) : u < 3 ? grad * (u * S(1.0 / 3) + S(0.5)) : grad;
    if (activation == SILU) { const S s = S(1) / (S(1) + exponential(-u)); return grad * (s * (S(1) + u * (S(1) - s))); }
    return grad;
}
