/* The three products of a convolution as products of matrices whose operands are never written down (implicit GEMM), and
   depthwise ones as sums over windows. See mpitrain/kernels/convolution.py, whose letters these are.

                 rows of a group     columns                        added up over
     forward     O / groups          n oh ow                        C / groups, kh, kw
     adjoint     C / groups          n h w, by phase of the stride  O / groups, those of kh and kw that meet the phase
     gradient    O / groups          C / groups, kh, kw             n oh ow, by parts of it (blockIdx.z)

   A block makes a tile of ROWS x 4096 / ROWS; each of 256 threads has 4 x 4 of it. While a tile's DEPTH products are added
   up, the next operands are on their way to registers. A number of the image is at `b` of its place in depth + `b` of its
   column; it is 0 where y or x, which add up alike, are outside. Tables of both are in shared memory: divisions are made
   once, not for each number. Offsets within an image are of 32 bits, as the number of columns is. */
#include "convolution.h"
#include "places.h"

enum { THREADS = 256 };

template <class S> struct alignas(16) Four { S at[4]; };
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

template <int MODE, int ROWS, class T, class R>
__device__ __forceinline__ void product_of(const T *a, const T *b, const T *bias, R *out, const Geometry &geometry) {
    typedef Sum<T> S;
    enum { COLUMNS = 4096 / ROWS, DEPTH = (ROWS == 16 ? 32 : 64) / sizeof(S),     // as registers allow
           LEFT = (ROWS * DEPTH + THREADS - 1) / THREADS, RIGHT = COLUMNS * DEPTH / THREADS };
    __shared__ Four<S> left[2][DEPTH][ROWS / 4 + 1], right[2][DEPTH][COLUMNS / 4 + 1];
    __shared__ Place in_depth[2][DEPTH], of_column[COLUMNS];
    const Product<MODE> p(geometry);
    const Geometry &g = p.g;
    const int t = threadIdx.x, bands = (p.rows + ROWS - 1) / ROWS, group = blockIdx.y / bands;
    const int first_row = (blockIdx.y - group * bands) * ROWS, pixels = g.h * g.w;
    const int inputs = g.c / g.groups, outputs = g.o / g.groups;
    const int64 first_column = blockIdx.x * (int64)COLUMNS, weights = (int64)group * outputs * inputs * p.taps;
    if (first_column >= p.columns) return;                                    // phases are of different sizes
    int begin = 0, end = p.depth;
    if (MODE == GRADIENT) {
        const int each = ((p.depth + (int)gridDim.z - 1) / (int)gridDim.z + DEPTH - 1) / DEPTH * DEPTH;
        begin = min((int64)p.depth, (int64)blockIdx.z * each);
        end = min((int64)p.depth, (int64)begin + each);
        out += (int64)blockIdx.z * g.o * inputs * p.taps;
    }
    const int64 images = MODE == ADJOINT ? (int64)group * outputs * p.area : (int64)group * inputs * pixels;
    const int64 results = MODE == FORWARD ? (int64)group * outputs * p.area
        : MODE == ADJOINT ? (int64)group * inputs * pixels : weights;
    const int64 a_row = MODE == FORWARD ? (int64)inputs * p.taps : MODE == ADJOINT ? p.taps : p.area;
    const int64 out_row = MODE == FORWARD ? p.area : MODE == ADJOINT ? pixels : inputs * p.taps;
    const int image_h = MODE == ADJOINT ? g.oh : g.h, image_w = MODE == ADJOINT ? g.ow : g.w;
    a += MODE == GRADIENT ? (int64)group * outputs * p.area : weights;
    b += images;
    out += results;

    for (int i = t; i < COLUMNS; i += THREADS) of_column[i] = p.of_column((int)min(first_column + i, (int64)p.columns));
    if (t < DEPTH) in_depth[0][t] = p.in_depth(begin + t, end);
    __syncthreads();

    S next_left[LEFT], next_right[RIGHT];
    const auto fetch = [&](int of) {
#pragma unroll
        for (int i = 0; i < LEFT; ++i) {
            const int k = (t + i * THREADS) % DEPTH, row = (t + i * THREADS) / DEPTH;
            const int64 at = in_depth[of][k].a;
            next_left[i] = row < ROWS && first_row + row < p.rows && at >= 0 ? ::of(a[(first_row + row) * a_row + at]) : S(0);
        }
        const Place own = of_column[t % COLUMNS];
#pragma unroll
        for (int i = 0; i < RIGHT; ++i) {         // neighbours have neighbouring pixels
            const int j = t + i * THREADS, k = MODE == GRADIENT ? j % DEPTH : j / COLUMNS;
            const Place column = MODE == GRADIENT ? of_column[j / DEPTH] : own, place = in_depth[of][k];
            const unsigned y = place.y + column.y, x = place.x + column.x;
            const bool is_inside = y < (unsigned)image_h && x < (unsigned)image_w;
            next_right[i] = is_inside ? ::of(b[place.b + column.b]) : S(0);
        }
    };
    const auto keep = [&](int of) {
#pragma unroll
        for (int i = 0; i < LEFT; ++i) {
            const int k = (t + i * THREADS) % DEPTH, row = (t + i * THREADS) / DEPTH;
            if (row < ROWS) left[of][k][row / 4].at[row % 4] = next_left[i];
        }
#pragma unroll
        for (int i = 0; i < RIGHT; ++i) {
            const int j = t + i * THREADS, k = MODE == GRADIENT ? j % DEPTH : j / COLUMNS;
            const int column = MODE == GRADIENT ? j / DEPTH : j % COLUMNS;
            right[of][k][column / 4].at[column % 4] = next_right[i];
        }
    };

    S sums[4][4] = {};
    const int row = t / (COLUMNS / 4) * 4, column = t % (COLUMNS / 4) * 4;
    if (begin < end) {
        fetch(0);
        keep(0);
        if (t < DEPTH) in_depth[1][t] = p.in_depth(begin + DEPTH + t, end);
    }
    __syncthreads();
    for (int k = begin, now = 0; k < end; k += DEPTH, now ^= 1) {
        const bool more = k + DEPTH < end;
        if (more) fetch(now ^ 1);
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const Four<S> l = left[now][i][row / 4], r = right[now][i][column / 4];
#pragma unroll
            for (int y = 0; y < 4; ++y)
#pragma unroll
                for (int x = 0; x < 4; ++x) sums[y][x] = fused(l.at[y], r.at[x], sums[y][x]);
        }
        if (more) {
            keep(now ^ 1);
            if (t < DEPTH) in_depth[now][t] = p.in_depth(k + 2 * DEPTH + t, end);
        }
        __syncthreads();
    }
#pragma unroll
    for (int y = 0; y < 4; ++y) {
        if (first_row + row + y >= p.rows) break;
        const S added = bias ? ::of(bias[group * p.rows + first_row + row + y]) : S(0);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int64 to = of_column[column + x].a;
            if (to >= 0) put(out[(first_row + row + y) * out_row + to], sums[y][x] + added);
        }
    }
}

/* Sums over windows of planes: O = C times a small number. */
template <class T>
__device__ __forceinline__ void depthwise(const T *x, const T *weight, const T *bias, T *y, const Geometry &g) {
    const int each = g.o / g.groups, taps = g.kh * g.kw;
    each_number((int64)g.n * g.o, g.oh * g.ow, [=](int64 plane, uint32 i) {
        const uint32 image = (uint32)plane / g.o;
        const int output = (uint32)plane - image * g.o, row = i / (uint32)g.ow, top = row * g.sh - g.ph,
                side = (i - row * g.ow) * g.sw - g.pw;
        const T *from = x + ((int64)image * g.c + output / each) * g.h * g.w, *factors = weight + output * taps;
        Sum<T> sum = bias ? of(bias[output]) : Sum<T>(0);
        for (int v = 0; v < g.kh; ++v) {
            const int line = top + v * g.dh;
            if (line < 0 || line >= g.h) continue;
            for (int u = 0; u < g.kw; ++u) {
                const int at = side + u * g.dw;
                if (at >= 0 && at < g.w) sum = fused(of(factors[v * g.kw + u]), of(from[line * g.w + at]), sum);
            }
        }
        put(y[plane * g.oh * g.ow + i], sum);
    });
}
template <class T>
__device__ __forceinline__ void depthwise_adjoint(const T *y, const T *weight, const T *bias, T *x, const Geometry &g) {
    const int each = g.o / g.groups, taps = g.kh * g.kw;
    each_number((int64)g.n * g.c, g.h * g.w, [=](int64 plane, uint32 i) {
        const uint32 image = (uint32)plane / g.c;
        const int channel = (uint32)plane - image * g.c, row = i / (uint32)g.w, column = i - row * g.w;
        Sum<T> sum = bias ? of(bias[channel]) : Sum<T>(0);
        for (int m = 0; m < each; ++m) {
            const int output = channel * each + m;
            const T *from = y + ((int64)image * g.o + output) * g.oh * g.ow, *factors = weight + output * taps;
            for (int v = 0; v < g.kh; ++v) {
                const int down = row + g.ph - v * g.dh, line = down / g.sh;
                if (down < 0 || line * g.sh != down || line >= g.oh) continue;
                for (int u = 0; u < g.kw; ++u) {
                    const int right = column + g.pw - u * g.dw, at = right / g.sw;
                    if (right >= 0 && at * g.sw == right && at < g.ow)
                        sum = fused(of(factors[v * g.kw + u]), of(from[line * g.ow + at]), sum);
                }
            }
        }
        put(x[plane * g.h * g.w + i], sum);
    });
}
/* Block (i, j, k) has output i, part j of the images, and nine positions in the window from 9 k on; partial (parts, O, taps). */
template <class T>
__device__ __forceinline__ void depthwise_gradient(const T *x, const T *y, Sum<T> *partial, const Geometry &g) {
    const int output = blockIdx.x, channel = output / (g.o / g.groups), taps = g.kh * g.kw, first = blockIdx.z * 9;
    const int area = g.oh * g.ow, each = (g.n + (int)gridDim.y - 1) / (int)gridDim.y;
    const int image = min(g.n, (int)blockIdx.y * each);
    const uint32 count = (uint32)(min(g.n, image + each) - image) * area;
    const T *grads = y + ((int64)image * g.o + output) * area, *images = x + ((int64)image * g.c + channel) * g.h * g.w;
    Sum<T> sums[9] = {};
    for (uint32 i = threadIdx.x; i < count; i += THREADS) {
        const int which = i / area, pixel = i - which * area, row = (uint32)pixel / g.ow;
        const int top = row * g.sh - g.ph, side = (pixel - row * g.ow) * g.sw - g.pw;
        const Sum<T> grad = of(grads[(int64)which * g.o * area + pixel]);
        const T *from = images + (int64)which * g.c * g.h * g.w;
        int v = first / g.kw, u = first - v * g.kw;
#pragma unroll
        for (int j = 0; j < 9; ++j) {
            const int line = top + v * g.dh, at = side + u * g.dw;
            if (++u == g.kw) { u = 0; ++v; }
            if (first + j < taps && (uint32)line < (uint32)g.h && (uint32)at < (uint32)g.w)
                sums[j] = fused(grad, of(from[line * g.w + at]), sums[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < 9; ++j) {
        const Sum<T> sum = sum_of_block(sums[j]);
        if (threadIdx.x == 0 && first + j < taps) partial[((int64)blockIdx.y * g.o + output) * taps + first + j] = sum;
    }
}
/* partial (parts, C): of each channel of x (n, C, l), over the images that block (channel, part) has. */
template <class T> __device__ __forceinline__ void plane_sums(const T *x, Sum<T> *partial, int64 n, int64 c, int64 l) {
    const int64 each = (n + gridDim.y - 1) / gridDim.y, end = min(n, (blockIdx.y + 1) * each);
    Sum<T> sum = 0;
    for (int64 image = blockIdx.y * each; image < end; ++image) {
        const T *from = x + (image * c + blockIdx.x) * l;
        for (int64 i = threadIdx.x; i < l; i += THREADS) sum += of(from[i]);
    }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) partial[blockIdx.y * c + blockIdx.x] = sum;
}

#define IN(T) const T *__restrict__
#define OUT(T) T *__restrict__
#define SIZES int64 n, int64 c, int64 h, int64 w, int64 kh, int64 kw, int64 sh, int64 sw, int64 ph, int64 pw, int64 dh, \
              int64 dw, int64 oh, int64 ow, int64 o, int64 groups
#define GEOMETRY Geometry{(int)n, (int)c, (int)h, (int)w, (int)kh, (int)kw, (int)sh, (int)sw, (int)ph, (int)pw, (int)dh, \
                          (int)dw, (int)oh, (int)ow, (int)o, (int)groups}
#define LINEAR(T) (IN(T) x, IN(T) weight, IN(T) bias, OUT(T) y, SIZES)
#define GRADIENTS(T) (IN(T) x, IN(T) y, OUT(Sum<T>) partial, SIZES, int64 parts)
/* As VERSIONS, for kernels that want 128 registers a thread rather than more blocks at once. */
#define ROOMY(NAME, T, SUFFIX, PARAMETERS, ARGUMENTS) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME##SUFFIX PARAMETERS(T) { NAME<T> ARGUMENTS; }
#define ROOMY_VERSIONS(NAME, PARAMETERS, ARGUMENTS) \
    ROOMY(NAME, float, _float32, PARAMETERS, ARGUMENTS) ROOMY(NAME, double, _float64, PARAMETERS, ARGUMENTS) \
    ROOMY(NAME, bfloat16, _bfloat16, PARAMETERS, ARGUMENTS) ROOMY(NAME, float16, _float16, PARAMETERS, ARGUMENTS)
#define PRODUCT(NAME, MODE, ROWS) \
    template <class T> __device__ __forceinline__ \
    void NAME(const T *x, const T *weight, const T *bias, T *y, const Geometry &g) { \
        product_of<MODE, ROWS>(weight, x, bias, y, g); } \
    ROOMY_VERSIONS(NAME, LINEAR, (x, weight, bias, y, GEOMETRY))
#define PRODUCT_GRADIENT(NAME, ROWS) \
    template <class T> __device__ __forceinline__ void NAME(const T *x, const T *y, Sum<T> *partial, const Geometry &g) { \
        product_of<GRADIENT, ROWS>(y, x, (const T *)0, partial, g); } \
    ROOMY_VERSIONS(NAME, GRADIENTS, (x, y, partial, GEOMETRY))
PRODUCT(forward_16, FORWARD, 16) PRODUCT(forward_64, FORWARD, 64)
PRODUCT(adjoint_16, ADJOINT, 16) PRODUCT(adjoint_64, ADJOINT, 64)
PRODUCT_GRADIENT(gradient_16, 16) PRODUCT_GRADIENT(gradient_64, 64)
VERSIONS(depthwise, THREADS, LINEAR, (x, weight, bias, y, GEOMETRY))
VERSIONS(depthwise_adjoint, THREADS, LINEAR, (x, weight, bias, y, GEOMETRY))
ROOMY_VERSIONS(depthwise_gradient, GRADIENTS, (x, y, partial, GEOMETRY))
#define PLANE_SUMS(T) (IN(T) x, OUT(Sum<T>) partial, int64 n, int64 c, int64 l, int64 parts)
VERSIONS(plane_sums, THREADS, PLANE_SUMS, (x, partial, n, c, l))
