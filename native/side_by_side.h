/* 1 x 1 convolutions of small images, for one number type T: the images of several samples side by side, as one image of one row,
   so that vectors are full. A sum has the terms and the order that it has in convolution.h, and the same bits. */

#define SIDE_PIXELS 192              /* in a row: four tiles of three vectors of 16 */
#define SIDE_BYTES (384 << 10)       /* of a row and its result, which stay in the L2 cache */

/* How many images make a row of whole vectors; 0 where nothing is gained. */
static i64 NAME(images_of_row)(const Geometry *g)
{
    i64 pixels = g->h * g->w, unit = LANES;
    if (g->kh * g->kw != 1 || g->sh * g->sw != 1 || g->ph || g->pw || g->groups != 1 || pixels > SIDE_BY_SIDE) return 0;
    while (unit > 1 && unit / 2 * pixels % LANES == 0) unit /= 2;
    i64 most = at_most(SIDE_PIXELS, SIDE_BYTES / (i64)sizeof(T) / (g->c + g->o)) / pixels, row = at_least(most - most % unit, unit);
    return g->n >= unit ? at_most(row, (g->n + unit - 1) / unit * unit) : 0;
}

/* `count` channels of each of `images`: from rows of `pixels` numbers in images to rows of `width` in channels, or the reverse. */
INLINE void NAME(move_rows)(const T *from, i64 from_image, i64 from_channel, T *to, i64 to_image, i64 to_channel, i64 images,
                            i64 count, const i64 pixels)
{
    for (i64 k = 0; k < images; k++) for (i64 c = 0; c < count; c++)
        memcpy(to + k * to_image + c * to_channel, from + k * from_image + c * from_channel, pixels * sizeof(T));
}

static void NAME(any_rows)(const T *from, i64 from_image, i64 from_channel, T *to, i64 to_image, i64 to_channel, i64 images,
                           i64 count, i64 pixels)
{
    if (pixels == 4) NAME(move_rows)(from, from_image, from_channel, to, to_image, to_channel, images, count, 4);
    else if (pixels == 16) NAME(move_rows)(from, from_image, from_channel, to, to_image, to_channel, images, count, 16);
    else NAME(move_rows)(from, from_image, from_channel, to, to_image, to_channel, images, count, pixels);
}

/* y (N, outputs, pixels) from x (N, channels, pixels), where the weight of an output and a channel lies at output * output_step +
   channel * channel_step. */
static int NAME(side_by_side)(Memory *m, const T *x, i64 channels, const T *weight, i64 output_step, i64 channel_step,
                              const T *bias, T *y, i64 outputs, i64 n, i64 pixels, i64 row)
{
    const i64 width = row * pixels;
    const Geometry side = {.n = 1, .c = channels, .h = 1, .w = width, .kh = 1, .kw = 1, .sh = 1, .sw = 1, .dh = 1, .dw = 1,
                           .oh = 1, .ow = width, .o = outputs, .groups = 1};
    Room room = views_room(m, 1, 1);
    Views s = forward_views(&side, &room, LANES, INT64_MAX / 2);
    NAME(Product) product = {0};
    T *packed = borrow_zeros(m, (channels * width + SLACK) * sizeof(T)), *result = borrow(m, (outputs * width + SLACK) * sizeof(T));
    if (!room.memory || !packed || !result || NAME(prepare)(m, &product, &s, weight, 0, output_step, channel_step, bias)) return 1;
    for (i64 first = 0; first < n; first += row) {
        const i64 images = at_most(row, n - first);
        const T *next = x + at_most(first + row, n) * channels * pixels;
        NAME(any_rows)(x + first * channels * pixels, channels * pixels, pixels, packed, pixels, width, images, channels, pixels);
        NAME(multiply)(&product, &s, packed, 1, 0, 1, result,
                       look_ahead(next, x + at_most(first + 2 * row, n) * channels * pixels,
                                  product.vectors * ((outputs + ROWS - 1) / ROWS) / VECTORS));
        NAME(any_rows)(result, pixels, width, y + first * outputs * pixels, outputs * pixels, pixels, images, outputs, pixels);
    }
    return 0;
}
