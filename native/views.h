/* A convolution by taps: pixel (y, x) of the result is the sum over channels and taps of weight times pixel
   (y * sh + ty, x * sw + tx) of the image, zero outside of it.

   The packed image holds one wide view, zero-padded, at which the columns of taps look from different places; then a vector of
   results ends with its row. Or it holds a view for each column of taps: the pixels that it meets, in rows as long as the
   result's; then a vector goes on from one row to the next, and nothing is computed that is thrown away. */
#ifndef MPITRAIN_VIEWS_H
#define MPITRAIN_VIEWS_H

#include "borrowed.h"
#include "geometry.h"

#define COPY_ROW 12                  /* what one copied row takes, in multiply-adds of vectors */
#define PACKED_BYTES (192 << 10)     /* packed at a time: with the weights they should stay in a 1 MiB L2 cache */

typedef struct { i64 ty, tx, element, offset; } Tap;      /* element: of the weight; offset: of what it meets, in views */

typedef struct { i64 r0, r1, j0, j1, first; } Bounds;      /* of a view, what lies inside the image, from `first` on */

typedef struct {
    i64 c, h, w, groups, outputs;    /* image and its groups, with so many channels of the result each */
    i64 sh, step;                    /* from one row of the result to the next, and one column, in the image */
    i64 oh, ow, block;               /* the result, and its rows at a time */
    i64 taps, top, phases;           /* phases: rows of a view, those that sh skips; top: where the first one begins */
    Tap *tap;
    i64 row_vectors;                 /* vectors of results a row, where they end with it, else 0 */
    i64 views, *left, rows, width;   /* left: the column where each view begins, in the image; rows of a phase */
    Bounds *bounds;                  /* room for one a view and phase */
    i64 image, plane, down, right, corner;   /* steps in memory of the result, and where it begins */
    i64 column, columns;             /* the column where it begins, and how many there are */
} Views;

/* Memory to bring into the L2 cache meanwhile, so many lines at a time: what will be packed next. */
typedef struct { const char *from, *end; i64 lines; } Ahead;

/* [from, end), at so many times. */
static Ahead look_ahead(const void *from, const void *end, i64 times)
{
    return (Ahead){from, end, ((const char *)end - (const char *)from) / 64 / at_least(times, 1) + 1};
}

static inline void fetch(Ahead *ahead)
{
    for (i64 k = 0; k < ahead->lines && ahead->from < ahead->end; k++, ahead->from += 64) __builtin_prefetch(ahead->from, 0, 2);
}

/* Memory for the lists of one Views, or none in `memory`. */
typedef struct { void *memory; Tap *tap; i64 *left; Bounds *bounds; } Room;

static Room views_room(Memory *m, i64 taps, i64 phases)
{
    char *memory = borrow(m, taps * sizeof(Tap) + (taps + 1) * (sizeof(i64) + phases * sizeof(Bounds)));
    Tap *tap = (Tap *)memory;
    Bounds *bounds = (Bounds *)(tap + taps);
    return (Room){memory, tap, (i64 *)(bounds + (taps + 1) * phases), bounds};
}

/* Fills in what follows from the image, the result and the taps; blocks of so many rows that the packed image takes no more
   than `most` numbers, where that can be. */
static void lay_views(Views *s, i64 sw, i64 lanes, i64 most)
{
    i64 top = 0, bottom = 0, start = 0, end = 0;
    for (i64 t = 0; t < s->taps; t++) {
        top = t ? at_most(top, s->tap[t].ty) : s->tap[t].ty;
        bottom = t ? at_least(bottom, s->tap[t].ty) : s->tap[t].ty;
        start = t ? at_most(start, s->tap[t].tx) : s->tap[t].tx;
        end = t ? at_least(end, s->tap[t].tx) : s->tap[t].tx;
    }
    /* in operations on vectors: what a term takes, and copying a row, which takes some of its own */
    i64 row_vectors = (s->ow + lanes - 1) / lanes, tiles = (s->outputs + 7) / 8 * 8 * s->groups;
    i64 saved = (s->oh * row_vectors - (s->oh * s->ow + lanes - 1) / lanes) * tiles * s->c / s->groups * s->taps;
    int wide = sw == 1 && saved <= (end - start) * s->c * s->oh * (row_vectors + COPY_ROW);
    s->row_vectors = wide ? row_vectors : 0;
    s->views = 0;
    for (i64 t = 0; t < s->taps && !wide; t++) {
        i64 view = 0;
        while (view < s->views && s->left[view] != s->tap[t].tx) view++;
        if (view == s->views) s->left[s->views++] = s->tap[t].tx;
    }
    if (wide || !s->views) { s->left[0] = start; s->views = 1; }
    s->step = sw;
    s->width = wide ? s->ow + end - start : s->ow;
    s->top = top;
    s->phases = at_most(s->sh, bottom - top + 1);
    i64 more = (bottom - top) / s->sh, row = s->c * s->views * s->phases * s->width;
    s->block = clip(most / at_least(row, 1) - more, at_most(4, s->oh), s->oh);
    s->rows = s->block + more;
    for (i64 t = 0; t < s->taps; t++) {
        i64 view = 0, down = s->tap[t].ty - top;
        while (!wide && s->left[view] != s->tap[t].tx) view++;
        s->tap[t].offset = (view * s->phases + down % s->sh) * s->rows * s->width + down / s->sh * s->width
                           + (wide ? s->tap[t].tx - start : 0);
    }
}

/* These use `room`; nothing where that has no memory. */
static Views forward_views(const Geometry *g, const Room *room, i64 lanes, i64 most)
{
    Views s = {.c = g->c, .h = g->h, .w = g->w, .groups = g->groups, .outputs = g->o / g->groups, .sh = g->sh, .oh = g->oh,
               .ow = g->ow, .tap = room->tap, .left = room->left, .bounds = room->bounds,
               .image = g->o * g->oh * g->ow, .plane = g->oh * g->ow, .down = g->ow, .right = 1, .columns = g->ow};
    if (!room->memory) return s;
    for (i64 ky = 0; ky < g->kh; ky++) for (i64 kx = 0; kx < g->kw; kx++)
        s.tap[s.taps++] = (Tap){ky * g->dh - g->ph, kx * g->dw - g->pw, ky * g->kw + kx, 0};
    lay_views(&s, g->sw, lanes, most);
    return s;
}

/* Phase (py, px) of the image, the part that is not padding, as a convolution of y with the kernel elements that meet it. */
static Views phase_views(const Geometry *g, i64 py, i64 px, const Room *room, i64 lanes, i64 most)
{
    i64 r0, r1, j0, j1;
    inside(py - g->ph, g->sh, g->h, (g->ph + g->h - 1) / g->sh + 1, &r0, &r1);
    inside(px - g->pw, g->sw, g->w, (g->pw + g->w - 1) / g->sw + 1, &j0, &j1);
    Views s = {.c = g->o, .h = g->oh, .w = g->ow, .groups = g->groups, .outputs = g->c / g->groups, .sh = 1, .oh = r1 - r0,
               .ow = j1 - j0, .tap = room->tap, .left = room->left, .bounds = room->bounds,
               .image = g->c * g->h * g->w, .plane = g->h * g->w, .down = g->sh * g->w,
               .right = g->sw, .column = j0 * g->sw + px - g->pw, .columns = g->w, .corner = (r0 * g->sh + py - g->ph) * g->w + j0 * g->sw + px - g->pw};
    if (!room->memory) return s;
    for (i64 ky = 0; ky < g->kh; ky++) for (i64 kx = 0; kx < g->kw; kx++)
        if (ky * g->dh % g->sh == py && kx * g->dw % g->sw == px)
            s.tap[s.taps++] = (Tap){r0 - ky * g->dh / g->sh, j0 - kx * g->dw / g->sw, ky * g->kw + kx, 0};
    if (s.oh > 0 && s.ow > 0) lay_views(&s, 1, lanes, most);
    return s;
}

#endif
