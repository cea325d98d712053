/* A sparse linear map along the middle dim of arrays (outer, size, inner), contiguous: interpolation, padding by reflection and
   the like, and their adjoints, which are such maps too. Output j is the sum of weight[t] * x[index[t]] over t in [starts[j],
   starts[j + 1]), in this order. For float and double. */

#ifndef T

#include <string.h>

#include "geometry.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define BLOCK 512                    /* numbers of a row that are summed before the next: they stay in registers and the L1 cache */
#define MOST_UNIFORM 4               /* taps of each output, if all have as many: then outputs are done a vector at a time */

#define SOURCE "resample.c"
#include "both.h"

#else

static void NAME(rows)(const T *restrict x, T *restrict y, const int32_t *starts, const int32_t *index, const T *weight,
                       i64 outputs, i64 inner)
{
    for (i64 j = 0; j < outputs; j++, y += inner) {
        const i64 from = starts[j], taps = starts[j + 1] - from;
        const int32_t *at = index + from;
        const T *w = weight + from;
        if (taps == 0) {
            memset(y, 0, inner * sizeof(T));
            continue;
        }
        for (i64 b = 0; b < inner; b += BLOCK) {
            const i64 size = at_most(inner - b, BLOCK);
            const T *restrict first = x + at[0] * inner + b;
            T *restrict to = y + b;
            i64 t = 1;
            if (taps == 1 && w[0] == 1) {
                memcpy(to, first, size * sizeof(T));
                continue;
            }
            if (taps > 1) {
                const T *restrict second = x + at[1] * inner + b;
                const T v = w[0], u = w[1];
                for (i64 i = 0; i < size; i++) to[i] = v * first[i] + u * second[i];
                t = 2;
            } else {
                const T v = w[0];
                for (i64 i = 0; i < size; i++) to[i] = v * first[i];
            }
            for (; t < taps; t++) {
                const T *restrict next = x + at[t] * inner + b;
                const T v = w[t];
                for (i64 i = 0; i < size; i++) to[i] += v * next[i];
            }
        }
    }
}

/* inner = 1, and `taps` for each output: index and weight lie tap by tap, (taps, outputs). */
static void NAME(uniform)(const T *restrict x, T *restrict y, const int32_t *restrict index, const T *restrict weight,
                          i64 outputs, i64 taps)
{
    const int32_t *i1 = index + outputs, *i2 = i1 + outputs, *i3 = i2 + outputs;
    const T *w1 = weight + outputs, *w2 = w1 + outputs, *w3 = w2 + outputs;
    if (taps == 1) for (i64 j = 0; j < outputs; j++) y[j] = weight[j] * x[index[j]];
    if (taps == 2) for (i64 j = 0; j < outputs; j++) y[j] = weight[j] * x[index[j]] + w1[j] * x[i1[j]];
    if (taps == 3) for (i64 j = 0; j < outputs; j++) y[j] = weight[j] * x[index[j]] + w1[j] * x[i1[j]] + w2[j] * x[i2[j]];
    if (taps == 4) for (i64 j = 0; j < outputs; j++)
        y[j] = weight[j] * x[index[j]] + w1[j] * x[i1[j]] + w2[j] * x[i2[j]] + w3[j] * x[i3[j]];
}

static void NAME(ragged)(const T *restrict x, T *restrict y, const int32_t *restrict starts, const int32_t *restrict index,
                         const T *restrict weight, i64 outputs)
{
    for (i64 j = 0; j < outputs; j++) {
        T sum = 0;
        for (i64 t = starts[j]; t < starts[j + 1]; t++) sum += weight[t] * x[index[t]];
        y[j] = sum;
    }
}

/* x (outer, size, inner), y (outer, outputs, inner). `taps`: how many each output has, 0 where they differ, and then or where
   inner > 1 index and weight lie output by output. */
void NAME(resample)(const T *x, T *y, const int32_t *starts, const int32_t *index, const T *weight, i64 outer, i64 size,
                    i64 outputs, i64 inner, i64 taps)
{
    for (i64 a = 0; a < outer; a++, x += size * inner, y += outputs * inner) {
        if (inner != 1) NAME(rows)(x, y, starts, index, weight, outputs, inner);
        else if (taps > 0) NAME(uniform)(x, y, index, weight, outputs, taps);
        else NAME(ragged)(x, y, starts, index, weight, outputs);
    }
}

#endif
