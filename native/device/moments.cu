/* Sums of rows, and means with sums of squared distances from them, in two stages without atomics: of chunks, then of these, each in
   a fixed order. See mpitrain/kernels/sums.py and variances.py. */
#include "row.h"

/* partial[row, chunk]: the sum of `span` numbers of a row (rows, n), or as many as are left. */
template <class T>
__device__ __forceinline__ void row_chunks(const T *x, Sum<T> *partial, int64 rows, int64 n, int64 chunks, int64 span) {
    typedef Sum<T> S;
    for (int64 block = blockIdx.x; block < rows * chunks; block += gridDim.x) {
        const int64 row = block / chunks, first = block % chunks * span;
        S sum = 0;
        walk<2>(x + row * n + first, (const T *)nullptr, (T *)nullptr, min(span, n - first), [&](int, S v, S) { sum += v; return v; });
        sum = sum_of_block(sum);
        if (threadIdx.x == 0) partial[block] = sum;
    }
}

template <class T> __device__ __forceinline__ void row_totals(T *out, const Sum<T> *partial, int64 rows, int64 chunks) {
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Sum<T> sum = 0;
        for (int64 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) sum += partial[row * chunks + chunk];
        sum = sum_of_block(sum);
        if (threadIdx.x == 0) put(out[row], sum);
    }
}

/* Of x (outer, rows, n), partial[a, chunk, b]: the sums over `span` rows of x[a, :, b], or of its squared distances from means[a, b],
   where given. A block has one chunk; where n is 1, its threads share the chunk, and else each has columns of its own. */
template <class T>
__device__ __forceinline__ void moment_chunks(const T *x, const double *means, double *partial, int64 outer, int64 rows, int64 n,
                                              int64 chunks, int64 span) {
    for (int64 block = blockIdx.x; block < outer * chunks; block += gridDim.x) {
        const int64 a = block / chunks, first = block % chunks * span, count = min(span, rows - first);
        const T *part = x + (a * rows + first) * n;
        if (n == 1) {
            const double mean = means ? means[a] : 0;
            double sum = 0;
            walk<1>(part, (const T *)nullptr, (T *)nullptr, count, [&](int, Sum<T> v, Sum<T>) {
                const double apart = (double)v - mean;
                sum += means ? apart * apart : apart;
                return v;
            });
            sum = sum_of_block(sum);
            if (threadIdx.x == 0) partial[block] = sum;
        } else for (int64 column = threadIdx.x; column < n; column += blockDim.x) {
            const double mean = means ? means[a * n + column] : 0;
            double sum = 0;
            for (int64 row = 0; row < count; ++row) {
                const double apart = (double)of(part[row * n + column]) - mean;
                sum += means ? apart * apart : apart;
            }
            partial[block * n + column] = sum;
        }
    }
}

/* out[a, b] = the sum of the chunks over `divisor`. */
KERNEL(moment_totals, ROW_THREADS, (double *__restrict__ out, const double *__restrict__ partial, double divisor, int64 outer,
                                    int64 chunks, int64 n)) {
    const int64 i = blockIdx.x * (int64)ROW_THREADS + threadIdx.x;
    if (i >= outer * n) return;
    const double *from = partial + i / n * chunks * n + i % n;
    double sum = 0;
    for (int64 chunk = 0; chunk < chunks; ++chunk) sum += from[chunk * n];
    out[i] = sum / divisor;
}

#define CHUNKS(T) (const T *__restrict__ x, Sum<T> *__restrict__ partial, int64 rows, int64 n, int64 chunks, int64 span)
#define TOTALS(T) (T *__restrict__ out, const Sum<T> *__restrict__ partial, int64 rows, int64 chunks)
#define MOMENTS(T) (const T *__restrict__ x, const double *__restrict__ means, double *__restrict__ partial, int64 outer, int64 rows, \
                    int64 n, int64 chunks, int64 span)
ROW_VERSIONS(row_chunks, CHUNKS, (x, partial, rows, n, chunks, span))
ROW_VERSIONS(row_totals, TOTALS, (out, partial, rows, chunks))
ROW_VERSIONS(moment_chunks, MOMENTS, (x, means, partial, outer, rows, n, chunks, span))
