/* The passes of batch_norm.c that add up, over a few channels of (N, C, L) at a time, for one number type T. */

/* Channels [first, last) of (N, C, L), sample by sample: k is the sample, j the channel, `at` where its run of l begins. What was
   read last is read first the next time, backwards: the cache still has it. */
#define RUNS(k, j, at) \
    for (i64 k = 0; k < n; k++) for (i64 j = first; j < last; j++) for (i64 at = (k * c + j) * l, once = 1; once; once = 0)
#define RUNS_BACK(k, j, at) \
    for (i64 k = n - 1; k >= 0; k--) for (i64 j = last - 1; j >= first; j--) \
        for (i64 at = (k * c + j) * l, once = 1; once; once = 0)

/* A few channels at a time: those that stay in the cache until they are read again. */
#define GROUPS(first, last) \
    for (i64 each = NAME(together)(n, c, l), first = 0, last = each < c ? each : c; first < c; \
         first = last, last = last + each < c ? last + each : c)

static i64 NAME(together)(i64 n, i64 c, i64 l)
{
    return clip(TOGETHER / (i64)sizeof(T) / at_least(n * l, 1), 1, at_most(at_least(c, 1), MOST_TOGETHER));
}

static void NAME(moments_about)(const T *x, const T *centre, double *mean, double *squares, i64 n, i64 c, i64 l, i64 first,
                                i64 last)
{
    SUMS sums[MOST_TOGETHER];
    memset(sums, 0, (last - first) * sizeof *sums);
    RUNS(k, j, at) NAME(add_moments)(sums + j - first, x + at, NAME(later)(j, first, last, c, l), centre[j - first], l);
    for (i64 j = first; j < last; j++) {
        SUMS *s = sums + j - first;
        double sum = NAME(total)(s, 0), distance = sum / (n * l), square = NAME(total)(s, 1) - sum * distance;
        mean[j] = centre[j - first] + distance;
        squares[j] = square < 0 ? 0 : square;
    }
}

/* A first guess of the means of channels [first, last): the mean of a few numbers. */
static void NAME(guesses)(const T *x, i64 n, i64 l, i64 first, i64 last, T *centre)
{
    const i64 few = n ? at_most(l, FEW) : 0;
    for (i64 j = first; j < last; j++) {
        double sum = 0;
        for (i64 i = 0; i < few; i++) sum += x[j * l + i];
        centre[j - first] = (T)(sum / few);
    }
}

/* Mean of channels [first, last) anew, where the centre turned out to be more than two deviations off. */
static void NAME(improve)(const T *x, const T *centre, double *mean, double *squares, i64 n, i64 c, i64 l, i64 first, i64 last)
{
    for (i64 j = first; j < last; j++) {
        double off = mean[j] - centre[j - first];
        T better = (T)mean[j];
        if (off * off * (n * l) > 4 * squares[j]) NAME(moments_about)(x, &better, mean, squares, n, c, l, j, j + 1);
    }
}

/* Mean of channels [first, last), and the sum of squared distances from it. One pass has both, from d = x - centre for any
   centre: sum d^2 - (sum d)^2 / N. That loses digits where the centre is far from the mean. So it is the mean of the first few,
   and where that turns out to be too far off, the channel is read again. */
static void NAME(moments)(const T *x, double *mean, double *squares, i64 n, i64 c, i64 l, i64 first, i64 last)
{
    T centre[MOST_TOGETHER] = {0};
    NAME(guesses)(x, n, l, first, last, centre);
    NAME(moments_about)(x, centre, mean, squares, n, c, l, first, last);
    NAME(improve)(x, centre, mean, squares, n, c, l, first, last);
}

/* For channels [first, last): the sums of h = passed(g), and of h * (x - centre). */
INLINE void NAME(sums_of)(const T *g, const T *x, const T *y, const T *centre, const T *scale, const T *bias, T *h,
                          double *plain, double *product, i64 n, i64 c, i64 l, i64 first, i64 last, const int masked)
{
    SUMS sums[MOST_TOGETHER];
    memset(sums, 0, (last - first) * sizeof *sums);
    RUNS(k, j, at) {
        const T s = scale ? scale[j - first] : 0, b = bias ? bias[j] : 0;
        const i64 next = NAME(later)(j, first, last, c, l);
        if (masked == SILU_BEFORE) {
            NAME(silu_passed)(g + at, x + at, h + at, l, centre[j], s, b);
            NAME(add_gradients)(sums + j - first, h + at, x + at, NULL, NULL, l, next, centre[j], s, b, 0);
        } else {
            NAME(add_gradients)(sums + j - first, g + at, x + at, masked == 1 ? y + at : NULL, masked == 1 ? h + at : NULL, l, next,
                                centre[j], s, b, masked);
        }
    }
    for (i64 j = first; j < last; j++) {
        plain[j] = NAME(total)(sums + j - first, 0);
        product[j] = NAME(total)(sums + j - first, 1);
    }
}
