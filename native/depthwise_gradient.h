/* The gradients of depthwise.h's convolutions, for one number type T. */

/* ---- of the image, where the stride is 2: even and odd columns of a row apart, with the elements that meet them ---- */

/* A row of the result, from the row of y in the band that the kernel's first row of its parity `a` meets, and those above it;
   kernel columns of parity q meet the even columns, first[0] and first[1]: where those begin that the first one meets. */
INLINE void NAME(between_row)(const T *band, i64 length, const i64 *first, const T *weight, T bias, T *to, i64 width, const int k,
                              const int a, const int q)
{
    for (i64 x = 0; 2 * x < width; x += LANES) {
        V sum[2] = {bias - (V){0}, bias - (V){0}};
        UNROLL for (int ky = a; ky < k; ky += 2) UNROLL for (int odd = 0; odd < 2; odd++)
            UNROLL for (int kx = odd ? 1 - q : q; kx < k; kx += 2)
                sum[odd] += weight[ky * k + kx] * *(const V *)(band - ky / 2 * length + first[odd] - kx / 2 + x);
        NEARER(to + 2 * x, 1);
        NEARER(to + 2 * x + LANES, 1);
        *(V *)(to + 2 * x) = PICK(MASK, sum[0], sum[1], ORDER(LOW, LANES));
        *(V *)(to + 2 * x + LANES) = PICK(MASK, sum[0], sum[1], ORDER(HIGH, LANES));
    }
}

#define BETWEEN(k)                                                                                                              \
static __attribute__((noinline)) void NAME(between_row_##k)(const T *band, i64 length, const i64 *first, const T *weight,        \
                                                            T bias, T *to, i64 width, int a, int q)                             \
{                                                                                                                               \
    if (a && q) NAME(between_row)(band, length, first, weight, bias, to, width, k, 1, 1);                                       \
    else if (a) NAME(between_row)(band, length, first, weight, bias, to, width, k, 1, 0);                                       \
    else if (q) NAME(between_row)(band, length, first, weight, bias, to, width, k, 0, 1);                                       \
    else NAME(between_row)(band, length, first, weight, bias, to, width, k, 0, 0);                                              \
}
BETWEEN(3) BETWEEN(5)
#undef BETWEEN

static int NAME(depthwise_between)(Memory *m, const T *y, const T *weight, const T *bias, T *x, const Geometry *g)
{
    i64 k = g->kw, size = g->h * g->w, pixels = g->oh * g->ow, above = (k - 1) / 2;
    const T *x_end = x + g->n * g->c * size, *y_end = y + g->n * g->c * pixels;
    T *from_spare = NAME(spare_plane)(m, pixels), *to_spare = NAME(spare_plane)(m, size);
    NAME(Band) b;
    if (!from_spare || !to_spare || NAME(make_band)(m, &b, g->oh, g->ow, 0, (g->w + 1) / 2, k, g->h, 1, k)) return 1;
    i64 first[2] = {b.margin + g->pw / 2, b.margin + (g->pw + 1) / 2};
    for (i64 p = 0; p < g->n * g->c; p++, x += size, y += pixels) {
        const T *from = NAME(readable)(y, pixels, y_end, from_spare), *w = weight + p % g->c * k * k;
        T *to = x_end - x >= size + BEYOND ? x : to_spare, offset = bias ? bias[p % g->c] : 0;
        for (i64 y0 = 0; y0 < g->h; y0 += b.rows) {
            i64 y1 = at_most(y0 + b.rows, g->h), top = (y0 + g->ph) / 2 - above;
            NAME(fill_band)(&b, from, top, (y1 - 1 + g->ph) / 2 - top + 1);
            for (i64 row = y0; row < y1; row++) {
                const T *band = b.memory + ((row + g->ph) / 2 - top) * b.length;
                (k == 3 ? NAME(between_row_3) : NAME(between_row_5))(band, b.length, first, w, offset, to + row * g->w, g->w,
                                                                     (row + g->ph) % 2, g->pw % 2);
            }
        }
        if (to != x) memcpy(x, to, size * sizeof(T));
    }
    return 0;
}

/* x = the adjoint applied to y: with stride 1 a convolution with the kernel turned round. */
static int NAME(depthwise_adjoint)(Memory *m, const T *y, const T *weight, const T *bias, T *x, const Geometry *g)
{
    if (g->sw == 2) return NAME(depthwise_between)(m, y, weight, bias, x, g);
    i64 area = g->kh * g->kw;
    T *turned = borrow(m, g->c * area * sizeof(T));
    if (!turned) return 1;
    for (i64 c = 0; c < g->c; c++) for (i64 t = 0; t < area; t++) turned[c * area + t] = weight[c * area + area - 1 - t];
    Geometry of_y = *g;
    of_y.h = g->oh, of_y.w = g->ow, of_y.oh = g->h, of_y.ow = g->w, of_y.ph = g->kh - 1 - g->ph, of_y.pw = g->kw - 1 - g->pw;
    return NAME(depthwise_forward)(m, y, turned, bias, x, &of_y);
}

/* ---- of the kernel ---- */

/* sum[ky, kx] += the products of R rows of y, their last vectors masked, and the band. */
INLINE void NAME(gradient_rows)(const T *band, i64 length, const i64 *column, const T *y, i64 width, MASK last, V *sum,
                                const int k, const int stride, const int R)
{
    for (i64 x = 0; x < width; x += LANES) {
        V a[4];
        UNROLL for (int r = 0; r < R; r++) {
            NEARER(y + r * width + x, 0);
            a[r] = *(const V *)(y + r * width + x);
            if (x + LANES >= width) a[r] = (V)((MASK)a[r] & last);
        }
        UNROLL for (int i = 0; i < (R - 1) * stride + k; i++) UNROLL for (int kx = 0; kx < k; kx++) {
            V b = *(const V *)(band + i * length + column[kx] + x);
            UNROLL for (int r = 0; r < R; r++)
                if (i >= r * stride && i < r * stride + k) sum[(i - r * stride) * k + kx] += a[r] * b;
        }
    }
}

INLINE void NAME(gradient_band)(const NAME(Band) *b, const i64 *column, const T *y, i64 width, i64 rows, MASK last, V *total,
                                const int k, const int stride)
{
    const T *band = b->memory;
    i64 at = 0;
    V sum[25];
    UNROLL for (int t = 0; t < k * k; t++) sum[t] = (V){0};
    for (; at + 4 <= rows; at += 4, band += 4 * b->length * stride, y += 4 * width)
        NAME(gradient_rows)(band, b->length, column, y, width, last, sum, k, stride, 4);
    for (; at < rows; at++, band += b->length * stride, y += width)
        NAME(gradient_rows)(band, b->length, column, y, width, last, sum, k, stride, 1);
    UNROLL for (int t = 0; t < k * k; t++) total[t] += sum[t];
}

#define GRADIENT(k, stride)                                                                                                     \
static __attribute__((noinline)) void NAME(gradient_band_##k##_##stride)(const NAME(Band) *b, const i64 *column, const T *y,     \
                                                                         i64 width, i64 rows, MASK last, V *total)              \
{                                                                                                                               \
    NAME(gradient_band)(b, column, y, width, rows, last, total, k, stride);                                                     \
}
GRADIENT(3, 1) GRADIENT(3, 2) GRADIENT(5, 1) GRADIENT(5, 2)
#undef GRADIENT

static int NAME(depthwise_gradient)(Memory *m, const T *x, const T *y, T *weight, const Geometry *g, const NAME(Channels) *bias)
{
    i64 k = g->kw, size = g->h * g->w, pixels = g->oh * g->ow, column[5];
    const T *x_end = x + g->n * g->c * size, *y_end = y + g->n * g->c * pixels;
    T *x_spare = NAME(spare_plane)(m, size), *y_spare = NAME(spare_plane)(m, pixels);
    V *total = borrow_zeros(m, g->c * k * k * sizeof(V));
    MASK last = NAME(first_of)(g->ow - (NAME(whole)(g->ow) - LANES));
    NAME(Band) b;
    if (!x_spare || !y_spare || !total || NAME(make_band)(m, &b, g->h, g->w, g->sw == 2, g->ow, k, g->oh, g->sh, k - 1)) return 1;
    for (i64 kx = 0; kx < k; kx++) column[kx] = NAME(column_of)(&b, kx, g->pw);
    for (i64 p = 0; p < g->n * g->c; p++, x += size, y += pixels) {
        const T *image = NAME(readable)(x, size, x_end, x_spare), *grad = NAME(readable)(y, pixels, y_end, y_spare);
        V *of_channel = total + p % g->c * k * k;
        for (i64 y0 = 0; y0 < g->oh; y0 += b.rows) {
            i64 rows = at_most(b.rows, g->oh - y0);
            const T *from = grad + y0 * g->ow;
            NAME(fill_band)(&b, image, y0 * g->sh - g->ph, (rows - 1) * g->sh + k);
            if (k == 3 && g->sw == 1) NAME(gradient_band_3_1)(&b, column, from, g->ow, rows, last, of_channel);
            else if (k == 3) NAME(gradient_band_3_2)(&b, column, from, g->ow, rows, last, of_channel);
            else if (g->sw == 1) NAME(gradient_band_5_1)(&b, column, from, g->ow, rows, last, of_channel);
            else NAME(gradient_band_5_2)(&b, column, from, g->ow, rows, last, of_channel);
        }
        if (p % g->c == g->c - 1) NAME(add_image)(bias, p / g->c);
    }
    for (i64 t = 0; t < g->c * k * k; t++) weight[t] = NAME(folded)(total[t]);
    return 0;
}
