/* Largest values and sums over windows of planes, and every stride-th pixel. See mpitrain/kernels/pool.py.

   `rows` (2 a + 2 h) has the windows of a plane's h rows: the starts of a windows, their ends, and for each row the first and the
   last window but one that may see it; those which do not, between them, are passed over. `columns` has as much of the w columns.
   Gradients are gathered: each pixel adds up what the windows that see it have for it, in their order. */
#include "device.h"
#include "places.h"

enum { WIDE = 256 };

template <class T>
__device__ __forceinline__ void largest(const T *x, T *y, int *where, const int *rows, const int *columns, int64 n, int64 h,
                                        int64 w, int64 a, int64 b, int64 relu) {
    each_number(n, a * b, [=](int64 plane, uint32 i) {
        const uint32 row = i / (uint32)b, column = i - row * (uint32)b;
        const int x0 = columns[column], x1 = columns[b + column], y0 = rows[row], y1 = rows[a + row], width = (int)w;
        const T *from = x + plane * h * w;
        int at = y0 * width + x0;
        Sum<T> best = of(from[at]);
        for (int v = y0; v < y1; ++v) {
#pragma unroll 1
            for (int j = v * width + x0, end = v * width + x1; j < end; ++j) {
                const Sum<T> value = of(from[j]);
                if (value > best || (value != value && best == best)) { best = value; at = j; }
            }
        }
        where[plane * a * b + i] = relu && best <= 0 ? -1 : at;
        put(y[plane * a * b + i], relu && best <= 0 ? Sum<T>(0) : best);
    });
}

template <class T>
__device__ __forceinline__ void largest_gradient(const T *grad, const int *where, T *result, const int *rows, const int *columns,
                                                 int64 n, int64 h, int64 w, int64 a, int64 b) {
    each_number(n, h * w, [=](int64 plane, uint32 i) {
        const uint32 v = i / (uint32)w, u = i - v * (uint32)w;
        const int end = rows[2 * a + h + v], left = columns[2 * b + u], right = columns[2 * b + w + u];
        Sum<T> sum = 0;
        for (int row = rows[2 * a + v]; row < end; ++row) {
            const int64 first = (plane * a + row) * b;
            for (int column = left; column < right; ++column)
                if (where[first + column] == (int)i) sum += of(grad[first + column]);
        }
        put(result[plane * h * w + i], sum);
    });
}

/* A thread has a window. */
template <class T>
__device__ __forceinline__ void total(const T *x, T *y, const int *rows, const int *columns, int64 n, int64 h, int64 w, int64 a,
                                      int64 b) {
    each_number(n, a * b, [=](int64 plane, uint32 i) {
        const uint32 row = i / (uint32)b, column = i - row * (uint32)b;
        const int x0 = columns[column], x1 = columns[b + column], y1 = rows[a + row];
        const T *from = x + plane * h * w;
        Sum<T> sum = 0;
        for (int v = rows[row]; v < y1; ++v)
            for (int u = x0; u < x1; ++u) sum += of(from[v * (int)w + u]);
        put(y[plane * a * b + i], sum);
    });
}
/* A warp has a window: large ones, such as whole planes. Four loads of a thread are on their way at once. */
template <class T>
__device__ __forceinline__ void large_total(const T *x, T *y, const int *rows, const int *columns, int64 n, int64 h, int64 w,
                                            int64 a, int64 b) {
    each_number<32>(n, a * b, [=](int64 plane, uint32 i) {
        const uint32 row = i / (uint32)b, column = i - row * (uint32)b, lane = threadIdx.x % 32;
        const int x0 = columns[column], y0 = rows[row];
        const uint32 across = columns[b + column] - x0, area = across * (rows[a + row] - y0);
        const T *from = x + plane * h * w + y0 * (int)w + x0;
        Sum<T> sums[4] = {0, 0, 0, 0};
        for (uint32 first = lane; first < area; first += 128) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint32 j = first + 32 * k;
                if (j < area) sums[k] += of(from[across == (uint32)w ? j : j / across * (uint32)w + j % across]);
            }
        }
        const Sum<T> sum = sum_of_warp((sums[0] + sums[1]) + (sums[2] + sums[3]));
        if (lane == 0) put(y[plane * a * b + i], sum);
    });
}
template <class T>
__device__ __forceinline__ void total_gradient(const T *grad, T *result, const int *rows, const int *columns, int64 n, int64 h,
                                               int64 w, int64 a, int64 b) {
    each_number(n, h * w, [=](int64 plane, uint32 i) {
        const int v = i / (uint32)w, u = i - v * (uint32)w;
        const int end = rows[2 * a + h + v], left = columns[2 * b + u], right = columns[2 * b + w + u];
        Sum<T> sum = 0;
        for (int row = rows[2 * a + v]; row < end; ++row) {
            if (rows[row] > v || rows[a + row] <= v) continue;
            const T *from = grad + (plane * a + row) * b;
            for (int column = left; column < right; ++column)
                if (columns[column] <= u && columns[b + column] > u) sum += of(from[column]);
        }
        put(result[plane * h * w + i], sum);
    });
}

/* y (n, before + c + after, a, b) from x (n, c, h, w): pixels stride apart; `all` is before + c + after. */
template <class T>
__device__ __forceinline__ void subsample(const T *x, T *y, int64 n, int64 c, int64 h, int64 w, int64 a, int64 b, int64 all,
                                          int64 stride, int64 before) {
    each_number(n, all * a * b, [=](int64 image, uint32 i) {
        const uint32 area = (uint32)(a * b), plane = i / area, pixel = i - plane * area;
        const uint32 row = pixel / (uint32)b, column = pixel - row * (uint32)b;
        const int64 channel = (int64)plane - before;
        T &to = y[image * all * a * b + i];
        if (channel < 0 || channel >= c) put(to, Sum<T>(0));
        else to = x[((image * c + channel) * h + row * stride) * w + column * stride];
    });
}
template <class T>
__device__ __forceinline__ void subsample_gradient(const T *grad, T *result, int64 n, int64 c, int64 h, int64 w, int64 a, int64 b,
                                                   int64 all, int64 stride, int64 before) {
    each_number(n, c * h * w, [=](int64 image, uint32 i) {
        const uint32 line = i / (uint32)w, u = i - line * (uint32)w, plane = line / (uint32)h, v = line - plane * (uint32)h;
        const uint32 row = v / (uint32)stride, column = u / (uint32)stride;
        T &to = result[image * c * h * w + i];
        if (row * stride != v || column * stride != u) put(to, Sum<T>(0));
        else to = grad[((image * all + before + plane) * a + row) * b + column];
    });
}

#define LARGEST(T) (const T *__restrict__ x, T *__restrict__ y, int *__restrict__ where, const int *__restrict__ rows, \
                    const int *__restrict__ columns, int64 n, int64 h, int64 w, int64 a, int64 b, int64 relu)
#define LARGEST_GRADIENT(T) (const T *__restrict__ grad, const int *__restrict__ where, T *__restrict__ result, \
                             const int *__restrict__ rows, const int *__restrict__ columns, int64 n, int64 h, int64 w, int64 a, \
                             int64 b)
#define TOTAL(T) (const T *__restrict__ x, T *__restrict__ y, const int *__restrict__ rows, const int *__restrict__ columns, \
                  int64 n, int64 h, int64 w, int64 a, int64 b)
#define SUBSAMPLE(T) (const T *__restrict__ x, T *__restrict__ y, int64 n, int64 c, int64 h, int64 w, int64 a, int64 b, \
                      int64 all, int64 stride, int64 before)
VERSIONS(largest, WIDE, LARGEST, (x, y, where, rows, columns, n, h, w, a, b, relu))
VERSIONS(largest_gradient, WIDE, LARGEST_GRADIENT, (grad, where, result, rows, columns, n, h, w, a, b))
VERSIONS(total, WIDE, TOTAL, (x, y, rows, columns, n, h, w, a, b))
VERSIONS(large_total, WIDE, TOTAL, (x, y, rows, columns, n, h, w, a, b))
VERSIONS(total_gradient, WIDE, TOTAL, (x, y, rows, columns, n, h, w, a, b))
VERSIONS(subsample, WIDE, SUBSAMPLE, (x, y, n, c, h, w, a, b, all, stride, before))
VERSIONS(subsample_gradient, WIDE, SUBSAMPLE, (x, y, n, c, h, w, a, b, all, stride, before))
