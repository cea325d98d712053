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
