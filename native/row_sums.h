/* Sums along rows of TERM(v, c), in T, in the order of row_sums.c: v is a vector of numbers of the type IN that have become T, or
   one of them, and c what `centres` has for their row (NULL: nothing). */

#define V NAME(vector)
#define MASK NAME(mask)

typedef T V __attribute__((vector_size(SIDE * sizeof(T)), aligned(sizeof(T)), may_alias));
typedef IN NAME(read) __attribute__((vector_size(SIDE * sizeof(IN)), aligned(sizeof(IN)), may_alias));
typedef INTEGER MASK __attribute__((vector_size(SIDE * sizeof(T))));

INLINE V NAME(terms)(const IN *x, T c)
{
    V v = __builtin_convertvector(*(const NAME(read) *)x, V);
    return TERM(v, c);
}

INLINE T NAME(term)(IN x, T c)
{
    T v = x;
    return TERM(v, c);
}

/* The sums of neighbours: those of a, then those of b. */
INLINE V NAME(neighbours)(V a, V b)
{
    return PICK(MASK, a, b, EVEN_8) + PICK(MASK, a, b, ODD_8);
}

/* The sums of SIDE leaves of 8 to LEAF numbers each, one behind the other; none is shorter than the first or longer than the
   last. What is added where a leaf has ended is 0: that may turn a -0, but so does the end of `rows`. */
INLINE V NAME(leaves)(const IN *const *x, const i64 *n, const T *c)
{
    V part[SIDE];
    const i64 common = n[0] / SIDE, most = n[SIDE - 1] / SIDE;
    UNROLL for (int l = 0; l < SIDE; l++) part[l] = NAME(terms)(x[l], c[l]);
    for (i64 i = 1; i < common; i++) {
        const char *next = (const char *)(x[0] + i * SIDE * SIDE) + AHEAD;
        for (int k = 0; k < SIDE * SIDE * (int)sizeof(IN); k += LINE) __builtin_prefetch(next + k);
        UNROLL for (int l = 0; l < SIDE; l++) part[l] += NAME(terms)(x[l] + i * SIDE, c[l]);
    }
    for (i64 i = common; i < most; i++)
        UNROLL for (int l = 0; l < SIDE; l++)
            part[l] += (V)((MASK)NAME(terms)(x[l] + i * SIDE, c[l]) & -(INTEGER)(i < n[l] / SIDE));
    V first = NAME(neighbours)(NAME(neighbours)(part[0], part[1]), NAME(neighbours)(part[2], part[3]));
    V sums = NAME(neighbours)(first, NAME(neighbours)(NAME(neighbours)(part[4], part[5]), NAME(neighbours)(part[6], part[7])));
    for (i64 i = 0; i < n[SIDE - 1] % SIDE; i++) {
        V rest = {0};
        UNROLL for (int l = 0; l < SIDE; l++) {
            const i64 at = n[l] / SIDE * SIDE + i;
            if (at < n[l]) rest[l] = NAME(term)(x[l][at], c[l]);
        }
        sums += rest;
    }
    return sums;
}

/* One leaf by itself, of 8 numbers at least. */
INLINE T NAME(leaf)(const IN *x, i64 n, T c)
{
    V part = NAME(terms)(x, c);
    i64 i = SIDE;
    for (; i + SIDE <= n; i += SIDE) part += NAME(terms)(x + i, c);
    T sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    for (; i < n; i++) sum += NAME(term)(x[i], c);
    return sum;
}

/* Cuts each of `count` parts in two. */
INLINE void NAME(halve)(const IN **x, i64 *n, T *c, int count)
{
    for (int i = count - 1; i >= 0; i--) {
        const i64 left = half_of(n[i]);
        x[2 * i + 1] = x[i] + left; n[2 * i + 1] = n[i] - left; c[2 * i + 1] = c[i];
        x[2 * i] = x[i]; n[2 * i] = left; c[2 * i] = c[i];
    }
}

/* The sums of `rows` rows of n numbers, which have SIDE leaves together. */
INLINE void NAME(together)(const IN *x, const T *centres, T *sums, i64 n, const int rows)
{
    const IN *part[SIDE];
    i64 size[SIDE];
    T c[SIDE];
    UNROLL for (int r = 0; r < rows; r++) { part[r] = x + r * n; size[r] = n; c[r] = centres ? centres[r] : 0; }
    UNROLL for (int count = rows; count < SIDE; count *= 2) NAME(halve)(part, size, c, count);
    V found = NAME(leaves)(part, size, c);
    UNROLL for (int count = SIDE; count > rows; count /= 2)
        UNROLL for (int i = 0; i < count / 2; i++) found[i] = found[2 * i] + found[2 * i + 1];
    UNROLL for (int r = 0; r < rows; r++) sums[r] = found[r] + 0;
}

static T NAME(pairwise)(const IN *x, const T *centre, i64 n)
{
    if (n <= LEAF) return NAME(leaf)(x, n, centre ? *centre : 0);
    if (n <= (LEAF + 1) * SIDE && leaves_of(n) == SIDE) {
        T sum;
        NAME(together)(x, centre, &sum, n, 1);
        return sum;
    }
    const i64 left = half_of(n);
    return NAME(pairwise)(x, centre, left) + NAME(pairwise)(x + left, centre, n - left);
}

/* Rows of fewer than 8 numbers, one number after the other. */
INLINE void NAME(short_rows)(const IN *x, const T *centres, T *sums, i64 rows, const int n)
{
    for (i64 r = 0; r < rows; r++, x += n) {
        T sum = 0;
        UNROLL for (int i = 0; i < n; i++) sum += NAME(term)(x[i], centres ? centres[r] : 0);
        sums[r] = sum;
    }
}

static void NAME(rows)(const IN *x, const T *centres, T *sums, i64 rows, i64 n)
{
    const int count = leaves_of(n);
    i64 r = 0;
#define SHORT(few) if (n == few) NAME(short_rows)(x, centres, sums, rows, few);
    SHORT(0) SHORT(1) SHORT(2) SHORT(3) SHORT(4) SHORT(5) SHORT(6) SHORT(7)
#undef SHORT
    if (n < SIDE) return;
#define GROUPS(several) \
    if (count * several == SIDE) \
        for (; r + several <= rows; r += several) NAME(together)(x + r * n, centres ? centres + r : 0, sums + r, n, several);
    GROUPS(8) GROUPS(4) GROUPS(2)
#undef GROUPS
    for (; r < rows; r++) sums[r] = NAME(pairwise)(x + r * n, centres ? centres + r : 0, n) + 0;
}

#undef V
#undef MASK
