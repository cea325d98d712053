/* The passes of batch_norm.c that write: a run of numbers of one channel, for one number type T. `later` is how far away the run
   lies that comes so much later; each is in pages of its own, where no CPU looks by itself. */

#ifndef NEAR
#define NEAR 1024                    /* numbers from the way of a run's memory into the cache to its use */
#define FAR 16384                    /* numbers in a run that is looked ahead in by itself */
#endif

#define EACH_256_BYTES(i, l) for (; i + 256 / (i64)sizeof(T) <= l; i += 256 / (i64)sizeof(T))
#define EACH_VECTOR(at, i) for (i64 at = i; at < i + 256 / (i64)sizeof(T); at += LANES)

/* The 256 bytes at x on their way, to be read or written. */
INLINE void NAME(bring)(const T *x, const int written)
{
    for (int byte = 0; byte < 256; byte += 64) __builtin_prefetch((const char *)x + byte, written, 2);
}

/* From run j of channels [first, last) to the one that comes NEAR numbers later, where runs are taken from the first to the last. */
INLINE i64 NAME(later)(i64 j, i64 first, i64 last, i64 c, i64 l)
{
    i64 wide = last - first, place = j - first + at_least(NEAR / at_least(l, 1), 1);
    return l > FAR ? NEAR : (place / wide * c + place % wide - (j - first)) * l;
}

/* The same from the last to the first. */
INLINE i64 NAME(earlier)(i64 j, i64 first, i64 last, i64 c, i64 l)
{
    i64 later = NAME(later)(first + last - 1 - j, first, last, c, l);
    return l > FAR ? later : -later;
}

/* y = (x - m) * s + b [+ r], activated. */
INLINE void NAME(normalised)(const T *x, const T *r, T *y, i64 l, i64 later, T m, T s, T b, const int residual,
                             const int activation)
{
    i64 i = 0;
    EACH_256_BYTES(i, l) {
        NAME(bring)(x + i + later, 0);
        NAME(bring)(y + i + later, 1);
        if (residual) NAME(bring)(r + i + later, 0);
        EACH_VECTOR(at, i) {
            V v = (*(const V *)(x + at) - m) * s + b;
            if (residual) v += *(const V *)(r + at);
            *(V *)(y + at) = NAME(activated)(v, activation);
        }
    }
    for (; i < l; i += LANES) {
        const i64 size = at_most(l - i, LANES);
        V v = (NAME(some)(x + i, size) - m) * s + b;
        if (residual) v += NAME(some)(r + i, size);
        NAME(put)(NAME(activated)(v, activation), y + i, size);
    }
}

/* dx = s * h + d * (x - m) + e, where h is what passes of g. */
INLINE void NAME(sloped)(const T *g, const T *x, T *dx, i64 l, i64 later, T m, T scale, T shift, T d, T e, const int masked)
{
    const V s = scale - (V){0}, b = shift - (V){0};
    i64 i = 0;
    EACH_256_BYTES(i, l) {
        NAME(bring)(g + i + later, 0);
        NAME(bring)(x + i + later, 0);
        NAME(bring)(dx + i + later, 1);
        EACH_VECTOR(at, i) {
            V z = *(const V *)(x + at) - m, h = *(const V *)(g + at);
            *(V *)(dx + at) = s * NAME(passed)(h, z, (V){0}, s, b, masked) + d * z + e;
        }
    }
    for (; i < l; i += LANES) {
        const i64 size = at_most(l - i, LANES);
        V z = NAME(some)(x + i, size) - m, h = NAME(some)(g + i, size);
        NAME(put)(s * NAME(passed)(h, z, (V){0}, s, b, masked) + d * z + e, dx + i, size);
    }
}
