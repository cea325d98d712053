/* The gradient of a convolution's kernel for many outputs and one number type T: see dense.h.

   A vector holds LANES outputs of one pixel; y is packed so, pixel by pixel. For each pixel it is multiplied by the numbers of
   the packed image that some kernel elements meet there, and the products are added up in registers over the pixels:

       sums[line, kx] += y[pixel] * packed[offset[line] + pixel + kx]          line: a channel and a row of the kernel

   Sums are kept over the rows and images of a block, whose size depends on shapes only, and then added to the total. */

typedef void NAME(GradientTile)(const T *y, i64 y_step, const T *packed, i64 step, const i64 *offset, i64 images, i64 rows,
                                i64 width, i64 columns, T *total, Ahead *ahead);

INLINE void NAME(gradient_tile)(const T *y, i64 y_step, const T *packed, i64 step, const i64 *offset, i64 images, i64 rows,
                                i64 width, i64 columns, T *total, Ahead *ahead, const int vectors, const int lines,
                                const int run)
{
    V sum[MOST_SUMS];
    const T *from[12];
    UNROLL for (int i = 0; i < lines * run * vectors; i++) sum[i] = (V){0};
    UNROLL for (int l = 0; l < lines; l++) from[l] = packed + offset[l];
    for (i64 n = 0; n < images; n++) for (i64 r = 0; r < rows; r++) {
        fetch(ahead);
        const T *pixel = y + n * y_step + r * width * vectors * LANES;
        i64 start = n * step + r * columns;
        for (i64 i = start; i < start + width; i++, pixel += vectors * LANES) {
            V a[2];
            UNROLL for (int v = 0; v < vectors; v++) a[v] = *(const V *)(pixel + v * LANES);
            UNROLL for (int l = 0; l < lines; l++) UNROLL for (int k = 0; k < run; k++) UNROLL for (int v = 0; v < vectors; v++)
                sum[(l * run + k) * vectors + v] = ADD_SCALED(sum[(l * run + k) * vectors + v], from[l][i + k], a[v]);
        }
    }
    UNROLL for (int i = 0; i < lines * run * vectors; i++) *(V *)(total + i * LANES) += sum[i];
}

/* vectors, lines and run of kernel columns of each tile */
#if MOST_SUMS >= 28
#define TILES(DO) \
    DO(1, 9, 3) DO(1, 8, 3) DO(2, 4, 3) DO(1, 5, 5) DO(1, 4, 5) DO(2, 2, 5) DO(1, 10, 1) DO(1, 6, 1) DO(2, 8, 1) DO(2, 4, 1)
#else
#define TILES(DO) DO(1, 4, 3) DO(2, 2, 3) DO(1, 2, 5) DO(2, 1, 5) DO(1, 8, 1) DO(2, 6, 1) DO(2, 4, 1)
#endif

#define DEFINE_TILE(vectors, lines, run)                                                                                   \
    static void NAME(gradient_tile_##vectors##_##lines##_##run)(                                                           \
        const T *y, i64 y_step, const T *packed, i64 step, const i64 *offset, i64 images, i64 rows, i64 width, i64 columns, \
        T *total, Ahead *ahead)                                                                                            \
    { NAME(gradient_tile)(y, y_step, packed, step, offset, images, rows, width, columns, total, ahead, vectors, lines, run); }
#define LIST_TILE(vectors, lines, run) {vectors, lines, run, NAME(gradient_tile_##vectors##_##lines##_##run)},

TILES(DEFINE_TILE)
static const struct NAME(gradient_kind) { int vectors, lines, run; NAME(GradientTile) *add; } NAME(gradient_kinds)[] = {
    TILES(LIST_TILE)};
#undef TILES
#undef DEFINE_TILE
#undef LIST_TILE

/* How many columns of the kernel follow each other in the packed image. */
static i64 NAME(gradient_run)(const Geometry *g)
{
    return g->sw == 1 && g->dw == 1 && (g->kw == 3 || g->kw == 5) ? g->kw : 1;
}

/* The tile that takes the least time, by the loads and multiply-adds of a pixel, two of which a core does at once. */
static const struct NAME(gradient_kind) *NAME(best_gradient_tile)(const Geometry *g, i64 *cost)
{
    const struct NAME(gradient_kind) *best = NULL;
    i64 run = NAME(gradient_run)(g), lines = g->c / g->groups * g->kh * g->kw / run;
    i64 blocks = (g->o / g->groups + LANES - 1) / LANES;
    for (size_t k = 0; k < sizeof NAME(gradient_kinds) / sizeof *NAME(gradient_kinds); k++) {
        const struct NAME(gradient_kind) *tile = NAME(gradient_kinds) + k;
        if (tile->run != run) continue;
        i64 sums = tile->lines * run, tiles = (lines + tile->lines - 1) / tile->lines;
        i64 all = (blocks + tile->vectors - 1) / tile->vectors * tiles
                  * at_least(at_least(sums * tile->vectors, sums + tile->vectors), 8);
        if (!best || all < *cost) { best = tile; *cost = all; }
    }
    return best;
}

/* Outputs of all pixels of an image, `there` of LANES, as vectors `step` apart; zero where no output is. */
static void NAME(pack_pixels)(const T *y, i64 plane, i64 there, T *to, i64 step)
{
    for (i64 p = 0; p < plane; p += LANES) {
        i64 first = plane < LANES ? 0 : at_most(p, plane - LANES), pixels = at_most(LANES, plane);
        if (there == LANES && pixels == LANES) {
            NAME(turn)(y + first, plane, to + first * step, step, LANES);
            continue;
        }
        T part[LANES * LANES] __attribute__((aligned(VECTOR_BYTES))) = {0};
        for (i64 o = 0; o < there; o++) for (i64 i = 0; i < pixels; i++) part[o * LANES + i] = y[o * plane + first + i];
        NAME(turn)(part, LANES, part, LANES, LANES);
        for (i64 i = 0; i < pixels; i++) *(V *)(to + (first + i) * step) = *(const V *)(part + i * LANES);
    }
}

/* All outputs of an image so, in blocks of some vectors of a group: to[group, block, pixel, output]. */
static void NAME(pack_outputs)(const T *y, i64 pixels, i64 groups, i64 outputs, i64 vectors, T *to)
{
    i64 wide = vectors * LANES, blocks = (outputs + wide - 1) / wide;
    for (i64 b = 0; b < groups * blocks; b++) for (i64 v = 0; v < vectors; v++) {
        i64 o = b % blocks * wide + v * LANES;
        NAME(pack_pixels)(y + (b / blocks * outputs + o) * pixels, pixels, clip(outputs - o, 0, LANES),
                          to + b * pixels * wide + v * LANES, wide);
    }
}

/* See kernel_gradient(). */
static int NAME(dense_gradient)(Memory *m, NAME(Images) *x, NAME(Images) *y, T *weight, const Geometry *g,
                                const NAME(Channels) *bias)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, area = g->kh * g->kw, terms = channels * area, cost;
    const struct NAME(gradient_kind) *tile = NAME(best_gradient_tile)(g, &cost);
    i64 wide = tile->vectors * LANES, blocks = (outputs + wide - 1) / wide, each = tile->lines * tile->run;
    i64 padded = (terms + each - 1) / each * each, most = MAPS_BYTES / (i64)sizeof(T) / wide, pixels = g->oh * g->ow;
    i64 chunk = clip(most / pixels, 1, at_least(g->n, 1)), block = clip(most / g->ow, 1, g->oh);
    i64 map = g->groups * blocks * pixels * wide;
    Room room = views_room(m, area, g->sh);
    Views s = forward_views(g, &room, 1, INT64_MAX / 2);
    i64 plane = s.views * s.phases * s.rows * s.width;
    T *packed = borrow(m, (chunk * g->c * plane + LANES) * sizeof(T)), *maps = borrow(m, chunk * map * sizeof(T));
    T *total = borrow_zeros(m, g->groups * blocks * padded * wide * sizeof(T));
    i64 *offset = borrow_zeros(m, padded * sizeof(i64));
    if (!room.memory || !packed || !maps || !total || !offset || NAME(make_room)(m, x, 1) || NAME(make_room)(m, y, 1)) return 1;

    for (i64 r = 0; r < terms; r += tile->run)
        offset[r / tile->run] = r / area * plane + s.tap[r % area].offset;
    for (i64 first = 0; first < g->n; first += chunk) {
        i64 images = at_most(chunk, g->n - first);
        for (i64 n = 0; n < images; n++) {
            const T *end, *image = NAME(ready)(x, first + n, 1, &end);
            NAME(pack_views)(image, &s, 0, packed + n * g->c * plane, end);
            NAME(pack_outputs)(NAME(ready)(y, first + n, 1, &end), pixels, g->groups, outputs, tile->vectors, maps + n * map);
            NAME(add_image)(bias, first + n);
        }
        i64 times = images * g->oh * g->groups * blocks * padded / each;
        Ahead ahead[2] = {NAME(images_ahead)(x, first + images, chunk, (times + 1) / 2),
                          NAME(images_ahead)(y, first + images, chunk, times / 2)};
        for (i64 b = 0; b < g->groups * blocks; b++) for (i64 y0 = 0; y0 < g->oh; y0 += block)
            for (i64 r = 0; r < padded; r += each)
                tile->add(maps + (b * pixels + y0 * g->ow) * wide, map,
                          packed + b / blocks * channels * plane + y0 * s.width, g->c * plane, offset + r / tile->run, images,
                          at_most(block, g->oh - y0), g->ow, s.width, total + (b * padded + r) * wide,
                          ahead + (ahead[0].from >= ahead[0].end));
    }
    for (i64 o = 0; o < g->o; o++) for (i64 r = 0; r < terms; r++) {
        i64 b = o / outputs * blocks + o % outputs / wide;
        weight[o * terms + r] = total[(b * padded + r) * wide + o % outputs % wide];
    }
    return 0;
}
