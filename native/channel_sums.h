/* Sums of the numbers of each channel of images, image by image beside what else is done with one, for one number type T. */

/* An array of images, in planes of `pixels` for each channel; nothing is added up where `sums` is NULL. */
typedef struct { double *sums; const T *from; i64 channels, pixels; } NAME(Channels);

/* The sum of a vector's numbers, in halves. */
static T NAME(folded)(V vector)
{
    T part[LANES];
    *(V *)part = vector;
    for (i64 half = LANES / 2; half > 0; half /= 2) for (i64 l = 0; l < half; l++) part[l] += part[l + half];
    return part[0];
}

/* In four vectors side by side. */
static T NAME(plane_sum)(const T *x, i64 pixels)
{
    V sum[4] = {0};
    i64 i = 0;
    for (; i + 4 * LANES <= pixels; i += 4 * LANES)
        UNROLL for (int k = 0; k < 4; k++) sum[k] += *(const V *)(x + i + k * LANES);
    for (; i < pixels; i += LANES) {
        V rest = {0};
        if (pixels - i >= LANES) rest = *(const V *)(x + i);
        else for (i64 p = i; p < pixels; p++) rest[p - i] = x[p];
        sum[0] += rest;
    }
    return NAME(folded)((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static void NAME(add_image)(const NAME(Channels) *c, i64 image)
{
    if (!c->sums) return;
    const T *from = c->from + image * c->channels * c->pixels;
    for (i64 k = 0; k < c->channels; k++) c->sums[k] += NAME(plane_sum)(from + k * c->pixels, c->pixels);
}
