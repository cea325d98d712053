/* The passes of batch_norm.c that add up: a run of numbers of one channel, for one number type T. */

/* Adds d = x - centre, and d * d. */
INLINE void NAME(add_moments)(SUMS *s, const T *x, i64 later, T centre, i64 n)
{
    for (i64 there; n > 0; x += there, n -= there) {
        there = NAME(room)(s, n);
        i64 i = 0;
        for (; i + AHEAD * LANES <= there; i += AHEAD * LANES) {
            NAME(bring)(x + i + later, 0);
            for (i64 u = 0; u < AHEAD; u++) {
                V d = *(const V *)(x + i + u * LANES) - centre;
                NAME(add)(s, u, d, d * d);
            }
        }
        for (i64 u = 0; i < there; i += LANES, u++) {
            V d = NAME(load)(x + i, at_most(there - i, LANES), centre) - centre;
            NAME(add)(s, u, d, d * d);
        }
    }
}

/* Adds h = passed(g), and h * (x - m); keeps h where masked is 1. */
INLINE void NAME(add_gradients)(SUMS *sums, const T *g, const T *x, const T *y, T *h, i64 n, i64 later, T m, T scale, T shift,
                               const int masked)
{
    const V s = scale - (V){0}, b = shift - (V){0};
    for (i64 done = 0, there; done < n; done += there) {
        there = NAME(room)(sums, n - done);
        i64 i = done, stop = done + there;
        for (; i + AHEAD * LANES <= stop; i += AHEAD * LANES) {
            NAME(bring)(g + i + later, 0);
            NAME(bring)(x + i + later, 0);
            if (masked == 1) NAME(bring)(y + i + later, 0);
            if (masked == 1) NAME(bring)(h + i + later, 1);
            for (i64 u = 0; u < AHEAD; u++) {
                const i64 at = i + u * LANES;
                V z = *(const V *)(x + at) - m, zero = {0};
                V v = NAME(passed)(*(const V *)(g + at), z, masked == 1 ? *(const V *)(y + at) : zero, s, b, masked);
                if (masked == 1) *(V *)(h + at) = v;
                NAME(add)(sums, u, v, v * z);
            }
        }
        for (i64 u = 0; i < stop; i += LANES, u++) {
            const i64 size = at_most(stop - i, LANES);
            V z = NAME(load)(x + i, size, m) - m, zero = {0};
            V v = NAME(passed)(NAME(load)(g + i, size, 0), z, masked == 1 ? NAME(load)(y + i, size, 0) : zero, s, b, masked);
            if (masked == 1) memcpy(h + i, &v, size * sizeof(T));
            NAME(add)(sums, u, v, v * z);
        }
    }
}
