/* Where a number of an array of planes stands. Divisions are of 32 bits: one of 64 is a routine that is called, and what a kernel
   knows goes to memory before. */
#pragma once
#include "device.h"

/* Calls f(plane, place in it) for each number of `planes` planes of `area` numbers, fewer than 2^31: a thread (or LANES of
   them) has one, and goes on by the size of the grid. Planes come in slabs that 32 bits count. */
template <int LANES = 1, class F> __device__ __forceinline__ void each_number(int64 planes, int64 area, F f) {
    const int64 slab = max((int64)(2e9f / (float)max(area, (int64)1)), (int64)1);
    for (int64 first = 0; first < planes; first += slab) {
        const uint32 count = (uint32)(min(slab, planes - first) * area), size = (uint32)area;
        for (uint32 i = (blockIdx.x * blockDim.x + threadIdx.x) / LANES; i < count; i += gridDim.x * blockDim.x / LANES) {
            const uint32 plane = i / size;
            f(first + plane, i - plane * size);
        }
    }
}
