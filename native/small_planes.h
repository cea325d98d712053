/* Batch norm of small planes, for one number type T: the passes of batch_norm.c, to the same bits, where a run of a channel's
   numbers is too short to fill vectors. The runs of neighbouring channels lie together in a sample, so vectors go over all of
   them, with what belongs to a channel spread over its run. Each number of a run has a sum of its own here as it has there. */

#ifndef ROW
#define ROW 512                      /* numbers of a sample that are done together; their sums stay in the L1 cache */
#define SAMPLES 4                    /* whose numbers are added to a sum before that is stored */
#endif

/* What belongs to channels [first, last) of a row: the centre, scale and shift of each number, sums, and two numbers more. */
typedef struct {
    T centre[ROW + LANES], scale[ROW + LANES], shift[ROW + LANES], slope[ROW + LANES], constant[ROW + LANES];
    T part[2][ROW + LANES];
    double total[2][ROW + LANES];
} NAME(Row);

static int NAME(are_small)(i64 l) { return l > 1 && l <= AHEAD * LANES; }

/* As many channels as fit into a row, and into what stays in the cache. */
static i64 NAME(of_row)(i64 n, i64 c, i64 l)
{
    return clip(at_most(ROW / l, TOGETHER / (i64)sizeof(T) / at_least(n * l, 1)), 1, at_least(c, 1));
}

/* GROUPS for small planes. */
#define ROWS(first, last) \
    for (i64 each = NAME(of_row)(n, c, l), first = 0, last = each < c ? each : c; first < c; \
         first = last, last = last + each < c ? last + each : c)

/* value[j] for each number of channel j. */
static void NAME(spread_over)(const T *value, i64 channels, i64 l, T *to)
{
    for (i64 j = 0; j < channels; j++) for (i64 i = 0; i < l; i++) to[j * l + i] = value[j];
}

/* Centre, scale and shift of the channels of a row; no shift is 0. */
static void NAME(describe)(NAME(Row) *row, const T *centre, const T *scale, const T *shift, i64 channels, i64 l)
{
    NAME(spread_over)(centre, channels, l, row->centre);
    NAME(spread_over)(scale, channels, l, row->scale);
    if (shift) NAME(spread_over)(shift, channels, l, row->shift);
    else memset(row->shift, 0, sizeof row->shift);
}

static void NAME(fold_row)(NAME(Row) *row, i64 width)
{
    for (int which = 0; which < 2; which++) for (i64 i = 0; i < width; i++) row->total[which][i] += row->part[which][i];
    memset(row->part, 0, sizeof row->part);
}

/* The sum of a run's numbers, as `total` of sums.h has it. */
static double NAME(run_total)(const double *sums, i64 l)
{
    double part[AHEAD * LANES] = {0};
    memcpy(part, sums, l * sizeof(double));
    for (i64 half = AHEAD * LANES / 2; half > 0; half /= 2) for (i64 i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* For `samples` rows `apart`, from the vector at i on: adds d = x - centre and d d to the sums, or, where g is not NULL, what
   passes of g and that times d. */
INLINE void NAME(add_vector)(NAME(Row) *row, const T *g, const T *x, const T *y, T *h, i64 i, i64 size, i64 apart,
                             const int samples, const int sloping, const int masked)
{
    V m = *(const V *)(row->centre + i), s = *(const V *)(row->scale + i), b = *(const V *)(row->shift + i), zero = {0};
    V first = *(const V *)(row->part[0] + i), second = *(const V *)(row->part[1] + i);
    for (int k = 0; k < samples; k++, i += apart) {
        V z = NAME(some)(x + i, size) - m;
        if (!sloping) { first += z; second += z * z; continue; }
        V v = NAME(passed)(NAME(some)(g + i, size), z, masked == 1 ? NAME(some)(y + i, size) : zero, s, b, masked);
        if (masked == 1) NAME(put)(v, h + i, size);
        first += v;
        second += v * z;
    }
    i -= samples * apart;
    *(V *)(row->part[0] + i) = first;
    *(V *)(row->part[1] + i) = second;
}

/* The sums of `width` numbers of each sample, into row->total. */
INLINE void NAME(add_rows)(NAME(Row) *row, const T *g, const T *x, const T *y, T *h, i64 n, i64 width, i64 apart, i64 l,
                           const int sloping, const int masked)
{
    const i64 most = SPAN / l;                       /* samples between two foldings */
    const int again = masked == SILU_BEFORE ? 0 : masked;
    memset(row->part, 0, sizeof row->part);
    memset(row->total, 0, sizeof row->total);
    for (i64 k = 0; k < n;) {
        i64 some = n - k >= SAMPLES && most - k % most >= SAMPLES ? SAMPLES : 1, at = k * apart;
        if (masked == SILU_BEFORE) for (i64 j = 0; j < some; j++) {
            const i64 of = at + j * apart;
            NAME(silu_passed_each)(g + of, x + of, h + of, width, row->centre, row->scale, row->shift);
        }
        for (i64 i = 0; i < width; i += LANES) {
            i64 size = at_most(width - i, LANES);
            const T *of_g = !sloping ? NULL : masked == SILU_BEFORE ? h + at : g + at, *of_y = masked == 1 ? y + at : NULL;
            T *of_h = masked == 1 ? h + at : NULL;
            if (some == SAMPLES && size == LANES) NAME(add_vector)(row, of_g, x + at, of_y, of_h, i, LANES, apart, SAMPLES, sloping, again);
            else if (some == SAMPLES) NAME(add_vector)(row, of_g, x + at, of_y, of_h, i, size, apart, SAMPLES, sloping, again);
            else NAME(add_vector)(row, of_g, x + at, of_y, of_h, i, size, apart, 1, sloping, again);
        }
        k += some;
        if (k % most == 0) NAME(fold_row)(row, width);
    }
    NAME(fold_row)(row, width);
}

/* `moments` of channel_statistics.h for the channels of a row. */
static void NAME(row_moments)(NAME(Row) *row, const T *x, double *mean, double *squares, i64 n, i64 c, i64 l, i64 first, i64 last)
{
    T centre[ROW];
    NAME(guesses)(x, n, l, first, last, centre);
    NAME(spread_over)(centre, last - first, l, row->centre);
    NAME(add_rows)(row, NULL, x + first * l, NULL, NULL, n, (last - first) * l, c * l, l, 0, 0);
    for (i64 j = first; j < last; j++) {
        double sum = NAME(run_total)(row->total[0] + (j - first) * l, l), distance = sum / (n * l);
        double square = NAME(run_total)(row->total[1] + (j - first) * l, l) - sum * distance;
        mean[j] = centre[j - first] + distance;
        squares[j] = square < 0 ? 0 : square;
    }
    NAME(improve)(x, centre, mean, squares, n, c, l, first, last);
}

/* `sums_of` of channel_statistics.h for a row that is described. */
INLINE void NAME(row_sums)(NAME(Row) *row, const T *g, const T *x, const T *y, T *h, double *plain, double *product, i64 n, i64 c,
                           i64 l, i64 first, i64 last, const int masked)
{
    const i64 at = first * l;
    NAME(add_rows)(row, g + at, x + at, masked == 1 ? y + at : NULL, masked == 1 || masked == SILU_BEFORE ? h + at : NULL, n,
                   (last - first) * l, c * l, l, 1, masked);
    for (i64 j = first; j < last; j++) {
        plain[j] = NAME(run_total)(row->total[0] + (j - first) * l, l);
        product[j] = NAME(run_total)(row->total[1] + (j - first) * l, l);
    }
}

INLINE void NAME(normalise_rows)(const NAME(Row) *row, const T *x, const T *r, T *y, i64 n, i64 width, i64 apart, const int residual,
                                 const int activation)
{
    for (i64 k = n - 1; k >= 0; k--) for (i64 i = 0; i < width; i += LANES) {
        i64 size = at_most(width - i, LANES), at = k * apart + i;
        V v = (NAME(some)(x + at, size) - *(const V *)(row->centre + i)) * *(const V *)(row->scale + i) + *(const V *)(row->shift + i);
        if (residual) v += NAME(some)(r + at, size);
        NAME(put)(NAME(activated)(v, activation), y + at, size);
    }
}

INLINE void NAME(slope_rows)(const NAME(Row) *row, const T *g, const T *x, T *dx, i64 n, i64 width, i64 apart, const int masked)
{
    for (i64 k = n - 1; k >= 0; k--) for (i64 i = 0; i < width; i += LANES) {
        i64 size = at_most(width - i, LANES), at = k * apart + i;
        V z = NAME(some)(x + at, size) - *(const V *)(row->centre + i), s = *(const V *)(row->scale + i);
        V h = NAME(passed)(NAME(some)(g + at, size), z, (V){0}, s, *(const V *)(row->shift + i), masked);
        NAME(put)(s * h + *(const V *)(row->slope + i) * z + *(const V *)(row->constant + i), dx + at, size);
    }
}
