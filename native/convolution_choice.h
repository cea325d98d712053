/* Forward and adjoint, each by the way that its shape suits, for one number type T. */

/* y (N, O, OH, OW) = x (N, C, H, W) * weight (O, C/groups, kh, kw) + bias (or NULL). Returns 1 without memory. */
int NAME(forward)(const T *x, const T *weight, const T *bias, T *y, const Geometry *g)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, area = g->kh * g->kw;
    NAME(Product) product = {0};
    Room room = views_room(area, g->sh);
    Views s = forward_views(g, &room, LANES, PACKED_BYTES / sizeof(T));
    int failed = !room.memory;
    if (!failed && NAME(suits_winograd)(&s))
        failed = NAME(winograd)(&s, weight, outputs * channels * area, channels * area, area, bias, x, g->n, y);
    else if (!failed)
        failed = NAME(prepare)(&product, &s, weight, outputs * channels * area, channels * area, area, bias)
                 || NAME(multiply_all)(&product, &s, 1, x, g->n, y);
    NAME(release)(&product);
    free(room.memory);
    return failed;
}

/* x (N, C, H, W) = the adjoint of forward applied to y (N, O, OH, OW), plus bias (or NULL) of each channel of x.
   Each phase of the image is a convolution of y with those kernel elements that meet the phase. */
int NAME(adjoint)(const T *y, const T *weight, const T *bias, T *x, const Geometry *g)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, area = g->kh * g->kw, phases = g->sh * g->sw;
    NAME(Product) *product = calloc(phases, sizeof *product);
    Views *s = calloc(phases, sizeof *s);
    Room *room = calloc(phases, sizeof *room);
    int failed = !product || !s || !room, fast = 0;
    for (i64 k = 0; k < phases && !failed; k++) {
        room[k] = views_room(area, 1);
        s[k] = phase_views(g, k / g->sw, k % g->sw, room + k, LANES, PACKED_BYTES / sizeof(T));
        failed = !room[k].memory;
        fast = !failed && phases == 1 && NAME(suits_winograd)(s);
        if (!failed && !fast && s[k].oh > 0 && s[k].ow > 0)
            failed = NAME(prepare)(product + k, s + k, weight, outputs * channels * area, area, channels * area, bias);
    }
    if (!failed && fast) failed = NAME(winograd)(s, weight, outputs * channels * area, area, channels * area, bias, y, g->n, x);
    else if (!failed) failed = NAME(multiply_all)(product, s, phases, y, g->n, x);
    for (i64 k = 0; k < phases; k++) {
        if (product) NAME(release)(product + k);
        if (room) free(room[k].memory);
    }
    free(product); free(s); free(room);
    return failed;
}

/* weight (O, C/groups, kh, kw) = sum over images and positions of y (N, O, OH, OW) times the window of x there. Which way
   depends on shapes alone: by tiles of 2 x 2 pixels of y; or vectors over outputs where they are filled, else over positions, by
   their times in loads and multiply-adds; loads that cross cache lines make the last way POSITION_SLOWNESS times as slow. */
int NAME(kernel_gradient)(const T *x, const T *y, T *weight, const Geometry *g)
{
    i64 outputs = g->o / g->groups, terms = g->c / g->groups * g->kh * g->kw, dense;
    i64 columns = g->ow + (g->kw - 1) * g->dw / g->sw;
    i64 tiles = (outputs + LEFT - 1) / LEFT * ((terms + RIGHT - 1) / RIGHT), parts = (g->oh * columns + LANES - 1) / LANES;
    Room room = views_room(g->kh * g->kw, g->sh);
    Views s = forward_views(g, &room, 1, INT64_MAX / 2);
    int failed = !room.memory, fast = !failed && NAME(suits_winograd_gradient)(&s);
    if (fast) failed = NAME(winograd_gradient)(&s, x, y, weight, g->n);
    free(room.memory);
    if (failed || fast) return failed;
    NAME(best_gradient_tile)(g, &dense);
    int suits = dense * g->oh * g->ow < POSITION_SLOWNESS * tiles * LEFT * RIGHT * parts;
    return (suits ? NAME(dense_gradient) : NAME(position_gradient))(x, y, weight, g);
}

#undef V
#undef MASK
