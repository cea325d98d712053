/* The activations that batch norm applies to what it has just computed, and what their gradients let pass, for one number type T.

   activation 0: none, 1: ReLU, 2: ReLU6, 3: hard-swish, u min(max(u + 3, 0), 6) / 6; 4, SiLU, whose exponential takes a loop of its
   own, goes over a run whose numbers have just been written. NaN stays NaN. */

#ifndef THIRD
#define THIRD 0.333333333333333333
#define SIXTH 0.166666666666666667
#define CHOICE(mask, yes, no) ((V)(((MASK)(yes) & (mask)) | ((MASK)(no) & ~(mask))))
#endif

#define ALL(value) ((T)(value) - (V){0})

INLINE V NAME(activated)(V u, const int activation)
{
    if (!activation) return u;
    V v = u;
    if (activation == 3) v = u + (T)3;
    v = (V)((MASK)v & ~(v < (V){0}));
    if (activation > 1) v = CHOICE(v > ALL(6), ALL(6), v);
    if (activation == 3) v = u * v * (T)SIXTH;
    return v;
}

/* SiLU of a run in its memory. */
INLINE void NAME(silu_run)(T *y, i64 n)
{
    EACH(i, n) y[i] = NAME(silu_of)(y[i]);
}

/* h = what the gradient g of SiLU(u) becomes, u = (x - m) s + b. */
INLINE void NAME(silu_passed)(const T *g, const T *x, T *h, i64 n, T m, T s, T b)
{
    EACH(i, n) {
        T value, slope;
        NAME(silu_both)((x[i] - m) * s + b, &value, &slope);
        h[i] = slope * g[i];
    }
}

/* The same where each number has its own m, s and b. */
INLINE void NAME(silu_passed_each)(const T *g, const T *x, T *h, i64 n, const T *m, const T *s, const T *b)
{
    EACH(i, n) {
        T value, slope;
        NAME(silu_both)((x[i] - m[i]) * s[i] + b[i], &value, &slope);
        h[i] = slope * g[i];
    }
}

/* What the gradient g of the activated number becomes: g but where ReLU made 0, that is where y <= 0 (masked 1), or, masked being
   2, where u = z * s + b <= 0, since y was that; 3 and 4: the same of ReLU6 and of hard-swish, from u. */
INLINE V NAME(passed)(V g, V z, V y, V s, V b, const int masked)
{
    if (!masked) return g;
    if (masked > 1) y = z * s + b;
    if (masked == 4) {
        g *= CHOICE(y < ALL(3), y * (T)THIRD + (T)0.5, ALL(1));
        return (V)((MASK)g & ~(y <= ALL(-3)));
    }
    MASK gone = y <= (V){0};
    if (masked == 3) gone |= y >= ALL(6);
    return (V)((MASK)g & ~gone);
}

/* The first `size` numbers at x, and 0 in the other lanes. */
INLINE V NAME(some)(const T *x, i64 size) { return size == LANES ? *(const V *)x : NAME(load)(x, size, 0); }

INLINE void NAME(put)(V v, T *y, i64 size)
{
    if (size == LANES) *(V *)y = v;
    else memcpy(y, &v, size * sizeof(T));
}
