/* One layer of an LSTM, GRU or RNN over whole sequences, in one call, and its gradient in another; float and double, one thread.

   The products with the inputs are made before, those that give the weights' gradients afterwards, each for all steps at once
   (kernels/recurrent.py). Here the state runs: the weight it is multiplied with is packed once, in panels that stay in the L2
   cache, and the gates of a few rows are computed while the L1 cache has their products. Sums are those of product.h, in the same
   order: a row has the same bits whatever batch it is part of. */

#ifndef T

#include "gates.h"
#include "blocks.h"

/* Sequences of several lengths, the longest first: step t has sizes[t] rows, the steps lie one after the other. A walk goes up or
   down the steps. */
typedef struct { const i64 *sizes; i64 steps, by, t, first, rows; } Walk;

static Walk walk(const i64 *sizes, i64 steps, i64 down)
{
    i64 all = 0;
    for (i64 t = 0; t < steps; t++) all += sizes[t];
    return (Walk){sizes, steps, down ? -1 : 1, down ? steps : -1, down ? all : 0, 0};
}

static int take_step(Walk *w)
{
    if (w->by > 0) w->first += w->rows;
    w->t += w->by;
    if (w->t < 0 || w->t >= w->steps) return 0;
    w->rows = w->sizes[w->t];
    if (w->by < 0) w->first -= w->rows;
    return 1;
}

/* Where the rows of the walk's next step begin, and how many of this step's it has. Backward walks against time: there that is the
   state before. */
typedef struct { i64 first, rows; } Beyond;

static Beyond beyond(const Walk *w)
{
    i64 t = w->t + w->by;
    if (t < 0 || t >= w->steps) return (Beyond){0, 0};
    i64 first = w->by > 0 ? w->first + w->rows : w->first - w->sizes[t];
    return (Beyond){first, least(w->sizes[t], w->rows)};
}

static i64 rows_at_once(i64 left) { return left >= ROWS ? ROWS : left >= ROWS / 2 ? ROWS / 2 : 1; }

#define SOURCE "recurrent.c"
#include "both.h"

#else

#include "product.h"
#include "recurrent.h"

#endif
