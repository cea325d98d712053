/* Each of the three products by the way that its shape suits, for one number type T. Those that are called take working memory,
   say in `wanted` how much they want (see borrowed.h), and return 1 where there is no more. */

/* One product of n images x, or of those that are `wanted`; arguments as for prepare() and multiply_all(). */
static int NAME(plain)(Memory *m, const Views *s, const T *weight, i64 group_step, i64 output_step, i64 channel_step,
                       const T *bias, const T *x, i64 n, T *to, const char *wanted)
{
    NAME(Product) product = {0};
    i64 size = s->c * s->h * s->w;
    if (NAME(prepare)(m, &product, s, weight, group_step, output_step, channel_step, bias)) return 1;
    for (i64 first = 0, last; first < n; first = last) {
        for (last = first + 1; last < n && (!wanted || wanted[last] == wanted[first]);) last++;
        NAME(Images) images = {x + first * size, size, last - first};
        if ((!wanted || wanted[first]) && NAME(multiply_all)(m, &product, s, 1, &images, to + first * s->image)) return 1;
    }
    return 0;
}

static int NAME(forward_in)(Memory *m, const T *x, const T *weight, const T *bias, T *y, const Geometry *g)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, area = g->kh * g->kw;
    if (NAME(suits_depthwise)(g))
        return (NAME(is_small)(g) ? NAME(small_forward) : NAME(depthwise_forward))(m, x, weight, bias, y, g);
    i64 row = NAME(images_of_row)(g);
    if (row) return NAME(side_by_side)(m, x, g->c, weight, g->c, 1, bias, y, g->o, g->n, g->h * g->w, row);
    Room room = views_room(m, area, g->sh);
    Views s = forward_views(g, &room, LANES, PACKED_BYTES / sizeof(T));
    char *spoilt = NULL;
    if (!room.memory) return 1;
    if (NAME(suits_winograd)(&s)) {
        spoilt = borrow_zeros(m, at_least(g->n, 1));
        if (!spoilt || NAME(winograd)(m, &s, weight, outputs * channels * area, channels * area, area, bias, x, g->n, y, spoilt))
            return 1;
        if (!memchr(spoilt, 1, g->n)) return 0;
        s = forward_views(g, &room, LANES, PACKED_BYTES / sizeof(T));
    }
    return NAME(plain)(m, &s, weight, outputs * channels * area, channels * area, area, bias, x, g->n, y, spoilt);
}

/* y (N, O, OH, OW) = x (N, C, H, W) * weight (O, C/groups, kh, kw) + bias (or NULL). */
int NAME(forward)(const T *x, const T *weight, const T *bias, T *y, const Geometry *g, void *memory, i64 bytes, i64 *wanted)
{
    Memory m = memory_of(memory, bytes);
    int failed = NAME(forward_in)(&m, x, weight, bias, y, g);
    give_back(&m, wanted);
    return failed;
}

/* Each phase of the image is a convolution of y with those kernel elements that meet the phase. */
static int NAME(adjoint_in)(Memory *m, const T *y, const T *weight, const T *bias, T *x, const Geometry *g)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, area = g->kh * g->kw, phases = g->sh * g->sw;
    if (NAME(suits_depthwise)(g))
        return (NAME(is_small)(g) ? NAME(small_adjoint) : NAME(depthwise_adjoint))(m, y, weight, bias, x, g);
    i64 row = NAME(images_of_row)(g);
    if (row) return NAME(side_by_side)(m, y, g->o, weight, 1, g->c, bias, x, g->c, g->n, g->h * g->w, row);
    NAME(Product) *product = borrow(m, phases * sizeof *product);
    Views *s = borrow(m, phases * sizeof *s);
    if (!product || !s) return 1;
    for (i64 k = 0; k < phases; k++) {
        Room room = views_room(m, area, 1);
        s[k] = phase_views(g, k / g->sw, k % g->sw, &room, LANES, PACKED_BYTES / sizeof(T));
        if (!room.memory) return 1;
        if (phases == 1 && NAME(suits_winograd)(s)) {
            char *spoilt = borrow_zeros(m, at_least(g->n, 1));
            if (!spoilt || NAME(winograd)(m, s, weight, outputs * channels * area, area, channels * area, bias, y, g->n, x, spoilt))
                return 1;
            if (!memchr(spoilt, 1, g->n)) return 0;
            *s = phase_views(g, 0, 0, &room, LANES, PACKED_BYTES / sizeof(T));
            return NAME(plain)(m, s, weight, outputs * channels * area, area, channels * area, bias, y, g->n, x, spoilt);
        }
        if (s[k].oh > 0 && s[k].ow > 0
            && NAME(prepare)(m, product + k, s + k, weight, outputs * channels * area, area, channels * area, bias)) return 1;
    }
    NAME(Images) maps = {y, g->o * g->oh * g->ow, g->n};
    return NAME(multiply_all)(m, product, s, phases, &maps, x);
}

/* x (N, C, H, W) = the adjoint of forward applied to y (N, O, OH, OW), plus bias (or NULL) of each channel of x. */
int NAME(adjoint)(const T *y, const T *weight, const T *bias, T *x, const Geometry *g, void *memory, i64 bytes, i64 *wanted)
{
    Memory m = memory_of(memory, bytes);
    int failed = NAME(adjoint_in)(&m, y, weight, bias, x, g);
    give_back(&m, wanted);
    return failed;
}

/* By tiles of 2 x 2 pixels of y; or vectors over outputs where they are filled, else over positions, by their times in loads and
   multiply-adds; loads that cross cache lines make the last way POSITION_SLOWNESS times as slow. */
static int NAME(kernel_gradient_in)(Memory *m, const T *x, const T *y, T *weight, const Geometry *g,
                                    const NAME(Channels) *bias)
{
    i64 outputs = g->o / g->groups, terms = g->c / g->groups * g->kh * g->kw, dense;
    i64 columns = g->ow + (g->kw - 1) * g->dw / g->sw;
    i64 tiles = (outputs + LEFT - 1) / LEFT * ((terms + RIGHT - 1) / RIGHT), parts = (g->oh * columns + LANES - 1) / LANES;
    if (NAME(suits_depthwise)(g))
        return (NAME(is_small)(g) ? NAME(small_gradient) : NAME(depthwise_gradient))(m, x, y, weight, g, bias);
    NAME(Channels) none = {0};
    Room room = views_room(m, g->kh * g->kw, g->sh);
    Views s = forward_views(g, &room, 1, INT64_MAX / 2);
    if (!room.memory) return 1;
    if (NAME(suits_winograd_gradient)(&s)) {
        if (NAME(winograd_gradient)(m, &s, x, y, weight, g->n, bias)) return 1;
        if (!NAME(not_finite)(weight, g->o * terms)) return 0;                    /* as in winograd.h */
        bias = &none;
    }
    NAME(best_gradient_tile)(g, &dense);
    int suits = dense * g->oh * g->ow < POSITION_SLOWNESS * tiles * LEFT * RIGHT * parts;
    NAME(Images) images = {x, g->c * g->h * g->w, g->n}, maps = {y, g->o * g->oh * g->ow, g->n};
    if (!suits) {
        if (NAME(position_gradient)(m, &images, &maps, weight, g, bias)) return 1;
        if (!NAME(not_finite)(weight, g->o * terms)) return 0;                    /* its padding is multiplied, too */
        bias = &none;
    }
    return NAME(dense_gradient)(m, &images, &maps, weight, g, bias);
}

/* weight (O, C/groups, kh, kw) = sum over images and positions of y (N, O, OH, OW) times the window of x there; bias (or NULL) of
   each channel = the sum of y over the same, or of x where `of_x`. */
int NAME(kernel_gradient)(const T *x, const T *y, T *weight, T *bias, i64 of_x, const Geometry *g, void *memory, i64 bytes,
                          i64 *wanted)
{
    Memory m = memory_of(memory, bytes);
    NAME(Channels) channels = {NULL, y, g->o, g->oh * g->ow};
    if (of_x) channels = (NAME(Channels)){NULL, x, g->c, g->h * g->w};
    if (bias) channels.sums = borrow_zeros(&m, channels.channels * sizeof(double));
    int failed = (bias && !channels.sums) || NAME(kernel_gradient_in)(&m, x, y, weight, g, &channels);
    for (i64 c = 0; bias && !failed && c < channels.channels; c++) bias[c] = (T)channels.sums[c];
    give_back(&m, wanted);
    return failed;
}

#undef V
#undef MASK
