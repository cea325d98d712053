/* The convolutions of depthwise.h on small images, for one number type T. Their rows would leave most of a vector empty: here
   one holds a pixel of LANES channels. Images are turned round on their way into the L1 cache and out of it. */

/* Where pixels of an image go, with zeros around them and (for the adjoint) between: `up` apart, the first one `corner` on. */
typedef struct { i64 h, w, up, corner, width; T *memory, *turned; } NAME(Spread);

static int NAME(make_spread)(Memory *m, NAME(Spread) *s, i64 h, i64 w, i64 up, i64 top, i64 left, i64 height, i64 width)
{
    *s = (NAME(Spread)){h, w, up, (top * width + left) * LANES, width, borrow_zeros(m, height * width * sizeof(V)),
                        borrow(m, h * w * sizeof(V))};
    return !s->memory || !s->turned;
}

/* The pixels of channels `there`. */
static void NAME(spread)(const NAME(Spread) *s, const T *x, i64 there)
{
    const T *from = s->turned;
    NAME(pack_pixels)(x, s->h * s->w, there, s->turned, LANES);
    for (i64 r = 0; r < s->h; r++) {
        T *to = s->memory + s->corner + r * s->up * s->width * LANES;
        for (i64 i = 0; i < s->w; i++, from += LANES, to += s->up * LANES) *(V *)to = *(const V *)from;
    }
}

/* The reverse of pack_pixels, for vectors one after the other. */
static void NAME(unpack_pixels)(const T *from, i64 pixels, i64 there, T *y)
{
    i64 p = 0;
    if (there == LANES)
        for (; p < pixels && pixels >= LANES; p += LANES) {
            i64 first = at_most(p, pixels - LANES);
            NAME(turn)(from + first * LANES, LANES, y + first, pixels, LANES);
        }
    for (; p < pixels; p++) for (i64 o = 0; o < there; o++) y[o * pixels + p] = from[p * LANES + o];
}

/* R pixels of a row of the result. */
INLINE void NAME(small_pixels)(const T *from, i64 width, const V *weight, V bias, T *to, const int k, const int stride,
                               const int R)
{
    V sum[4];
    UNROLL for (int r = 0; r < R; r++) sum[r] = bias;
    UNROLL for (int ky = 0; ky < k; ky++) UNROLL for (int i = 0; i < (R - 1) * stride + k; i++) {
        V b = *(const V *)(from + (ky * width + i) * LANES);
        UNROLL for (int r = 0; r < R; r++)
            if (i >= r * stride && i < r * stride + k) sum[r] += weight[ky * k + i - r * stride] * b;
    }
    UNROLL for (int r = 0; r < R; r++) *(V *)(to + r * LANES) = sum[r];
}

INLINE void NAME(small_image)(const T *from, i64 width, const V *weight, V bias, T *to, i64 oh, i64 ow, Ahead *ahead, const int k,
                              const int stride)
{
    for (i64 y = 0; y < oh; y++, from += stride * width * LANES) {
        i64 x = 0;
        fetch(ahead);
        for (; x + 4 <= ow; x += 4, to += 4 * LANES)
            NAME(small_pixels)(from + x * stride * LANES, width, weight, bias, to, k, stride, 4);
        for (; x < ow; x++, to += LANES) NAME(small_pixels)(from + x * stride * LANES, width, weight, bias, to, k, stride, 1);
    }
}

/* sum[ky, kx] += the products of pixels of y and those of the image. */
INLINE void NAME(small_sums)(const T *from, i64 width, const T *y, i64 oh, i64 ow, V *total, Ahead *ahead, const int k,
                             const int stride)
{
    V sum[25];
    UNROLL for (int t = 0; t < k * k; t++) sum[t] = (V){0};
    for (i64 r = 0; r < oh; r++, from += stride * width * LANES) {
        fetch(ahead);
        for (i64 x = 0; x < ow; x++, y += LANES) {
            V a = *(const V *)y;
            UNROLL for (int t = 0; t < k * k; t++)
                sum[t] += a * *(const V *)(from + (t / k * width + x * stride + t % k) * LANES);
        }
    }
    UNROLL for (int t = 0; t < k * k; t++) total[t] += sum[t];
}

#define SMALL(k, stride)                                                                                                        \
static __attribute__((noinline)) void NAME(small_image_##k##_##stride)(const T *from, i64 width, const V *weight, V bias, T *to, \
                                                                       i64 oh, i64 ow, Ahead *ahead)                            \
{                                                                                                                               \
    NAME(small_image)(from, width, weight, bias, to, oh, ow, ahead, k, stride);                                                 \
}                                                                                                                               \
static __attribute__((noinline)) void NAME(small_sums_##k##_##stride)(const T *from, i64 width, const T *y, i64 oh, i64 ow,      \
                                                                      V *total, Ahead *ahead)                                   \
{                                                                                                                               \
    NAME(small_sums)(from, width, y, oh, ow, total, ahead, k, stride);                                                          \
}
SMALL(3, 1) SMALL(3, 2) SMALL(5, 1) SMALL(5, 2)
#undef SMALL

/* What comes after block b of the channels of all images: that of the next image after the last. */
static Ahead NAME(next_channels)(const T *x, i64 block, i64 channels, i64 pixels, const T *end, i64 times)
{
    const T *next = x + at_most(LANES, channels - block * LANES) * pixels;
    return look_ahead(next, at_most(end - next, LANES * pixels) + next, times);
}

/* weight[channel, element] by blocks of LANES channels: [block, element, channel], the elements in reverse where `turned`. */
static V *NAME(weights_by_channel)(Memory *m, const T *weight, i64 channels, i64 area, int turned)
{
    T *to = borrow_zeros(m, (channels + LANES - 1) / LANES * area * sizeof(V));
    for (i64 c = 0; to && c < channels; c++) for (i64 t = 0; t < area; t++)
        to[(c / LANES * area + t) * LANES + c % LANES] = weight[c * area + (turned ? area - 1 - t : t)];
    return (V *)to;
}

/* The result (n, channels, oh, ow) with strides of 1 or 2 over what is spread. */
static int NAME(small_products)(Memory *m, const NAME(Spread) *s, const T *x, const V *weight, const T *bias, T *y, i64 n,
                                i64 channels, i64 oh, i64 ow, i64 k, i64 stride)
{
    T *result = borrow(m, oh * ow * sizeof(V));
    const T *end = x + n * channels * s->h * s->w;
    if (!result || !weight) return 1;
    for (i64 i = 0; i < n; i++) for (i64 c = 0; c < channels; c += LANES) {
        i64 there = at_most(LANES, channels - c);
        const V *w = weight + c / LANES * k * k;
        V offset = {0};
        for (i64 l = 0; bias && l < there; l++) offset[l] = bias[c + l];
        Ahead ahead = NAME(next_channels)(x, c / LANES, channels, s->h * s->w, end, oh);
        NAME(spread)(s, x, there);
        if (k == 3 && stride == 1) NAME(small_image_3_1)(s->memory, s->width, w, offset, result, oh, ow, &ahead);
        else if (k == 3) NAME(small_image_3_2)(s->memory, s->width, w, offset, result, oh, ow, &ahead);
        else if (stride == 1) NAME(small_image_5_1)(s->memory, s->width, w, offset, result, oh, ow, &ahead);
        else NAME(small_image_5_2)(s->memory, s->width, w, offset, result, oh, ow, &ahead);
        NAME(unpack_pixels)(result, oh * ow, there, y);
        x += there * s->h * s->w;
        y += there * oh * ow;
    }
    return 0;
}

static int NAME(is_small)(const Geometry *g) { return g->h * g->w + g->oh * g->ow <= SMALL_IMAGE; }

static int NAME(small_forward)(Memory *m, const T *x, const T *weight, const T *bias, T *y, const Geometry *g)
{
    NAME(Spread) s;
    return NAME(make_spread)(m, &s, g->h, g->w, 1, g->ph, g->pw, g->h + 2 * g->ph, g->w + 2 * g->pw)
           || NAME(small_products)(m, &s, x, NAME(weights_by_channel)(m, weight, g->c, g->kh * g->kw, 0), bias, y, g->n, g->c,
                                   g->oh, g->ow, g->kw, g->sw);
}

static int NAME(small_adjoint)(Memory *m, const T *y, const T *weight, const T *bias, T *x, const Geometry *g)
{
    NAME(Spread) s;
    i64 k = g->kw;
    return NAME(make_spread)(m, &s, g->oh, g->ow, g->sw, k - 1 - g->ph, k - 1 - g->pw, g->h + k - 1, g->w + k - 1)
           || NAME(small_products)(m, &s, y, NAME(weights_by_channel)(m, weight, g->c, k * k, 1), bias, x, g->n, g->c,
                                   g->h, g->w, k, 1);
}

static int NAME(small_gradient)(Memory *m, const T *x, const T *y, T *weight, const Geometry *g, const NAME(Channels) *bias)
{
    NAME(Spread) s;
    i64 k = g->kw, size = g->h * g->w, pixels = g->oh * g->ow;
    const T *end = x + g->n * g->c * size;
    T *turned = borrow(m, pixels * sizeof(V));
    V *total = borrow_zeros(m, (g->c + LANES - 1) / LANES * k * k * sizeof(V));
    if (!turned || !total) return 1;
    if (NAME(make_spread)(m, &s, g->h, g->w, 1, g->ph, g->pw, g->h + 2 * g->ph, g->w + 2 * g->pw)) return 1;
    for (i64 i = 0; i < g->n; i++) {
        NAME(add_image)(bias, i);
        for (i64 c = 0; c < g->c; c += LANES) {
            i64 there = at_most(LANES, g->c - c);
            V *sums = total + c / LANES * k * k;
            Ahead ahead = NAME(next_channels)(x, c / LANES, g->c, size, end, g->oh);
            NAME(spread)(&s, x, there);
            NAME(pack_pixels)(y, pixels, there, turned, LANES);
            if (k == 3 && g->sw == 1) NAME(small_sums_3_1)(s.memory, s.width, turned, g->oh, g->ow, sums, &ahead);
            else if (k == 3) NAME(small_sums_3_2)(s.memory, s.width, turned, g->oh, g->ow, sums, &ahead);
            else if (g->sw == 1) NAME(small_sums_5_1)(s.memory, s.width, turned, g->oh, g->ow, sums, &ahead);
            else NAME(small_sums_5_2)(s.memory, s.width, turned, g->oh, g->ow, sums, &ahead);
            x += there * size;
            y += there * pixels;
        }
    }
    for (i64 c = 0; c < g->c; c++) for (i64 t = 0; t < k * k; t++)
        weight[c * k * k + t] = total[c / LANES * k * k + t][c % LANES];
    return 0;
}
