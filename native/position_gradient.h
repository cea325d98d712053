/* The gradient of a convolution's kernel for few outputs and one number type T: vectors run over positions. */

/* out[i, j] += sum over images n and p of left[n * left_step + i * left_stride + p] * right[n * right_step + offset[j] + p] */
INLINE void NAME(inner)(const T *left, i64 left_step, i64 left_stride, const T *right, i64 right_step, const i64 *offset,
                        i64 images, i64 positions, T out[LEFT][RIGHT])
{
    V sum[LEFT][RIGHT] = {0};
    for (i64 n = 0; n < images; n++, left += left_step, right += right_step)
        for (i64 p = 0; p < positions; p += LANES) {
            V a[LEFT];
            for (int i = 0; i < LEFT; i++) a[i] = *(const V *)(left + i * left_stride + p);
            for (int j = 0; j < RIGHT; j++) {
                V b = *(const V *)(right + offset[j] + p);
                for (int i = 0; i < LEFT; i++) sum[i][j] = ADD_PRODUCT(sum[i][j], a[i], b);
            }
        }
    /* Each vector is folded in halves; turned round, as many as a vector has lanes are folded at once. */
    T all[(LEFT * RIGHT + LANES) * LANES] __attribute__((aligned(VECTOR_BYTES))), *folded = &out[0][0];
    UNROLL for (int i = 0; i < LEFT; i++) UNROLL for (int j = 0; j < RIGHT; j++) *(V *)(all + (i * RIGHT + j) * LANES) = sum[i][j];
    for (int k = 0; k < LEFT * RIGHT; k += LANES) {
        V lane[LANES];
        NAME(turn)(all + k * LANES, LANES, all + k * LANES, LANES, LANES);
        UNROLL for (int l = 0; l < LANES; l++) lane[l] = *(const V *)(all + (k + l) * LANES);
        UNROLL for (int half = LANES / 2; half > 0; half /= 2) UNROLL for (int l = 0; l < half; l++) lane[l] += lane[l + half];
        memcpy(folded + k, lane, at_most(LANES, LEFT * RIGHT - k) * sizeof(T));
    }
}

static int NAME(not_finite)(const T *x, i64 n)
{
    int found = 0;
    for (i64 i = 0; i < n; i++) found |= x[i] - x[i] != 0;
    return found;
}

/* See kernel_gradient(). */
static int NAME(position_gradient)(Memory *m, NAME(Images) *x, NAME(Images) *y, T *weight, const Geometry *g,
                                   const NAME(Channels) *bias)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, padded = (outputs + LEFT - 1) / LEFT * LEFT;
    i64 area = g->kh * g->kw, terms = channels * area, pixels = g->oh * g->ow;
    Room room = views_room(m, area, g->sh);
    Views s = forward_views(g, &room, 1, INT64_MAX / 2);
    i64 plane = s.views * s.phases * s.rows * s.width, image = g->c * plane;
    i64 step = (g->oh * s.width + LANES - 1) / LANES * LANES, maps = g->groups * padded * step;
    i64 least = GRADIENT_POSITIONS / 2 / step, most = GRADIENT_POSITIONS / step;
    i64 chunk = clip(PACKED_BYTES / (i64)sizeof(T) / (image + maps), at_least(least, 1), at_least(most, 1));
    i64 block = (at_most(g->oh, GRADIENT_POSITIONS / s.width) + LANES - 1) / LANES * LANES; /* ends at a whole vector */
    block = at_least(block, LANES);
    T *packed = borrow_zeros(m, (chunk * image + SLACK) * sizeof(T));  /* what is read beyond is multiplied by zero, and zero times */
    T *left = borrow_zeros(m, (chunk * maps + SLACK) * sizeof(T));     /* garbage may be NaN */
    i64 *offset = borrow_zeros(m, (terms + RIGHT) * sizeof(i64));
    if (!room.memory || !packed || !left || !offset || NAME(make_room)(m, x, 1) || NAME(make_room)(m, y, 1)) return 1;

    memset(weight, 0, g->o * terms * sizeof(T));
    for (i64 r = 0; r < terms; r++) offset[r] = r / area * plane + s.tap[r % area].offset;
    for (i64 first = 0; first < g->n; first += chunk) {
        i64 images = at_most(chunk, g->n - first);
        for (i64 n = 0; n < images; n++) {
            const T *end, *from = NAME(ready)(x, first + n, 1, &end);
            NAME(pack_views)(from, &s, 0, packed + n * image, end);
            from = NAME(ready)(y, first + n, 1, &end);
            for (i64 o = 0; o < g->o; o++) {
                T *to = left + n * maps + (o / outputs * padded + o % outputs) * step;
                NAME(copy_rows)(to, from + o * pixels, g->oh, s.width, 0, g->ow, 1, g->ow, end);
                NAME(clear)(to + g->oh * s.width, to + step);
            }
            NAME(add_image)(bias, first + n);
        }
        for (i64 y0 = 0; y0 < g->oh; y0 += block) for (i64 group = 0; group < g->groups; group++)
            for (i64 o = 0; o < outputs; o += LEFT) for (i64 r = 0; r < terms; r += RIGHT) {
                T part[LEFT][RIGHT];
                i64 positions = at_most(block, g->oh - y0) * s.width;
                NAME(inner)(left + (group * padded + o) * step + y0 * s.width, maps, step,
                            packed + group * channels * plane + y0 * s.width, image, offset + r, images, positions, part);
                for (i64 i = 0; i < at_most(LEFT, outputs - o); i++) for (i64 j = 0; j < at_most(RIGHT, terms - r); j++)
                    weight[(group * outputs + o + i) * terms + r + j] += part[i][j];
            }
    }
    return 0;
}
