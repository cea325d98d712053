/* The sums of row_sums.c, for one number type T. */

#define V NAME(vector)
#define MASK NAME(mask)

typedef T V __attribute__((vector_size(SIDE * sizeof(T)), aligned(sizeof(T)), may_alias));
typedef INTEGER MASK __attribute__((vector_size(SIDE * sizeof(T))));

/* The sums of neighbours: those of a, then those of b. */
INLINE V NAME(neighbours)(V a, V b)
{
    return PICK(MASK, a, b, EVEN_8) + PICK(MASK, a, b, ODD_8);
}

/* The sums of `count` leaves, at most SIDE, of 8 to LEAF numbers each. */
INLINE V NAME(leaves)(const T *const *x, const i64 *n, const int count)
{
    V part[SIDE] = {0};
    i64 common = n[0] / SIDE;
    UNROLL for (int l = 0; l < count; l++) {
        part[l] = *(const V *)x[l];
        common = n[l] / SIDE < common ? n[l] / SIDE : common;
    }
    for (i64 i = 1; i < common; i++) {
        const char *next = (const char *)(x[0] + i * count * SIDE) + AHEAD;
        for (int k = 0; k < count * SIDE * (int)sizeof(T); k += LINE) __builtin_prefetch(next + k);
        UNROLL for (int l = 0; l < count; l++) part[l] += *(const V *)(x[l] + i * SIDE);
    }
    UNROLL for (int l = 0; l < count; l++)
        for (i64 i = common; i < n[l] / SIDE; i++) part[l] += *(const V *)(x[l] + i * SIDE);
    V first = NAME(neighbours)(NAME(neighbours)(part[0], part[1]), NAME(neighbours)(part[2], part[3]));
    V sums = NAME(neighbours)(first, NAME(neighbours)(NAME(neighbours)(part[4], part[5]), NAME(neighbours)(part[6], part[7])));
    for (i64 i = 0; i < SIDE - 1; i++) {
        V rest = -(V){0};            /* what adds nothing, to a sum of -0 neither */
        i64 some = 0;
        UNROLL for (int l = 0; l < count; l++) {
            const i64 at = n[l] / SIDE * SIDE + i;
            if (at < n[l]) rest[l] = x[l][at], some = 1;
        }
        if (!some) break;
        sums += rest;
    }
    return sums;
}

/* Whether halving n three times gives leaves, and twice does not. */
INLINE int NAME(is_eight)(const i64 *four, const i64 *eight)
{
    for (int i = 0; i < 4; i++) if (four[i] <= LEAF) return 0;
    for (int i = 0; i < 8; i++) if (eight[i] > LEAF) return 0;
    return 1;
}

INLINE void NAME(halved)(const T *const *x, const i64 *n, const T **half, i64 *size, int count)
{
    for (int i = 0; i < count; i++) {
        const i64 left = half_of(n[i]);
        half[2 * i] = x[i]; half[2 * i + 1] = x[i] + left;
        size[2 * i] = left; size[2 * i + 1] = n[i] - left;
    }
}

static T NAME(pairwise)(const T *x, i64 n)
{
    const T *two[2], *four[4], *eight[8];
    i64 sizes_2[2], sizes_4[4], sizes_8[8];
    if (n < SIDE) {
        T sum = -(T)0;
        for (i64 i = 0; i < n; i++) sum += x[i];
        return sum;
    }
    if (n <= LEAF) return NAME(leaves)(&x, &n, 1)[0];
    NAME(halved)(&x, &n, two, sizes_2, 1);
    if (n <= 2 * LEAF && sizes_2[1] <= LEAF) {
        V sums = NAME(leaves)(two, sizes_2, 2);
        return sums[0] + sums[1];
    }
    if (n <= 9 * LEAF) {
        NAME(halved)(two, sizes_2, four, sizes_4, 2);
        NAME(halved)(four, sizes_4, eight, sizes_8, 4);
        if (NAME(is_eight)(sizes_4, sizes_8)) {
            V sums = NAME(leaves)(eight, sizes_8, 8);
            return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        }
    }
    return NAME(pairwise)(two[0], sizes_2[0]) + NAME(pairwise)(two[1], sizes_2[1]);
}

void NAME(row_sums)(const T *x, T *sums, i64 rows, i64 n)
{
    i64 r = 0;
    if (n >= SIDE && n <= LEAF)
        for (; r + SIDE <= rows; r += SIDE) {
            const T *row[SIDE];
            i64 size[SIDE];
            for (int l = 0; l < SIDE; l++) { row[l] = x + (r + l) * n; size[l] = n; }
            V found = NAME(leaves)(row, size, SIDE);
            *(V *)(sums + r) = found + (T)0;
        }
    for (; r < rows; r++) sums[r] = NAME(pairwise)(x + r * n, n) + (T)0;
}

#undef V
#undef MASK
