/* Forward and adjoint of convolutions, for one number type T: see convolution.c. */

/* rows x (vectors * LANES) sums, rows at most ROWS:
   out[(i * VECTORS + v) * LANES + p] = sum over r of left[r * ROWS + i] * from[v][offset[r] + p]. */
INLINE void NAME(tile)(const T *left, const T *const *from, const i64 *offset, i64 terms, T *out, const int vectors,
                       const int rows)
{
    V sum[ROWS][VECTORS] = {0};
    const T *right[VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) right[v] = from[v];
    for (i64 r = 0; r < terms; r++, left += ROWS) {
        V b[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) b[v] = *(const V *)(right[v] + offset[r]);
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = ADD_SCALED(sum[i][v], left[i], b[v]);
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) *(V *)(out + (i * VECTORS + v) * LANES) = sum[i][v];
}

static __attribute__((noinline)) void NAME(any_tile)(const T *left, const T *const *from, const i64 *offset, i64 terms, T *out,
                                                     int vectors, i64 rows)
{
    if (rows == 1) {                                 /* one channel a group */
        if (vectors == 3) NAME(tile)(left, from, offset, terms, out, 3, 1);
        else if (vectors == 2) NAME(tile)(left, from, offset, terms, out, 2, 1);
        else NAME(tile)(left, from, offset, terms, out, 1, 1);
    } else if (vectors == 3) NAME(tile)(left, from, offset, terms, out, 3, ROWS);
    else if (vectors == 2) NAME(tile)(left, from, offset, terms, out, 2, ROWS);
    else NAME(tile)(left, from, offset, terms, out, 1, ROWS);
}

/* Zeros from `from` to `to`, and up to LANES - 1 numbers more. */
INLINE T *NAME(clear)(T *from, T *to)
{
    for (; from < to; from += LANES) *(V *)from = (V){0};
    return to;
}

/* `rows` rows of `width` numbers, zero but for columns [j0, j1), which are those of `from`, `step` numbers apart in rows `down`
   apart. Up to LANES numbers more are written; none is read at `end` or beyond. */
INLINE void NAME(copy_rows)(T *to, const T *from, i64 rows, i64 width, i64 j0, i64 j1, const i64 step, i64 down, const T *end)
{
    i64 count = j1 - j0, whole = clip((end - from - step * (count + LANES)) / down + 1, 0, rows), r = 0;
    if (end - from < step * (count + LANES) || step > 2) whole = 0;
    for (; r < whole; r++, to += width, from += down) {
        NAME(clear)(to, to + j0);
        if (step == 1) for (i64 i = 0; i < count; i += LANES) *(V *)(to + j0 + i) = *(const V *)(from + i);
        else for (i64 i = 0; i < count; i += LANES)
            *(V *)(to + j0 + i) = PICK(MASK, *(const V *)(from + 2 * i), *(const V *)(from + 2 * i + LANES), ORDER(EVEN, LANES));
        NAME(clear)(to + j1, to + width);
    }
    for (; r < rows; r++, to += width, from += down) {
        NAME(clear)(to, to + j0);
        for (i64 i = 0; i < count; i++) to[j0 + i] = from[i * step];
        NAME(clear)(to + j1, to + width);
    }
}

/* Rows of one image as each view sees them, for rows [y0, y0 + rows) of the result and those that its taps need beside:
   to[channel, view, phase, row, column], zero outside the image. Written in the order of memory, as copy_rows wants it; room for
   LANES numbers more. */
static void NAME(pack_views)(const T *x, const Views *s, i64 y0, T *to, const T *end)
{
    for (i64 k = 0; k < s->views * s->phases; k++) {
        i64 shift = y0 * s->sh + s->top + k % s->phases, left = s->left[k / s->phases];
        Bounds *b = s->bounds + k;
        inside(shift, s->sh, s->h, s->rows, &b->r0, &b->r1);
        inside(left, s->step, s->w, s->width, &b->j0, &b->j1);
        b->first = (b->r0 * s->sh + shift) * s->w + left + b->j0 * s->step;
    }
    for (i64 c = 0; c < s->c; c++, x += s->h * s->w) for (i64 k = 0; k < s->views * s->phases; k++) {
        const Bounds b = s->bounds[k];
        to = NAME(clear)(to, to + b.r0 * s->width);
        if (s->step == 1)
            NAME(copy_rows)(to, x + b.first, b.r1 - b.r0, s->width, b.j0, b.j1, 1, s->sh * s->w, end);
        else
            NAME(copy_rows)(to, x + b.first, b.r1 - b.r0, s->width, b.j0, b.j1, s->step, s->sh * s->w, end);
        to += (b.r1 - b.r0) * s->width;
        to = NAME(clear)(to, to + (s->rows - b.r1) * s->width);
    }
}

/* Vector v of a tile into channels of the result: `count` of its pixels, side by side, or at their places. */
INLINE void NAME(store_vector)(const T *sums, i64 channels, const T *bias, const i64 *place, i64 count, int together, i64 plane,
                               T *to)
{
    if (!together) {
        for (i64 i = 0; i < channels; i++)
            for (i64 p = 0; p < count; p++) to[i * plane + place[p]] = sums[i * VECTORS * LANES + p] + bias[i];
        return;
    }
    to += *place;
    for (i64 i = 0; i < channels; i++, to += plane, sums += VECTORS * LANES) {
        V whole = *(const V *)sums + bias[i];
        T part[LANES];
        if (count == LANES) { *(V *)to = whole; continue; }
        *(V *)part = whole;
        if (count >= LANES / 2) {                    /* two halves that overlap */
            memcpy(to, part, LANES / 2 * sizeof(T));
            memcpy(to + count - LANES / 2, part + count - LANES / 2, LANES / 2 * sizeof(T));
        } else for (i64 p = 0; p < count; p++) to[p] = part[p];
    }
}

/* A vector of pixels two numbers apart; what is between them stays as it is. The LANES numbers of memory that hold half of the
   pixels are written at once, where they are in one row: with the pixels in their even places, or in their odd ones. */
enum { NAME(APART), NAME(EVEN), NAME(ODD) };

INLINE void NAME(store_between)(const T *sums, i64 channels, const T *bias, const i64 *place, const char *kind, i64 plane, T *to)
{
    for (i64 i = 0; i < channels; i++, to += plane, sums += VECTORS * LANES) {
        V whole = *(const V *)sums + bias[i];
        UNROLL for (int half = 0; half < 2; half++) {
            V *at = (V *)(to + place[half * LANES / 2] - (kind[half] == NAME(ODD)));
            V even = whole, odd = whole;
            if (kind[half] == NAME(ODD)) even = PICK(MASK, *at, *at, ORDER(EVEN, LANES));
            else odd = PICK(MASK, *at, *at, ORDER(ODD, LANES));
            *at = half ? PICK(MASK, even, odd, ORDER(HIGH, LANES)) : PICK(MASK, even, odd, ORDER(LOW, LANES));
        }
    }
}

static int NAME(kind_of)(const Views *s, const i64 *place, i64 pixel)
{
    i64 column = s->column + pixel % s->ow * s->right;
    if (s->right != 2 || place[LANES / 2 - 1] - place[0] != LANES - 2) return NAME(APART);
    return column > 0 ? NAME(ODD) : column + LANES <= s->columns ? NAME(EVEN) : NAME(APART);
}

/* What belongs to one set of taps: weights by group, tile of channels and term; bias by group and tile; offsets of terms;
   where vectors of a block of rows begin in the packed image, where each pixel goes, and how halves of vectors are stored. */
typedef struct { T *weight, *bias; i64 *offset, *where, *place, vectors; char *kind; } NAME(Product);

/* weight[group * group_step + output * output_step + channel * channel_step + element] of a tap belongs to these. Returns 1
   without memory. */
static int NAME(prepare)(Memory *m, NAME(Product) *product, const Views *s, const T *weight, i64 group_step, i64 output_step,
                         i64 channel_step, const T *bias)
{
    i64 channels = s->c / s->groups, terms = channels * s->taps, tiles = (s->outputs + ROWS - 1) / ROWS;
    i64 vectors = s->row_vectors ? s->block * s->row_vectors : (s->block * s->ow + LANES - 1) / LANES;
    product->weight = borrow(m, s->groups * tiles * (terms + 1) * ROWS * sizeof(T));
    product->offset = borrow(m, (terms + vectors * (1 + LANES)) * sizeof(i64) + 2 * vectors);
    if (!product->weight || !product->offset) return 1;
    product->bias = product->weight + s->groups * tiles * terms * ROWS;
    product->where = product->offset + terms;
    product->place = product->where + vectors;
    product->kind = (char *)(product->place + vectors * LANES);
    product->vectors = vectors;
    for (i64 c = 0; c < channels; c++) for (i64 t = 0; t < s->taps; t++)
        product->offset[c * s->taps + t] = c * s->views * s->phases * s->rows * s->width + s->tap[t].offset;
    for (i64 v = 0; v < vectors; v++) for (i64 i = 0; i < LANES; i++) {
        i64 y = s->row_vectors ? v / s->row_vectors : (v * LANES + i) / s->ow;
        i64 x = s->row_vectors ? v % s->row_vectors * LANES + i : (v * LANES + i) % s->ow;
        if (i == 0) product->where[v] = y * s->width + x;
        product->place[v * LANES + i] = y * s->down + x * s->right;
    }
    for (i64 h = 0; h < 2 * vectors; h++) {
        i64 pixel = s->row_vectors ? h / 2 % s->row_vectors * LANES + h % 2 * LANES / 2 : h * LANES / 2;
        product->kind[h] = NAME(kind_of)(s, product->place + h * LANES / 2, pixel);
    }
    T *to = product->weight;
    for (i64 t = 0; t < s->groups * tiles; t++) {
        i64 o0 = t % tiles * ROWS, group = t / tiles;
        for (i64 i = 0; i < ROWS; i++)
            product->bias[t * ROWS + i] = bias && o0 + i < s->outputs ? bias[group * s->outputs + o0 + i] : 0;
        for (i64 c = 0; c < channels; c++) for (i64 k = 0; k < s->taps; k++, to += ROWS) {
            const T *from = weight + group * group_step + o0 * output_step + c * channel_step + s->tap[k].element;
            for (i64 i = 0; i < ROWS; i++) to[i] = o0 + i < s->outputs ? from[i * output_step] : 0;
        }
    }
    return 0;
}

/* Rows [y0, y0 + lines) of the result for `images` packed images. Meanwhile the memory of the next results comes nearer, and
   some of what will be packed next, `ahead`. */
static void NAME(multiply)(const NAME(Product) *product, const Views *s, const T *packed, i64 images, i64 y0, i64 lines, T *to,
                           Ahead ahead)
{
    T sums[ROWS * VECTORS * LANES] __attribute__((aligned(64)));
    i64 channels = s->c / s->groups, terms = channels * s->taps, tiles = (s->outputs + ROWS - 1) / ROWS;
    i64 plane = s->rows * s->width * s->phases * s->views, pixels = lines * s->ow;
    i64 each = s->row_vectors ? lines * s->row_vectors : (pixels + LANES - 1) / LANES;
    int together = s->right == 1 && (s->row_vectors || s->down == s->ow);
    for (i64 t = 0; t < s->groups * tiles; t++) {
        i64 o = t / tiles * s->outputs + t % tiles * ROWS, there = at_most(ROWS, s->outputs - t % tiles * ROWS);
        const T *left = product->weight + t * terms * ROWS, *right = packed + t / tiles * channels * plane;
        T *image = to + o * s->plane + y0 * s->down;
        for (i64 first = 0, vector = 0, column = 0; first < images * each; first += VECTORS) {
            const T *from[VECTORS];
            const i64 *place[VECTORS];
            T *result[VECTORS];
            i64 there_are[VECTORS], count = at_most(VECTORS, images * each - first);
            for (i64 v = 0; v < count; v++, vector++) {
                if (vector == each) { vector = 0; image += s->image; right += s->c * plane; }
                from[v] = right + product->where[vector];
                place[v] = product->place + vector * LANES;
                result[v] = image;
                there_are[v] = at_most(LANES, s->row_vectors ? s->ow - column : pixels - vector * LANES);
                column = column + LANES < s->ow ? column + LANES : 0;
                for (i64 i = 0; i < there; i++) __builtin_prefetch(image + i * s->plane + *place[v], 1, 3);
            }
            fetch(&ahead);
            NAME(any_tile)(left, from, product->offset, terms, sums, count, there);
            for (i64 v = 0; v < count; v++) {
                const char *kind = product->kind + (place[v] - product->place) / LANES * 2;
                if (there_are[v] == LANES && kind[0] && kind[1])
                    NAME(store_between)(sums + v * LANES, there, product->bias + t * ROWS, place[v], kind, s->plane, result[v]);
                else
                    NAME(store_vector)(sums + v * LANES, there, product->bias + t * ROWS, place[v],
                                       there_are[v], together, s->plane, result[v]);
            }
        }
    }
}

/* All products of the images. Returns 1 without memory. */
static int NAME(multiply_all)(Memory *m, const NAME(Product) *product, const Views *s, i64 products, NAME(Images) *x, T *to)
{
    i64 most = 0, n = x->n;
    for (i64 k = 0; k < products; k++) most = at_least(most, s[k].c * s[k].views * s[k].phases * s[k].rows * s[k].width);
    i64 chunk = clip(PACKED_BYTES / (i64)sizeof(T) / at_least(most, 1), 1, n), size = s->c * s->h * s->w;
    if (chunk > VECTORS) chunk -= chunk % VECTORS;                             /* then all tiles are whole */
    T *packed = borrow(m, (chunk * most + SLACK) * sizeof(T));
    if (!packed || NAME(make_room)(m, x, chunk)) return 1;
    for (i64 first = 0; first < n; first += chunk) {
        i64 images = at_most(chunk, n - first);
        const T *end, *from = NAME(ready)(x, first, images, &end);
        for (i64 k = 0; k < products; k++) for (i64 y0 = 0; y0 < s[k].oh && s[k].ow > 0; y0 += s[k].block) {
            i64 image = s[k].c * s[k].views * s[k].phases * s[k].rows * s[k].width;
            int last = k == products - 1 && y0 + s[k].block >= s[k].oh;
            Ahead ahead = NAME(images_ahead)(x, first + images, last ? chunk : 0,
                                             images * product[k].vectors * s[k].groups * ((s[k].outputs + ROWS - 1) / ROWS) / VECTORS);
            for (i64 i = 0; i < images; i++) NAME(pack_views)(from + i * size, s + k, y0, packed + i * image, end);
            NAME(multiply)(product + k, s + k, packed, images, y0, at_most(s[k].block, s[k].oh - y0),
                           to + first * s[k].image + s[k].corner, ahead);
        }
    }
    return 0;
}
