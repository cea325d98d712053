/* 3 x 3 convolutions of stride 1 with 4 multiplications for each pixel of the result instead of 9, for one number type T.

   A tile of 2 x 2 results y and the 4 x 4 numbers d of the image that it depends on: y = A' [(G w G') * (B' d B)] A, where * is
   by element and summed over channels (Winograd's F(2 x 2, 3 x 3); Lavin and Gray, "Fast algorithms for convolutional neural
   networks", CVPR 2016). So there are 16 small matrix products, one for each element. B and A hold 0, 1 and -1 and G halves,
   which keeps rounding errors near those of the plain sum: 2e-7 of the largest result with normal numbers and 16 channels, 8e-7
   with 512, and a plain sum's 4e-7 and 2e-6. Larger tiles need fewer multiplications, but F(4 x 4, 3 x 3) multiplies by up to 8:
   its errors were fourteen times as large and more, 3e-6 to 1e-5.

   What is not finite spoils whole tiles: where the image has infinity, a tile has it with both signs, and their sum is NaN. A NaN in a
   result says so, and its image is then convolved once more, plainly (convolution_choice.h); finite results are right.

   A vector holds LANES tiles, from `depth` rows of tiles of an image: one where they are long, else 2 or 4. The order of each sum
   depends on shapes only. */

#define ELEMENTS 16

/* How tiles lie in vectors, `across` vectors in a row of them. */
typedef struct { i64 depth, across, block, vectors; } NAME(TilePlan);

static NAME(TilePlan) NAME(plan_tiles)(const Views *s, i64 most)
{
    NAME(TilePlan) p = {1, 1, 0, 0};
    i64 rows = (s->oh + 1) / 2, columns = (s->ow + 1) / 2;
    while (p.depth < 4 && LANES / p.depth > 3 && columns <= LANES / p.depth / 2) p.depth *= 2;
    p.across = (columns * p.depth + LANES - 1) / LANES;
    i64 width = 2 * p.across * LANES / p.depth + 2;
    p.block = clip((most / (s->c * width) - 2) / 2, p.depth, rows);           /* rows of tiles at a time */
    p.block = (p.block + p.depth - 1) / p.depth * p.depth;
    p.vectors = p.block / p.depth * p.across;
    return p;
}

/* One view for all taps, with room for whole tiles. */
static void NAME(lay_tiles)(Views *s, const NAME(TilePlan) *p)
{
    for (i64 t = 0; t < 9; t++) s->left[0] = t ? at_most(s->left[0], s->tap[t].tx) : s->tap[t].tx;
    s->views = s->phases = 1;
    s->width = 2 * p->across * LANES / p->depth + 2;
    s->rows = 2 * p->block + 2;
}

/* True where it is a 3 x 3 convolution of stride 1, and this way takes fewer multiply-adds with what it adds of its own. */
static int NAME(suits_winograd)(const Views *s)
{
    i64 channels = s->c / s->groups, top = s->top, left = s->tap[0].tx, found = 0;
    if (s->taps != 9 || s->sh != 1 || s->step != 1 || s->right != 1 || channels < 16 || s->outputs < 16 || LANES < 4) return 0;
    for (i64 t = 0; t < 9; t++) left = at_most(left, s->tap[t].tx);
    for (i64 t = 0; t < 9; t++) {
        i64 y = s->tap[t].ty - top, x = s->tap[t].tx - left;
        if (y <= 2 && x <= 2) found |= 1 << (3 * y + x);
    }
    NAME(TilePlan) p = NAME(plan_tiles)(s, INT64_MAX / 4);
    i64 plain = (s->oh * s->ow + LANES - 1) / LANES * 9 * channels * s->outputs;
    i64 here = p.vectors * (ELEMENTS * channels * s->outputs + 80 * channels + 60 * s->outputs);
    return found == 511 && here < plain;
}

/* What weights become, by tile of ROWS outputs, element and channel: see prepare(). */
static void NAME(transform_weights)(const Views *s, const T *weight, i64 group_step, i64 output_step, i64 channel_step, T *to)
{
    i64 channels = s->c / s->groups, tiles = (s->outputs + ROWS - 1) / ROWS, element[9], left = s->tap[0].tx;
    for (i64 t = 0; t < 9; t++) left = at_most(left, s->tap[t].tx);
    for (i64 t = 0; t < 9; t++) element[3 * (s->tap[t].ty - s->top) + s->tap[t].tx - left] = s->tap[t].element;
    for (i64 t = 0; t < s->groups * tiles; t++) for (i64 c = 0; c < channels; c++) for (i64 i = 0; i < ROWS; i++) {
        i64 o = t % tiles * ROWS + i;
        const T *from = weight + t / tiles * group_step + o * output_step + c * channel_step;
        T half[4][3], w[3];
        for (int x = 0; x < 3; x++) {
            for (int y = 0; y < 3; y++) w[y] = o < s->outputs ? from[element[3 * y + x]] : 0;
            half[0][x] = w[0];
            half[1][x] = (w[0] + w[1] + w[2]) / 2;
            half[2][x] = (w[0] - w[1] + w[2]) / 2;
            half[3][x] = w[2];
        }
        for (int y = 0; y < 4; y++) {
            const T all[4] = {half[y][0], (half[y][0] + half[y][1] + half[y][2]) / 2,
                              (half[y][0] - half[y][1] + half[y][2]) / 2, half[y][2]};
            for (int x = 0; x < 4; x++) to[((t * ELEMENTS + 4 * y + x) * channels + c) * ROWS + i] = all[x];
        }
    }
}

/* Two vectors with the columns of LANES tiles, one row of theirs: `next` is two rows on, where the tiles' next row begins. */
INLINE void NAME(load_row)(const T *from, i64 next, V *a, V *b, const int depth)
{
    *a = *(const V *)from;
    *b = *(const V *)(from + (depth == 1 ? LANES : next));
    if (depth < 4) return;
    *a = PICK(MASK, *a, *b, ORDER(HALVES, LANES));
    *b = PICK(MASK, *(const V *)(from + 2 * next), *(const V *)(from + 3 * next), ORDER(HALVES, LANES));
}

/* B' d B of LANES tiles of one channel; elements are `step` apart. */
INLINE void NAME(transform_tiles)(const T *from, i64 width, T *to, i64 step, const int depth)
{
    V d[4][4];
    UNROLL for (int y = 0; y < 4; y++) {
        V a, b, c[4];
        UNROLL for (int x = 0; x < 4; x += 2) {
            NAME(load_row)(from + y * width + x, 2 * width, &a, &b, depth);
            c[x] = PICK(MASK, a, b, ORDER(EVEN, LANES));
            c[x + 1] = PICK(MASK, a, b, ORDER(ODD, LANES));
        }
        d[y][0] = c[0] - c[2];
        d[y][1] = c[1] + c[2];
        d[y][2] = c[2] - c[1];
        d[y][3] = c[1] - c[3];
    }
    UNROLL for (int x = 0; x < 4; x++) {
        *(V *)(to + x * step) = d[0][x] - d[2][x];
        *(V *)(to + (4 + x) * step) = d[1][x] + d[2][x];
        *(V *)(to + (8 + x) * step) = d[2][x] - d[1][x];
        *(V *)(to + (12 + x) * step) = d[1][x] - d[3][x];
    }
}

/* The first `count` numbers of a vector, from number `first` on. */
INLINE void NAME(store_some)(V vector, i64 first, i64 count, T *to)
{
    if (count <= 0) return;
    if (count == LANES && !first) { *(V *)to = vector; return; }
    T part[LANES];
    *(V *)part = vector;
    if (count == LANES / 2) memcpy(to, part + first, LANES / 2 * sizeof(T));
    else for (i64 i = 0; i < count; i++) to[i] = part[first + i];
}

/* A' m A + bias of LANES tiles of one channel into rows of the result; `rows` and `columns` are those that are left. Its answer is
   their sum, not finite in lanes where one is not. */
INLINE V NAME(store_tiles)(const T *m, i64 step, T bias, T *to, i64 down, i64 rows, i64 columns, i64 depth)
{
    V s[2][4], all = {0};
    UNROLL for (int x = 0; x < 4; x++) {
        V m0 = *(const V *)(m + x * step), m1 = *(const V *)(m + (4 + x) * step), m2 = *(const V *)(m + (8 + x) * step);
        V m3 = *(const V *)(m + (12 + x) * step);
        s[0][x] = m0 + m1 + m2;
        s[1][x] = m1 - m2 - m3;
    }
    UNROLL for (int y = 0; y < 2; y++) {
        V even = s[y][0] + s[y][1] + s[y][2] + bias, odd = s[y][1] - s[y][2] - s[y][3] + bias;
        all += even + odd;
        V part[2] = {PICK(MASK, even, odd, ORDER(LOW, LANES)), PICK(MASK, even, odd, ORDER(HIGH, LANES))};
        UNROLL for (int h = 0; h < 2; h++) {
            T *row = to + (depth == 1 ? y * down + h * LANES : (h * depth + y) * down);
            i64 left = depth == 1 ? columns - h * LANES : columns, line = depth == 1 ? y : h * depth + y;
            if (line < rows) NAME(store_some)(part[h], 0, at_most(left, depth == 4 ? LANES / 2 : LANES), row);
            if (depth == 4 && line + 2 < rows)
                NAME(store_some)(part[h], LANES / 2, at_most(left, LANES / 2), row + 2 * down);
        }
    }
    return all;
}

/* Whether a lane of x is NaN or infinite. */
INLINE int NAME(any_not_finite)(V x)
{
    MASK there = (MASK)(x - x != 0);
    INTEGER any = 0;
    for (int l = 0; l < LANES; l++) any |= there[l];
    return any != 0;
}

/* From one element of the transformed image to the next; the vector more spreads them over the sets of a cache. */
static i64 NAME(element_step)(i64 channels) { return (channels * VECTORS + 1) * LANES; }

/* Vectors of tiles [first, first + count) of the packed images: see multiply(). */
typedef struct { const T *from[VECTORS]; T *to[VECTORS]; i64 rows[VECTORS], columns[VECTORS]; char *spoilt[VECTORS]; } NAME(Tiles);

static void NAME(multiply_tiles)(const Views *s, const NAME(TilePlan) *p, const NAME(Tiles) *tiles, int count, i64 plane,
                                 const i64 *offset, const T *weight, const T *bias, T *work, Ahead *ahead)
{
    i64 channels = s->c / s->groups, each = (s->outputs + ROWS - 1) / ROWS, step = NAME(element_step)(channels);
    T *products = work + ELEMENTS * step;
    V all[VECTORS] = {{0}};
    const i64 one = ROWS * VECTORS * LANES;
    for (i64 t = 0; t < s->groups * each; t++) {
        i64 o0 = t % each * ROWS, first = t / each * s->outputs + o0;
        if (o0 == 0) for (i64 c = 0; c < channels; c++) for (int v = 0; v < count; v++) {
            const T *from = tiles->from[v] + (t / each * channels + c) * plane;
            T *to = work + (c * VECTORS + v) * LANES;
            if (p->depth == 1) NAME(transform_tiles)(from, s->width, to, step, 1);
            else if (p->depth == 2) NAME(transform_tiles)(from, s->width, to, step, 2);
            else NAME(transform_tiles)(from, s->width, to, step, 4);
        }
        for (i64 e = 0; e < ELEMENTS; e++) {
            const T *left = weight + (t * ELEMENTS + e) * channels * ROWS, *from[VECTORS];
            for (int v = 0; v < VECTORS; v++) from[v] = work + e * step + v * LANES;
            fetch(ahead);
            if (e < 2 * ROWS && o0 + e / 2 < s->outputs) for (int v = 0; v < count; v++) {
                const T *row = tiles->to[v] + (first + e / 2) * s->plane + at_most(e % 2, tiles->rows[v] - 1) * s->down;
                __builtin_prefetch(row, 1, 3);
                if (p->depth == 1) __builtin_prefetch(row + at_most(LANES, tiles->columns[v] - 1), 1, 3);
            }
            NAME(any_tile)(left, from, offset, channels, products + e * one, count, ROWS);
        }
        for (i64 i = 0; i < at_most(ROWS, s->outputs - o0); i++) for (int v = 0; v < count; v++)
            all[v] += NAME(store_tiles)(products + (i * VECTORS + v) * LANES, one, bias ? bias[first + i] : 0,
                                        tiles->to[v] + (first + i) * s->plane, s->down, tiles->rows[v], tiles->columns[v], p->depth);
    }
    for (int v = 0; v < count; v++) if (NAME(any_not_finite)(all[v])) *tiles->spoilt[v] = 1;
}

/* The results of n images x, in `to`; arguments as for prepare() and multiply_all(). `spoilt` becomes 1 for an image whose results
   are not all finite. Returns 1 without memory. */
static int NAME(winograd)(Memory *m, Views *s, const T *weight, i64 group_step, i64 output_step, i64 channel_step,
                          const T *bias, const T *x, i64 n, T *to, char *spoilt)
{
    NAME(TilePlan) p = NAME(plan_tiles)(s, PACKED_BYTES / (i64)sizeof(T));
    i64 channels = s->c / s->groups, each = (s->outputs + ROWS - 1) / ROWS, size = s->c * s->h * s->w;
    NAME(lay_tiles)(s, &p);
    i64 plane = s->rows * s->width, image = s->c * plane;
    i64 chunk = clip(PACKED_BYTES / (i64)sizeof(T) / image, at_most(VECTORS, at_least(n, 1)), at_least(n, 1));
    if (chunk > VECTORS) chunk -= chunk % VECTORS;                             /* then all tiles of products are whole */
    T *packed = borrow(m, (chunk * image + SLACK) * sizeof(T));
    T *left = borrow(m, s->groups * each * ROWS * channels * ELEMENTS * sizeof(T));
    T *work = borrow(m, ELEMENTS * (NAME(element_step)(channels) + ROWS * VECTORS * LANES) * sizeof(T));
    i64 *offset = borrow(m, channels * sizeof(i64));
    if (!packed || !left || !work || !offset) return 1;

    NAME(transform_weights)(s, weight, group_step, output_step, channel_step, left);
    for (i64 c = 0; c < channels; c++) offset[c] = c * VECTORS * LANES;
    for (i64 first = 0; first < n; first += chunk) for (i64 y0 = 0; y0 < s->oh; y0 += 2 * p.block) {
        i64 images = at_most(chunk, n - first), rows = at_most(2 * p.block, s->oh - y0);
        i64 vectors = (rows + 2 * p.depth - 1) / (2 * p.depth) * p.across;
        const T *next = x + (first + images) * size;
        Ahead ahead = look_ahead(next, next + at_most(chunk, n - first - images) * size,
                                 images * vectors * s->groups * each * ELEMENTS / VECTORS);
        for (i64 i = 0; i < images; i++) NAME(pack_views)(x + (first + i) * size, s, y0, packed + i * image, x + n * size);
        for (i64 k = 0; k < images * vectors; k += VECTORS) {
            NAME(Tiles) tiles;
            int count = at_most(VECTORS, images * vectors - k);
            for (int v = 0; v < count; v++) {
                i64 i = (k + v) / vectors, row = (k + v) % vectors / p.across * 2 * p.depth;
                i64 column = (k + v) % p.across * 2 * LANES;
                tiles.from[v] = packed + i * image + row * s->width + column;
                tiles.to[v] = to + s->corner + (first + i) * s->image + (y0 + row) * s->down + column;
                tiles.rows[v] = rows - row;
                tiles.columns[v] = s->ow - column;
                tiles.spoilt[v] = spoilt + first + i;
            }
            NAME(multiply_tiles)(s, &p, &tiles, count, plane, offset, left, bias, work, &ahead);
        }
    }
    return 0;
}
