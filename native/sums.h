/* Two sums over the same numbers, in vectors of T that are added up in double every SPAN numbers: there may be millions. The
   bits do not depend on the width of vectors: each number of 256 bytes has a sum of its own. Included once for each number
   type; who includes it undefines V, MASK, WIDE and SUMS at its end.

   The vectors are written out: left to find them itself, GCC 12 at -O3 makes wrong code of a sum in double whose terms are
   chosen by a comparison. */

#ifndef SPAN
#define SPAN 1024                   /* 16 for each of the sums of float */
#define AHEAD (256 / VECTOR_BYTES)  /* vectors, which do not wait for each other */
#endif

#define V NAME(vector)
#define MASK NAME(mask)
#define WIDE NAME(wide)
#define SUMS NAME(sums)

typedef T V __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
typedef INTEGER MASK __attribute__((vector_size(VECTOR_BYTES)));

typedef double WIDE __attribute__((vector_size(VECTOR_BYTES / sizeof(T) * sizeof(double))));
typedef struct { V part[2][AHEAD]; WIDE total[2][AHEAD]; i64 count; } SUMS;

/* The first `size` numbers at x, and `rest` in the other lanes. */
INLINE V NAME(load)(const T *x, i64 size, T rest)
{
    V v = rest - (V){0};
    memcpy(&v, x, size * sizeof(T));
    return v;
}

/* Adds what the vectors hold to the totals and empties them. */
static void NAME(fold)(SUMS *s)
{
    for (int which = 0; which < 2; which++)
        for (i64 u = 0; u < AHEAD; u++) s->total[which][u] += __builtin_convertvector(s->part[which][u], WIDE);
    memset(s->part, 0, sizeof s->part);
    s->count = 0;
}

/* One of the two sums, the halves of what there is added up again and again: in one fixed order. */
static double NAME(total)(SUMS *s, int which)
{
    double part[AHEAD * LANES];
    NAME(fold)(s);
    memcpy(part, s->total[which], sizeof part);
    for (i64 half = AHEAD * LANES / 2; half > 0; half /= 2) for (i64 i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* Makes room for `n` more numbers, or for as many as go in at a time; says for how many. */
INLINE i64 NAME(room)(SUMS *s, i64 n)
{
    n = at_most(n, SPAN);
    if (s->count + n > SPAN) NAME(fold)(s);
    s->count += n;
    return n;
}

INLINE void NAME(add)(SUMS *s, i64 u, V first, V second)
{
    s->part[0][u] += first;
    s->part[1][u] += second;
}
