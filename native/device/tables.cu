/* Rows of a table (entries, width) by index: read, and added to in an order that nothing but the indices decides.

   Indices are sorted first, equal ones in the order of their positions (a radix sort of 8 bits a pass: count_digits, scan_counts,
   place_digits), and the rows of each index are added from the first to the last position, as on the host. An index that comes more
   than CHUNK times is added up in chunks of so many, and these in their order. See mpitrain/kernels/rows.py. */
#include "row.h"

enum { THREADS = 256, KEYS_A_BLOCK = 1024, DIGITS = 256, SCANNING = 1024, CHUNK = 128, AHEAD = 4 };

template <class T> __device__ __forceinline__ void take_rows(const T *table, const int64 *indices, T *out, int64 n, int64 width,
                                                             int64 entries) {
    typedef Sum<T> S;
    for (int64 i = blockIdx.x; i < n; i += gridDim.x) {
        const int64 index = indices[i];
        if (0 <= index && index < entries)
            walk<2>(table + index * width, (const T *)nullptr, out + i * width, width, [](int, S v, S) { return v; });
        else
            walk<1>((const T *)nullptr, (const T *)nullptr, out + i * width, width, [](int, S, S) { return not_a_number<S>(); });
    }
}

/* What is sorted: indices, `entries` for those out of range, with their positions. */
KERNEL(keys_of_indices, THREADS, (const int64 *__restrict__ indices, int *__restrict__ keys, int *__restrict__ order, int64 n,
                                  int64 entries)) {
    const int64 i = blockIdx.x * (int64)THREADS + threadIdx.x;
    if (i >= n) return;
    keys[i] = (int)(0 <= indices[i] && indices[i] < entries ? indices[i] : entries);
    order[i] = (int)i;
}

/* counts[digit, block]: how many keys of a block have that digit. */
KERNEL(count_digits, THREADS, (const int *__restrict__ keys, int *__restrict__ counts, int64 n, int64 blocks, int64 shift)) {
    __shared__ int found[DIGITS];
    found[threadIdx.x] = 0;
    __syncthreads();
    const int64 first = blockIdx.x * (int64)KEYS_A_BLOCK, end = min(first + KEYS_A_BLOCK, n);
    for (int64 i = first + threadIdx.x; i < end; i += THREADS) atomicAdd(&found[keys[i] >> shift & DIGITS - 1], 1);
    __syncthreads();
    counts[threadIdx.x * blocks + blockIdx.x] = found[threadIdx.x];
}

/* counts[i] = the sum of those before, by one block. */
KERNEL(scan_counts, SCANNING, (int *counts, int64 n)) {
    __shared__ int warps[SCANNING / 32];
    const int64 each = (n + SCANNING - 1) / SCANNING, first = min(threadIdx.x * each, n), end = min(first + each, n);
    int own = 0;
    for (int64 i = first; i < end; ++i) own += counts[i];
    int upto = own;                                                      // the sum of this thread's and those before it in the warp
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, upto, lanes);
        if (threadIdx.x % 32 >= lanes) upto += other;
    }
    if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = upto;
    __syncthreads();
    int before = upto - own;
    for (int warp = 0; warp < threadIdx.x / 32; ++warp) before += warps[warp];
    for (int64 i = first; i < end; ++i) {
        const int count = counts[i];
        counts[i] = before;
        before += count;
    }
}

/* Keys and positions in the order of a digit of the keys, and of where they were; `counts` as scanned. */
KERNEL(place_digits, THREADS, (const int *__restrict__ keys, const int *__restrict__ order, int *__restrict__ keys_out,
                               int *__restrict__ order_out, const int *__restrict__ counts, int64 n, int64 blocks, int64 shift)) {
    __shared__ int next[DIGITS], of_warps[THREADS / 32][DIGITS];
    const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    next[thread] = counts[thread * blocks + blockIdx.x];
    const int64 first = blockIdx.x * (int64)KEYS_A_BLOCK, end = min(first + KEYS_A_BLOCK, n);
    for (int64 from = first; from < end; from += THREADS) {
        const int64 i = from + thread;
        const bool here = i < end;
        const int key = here ? keys[i] : 0, digit = key >> shift & DIGITS - 1;
        for (int w = 0; w < THREADS / 32; ++w) of_warps[w][thread] = 0;
        __syncthreads();
        unsigned same = __ballot_sync(0xffffffffu, here);                // the lanes of this warp with the same digit
        for (int bit = 0; bit < 8; ++bit) {
            const unsigned set = __ballot_sync(0xffffffffu, digit >> bit & 1);
            same &= digit >> bit & 1 ? set : ~set;
        }
        const int before = __popc(same & ((1u << lane) - 1));
        if (here && !before) of_warps[warp][digit] = __popc(same);
        __syncthreads();
        if (here) {
            int place = next[digit] + before;
            for (int w = 0; w < warp; ++w) place += of_warps[w][digit];
            keys_out[place] = key;
            order_out[place] = order[i];
        }
        __syncthreads();
        for (int w = 0; w < THREADS / 32; ++w) next[thread] += of_warps[w][thread];
    }
}

/* N numbers that are loaded at once. */
template <int N, class T> struct __align__(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Some { T at[N]; };

/* to = from (where given, else 0) + the rows order[p], order[p + 1], ... of `values`, at most CHUNK of them, as long as their key is
   that of p. */
template <int N, class T>
__device__ __forceinline__ void add_run(const T *values, const int *keys, const int *order, const Sum<T> *from, Sum<T> *to, int64 p,
                                        int64 n, int64 width) {
    typedef Sum<T> S;
    const int key = keys[p];
    const int64 end = min(p + CHUNK, n);
    for (int64 column = threadIdx.x * (int64)N; column < width; column += blockDim.x * (int64)N) {
        Some<N, S> sum;
        if (from) sum = *(const Some<N, S> *)(from + column);
        else for (int l = 0; l < N; ++l) sum.at[l] = 0;
        bool more = true;
        for (int64 q = p; more; q += AHEAD) {
            Some<N, T> row[AHEAD];
            bool there[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                there[k] = q + k < end && keys[q + k] == key;
                if (there[k]) row[k] = *(const Some<N, T> *)(values + order[q + k] * width + column);
            }
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) if (there[k])
#pragma unroll
                for (int l = 0; l < N; ++l) sum.at[l] += of(row[k].at[l]);
            more = there[AHEAD - 1];
        }
        *(Some<N, S> *)(to + column) = sum;
    }
}

/* The first place of `key` before place `end`, at which it is. */
__device__ __forceinline__ int64 first_of(const int *keys, int key, int64 end) {
    int64 low = 0;
    while (low < end) {
        const int64 middle = (low + end) / 2;
        if (keys[middle] < key) low = middle + 1; else end = middle;
    }
    return low;
}

/* Chunks: a run of equal keys is one, or several where it is longer than CHUNK. Of CHUNK places, from a multiple of CHUNK on, one at
   most begins a run that long, and one at most a further chunk of one: so partial has two rows for so many places. */
__device__ __forceinline__ int64 partial_row(int64 p, bool first) { return p / CHUNK * 2 + first; }

/* Adds the rows of runs of one chunk to `out`; of longer ones each chunk is written to `partial`, the first with the row of out.
   Blocks 0 ... n - 1 are for runs that begin there, the others for further chunks in so many places. */
template <int N, class T>
__device__ __forceinline__ void add_runs(const T *values, const int *keys, const int *order, Sum<T> *out, Sum<T> *partial, int64 n,
                                         int64 width, int64 entries) {
    int64 p = blockIdx.x;
    if (p < n) {
        const int key = keys[p];
        if (key >= entries || (p && keys[p - 1] == key)) return;
        Sum<T> *row = out + key * width;
        const bool is_long = p + CHUNK < n && keys[p + CHUNK] == key;
        add_run<N>(values, keys, order, row, is_long ? partial + partial_row(p, true) * width : row, p, n, width);
        return;
    }
    const int64 place = (p - n) * CHUNK;
    const int key = keys[place];
    const int64 first = first_of(keys, key, place);
    p = first + (place - first + CHUNK - 1) / CHUNK * CHUNK;
    if (key >= entries || p == first || p >= n || keys[p] != key) return;
    add_run<N>(values, keys, order, (const Sum<T> *)nullptr, partial + partial_row(p, false) * width, p, n, width);
}

/* out = the sum of the chunks of each long run, in their order. */
template <class S>
__device__ __forceinline__ void add_chunks(const int *keys, S *out, const S *partial, int64 n, int64 width, int64 entries) {
    const int64 after = (blockIdx.x + 1) * (int64)CHUNK;                 // a long run that begins in the CHUNK places before goes on here
    if (after >= n) return;
    const int key = keys[after];
    const int64 first = first_of(keys, key, after);
    if (key >= entries || first < after - CHUNK || first == after || first + CHUNK >= n || keys[first + CHUNK] != key) return;
    for (int64 column = threadIdx.x; column < width; column += blockDim.x) {
        S sum = partial[partial_row(first, true) * width + column];
        for (int64 p = first + CHUNK; p < n && keys[p] == key; p += CHUNK) sum += partial[partial_row(p, false) * width + column];
        out[key * width + column] = sum;
    }
}

template <class T> __device__ __forceinline__ void sum_runs(const T *values, const int *keys, const int *order, Sum<T> *out,
                                                            Sum<T> *partial, int64 n, int64 width, int64 entries) {
    enum { N = Vector<T>::N };
    if (width % N == 0 && ((uint64)values | (uint64)out | (uint64)partial) % 16 == 0)
        add_runs<N>(values, keys, order, out, partial, n, width, entries);
    else
        add_runs<1>(values, keys, order, out, partial, n, width, entries);
}
template <class S> __device__ __forceinline__ void sum_chunks(const int *keys, S *out, const S *partial, int64 n, int64 width,
                                                              int64 entries, int64 rows) {
    add_chunks(keys, out, partial, n, width, entries);
}

#define TAKE(T) (const T *__restrict__ table, const int64 *__restrict__ indices, T *__restrict__ out, int64 n, int64 width, \
                 int64 entries)
#define RUNS(T) (const T *__restrict__ values, const int *__restrict__ keys, const int *__restrict__ order, Sum<T> *__restrict__ out, \
                 Sum<T> *__restrict__ partial, int64 n, int64 width, int64 entries, int64 rows)
#define CHUNKS(T) (const int *__restrict__ keys, T *__restrict__ out, const T *__restrict__ partial, int64 n, int64 width, \
                   int64 entries, int64 rows)
ROW_VERSIONS(take_rows, TAKE, (table, indices, out, n, width, entries))
ROW_VERSIONS(sum_runs, RUNS, (values, keys, order, out, partial, n, width, entries))
ROW_VERSION(sum_chunks, float, _float32, CHUNKS, (keys, out, partial, n, width, entries, rows))
ROW_VERSION(sum_chunks, double, _float64, CHUNKS, (keys, out, partial, n, width, entries, rows))
