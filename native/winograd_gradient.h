/* The gradient of a 3 x 3 kernel of stride 1 with 4 multiplications for each pixel of y instead of 9, for one number type T.

   With tiles as in winograd.h, the gradient of w in y = A' [(G w G') * (B' d B)] A is G' [sum over tiles (A y A') * (B' d B)] G.
   Both factors are made for BLOCK tiles at a time: that of the image by channel with tiles side by side, that of y by tile with
   outputs side by side, as vectors, which are multiplied by numbers of the other and added up in registers over the block. */

#define BLOCK (4 * LANES)

/* total[c, v] += sum over tiles of y[tile, v] * x[c, tile], for CHANNELS c and two vectors v; x has BLOCK numbers a channel. */
static __attribute__((noinline)) void NAME(element_tile)(const T *y, const T *x, i64 tiles, T *total)
{
    V sum[2 * CHANNELS];
    UNROLL for (int i = 0; i < 2 * CHANNELS; i++) sum[i] = (V){0};
    for (i64 t = 0; t < tiles; t++, y += 2 * LANES, x++) {
        V a = *(const V *)y, b = *(const V *)(y + LANES);
        UNROLL for (int c = 0; c < CHANNELS; c++) {
            sum[2 * c] += a * x[c * BLOCK];
            sum[2 * c + 1] += b * x[c * BLOCK];
        }
    }
    UNROLL for (int i = 0; i < 2 * CHANNELS; i++) *(V *)(total + i * LANES) += sum[i];
}

/* With fewer channels the transforms take what the products save, with more the factors would not stay in the L2 cache. */
static int NAME(suits_winograd_gradient)(const Views *s)
{
    i64 channels = s->c / s->groups;
    return channels >= 32 && s->outputs >= 32 && channels + s->outputs <= MOST_CHANNELS && NAME(suits_winograd)(s);
}

/* A y A' of a tile of y, LANES outputs; the pixels of y are `wide` numbers apart, the tile has `rows` x `columns` of them, and
   elements are `step` apart. */
INLINE void NAME(transform_outputs)(const T *y, i64 wide, i64 width, i64 rows, i64 columns, T *to, i64 step)
{
    V r[4][2];
    UNROLL for (int x = 0; x < 2; x++) {
        V y0 = (V){0}, y1 = (V){0};
        if (x < columns && rows > 0) y0 = *(const V *)(y + x * wide);
        if (x < columns && rows > 1) y1 = *(const V *)(y + (width + x) * wide);
        r[0][x] = y0;
        r[1][x] = y0 + y1;
        r[2][x] = y0 - y1;
        r[3][x] = -y1;
    }
    UNROLL for (int i = 0; i < 4; i++) {
        *(V *)(to + (4 * i) * step) = r[i][0];
        *(V *)(to + (4 * i + 1) * step) = r[i][0] + r[i][1];
        *(V *)(to + (4 * i + 2) * step) = r[i][0] - r[i][1];
        *(V *)(to + (4 * i + 3) * step) = -r[i][1];
    }
}

/* Tiles of one vector: row of tiles and column of tiles where it begins, and its packed image and pixels of y. */
typedef struct { const T *image, *pixels; i64 row, column; } NAME(Place);

/* Both factors for `count` vectors of tiles, of group `group`. */
static void NAME(transform_block)(const Views *s, const NAME(TilePlan) *p, const NAME(Place) *places, int count, i64 group,
                                  i64 plane, T *x, i64 x_step, T *y, i64 y_step, i64 wide, i64 blocks)
{
    i64 channels = s->c / s->groups, across = LANES / p->depth;
    for (i64 c = 0; c < channels; c++) for (int v = 0; v < count; v++) {
        const T *from = places[v].image + (group * channels + c) * plane + 2 * places[v].row * s->width + 2 * places[v].column;
        T *to = x + c * BLOCK + v * LANES;
        if (p->depth == 1) NAME(transform_tiles)(from, s->width, to, x_step, 1);
        else if (p->depth == 2) NAME(transform_tiles)(from, s->width, to, x_step, 2);
        else NAME(transform_tiles)(from, s->width, to, x_step, 4);
    }
    for (i64 b = 0; b < blocks; b++) for (int v = 0; v < count; v++) for (i64 d = 0; d < p->depth; d++) {
        i64 row = 2 * (places[v].row + d), column = 2 * places[v].column;
        const T *from = places[v].pixels + ((group * blocks + b) * s->oh * s->ow + row * s->ow + column) * wide;
        T *to = y + (b * BLOCK + v * LANES + d * across) * wide;
        for (i64 l = 0; l < across; l++, column += 2, from += 2 * wide, to += wide) for (i64 i = 0; i < wide; i += LANES)
            if (row + 1 < s->oh && column + 1 < s->ow) NAME(transform_outputs)(from + i, wide, s->ow, 2, 2, to + i, y_step);
            else NAME(transform_outputs)(from + i, wide, s->ow, s->oh - row, s->ow - column, to + i, y_step);
    }
}

/* weight (O, C/groups, 3, 3) = G' total G, total by group, element, block of outputs and channel. */
static void NAME(finish_gradient)(const Views *s, const T *total, i64 padded, i64 wide, i64 blocks, T *weight)
{
    i64 channels = s->c / s->groups, step = blocks * padded * wide;
    for (i64 o = 0; o < s->groups * s->outputs; o++) for (i64 c = 0; c < channels; c++, weight += 9) {
        i64 group = o / s->outputs, of_group = o % s->outputs;
        const T *m = total + (group * ELEMENTS * blocks + of_group / wide) * padded * wide + c * wide + of_group % wide;
        T half[3][4];
        for (int x = 0; x < 4; x++) {
            T m0 = m[x * step], m1 = m[(4 + x) * step], m2 = m[(8 + x) * step], m3 = m[(12 + x) * step];
            half[0][x] = m0 + (m1 + m2) / 2;
            half[1][x] = (m1 - m2) / 2;
            half[2][x] = (m1 + m2) / 2 + m3;
        }
        for (int y = 0; y < 3; y++) {
            weight[3 * y] = half[y][0] + (half[y][1] + half[y][2]) / 2;
            weight[3 * y + 1] = (half[y][1] - half[y][2]) / 2;
            weight[3 * y + 2] = (half[y][1] + half[y][2]) / 2 + half[y][3];
        }
    }
}

/* See kernel_gradient(); `s` is that of forward. */
static int NAME(winograd_gradient)(Memory *m, Views *s, const T *x, const T *y, T *weight, i64 n,
                                   const NAME(Channels) *bias)
{
    NAME(TilePlan) p = NAME(plan_tiles)(s, INT64_MAX / 4);
    NAME(lay_tiles)(s, &p);
    i64 channels = s->c / s->groups, wide = 2 * LANES, each = CHANNELS;
    i64 blocks = (s->outputs + wide - 1) / wide, padded = (channels + each - 1) / each * each, pixels = s->oh * s->ow;
    i64 plane = s->rows * s->width, image = s->c * plane, size = s->c * s->h * s->w, map = s->groups * blocks * pixels * wide;
    i64 x_step = padded * BLOCK + LANES, y_step = blocks * BLOCK * wide + LANES, t_step = blocks * padded * wide;
    i64 chunk = clip(4 / p.vectors, 1, at_least(n, 1));
    T *packed = borrow_zeros(m, (chunk * image + SLACK) * sizeof(T)), *maps = borrow(m, chunk * map * sizeof(T));
    T *left = borrow_zeros(m, ELEMENTS * x_step * sizeof(T)), *right = borrow(m, ELEMENTS * y_step * sizeof(T));
    T *total = borrow_zeros(m, s->groups * ELEMENTS * t_step * sizeof(T));
    if (!packed || !maps || !left || !right || !total) return 1;

    for (i64 first = 0; first < n; first += chunk) {
        i64 images = at_most(chunk, n - first), more = at_most(chunk, n - first - images), next = first + images;
        i64 times = (images * p.vectors + 3) / 4 * s->groups * ELEMENTS * blocks;
        Ahead ahead[2] = {look_ahead(x + next * size, x + (next + more) * size, times),
                          look_ahead(y + next * s->image, y + (next + more) * s->image, times)};
        for (i64 i = 0; i < images; i++) {
            NAME(pack_views)(x + (first + i) * size, s, 0, packed + i * image, x + n * size);
            NAME(pack_outputs)(y + (first + i) * s->image, pixels, s->groups, s->outputs, 2, maps + i * map);
            NAME(add_image)(bias, first + i);
        }
        for (i64 k = 0; k < images * p.vectors; k += 4) for (i64 group = 0; group < s->groups; group++) {
            NAME(Place) places[4];
            int count = at_most(4, images * p.vectors - k);
            for (int v = 0; v < count; v++) {
                i64 i = (k + v) / p.vectors, at = (k + v) % p.vectors;
                places[v] = (NAME(Place)){packed + i * image, maps + i * map, at / p.across * p.depth, at % p.across * LANES};
            }
            NAME(transform_block)(s, &p, places, count, group, plane, left, x_step, right, y_step, wide, blocks);
            for (i64 e = 0; e < ELEMENTS; e++) for (i64 b = 0; b < blocks; b++) {
                fetch(ahead);
                fetch(ahead + 1);
                for (i64 c = 0; c < padded; c += each)
                    NAME(element_tile)(right + e * y_step + b * BLOCK * wide, left + e * x_step + c * BLOCK, count * LANES,
                                       total + (group * ELEMENTS + e) * t_step + (b * padded + c) * wide);
            }
        }
    }
    NAME(finish_gradient)(s, total, padded, wide, blocks, weight);
    return 0;
}

#undef BLOCK
