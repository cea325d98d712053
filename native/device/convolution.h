/* Where the numbers of a convolution's products stand, for each place in depth and each column of a tile. See convolution.cu. */
#pragma once
#include "device.h"

enum { FORWARD = 0, ADJOINT = 1, GRADIENT = 2, NOWHERE = -(1 << 29) };

struct Geometry { int n, c, h, w, kh, kw, sh, sw, ph, pw, dh, dw, oh, ow, o, groups; };
struct Place { int64 a, b; int y, x; };           // a: of the other operand, or where a column's results go; -1: nowhere

/* Which positions along a dim of the kernel meet outputs of one phase of the stride: first, first + step, ...; `count` of
   them. */
struct Taps { int first, step, count; };
__device__ __forceinline__ Taps taps_of(int kernel, int stride, int padding, int dilation, int phase) {
    int first = 0, step = 1;
    while (first < kernel && (phase + padding - first * dilation) % stride) ++first;
    while (step * dilation % stride) ++step;
    return {first, step, first < kernel ? (kernel - 1 - first) / step + 1 : 0};
}

template <int MODE> struct Product {
    Geometry g;
    int area, taps, phase_y, phase_x, rows, columns, depth;
    Taps down, across;

    __device__ __forceinline__ Product(const Geometry &of) : g(of) {
        const int inputs = g.c / g.groups, outputs = g.o / g.groups;
        area = g.oh * g.ow;
        taps = g.kh * g.kw;
        rows = MODE == ADJOINT ? inputs : outputs;
        phase_y = phase_x = 0;
        if (MODE == FORWARD) { columns = g.n * area; depth = inputs * taps; }
        if (MODE == GRADIENT) { columns = inputs * taps; depth = g.n * area; }
        if (MODE == ADJOINT) {
            phase_y = blockIdx.z / g.sw;
            phase_x = blockIdx.z % g.sw;
            down = taps_of(g.kh, g.sh, g.ph, g.dh, phase_y);
            across = taps_of(g.kw, g.sw, g.pw, g.dw, phase_x);
            columns = g.n * high() * wide();
            depth = outputs * down.count * across.count;
        }
    }
    __device__ __forceinline__ int high() const { return g.h > phase_y ? (g.h - phase_y - 1) / g.sh + 1 : 0; }
    __device__ __forceinline__ int wide() const { return g.w > phase_x ? (g.w - phase_x - 1) / g.sw + 1 : 0; }

    __device__ __forceinline__ Place in_depth(int k, int end) const {
        if (k >= end) return {-1, 0, NOWHERE, NOWHERE};
        if (MODE == GRADIENT) {
            const int image = (unsigned)k / area, pixel = k - image * area, row = (unsigned)pixel / g.ow;
            const int y = row * g.sh - g.ph, x = (pixel - row * g.ow) * g.sw - g.pw;
            return {(int64)image * g.o * area + pixel, (int64)image * g.c * g.h * g.w + y * g.w + x, y, x};
        }
        if (MODE == FORWARD) {
            const int channel = (unsigned)k / taps, tap = k - channel * taps, row = (unsigned)tap / g.kw;
            const int y = row * g.dh, x = (tap - row * g.kw) * g.dw;
            return {k, channel * g.h * g.w + y * g.w + x, y, x};
        }
        const int each = down.count * across.count, channel = (unsigned)k / each, tap = k - channel * each;
        const int row = (unsigned)tap / across.count;
        const int v = down.first + row * down.step, u = across.first + (tap - row * across.count) * across.step;
        const int y = (phase_y + g.ph - v * g.dh) / g.sh, x = (phase_x + g.pw - u * g.dw) / g.sw;
        return {(int64)channel * (g.c / g.groups) * taps + v * g.kw + u, channel * area + y * g.ow + x, y, x};
    }
    __device__ __forceinline__ Place of_column(int column) const {
        if (column >= columns) return {-1, 0, NOWHERE, NOWHERE};
        if (MODE == GRADIENT) {
            const int channel = (unsigned)column / taps, tap = column - channel * taps, row = (unsigned)tap / g.kw;
            const int y = row * g.dh, x = (tap - row * g.kw) * g.dw;
            return {column, channel * g.h * g.w + y * g.w + x, y, x};
        }
        if (MODE == FORWARD) {
            const int image = (unsigned)column / area, pixel = column - image * area, row = (unsigned)pixel / g.ow;
            const int y = row * g.sh - g.ph, x = (pixel - row * g.ow) * g.sw - g.pw;
            return {(int64)image * g.o * area + pixel, (int64)image * g.c * g.h * g.w + y * g.w + x, y, x};
        }
        const int each = high() * wide(), image = (unsigned)column / each, pixel = column - image * each;
        const int y = (unsigned)pixel / wide(), x = pixel - y * wide();
        return {((int64)image * g.c * g.h + phase_y + y * g.sh) * g.w + phase_x + x * g.sw,
                (int64)image * g.o * area + y * g.ow + x, y, x};
    }
};
