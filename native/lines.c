/* Scans, ranks, and values taken from or put at places, along the middle dim of arrays (outer, n, inner). Arrays are contiguous;
   indices were checked, and are checked again: a function answers 2 where one lies outside.

   This file includes itself for each type: see both.h. */

#ifndef T

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

#define PART 64

#define SOURCE "lines.c"
#include "both.h"

#else

/* Running sums or products, in float64; `back`: from the end. Lines or columns go PART side by side, as each waits for itself. */
static void NAME(scan)(const T *x, T *y, i64 outer, i64 n, i64 inner, i64 back, const int product)
{
    const i64 lines = outer * inner;
    const double start = product ? 1.0 : -0.0;                 /* which leaves the sign of a first 0 */
    for (i64 first = 0; first < lines; first += PART) {
        const i64 size = lines - first < PART ? lines - first : PART;
        double so_far[PART];
        i64 at[PART];
        for (i64 l = 0; l < size; l++) {
            so_far[l] = start;
            at[l] = (first + l) / inner * n * inner + (first + l) % inner + (back ? (n - 1) * inner : 0);
        }
        const i64 step = back ? -inner : inner;
        if (size > 1 && at[size - 1] - at[0] == size - 1) {                /* columns of one row */
            const T *from = x + at[0];
            T *to = y + at[0];
            for (i64 j = 0; j < n; j++, from += step, to += step) {
                if (product) for (i64 l = 0; l < size; l++) to[l] = (T)(so_far[l] *= from[l]);
                else for (i64 l = 0; l < size; l++) to[l] = (T)(so_far[l] += from[l]);
            }
            continue;
        }
        i64 l = 0;
        for (; l + 4 <= size; l += 4) {                         /* the latency of an addition is that of four */
            const T *a = x + at[l], *b = x + at[l + 1], *c = x + at[l + 2], *d = x + at[l + 3];
            T *p = y + at[l], *q = y + at[l + 1], *r = y + at[l + 2], *s = y + at[l + 3];
            double e = start, f = start, g = start, h = start;
            for (i64 j = 0, k = 0; j < n; j++, k += step) {
                if (product) e *= a[k], f *= b[k], g *= c[k], h *= d[k];
                else e += a[k], f += b[k], g += c[k], h += d[k];
                p[k] = (T)e, q[k] = (T)f, r[k] = (T)g, s[k] = (T)h;
            }
        }
        for (; l < size; l++) {
            double e = start;
            for (i64 j = 0, k = at[l]; j < n; j++, k += step) {
                if (product) e *= x[k];
                else e += x[k];
                y[k] = (T)e;
            }
        }
    }
}

void NAME(cumsum)(const T *x, T *y, i64 outer, i64 n, i64 inner, i64 back) { NAME(scan)(x, y, outer, n, inner, back, 0); }
void NAME(cumprod)(const T *x, T *y, i64 outer, i64 n, i64 inner, i64 back) { NAME(scan)(x, y, outer, n, inner, back, 1); }

/* The gradient of running products of `w` lines: the product of what comes before k, times s_k = g_k + x_{k+1} s_{k+1}; and that
   of the product of all, for which s_k is what comes after k, times the line's number in g. */
static inline __attribute__((always_inline)) void NAME(slopes)(const T *x, const T *g, T *dx, i64 n, const int w, const int whole)
{
    T product[4] = {1, 1, 1, 1}, tail[4] = {0};
    for (i64 k = 0; k < n; k++)
        for (int c = 0; c < w; c++) {
            dx[c * n + k] = product[c];
            product[c] *= x[c * n + k];
        }
    for (i64 k = n - 1; k >= 0; k--)
        for (int c = 0; c < w; c++) {
            const T own = whole ? 0 : g[c * n + k];
            tail[c] = k == n - 1 ? (whole ? g[c] : own) : whole ? x[c * n + k + 1] * tail[c] : own + x[c * n + k + 1] * tail[c];
            dx[c * n + k] *= tail[c];
        }
}

void NAME(cumprod_gradient)(const T *x, const T *g, T *dx, i64 lines, i64 n)
{
    i64 l = 0;
    for (; l + 4 <= lines; l += 4) NAME(slopes)(x + l * n, g + l * n, dx + l * n, n, 4, 0);
    for (; l < lines; l++) NAME(slopes)(x + l * n, g + l * n, dx + l * n, n, 1, 0);
}

void NAME(prod_gradient)(const T *x, const T *g, T *dx, i64 lines, i64 n)
{
    i64 l = 0;
    for (; l + 4 <= lines; l += 4) NAME(slopes)(x + l * n, g + l, dx + l * n, n, 4, 1);
    for (; l < lines; l++) NAME(slopes)(x + l * n, g + l, dx + l * n, n, 1, 1);
}

/* The products of `w` lines, in float64 and in the order of the numbers: products of parts may overflow where the whole does not. */
static inline __attribute__((always_inline)) void NAME(products)(const T *x, T *y, i64 n, const int w)
{
    double so_far[8];
    for (int c = 0; c < w; c++) so_far[c] = 1;
    for (i64 j = 0; j < n; j++) for (int c = 0; c < w; c++) so_far[c] *= (double)x[c * n + j];
    for (int c = 0; c < w; c++) y[c] = (T)so_far[c];
}

void NAME(prod)(const T *x, T *y, i64 lines, i64 n)
{
    i64 l = 0;
    for (; l + 8 <= lines; l += 8) NAME(products)(x + l * n, y + l, n, 8);
    for (; l < lines; l++) NAME(products)(x + l * n, y + l, n, 1);
}

/* Where the largest (or smallest) number so far is, the last place at a tie; NaN wins. */
void NAME(cumextremum)(const T *x, i64 *places, i64 outer, i64 n, i64 inner, i64 smallest)
{
    for (i64 a = 0; a < outer; a++, x += n * inner, places += n * inner)
        for (i64 i = 0; i < inner; i++) {
            i64 best = 0;
            T top = n ? x[i] : 0;
            for (i64 j = 0; j < n; j++) {
                const T v = x[j * inner + i];
                const int reached = v != v || (top == top && (smallest ? v <= top : v >= top));
                best = reached ? j : best;
                top = reached ? v : top;
                places[j * inner + i] = best;
            }
        }
}

/* A number that grows with x: -0.0 is 0, and NaN, whatever its bits, is the largest. `turned` reverses the order. */
static inline WORD NAME(key)(T x, int turned)
{
    WORD bits;
    x = x == 0 ? (T)0 : x;
    memcpy(&bits, &x, sizeof bits);
    bits = (INTEGER)bits < 0 ? ~bits : bits | (WORD)1 << (8 * sizeof bits - 1);
    bits = x != x ? (WORD)-1 : bits;
    return turned ? ~bits : bits;
}

/* The number of rank r among n, which are put in another order (Hoare's select; the middle of three that
   a generator chooses, so that no order of the numbers is a bad one). */
static WORD NAME(of_rank)(WORD *v, i64 n, i64 r)
{
    i64 low = 0, high = n - 1;
    uint64_t random = 1;
    while (low < high) {
        WORD of[3];
        for (int c = 0; c < 3; c++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            of[c] = v[low + (i64)((random >> 33) % (uint64_t)(high - low + 1))];
        }
        const WORD a = of[0], b = of[1], c = of[2];
        const WORD pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        i64 i = low, j = high;
        while (i <= j) {
            while (v[i] < pivot) i++;
            while (v[j] > pivot) j--;
            if (i <= j) {
                const WORD other = v[i];
                v[i++] = v[j];
                v[j--] = other;
            }
        }
        if (r <= j) high = j;
        else if (r >= i) low = i;
        else break;
    }
    return v[r];
}

/* Where the number of rank ranks[l] of each line is, as a stable sort would say. */
int NAME(place_of_rank)(const T *x, const i64 *ranks, i64 *places, i64 lines, i64 n)
{
    WORD *keys = malloc((size_t)n * sizeof(WORD) + 1);
    int answer = keys ? 0 : 1;
    for (i64 l = 0; l < lines && !answer; l++, x += n) {
        if (ranks[l] < 0 || ranks[l] >= n) { answer = 2; break; }
        for (i64 j = 0; j < n; j++) keys[j] = NAME(key)(x[j], 0);
        const WORD wanted = NAME(of_rank)(keys, n, ranks[l]);
        i64 below = 0, at = -1;
        for (i64 j = 0; j < n; j++) below += NAME(key)(x[j], 0) < wanted;
        for (i64 left = ranks[l] - below; left >= 0; left -= NAME(key)(x[at], 0) == wanted) at++;
        places[l] = at;
    }
    free(keys);
    return answer;
}

/* Where the k smallest (or largest) numbers of each line are, in the order of their places, the first ones of equal numbers. What
   is not above the k-th smallest so far is collected, and thinned out when there is no more room. */
int NAME(smallest)(const T *x, i64 *places, i64 lines, i64 n, i64 k, i64 largest)
{
    if (k > n) return 2;
    const i64 room = 2 * k + 64 < n ? 2 * k + 64 : n;
    WORD *keys = malloc((size_t)n * sizeof(WORD) + 1), *some = malloc((size_t)room * sizeof(WORD) + 1);
    const int answer = keys && some ? 0 : 1;
    for (i64 l = 0; l < lines && k && !answer; l++, x += n, places += k) {
        WORD most = (WORD)-1;
        i64 kept = 0, below = 0, found = 0;
        for (i64 j = 0; j < n; j++) keys[j] = NAME(key)(x[j], largest != 0);
        for (i64 j = 0; j < n; j++) {
            if (keys[j] > most) continue;
            if (kept == room) {
                most = NAME(of_rank)(some, kept, k - 1);
                kept = k;
                if (keys[j] > most) continue;
            }
            some[kept++] = keys[j];
        }
        most = NAME(of_rank)(some, kept, k - 1);
        for (i64 j = 0; j < kept; j++) below += some[j] < most;
        for (i64 j = 0, equal = k - below; j < n && found < k; j++) {
            if (keys[j] > most || (keys[j] == most && !equal)) continue;
            equal -= keys[j] == most;
            places[found++] = j;
        }
    }
    free(keys);
    free(some);
    return answer;
}

/* y (outer, m, inner) = x[o, index[o, j, i], i]. */
int NAME(gather)(const T *x, const i64 *index, T *y, i64 outer, i64 n, i64 inner, i64 m)
{
    uint64_t wrong = 0;
    if (n <= 0) return outer * m * inner ? 2 : 0;
    for (i64 a = 0; a < outer; a++, x += n * inner)
        for (i64 j = 0; j < m; j++, index += inner, y += inner)
            for (i64 i = 0; i < inner; i++) {
                const uint64_t at = (uint64_t)index[i];
                wrong |= at >= (uint64_t)n;
                y[i] = x[(at < (uint64_t)n ? at : 0) * inner + i];
            }
    return wrong ? 2 : 0;
}

/* x[o, index[o, j, i], i] = or += source (outer, m, inner), in the order of the index. */
int NAME(scatter)(T *x, const i64 *index, const T *source, i64 outer, i64 n, i64 inner, i64 m, i64 add)
{
    for (i64 a = 0; a < outer; a++, x += n * inner)
        for (i64 j = 0; j < m; j++, index += inner, source += inner)
            for (i64 i = 0; i < inner; i++) {
                const uint64_t at = (uint64_t)index[i];
                if (at >= (uint64_t)n) return 2;
                if (add) x[at * inner + i] += source[i];
                else x[at * inner + i] = source[i];
            }
    return 0;
}

/* Matrices (rows, columns) with 0 above the diagonal that begins at column `diagonal`, or below it (`upper`). */
void NAME(triangle)(const T *x, T *y, i64 matrices, i64 rows, i64 columns, i64 diagonal, i64 upper)
{
    for (i64 r = 0; r < matrices * rows; r++, x += columns, y += columns) {
        i64 edge = r % rows + diagonal + !upper;
        edge = edge < 0 ? 0 : edge > columns ? columns : edge;
        memcpy(upper ? y + edge : y, upper ? x + edge : x, (size_t)(upper ? columns - edge : edge) * sizeof(T));
        memset(upper ? y : y + edge, 0, (size_t)(upper ? edge : columns - edge) * sizeof(T));
    }
}

#endif
