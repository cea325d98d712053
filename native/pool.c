/* Largest values of windows of images (N, C, H, W), contiguous, for float and double; the file includes itself for each. A plane
   is one (H, W); output (i, j) of a plane looks at rows [y0[i], y1[i]) and columns [x0[j], x1[j]), so one loop serves fixed,
   padded and adaptive windows. Those of 2 x 2 side by side, which most nets have, are done a vector of outputs at a time. */

#ifndef T

#include <string.h>

#include "geometry.h"
#include "vectors.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOWHERE -1                   /* the place of a largest value that ReLU made 0: no gradient goes there */

/* Do windows i of `count` look at [2 i, 2 i + 2)? */
static int are_pairs(const int32_t *from, const int32_t *to, i64 count)
{
    for (i64 i = 0; i < count; i++) if (from[i] != 2 * i || to[i] != 2 * i + 2) return 0;
    return 1;
}

#define SOURCE "pool.c"
#include "both.h"

#else

#define V NAME(vector)
#define MASK NAME(mask)
#define PLACES NAME(places)

typedef T V __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
typedef INTEGER MASK __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t PLACES __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE V NAME(choose)(MASK mask, V a, V b) { return (V)(((MASK)a & mask) | ((MASK)b & ~mask)); }

/* 0, 1, 2, ... */
INLINE MASK NAME(count)(void)
{
    MASK found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = lane;
    return found;
}

/* The better one of best and another value, and where it is; NaN wins, and the first of equals. */
INLINE void NAME(better)(V value, MASK place, V *best, MASK *where)
{
    MASK takes = (value > *best) | ((value != value) & (*best == *best));
    *best = NAME(choose)(takes, value, *best);
    *where = (place & takes) | (*where & ~takes);
}

/* LANES outputs of a row from 2 LANES numbers of each of two rows. `at`: the place of *top in its plane. */
INLINE void NAME(pairs_maximum)(const T *top, const T *bottom, i64 w, i64 at, T *y, int32_t *where, i64 relu)
{
    const V a = *(const V *)top, b = *(const V *)(top + LANES), c = *(const V *)bottom, d = *(const V *)(bottom + LANES);
    MASK places = NAME(count)() * 2 + (INTEGER)at, place = places;
    V best = PICK(MASK, a, b, ORDER(EVEN, LANES));
    NAME(better)(PICK(MASK, a, b, ORDER(ODD, LANES)), places + 1, &best, &place);
    NAME(better)(PICK(MASK, c, d, ORDER(EVEN, LANES)), places + (INTEGER)w, &best, &place);
    NAME(better)(PICK(MASK, c, d, ORDER(ODD, LANES)), places + (INTEGER)w + 1, &best, &place);
    if (relu) {
        const V zero = {0};
        place |= best <= zero;                       /* NOWHERE has all bits set */
        best = (V)((MASK)best & ~(best < zero));
    }
    *(V *)y = best;
    *(PLACES *)where = __builtin_convertvector(place, PLACES);
}

/* Beyond a row's end something is written too, and then, with the next row, what belongs there: but for the end of all. */
static void NAME(maximum_of_pairs)(const T *x, T *y, int32_t *where, i64 planes, i64 h, i64 w, i64 oh, i64 ow, i64 relu)
{
    const T *x_end = x + planes * h * w, *y_end = y + planes * oh * ow;
    for (i64 p = 0; p < planes; p++, x += h * w)
        for (i64 i = 0; i < oh; i++, y += ow, where += ow)
            for (i64 j = 0; j < ow; j += LANES) {
                const i64 at = 2 * i * w + 2 * j, size = at_most(ow - j, LANES);
                const T *top = x + at, *bottom = top + w;
                if (x_end - bottom >= 2 * LANES && y_end - (y + j) >= LANES) {
                    NAME(pairs_maximum)(top, bottom, w, at, y + j, where + j, relu);
                    continue;
                }
                T from[2][2 * LANES] = {{0}}, best[LANES];
                int32_t place[LANES];
                memcpy(from[0], top, 2 * size * sizeof(T));
                memcpy(from[1], bottom, 2 * size * sizeof(T));
                NAME(pairs_maximum)(from[0], from[1], w, at, best, place, relu);
                memcpy(y + j, best, size * sizeof(T));
                memcpy(where + j, place, size * sizeof(int32_t));
            }
}

/* The largest value and where it is in its plane; NaN wins, and the first of equals. With `relu` what is 0 or less becomes 0,
   and is NOWHERE. */
void NAME(maximum)(const T *restrict x, T *restrict y, int32_t *restrict where, const int32_t *y0, const int32_t *y1,
                   const int32_t *x0, const int32_t *x1, i64 planes, i64 h, i64 w, i64 oh, i64 ow, i64 relu)
{
    if (are_pairs(y0, y1, oh) && are_pairs(x0, x1, ow)) {
        NAME(maximum_of_pairs)(x, y, where, planes, h, w, oh, ow, relu);
        return;
    }
    i64 widest = 0;
    for (i64 j = 0; j < ow; j++) widest = at_least(widest, x1[j] - x0[j]);
    for (i64 p = 0; p < planes; p++, x += h * w)
        for (i64 i = 0; i < oh; i++, y += ow, where += ow) {
            for (i64 j = 0; j < ow; j++) {
                where[j] = y0[i] * w + x0[j];
                y[j] = x[where[j]];
            }
            for (i64 r = y0[i]; r < y1[i]; r++) for (i64 step = 0; step < widest; step++)
                for (i64 j = 0; j < ow; j++) {           /* a narrower window sees its last column again, which changes nothing */
                    int32_t column = x0[j] + (int32_t)step, at = (int32_t)(r * w) + (column < x1[j] ? column : x1[j] - 1);
                    T value = x[at], best = y[j];
                    int takes = (value > best) | ((value != value) & (best == best));
                    y[j] = takes ? value : best;
                    where[j] = takes ? at : where[j];
                }
            if (relu) for (i64 j = 0; j < ow; j++) {
                where[j] = y[j] <= 0 ? NOWHERE : where[j];
                y[j] = y[j] < 0 ? 0 : y[j];
            }
        }
}

/* One row of dx after the other: beyond its end zeros are written, which the next row replaces, or which stand where a row or
   column belongs to no window. */
static void NAME(gradient_of_pairs)(const T *g, const int32_t *where, T *dx, i64 planes, i64 h, i64 w, i64 oh, i64 ow)
{
    const T *g_end = g + planes * oh * ow, *dx_end = dx + planes * h * w;
    for (i64 p = 0; p < planes; p++, g += oh * ow, where += oh * ow, dx += h * w) {
        for (i64 row = 0; row < 2 * oh; row++) {
            T *to = dx + row * w;
            for (i64 j = 0; j < ow; j += LANES) {
                const i64 from = row / 2 * ow + j, size = at_most(ow - j, LANES);
                V grads;
                PLACES found;
                if (g_end - (g + from) >= LANES) {
                    grads = *(const V *)(g + from);
                    found = *(const PLACES *)(where + from);
                } else {
                    T last[LANES] = {0};
                    int32_t last_places[LANES] = {0};
                    memcpy(last, g + from, size * sizeof(T));
                    memcpy(last_places, where + from, size * sizeof(int32_t));
                    grads = *(const V *)last;
                    found = *(const PLACES *)last_places;
                }
                const MASK lanes = NAME(count)(), inside = lanes < (INTEGER)size;
                const MASK steps = __builtin_convertvector(found, MASK) - lanes * 2 - (INTEGER)(row * w + 2 * j);
                const V left = (V)((MASK)grads & inside & (steps == 0)), right = (V)((MASK)grads & inside & (steps == 1));
                const V low = PICK(MASK, left, right, ORDER(LOW, LANES)), high = PICK(MASK, left, right, ORDER(HIGH, LANES));
                T *place = to + 2 * j;
                if (dx_end - place >= 2 * LANES) {
                    *(V *)place = low;
                    if (2 * size > LANES) *(V *)(place + LANES) = high;
                } else {
                    T last[2 * LANES];
                    *(V *)last = low;
                    *(V *)(last + LANES) = high;
                    memcpy(place, last, 2 * size * sizeof(T));
                }
            }
            for (i64 column = 2 * ow; column < w; column++) to[column] = 0;
        }
        memset(dx + 2 * oh * w, 0, (h - 2 * oh) * w * sizeof(T));
    }
}

/* `pairs`: the windows are of 2 x 2, side by side. */
void NAME(maximum_gradient)(const T *restrict g, const int32_t *restrict where, T *restrict dx, i64 planes, i64 h, i64 w, i64 oh,
                            i64 ow, i64 pairs)
{
    if (pairs) {
        NAME(gradient_of_pairs)(g, where, dx, planes, h, w, oh, ow);
        return;
    }
    memset(dx, 0, planes * h * w * sizeof(T));
    for (i64 p = 0; p < planes; p++, g += oh * ow, where += oh * ow, dx += h * w)
        for (i64 i = 0; i < oh * ow; i++) if ((uint32_t)where[i] < (uint32_t)(h * w)) dx[where[i]] += g[i];      /* not NOWHERE */
}

#undef V
#undef MASK
#undef PLACES
#endif
