/* Convolutions of each channel by itself, with kernels of 3 x 3 or 5 x 5 and stride 1 or 2, for one number type T.

   So few multiply-adds a pixel are there that the memory's speed decides, once nothing else is done: no copies of whole images,
   no lists. Rows of one channel go through a band in the L1 cache, with zeros beside them, those of stride 2 as even and odd
   columns; weights stay in registers, and each vector of the band serves several rows of the result.

   Vectors may be read and written past the end of a row: what follows is not looked at, or written later. At the end of an array
   a channel goes through `spare`. Each sum has the order of the kernel's elements, with the bias first. */

#define BAND_BYTES (16 << 10)
#define AWAY 4096                    /* bytes from a line's way into the L2 cache to its use; arrays are gone through in order */
#define NEARER(at, write) __builtin_prefetch((const char *)(at) + AWAY, write, 2)

/* How rows of an image lie in the band: `length` numbers each, of which the columns begin at `margin`; with `split`, even ones,
   and `half` numbers further the odd ones. `last` masks the last vectors of both. */
typedef struct { i64 h, w, split, margin, half, length, rows; T *memory; MASK last[2]; } NAME(Band);

static i64 NAME(whole)(i64 count) { return (count + LANES - 1) / LANES * LANES; }

static MASK NAME(first_of)(i64 count)
{
    MASK mask;
    for (i64 l = 0; l < LANES; l++) mask[l] = l < count ? -1 : 0;
    return mask;
}

/* For `reach` numbers read at most to the left of a column and to the right of the `columns` computed; `more` rows beside those
   of a result, `step` rows of the image for each. */
static int NAME(make_band)(Memory *m, NAME(Band) *b, i64 h, i64 w, i64 split, i64 columns, i64 reach, i64 results, i64 step,
                           i64 more)
{
    *b = (NAME(Band)){.h = h, .w = w, .split = split, .margin = NAME(whole)(reach)};
    i64 counts[2] = {split ? (w + 1) / 2 : w, w / 2};
    b->half = b->margin + NAME(whole)(at_least(counts[0], columns)) + NAME(whole)(reach);
    b->length = b->half * (1 + split);
    for (int k = 0; k < 2; k++) b->last[k] = NAME(first_of)(counts[k] - (NAME(whole)(counts[0]) - LANES));
    b->rows = clip((BAND_BYTES / (i64)sizeof(T) / b->length - more) / step, at_most(4, results), results);
    b->memory = borrow_zeros(m, ((b->rows * step + more) * b->length + LANES) * sizeof(T));
    return !b->memory;
}

/* Rows [first, first + rows) of an image; those outside of it are zero. What is beside the rows stays zero. */
static void NAME(fill_band)(const NAME(Band) *b, const T *x, i64 first, i64 rows)
{
    T *to = b->memory;
    const i64 w = b->w, step = (1 + b->split) * LANES;
    x += first * w;
    for (i64 r = first; r < first + rows; r++, x += w, to += b->length) {
        T *even = to + b->margin, *odd = even + b->half;
        i64 i = 0;
        if (r < 0 || r >= b->h) { for (i = 0; i < b->length; i += LANES) *(V *)(to + i) = (V){0}; continue; }
        if (!b->split) {
            for (; i + step < w; i += step) {
                NEARER(x + i, 0);
                *(V *)(even + i) = *(const V *)(x + i);
            }
            NEARER(x + i, 0);
            *(V *)(even + i) = (V)((MASK)*(const V *)(x + i) & b->last[0]);
            continue;
        }
        for (; i < w; i += step, even += LANES, odd += LANES) {
            NEARER(x + i, 0);
            NEARER(x + i + LANES, 0);
            V low = *(const V *)(x + i), high = *(const V *)(x + i + LANES);
            V evens = PICK(MASK, low, high, ORDER(EVEN, LANES)), odds = PICK(MASK, low, high, ORDER(ODD, LANES));
            if (i + step >= w) { evens = (V)((MASK)evens & b->last[0]); odds = (V)((MASK)odds & b->last[1]); }
            *(V *)even = evens;
            *(V *)odd = odds;
        }
    }
}

/* Where the columns that kernel column kx meets begin in the band's rows, with `pad` columns of padding. */
static i64 NAME(column_of)(const NAME(Band) *b, i64 kx, i64 pad)
{
    i64 x = kx - pad, odd = b->split ? x & 1 : 0;
    return b->margin + odd * b->half + (b->split ? (x - odd) / 2 : x);
}

/* ---- forward, and the adjoint of stride 1 ---- */

/* R rows of the result from a band on; column: of each kernel column. */
INLINE void NAME(depthwise_rows)(const T *band, i64 length, const i64 *column, const T *weight, T bias, T *to, i64 width,
                                 const int k, const int stride, const int R)
{
    V w[25];
    UNROLL for (int t = 0; t < k * k; t++) w[t] = weight[t] - (V){0};
    for (i64 x = 0; ; x += LANES) {
        if (x + LANES > width && width >= LANES) x = width - LANES;          /* ends with the row; some are computed twice */
        V sum[4];
        UNROLL for (int r = 0; r < R; r++) sum[r] = bias - (V){0};
        UNROLL for (int i = 0; i < (R - 1) * stride + k; i++) UNROLL for (int kx = 0; kx < k; kx++) {
            V b = *(const V *)(band + i * length + column[kx] + x);
            UNROLL for (int r = 0; r < R; r++)
                if (i >= r * stride && i < r * stride + k) sum[r] += w[(i - r * stride) * k + kx] * b;
        }
        UNROLL for (int r = 0; r < R; r++) {
            NEARER(to + r * width + x, 1);
            *(V *)(to + r * width + x) = sum[r];
        }
        if (x + LANES >= width) break;
    }
}

INLINE void NAME(depthwise_band)(const NAME(Band) *b, const i64 *column, const T *weight, T bias, T *to, i64 width, i64 rows,
                                 const int k, const int stride)
{
    const T *band = b->memory;
    i64 y = 0, down = b->length * stride;
    for (; y + 4 <= rows; y += 4, band += 4 * down, to += 4 * width)
        NAME(depthwise_rows)(band, b->length, column, weight, bias, to, width, k, stride, 4);
    if (y + 2 <= rows) {
        NAME(depthwise_rows)(band, b->length, column, weight, bias, to, width, k, stride, 2);
        y += 2, band += 2 * down, to += 2 * width;
    }
    if (y < rows) NAME(depthwise_rows)(band, b->length, column, weight, bias, to, width, k, stride, 1);
}

#define DEPTHWISE(k, stride)                                                                                                    \
static __attribute__((noinline)) void NAME(depthwise_band_##k##_##stride)(const NAME(Band) *b, const i64 *column,               \
                                                                          const T *weight, T bias, T *to, i64 width, i64 rows)  \
{                                                                                                                               \
    NAME(depthwise_band)(b, column, weight, bias, to, width, rows, k, stride);                                                  \
}
DEPTHWISE(3, 1) DEPTHWISE(3, 2) DEPTHWISE(5, 1) DEPTHWISE(5, 2)
#undef DEPTHWISE

/* Whether the convolution is one of these. */
static int NAME(suits_depthwise)(const Geometry *g)
{
    return g->c == g->groups && g->o == g->groups && g->kh == g->kw && (g->kh == 3 || g->kh == 5) && g->dh == 1 && g->dw == 1
           && g->sh == g->sw && (g->sh == 1 || g->sh == 2) && g->ph < g->kh && g->pw < g->kw;
}

/* Numbers of a plane that vectors may be read or written beyond its end, and a plane with so many. */
#define BEYOND (2 * LANES)
static T *NAME(spare_plane)(Memory *m, i64 pixels) { return borrow_zeros(m, (pixels + BEYOND) * sizeof(T)); }

/* A plane of an array that ends at `end`, so that reading beyond it is allowed. */
static const T *NAME(readable)(const T *plane, i64 pixels, const T *end, T *spare)
{
    return end - plane >= pixels + BEYOND ? plane : memcpy(spare, plane, pixels * sizeof(T));
}

/* y = x convolved, (N, C, OH, OW); `weight` has k * k numbers a channel. */
static int NAME(depthwise_forward)(Memory *m, const T *x, const T *weight, const T *bias, T *y, const Geometry *g)
{
    i64 k = g->kw, size = g->h * g->w, pixels = g->oh * g->ow, column[5];
    const T *x_end = x + g->n * g->c * size, *y_end = y + g->n * g->c * pixels;
    T *from_spare = NAME(spare_plane)(m, size), *to_spare = NAME(spare_plane)(m, pixels);
    NAME(Band) b;
    if (!from_spare || !to_spare || NAME(make_band)(m, &b, g->h, g->w, g->sw == 2, g->ow, k, g->oh, g->sh, k - 1)) return 1;
    for (i64 kx = 0; kx < k; kx++) column[kx] = NAME(column_of)(&b, kx, g->pw);
    for (i64 p = 0; p < g->n * g->c; p++, x += size, y += pixels) {
        const T *from = NAME(readable)(x, size, x_end, from_spare), *w = weight + p % g->c * k * k;
        T *to = y_end - y >= pixels + BEYOND ? y : to_spare, offset = bias ? bias[p % g->c] : 0;
        for (i64 y0 = 0; y0 < g->oh; y0 += b.rows) {
            i64 rows = at_most(b.rows, g->oh - y0);
            T *result = to + y0 * g->ow;
            NAME(fill_band)(&b, from, y0 * g->sh - g->ph, (rows - 1) * g->sh + k);
            if (k == 3 && g->sw == 1) NAME(depthwise_band_3_1)(&b, column, w, offset, result, g->ow, rows);
            else if (k == 3) NAME(depthwise_band_3_2)(&b, column, w, offset, result, g->ow, rows);
            else if (g->sw == 1) NAME(depthwise_band_5_1)(&b, column, w, offset, result, g->ow, rows);
            else NAME(depthwise_band_5_2)(&b, column, w, offset, result, g->ow, rows);
        }
        if (to != y) memcpy(y, to, pixels * sizeof(T));
    }
    return 0;
}
