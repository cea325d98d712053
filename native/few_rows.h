/* y = f(x w' + bias) for few rows of x (m, k), with w (n, k) read once, as it lies: a token of a text, where reading weights is all
   that costs.

   A square of LANES x LANES numbers of w at a time is turned in registers, so that each number of y has a lane of its own, whose
   terms are added in the order of product.h: a row has the bits that it would have in a batch. The lines of w that come next are
   asked for early, since LANES streams are more than the CPU follows by itself. */

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define V NAME(vector)
#define MASK NAME(mask)
#define FEW 8                       /* rows at a time, whose sums stay in registers beside a square of w */
#define SOON 512                    /* bytes */

/* row[r] = numbers r of LANES rows of w, k numbers apart. */
INLINE void NAME(square)(const T *w, i64 k, V *row)
{
#if defined(__AVX512F__)
    if (LANES == 16) {                                   /* loads of 4 numbers do half of the turning: a tenth faster in caches */
        for (int c = 0; c < LANES; c += 4) {
            __m512 part[4];
            for (int r = 0; r < 4; r++) {
                const float *from = (const float *)w + r * k + c;
                part[r] = _mm512_castps128_ps512(_mm_loadu_ps(from));
                part[r] = _mm512_insertf32x4(part[r], _mm_loadu_ps(from + 4 * k), 1);
                part[r] = _mm512_insertf32x4(part[r], _mm_loadu_ps(from + 8 * k), 2);
                part[r] = _mm512_insertf32x4(part[r], _mm_loadu_ps(from + 12 * k), 3);
            }
            for (int h = 0; h < 2; h++) {
                __m512 a = h ? _mm512_unpackhi_ps(part[0], part[1]) : _mm512_unpacklo_ps(part[0], part[1]);
                __m512 b = h ? _mm512_unpackhi_ps(part[2], part[3]) : _mm512_unpacklo_ps(part[2], part[3]);
                row[c + 2 * h] = (V)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
                row[c + 2 * h + 1] = (V)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
            }
        }
        return;
    }
#endif
    UNROLL for (int l = 0; l < LANES; l++) row[l] = *(const V *)(w + l * k);
    NAME(shuffled)(row, LANES);
}

/* `m` rows by `there` rows of w, up to LANES of them; the rest of w begins LANES * k numbers later, if at all. */
INLINE void NAME(few)(const T *x, const T *w, const T *bias, T *y, i64 n, i64 k, i64 size, i64 there, const int m)
{
    V total[FEW], row[LANES];
    for (i64 r0 = 0; r0 < k; r0 += size) {
        const i64 end = least(k, r0 + size);
        V sum[FEW];
        UNROLL for (int i = 0; i < m; i++) sum[i] = (V){0};
        i64 r = r0;
        if (there == LANES)
            for (; r + LANES <= end; r += LANES) {
                i64 next = r + SOON / (i64)sizeof(T);
                if (next >= k) next += (LANES - 1) * k;
                UNROLL for (int l = 0; l < LANES; l++) __builtin_prefetch(w + l * k + next, 0, 3);
                NAME(square)(w + r, k, row);
                UNROLL for (int l = 0; l < LANES; l++)
                    UNROLL for (int i = 0; i < m; i++) sum[i] += x[i * k + r + l] * row[l];
            }
        for (; r < end; r += LANES) {
            const i64 left = least(end - r, LANES);
            for (int l = 0; l < LANES; l++) {
                row[l] = (V){0};
                if (l < there) memcpy(&row[l], w + l * k + r, left * sizeof(T));
            }
            NAME(shuffled)(row, LANES);
            for (i64 l = 0; l < left; l++)
                UNROLL for (int i = 0; i < m; i++) sum[i] += x[i * k + r + l] * row[l];
        }
        UNROLL for (int i = 0; i < m; i++) {
            if (r0) sum[i] += total[i];
            total[i] = sum[i];
        }
    }
    V added = {0};
    if (bias) memcpy(&added, bias, there * sizeof(T));
    UNROLL for (int i = 0; i < m; i++) {
        if (bias) total[i] += added;
        memcpy(y + i * n, &total[i], there * sizeof(T));
    }
}

static __attribute__((noinline)) void NAME(some_rows)(const T *x, const T *w, const T *bias, T *y, i64 n, i64 k, i64 m)
{
    const i64 size = even_parts(k, TERMS, GROUP);
    for (i64 j = 0; j < n; j += LANES) {
        const i64 there = least(n - j, LANES);
#define OF(rows) case rows: NAME(few)(x, w + j * k, bias ? bias + j : NULL, y + j, n, k, size, there, rows); break;
        switch (m) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) }
#undef OF
    }
}

void NAME(few_rows)(const T *x, const T *w, const T *bias, T *y, i64 m, i64 n, i64 k)
{
    if (k <= 0) for (i64 i = 0; i < m * n; i++) y[i] = bias ? bias[i % n] : 0;
    for (i64 i = 0; i < m && k > 0; i += FEW) NAME(some_rows)(x + i * k, w, bias, y + i * n, n, k, least(m - i, FEW));
}

#undef V
#undef MASK
#undef FEW
#undef SOON
