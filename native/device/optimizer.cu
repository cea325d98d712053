/* Updates of optimizers, all runs of a flat array in one launch, and the norm of a gradient in two. Letters, and the order of the
   scalars, are those of mpitrain/kernels/optimizer.py; the bits are those of native/optimizer.c.
   A step moves 28 bytes an element (Adam in float32; 30 with the copy in 16 bits), so each array is read and written once, 16 bytes a
   thread at a time. A block has one tile: a row of the table `tiles`, which says where it lies in the values, the gradients and the
   state, how long it is and which row of `scalars` it is updated with. Without tiles, blocks have the elements of one run in turn. */
#include "device.h"

enum { WIDE = 256, TILE = 2048, NORM_BLOCK = 4096 };
enum { NORM, FACTOR, FOUND, SCALE, GOOD, LEFT_OUT };      /* places in `numbers`, as in kernels/optimizer.py */
enum { RATE, ROOT, FIRST };                               /* kinds of scalars that depend on the step, as there */

template <class T> struct Sixteen { enum { LANES = 16 / sizeof(T) }; union { uint4 whole; T x[LANES]; }; };

struct Sgd {
    enum { STATES = 0, SCALARS = 3, WRITES = 1, FRESH = 0 };
    template <class S> static __device__ __forceinline__ void step(S &w, S gradient, S *, const S *s, S scale) {
        const S lr = s[0], decay = s[1];
        w -= lr * (gradient * scale + decay * w);
    }
};
struct SgdMomentum {
    enum { STATES = 1, SCALARS = 6, WRITES = 1, FRESH = 0 };
    template <class S> static __device__ __forceinline__ void step(S &w, S gradient, S *state, const S *s, S scale) {
        const S lr = s[0], momentum = s[1], own = s[2], ahead = s[3], decay = s[4];
        const S g = gradient * scale + decay * w;
        state[0] = state[0] * momentum + g;
        w -= lr * (own * g + ahead * state[0]);
    }
};
struct SgdDampened {
    enum { STATES = 1, SCALARS = 7, WRITES = 1, FRESH = 0 };
    template <class S> static __device__ __forceinline__ void step(S &w, S gradient, S *state, const S *s, S scale) {
        const S lr = s[0], momentum = s[1], fresh = s[2], own = s[3], ahead = s[4], decay = s[5];
        const S g = gradient * scale + decay * w;
        state[0] = state[0] * momentum + fresh * g;
        w -= lr * (own * g + ahead * state[0]);
    }
};
struct Adam {
    enum { STATES = 2, SCALARS = 9, WRITES = 1, FRESH = 0 };
    template <class S> static __device__ __forceinline__ S divisor(S second, S *) { return second; }
    template <class R, class S> static __device__ __forceinline__ void by(S &w, S gradient, S *state, const S *s, S scale) {
        const S step_size = s[0], keep = s[1], penalty = s[2], new1 = s[3], old2 = s[4], new2 = s[5], correct = s[6], eps = s[7];
        const S g = gradient * scale + penalty * w;
        const S first = state[0] + new1 * (g - state[0]), second = state[1] * old2 + new2 * g * g;
        state[0] = first;
        state[1] = second;
        w = w * keep - step_size * first / (root(R::divisor(second, state)) * correct + eps);
    }
    template <class S> static __device__ __forceinline__ void step(S &w, S gradient, S *state, const S *s, S scale) {
        by<Adam>(w, gradient, state, s, scale);
    }
};
struct Amsgrad {
    enum { STATES = 3, SCALARS = 9, WRITES = 1, FRESH = 0 };
    template <class S> static __device__ __forceinline__ S divisor(S second, S *state) {
        if (second > state[2] || second != second) state[2] = second;                    /* NaN where one is NaN */
        return state[2];
    }
    template <class S> static __device__ __forceinline__ void step(S &w, S gradient, S *state, const S *s, S scale) {
        Adam::by<Amsgrad>(w, gradient, state, s, scale);
    }
};
/* state[0] is the direction, which is only written, and w is only read. */
struct Lamb {
    enum { STATES = 3, SCALARS = 8, WRITES = 0, FRESH = 1 };
    template <class S> static __device__ __forceinline__ void step(S &w, S gradient, S *state, const S *s, S scale) {
        const S new1 = s[0], old2 = s[1], new2 = s[2], correct1 = s[3], correct2 = s[4], eps = s[5], decay = s[6];
        const S g = gradient * scale;
        const S first = state[1] + new1 * (g - state[1]), second = state[2] * old2 + new2 * g * g;
        state[1] = first;
        state[2] = second;
        state[0] = correct1 * first / (root(second) * correct2 + eps) + decay * w;
    }
};
struct Rmsprop {
    enum { STATES = 2, SCALARS = 7, WRITES = 1, FRESH = 0 };
    template <class S> static __device__ __forceinline__ S divisor(S second, S, S *, S) { return second; }
    template <class R, class S> static __device__ __forceinline__ void by(S &w, S gradient, S *state, const S *s, S scale) {
        const S lr = s[0], momentum = s[1], old = s[2], fresh = s[3], eps = s[4], decay = s[5];
        const S g = gradient * scale + decay * w, second = state[0] * old + fresh * g * g;
        state[0] = second;
        state[1] = state[1] * momentum + g / (root(R::divisor(second, g, state, fresh)) + eps);
        w -= lr * state[1];
    }
    template <class S> static __device__ __forceinline__ void step(S &w, S gradient, S *state, const S *s, S scale) {
        by<Rmsprop>(w, gradient, state, s, scale);
    }
};
struct RmspropCentered {
    enum { STATES = 3, SCALARS = 7, WRITES = 1, FRESH = 0 };
    template <class S> static __device__ __forceinline__ S divisor(S second, S g, S *state, S fresh) {
        state[2] += fresh * (g - state[2]);
        const S variance = second - state[2] * state[2];
        return variance < 0 ? S(0) : variance;                                           /* rounding may leave less than 0 */
    }
    template <class S> static __device__ __forceinline__ void step(S &w, S gradient, S *state, const S *s, S scale) {
        Rmsprop::by<RmspropCentered>(w, gradient, state, s, scale);
    }
};

/* The copy of a value in 16 bits: bfloat16, or float16 where `half`. */
template <class S> __device__ __forceinline__ uint16 copied(S w, bool half) {
    if (half) { float16 made; put(made, (float)w); return made.bits; }
    bfloat16 made;
    put(made, (float)w);
    return made.bits;
}

template <class R, class T>
__device__ __forceinline__ void update(T *values, const T *gradients, T *first, T *second, T *third, const Sum<T> *scalars,
                                       const int64 *tiles, uint16 *copy, const double *numbers, int64 n, bool half) {
    typedef Sum<T> S;
    enum { LANES = Sixteen<T>::LANES };
    if (numbers && numbers[FOUND] != 0) return;           /* a gradient was not finite: all keep what they have */
    int64 place = (int64)blockIdx.x * TILE, read = place, kept = place, count = min((int64)TILE, n - place), row = 0;
    if (tiles) {
        const int64 *tile = tiles + 5 * (int64)blockIdx.x;
        place = tile[0]; read = tile[1]; kept = tile[2]; count = tile[3]; row = tile[4];
    }
    S s[R::SCALARS];
    for (int i = 0; i < R::SCALARS; ++i) s[i] = scalars[row * R::SCALARS + i];
    const S scale = numbers ? (S)((double)s[R::SCALARS - 1] * numbers[FACTOR]) : s[R::SCALARS - 1];

    T *w = values + place, *state[3] = {first + kept, second + kept, third + kept};
    const T *g = gradients + read;
    uint64 joined = (uint64)w | (uint64)g;
    for (int k = 0; k < R::STATES; ++k) joined |= (uint64)state[k];
    if (copy) { copy += place; joined |= (uint64)copy % 8 ? 1 : 0; }
    const int64 wide = joined % 16 ? 0 : count / LANES * LANES;
    for (int64 i = (int64)threadIdx.x * LANES; i < wide; i += WIDE * LANES) {
        Sixteen<T> value, gradient, old[R::STATES ? R::STATES : 1];
        value.whole = *(const uint4 *)(w + i);
        gradient.whole = *(const uint4 *)(g + i);
        for (int k = R::FRESH; k < R::STATES; ++k) old[k].whole = *(const uint4 *)(state[k] + i);
        uint16 made[LANES];
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            S x = of(value.x[lane]), parts[3];
            for (int k = R::FRESH; k < R::STATES; ++k) parts[k] = of(old[k].x[lane]);
            R::step(x, (S)of(gradient.x[lane]), parts, s, scale);
            for (int k = 0; k < R::STATES; ++k) put(old[k].x[lane], parts[k]);
            put(value.x[lane], x);
            made[lane] = copied(x, half);
        }
        if (R::WRITES) *(uint4 *)(w + i) = value.whole;
        for (int k = 0; k < R::STATES; ++k) *(uint4 *)(state[k] + i) = old[k].whole;
        if (!copy) continue;
        if (LANES % 4 == 0)
            for (int lane = 0; lane < LANES; lane += 4)
                *(uint2 *)(copy + i + lane) = make_uint2(made[lane] | (uint32)made[lane + 1] << 16,
                                                         made[lane + 2] | (uint32)made[lane + 3] << 16);
        else
            for (int lane = 0; lane < LANES; ++lane) copy[i + lane] = made[lane];
    }
    for (int64 i = wide + threadIdx.x; i < count; i += WIDE) {
        S x = of(w[i]), parts[3];
        for (int k = R::FRESH; k < R::STATES; ++k) parts[k] = of(state[k][i]);
        R::step(x, (S)of(g[i]), parts, s, scale);
        if (R::WRITES) put(w[i], x);
        for (int k = 0; k < R::STATES; ++k) put(state[k][i], parts[k]);
        if (copy) copy[i] = copied(x, half);
    }
}

/* e: gradients, m: elements of a state, t: tiles, r: rows of scalars, c: scalars of a row. */
#define UPDATE(T) (T *__restrict__ values, const T *__restrict__ gradients, T *__restrict__ first, T *__restrict__ second, \
    T *__restrict__ third, const Sum<T> *__restrict__ scalars, const int64 *__restrict__ tiles, uint16 *__restrict__ copy, \
    const double *__restrict__ numbers, int64 n, int64 e, int64 m, int64 t, int64 r, int64 c, int64 half)
#define RULE(NAME, R) \
    template <class T> __device__ __forceinline__ \
    void NAME(T *values, const T *gradients, T *first, T *second, T *third, const Sum<T> *scalars, const int64 *tiles, \
              uint16 *copy, const double *numbers, int64 n, bool half) { \
        update<R>(values, gradients, first, second, third, scalars, tiles, copy, numbers, n, half); } \
    VERSIONS(NAME, WIDE, UPDATE, (values, gradients, first, second, third, scalars, tiles, copy, numbers, n, half != 0))
RULE(sgd, Sgd) RULE(sgd_momentum, SgdMomentum) RULE(sgd_dampened, SgdDampened) RULE(adam, Adam) RULE(amsgrad, Amsgrad)
RULE(lamb, Lamb) RULE(rmsprop, Rmsprop) RULE(rmsprop_centered, RmspropCentered)

template <int HALF> __device__ __forceinline__ void fold(double *sums) {
#pragma unroll
    for (int k = 0; k < HALF; ++k) sums[k] += sums[HALF + k];
}
/* The sum of the squares of each NORM_BLOCK elements, filled up with zeros and folded in halves: a thread has every 256th, so
   the first four folds are its own, and its loads wait for nothing. `places`, rows (start, count), say where blocks lie; without
   them they follow each other. */
template <class T> __device__ __forceinline__ void square_sums(const T *x, const int64 *places, double *out, int64 n) {
    __shared__ double parts[WIDE];
    enum { EACH = NORM_BLOCK / WIDE };
    int64 start = (int64)blockIdx.x * NORM_BLOCK, count = min((int64)NORM_BLOCK, n - start);
    if (places) { start = places[2 * (int64)blockIdx.x]; count = places[2 * (int64)blockIdx.x + 1]; }
    const T *from = x + start;
    double sums[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int i = k * WIDE + threadIdx.x;
        const double value = i < count ? (double)of(from[i]) : 0.0;
        sums[k] = value * value;
    }
    fold<EACH / 2>(sums);
    fold<EACH / 4>(sums);
    fold<EACH / 8>(sums);
    fold<EACH / 16>(sums);
    parts[threadIdx.x] = sums[0];
    __syncthreads();
    for (unsigned half = WIDE / 2; half >= 32; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] += parts[half + threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.x < 32) {
        const double total = sum_of_warp(parts[threadIdx.x]);
        if (threadIdx.x == 0) out[blockIdx.x] = total;
    }
}
#define SQUARE_SUMS(T) (const T *__restrict__ x, const int64 *__restrict__ places, double *__restrict__ out, int64 n, int64 blocks)
VERSIONS(square_sums, WIDE, SQUARE_SUMS, (x, places, out, n))

/* What an update's scalars are once steps have been left out: those of the step that the optimizer is at, `now` (the run's step, the
   rate) less the steps left out, are made anew; `from` has the others, and all of a run that has left out none. `table` has rows
   (column, kind, beta). */
template <class T> __device__ __forceinline__ void step_scalars(T *to, const T *from, const double *now, const double *table,
                                                                const double *numbers, int64 rows, int64 columns, int64 kinds) {
    for (int64 i = threadIdx.x; i < rows * columns; i += blockDim.x) to[i] = from[i];
    const double left_out = numbers[LEFT_OUT];
    if (left_out == 0) return;
    __syncthreads();
    const int64 step = max((int64)1, (int64)(now[0] - left_out));
    for (int64 k = threadIdx.x; k < kinds; k += blockDim.x) {
        const double beta = table[3 * k + 2];
        double power = 1, square = beta;
        for (int64 rest = step; rest; rest >>= 1, square *= square)
            if (rest & 1) power *= square;
        const int kind = (int)table[3 * k + 1];
        const double value = kind == RATE ? now[1] / (1 - power) : kind == ROOT ? 1 / sqrt(1 - power) : step > 1 ? beta : 1.0;
        for (int64 row = 0; row < rows; ++row) put(to[row * columns + (int64)table[3 * k]], (Sum<T>)value);
    }
}
#define STEP_SCALARS(T) (T *__restrict__ to, const T *__restrict__ from, const double *__restrict__ now, \
    const double *__restrict__ table, const double *__restrict__ numbers, int64 rows, int64 columns, int64 kinds, int64 n)
VERSIONS(step_scalars, WIDE, STEP_SCALARS, (to, from, now, table, numbers, rows, columns, kinds))

/* One block: the sums one after the other, as the host adds them, and then what a step does with the norm (kernels/optimizer.py).

   Additions that wait for each other would take a sixth of a millisecond for the 30,000 blocks of GPT-2. But as long as the total
   stays below the next power of two, adding x to it is adding r(x) = (total + x) - total, x rounded to a multiple of its last place,
   whatever the total was, unless x lies halfway between two: then the total's last bit decides. And sums of such multiples are exact in
   any order. So all threads find r of WIDE numbers at once and add them up; where the power of two is reached, or an x lies halfway,
   or is not finite, one thread adds these numbers one after the other. The numbers are sums of squares, so none is less than 0. */
KERNEL(conclude_norm, WIDE, (double *__restrict__ numbers, const double *__restrict__ sums, int64 n, int64 interval, double limit,
                             double growth, double backoff)) {
    enum { AHEAD = 4 };
    __shared__ double here[WIDE], added;
    double next[AHEAD], total = 0;
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) next[k] = k * WIDE + threadIdx.x < n ? sums[k * WIDE + threadIdx.x] : 0.0;
    for (int64 first = 0; first < n; first += AHEAD * WIDE) {
        double now[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int64 i = first + (AHEAD + k) * WIDE + threadIdx.x;
            now[k] = next[k];
            next[k] = i < n ? sums[i] : 0.0;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            here[threadIdx.x] = now[k];
            const double power = __longlong_as_double(__double_as_longlong(total) & 0x7ff0000000000000ll);
            const double rounded = (total + now[k]) - total, rest = now[k] - rounded;
            const bool halfway = (rest < 0 ? -rest : rest) == power * 0x1p-53;
            const double sum = total + sum_of_block(halfway ? power * 2 : rounded);
            if (power > 0x1p-900 && sum < power * 2) {
                total = sum;
                continue;
            }
            if (threadIdx.x == 0) {
                for (int i = 0; i < WIDE; ++i) total += here[i];
                added = total;
            }
            __syncthreads();
            total = added;
        }
    }
    if (threadIdx.x) return;
    const double scale = numbers[SCALE], norm = sqrt(total) / scale;
    const bool found = !(norm - norm == 0);                                              /* infinite, or NaN */
    numbers[NORM] = norm;
    numbers[FOUND] = found;
    numbers[FACTOR] = (limit > 0 && !found ? min(1.0, limit / (norm + 1e-6)) : 1.0) / scale;
    if (interval <= 0) return;
    if (found) {
        numbers[SCALE] = scale * backoff;
        numbers[GOOD] = 0;
        numbers[LEFT_OUT] += 1;
    } else if (numbers[GOOD] + 1 < interval) {
        numbers[GOOD] += 1;
    } else {
        numbers[GOOD] = 0;
        const float grown = (float)(scale * growth);
        if (grown - grown == 0) numbers[SCALE] = scale * growth;
    }
}
