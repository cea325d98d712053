/* Convolutions of floats whose operands are rounded to bfloat16 (to the nearest, ties to even) and whose sums are floats.

   Two numbers make a pair, a word of 32 bits, and AVX512-BF16 adds both products of two pairs to a float. So images of pairs are
   convolved by the loops of convolution.h and its neighbours, which move words and leave arithmetic to that instruction: forward
   pairs two channels of the image, the adjoint two of the result, the gradient of the kernel two images. A last one without
   a partner has zero for it. The order of the sums depends on shapes only.

   Numbers and results below 2^-126 are zeros to the instruction; without it the same sums are made of fused multiply-adds, and
   keep them. */

#define ADD_SCALED(sum, a, b) ((V)add_products((Floats)(sum), bits_of(a), (Words)(b)))
#define ADD_PRODUCT(sum, a, b) ((V)add_pairs((Floats)(sum), (Words)(a), (Words)(b)))

#include "convolution_tiles.h"
#include "pairs.h"

#define T float
#define INTEGER int32_t
#define LANES FLOATS
#define NAME(name) name##_pairs
#include "turn.h"

/* to[i] = the pair of one[i] and two[i], or of one[i] and zero. */
static void pair_up(const float *one, const float *two, u32 *to, i64 n)
{
    i64 i = 0;
    for (; i + LANES <= n; i += LANES)
        *(Words *)(to + i) = pairs_of(*(const Words *)(one + i), two ? *(const Words *)(two + i) : (Words){0});
    for (; i < n; i++) to[i] = pair_of(one[i], two ? two[i] : 0);
}

/* Images of pairs, made from x when they are wanted: they are not to be written to memory and read again. An image has `sets` of
   `count` planes each; two planes make one of pairs, the last of a set, and the one before `end`, pairs with zeros. */
typedef struct { const float *x, *end; i64 sets, count, plane, n; u32 *room; } Images_pairs;

static i64 size_of_image(const Images_pairs *s) { return s->sets * ((s->count + 1) / 2) * s->plane; }

static int make_room_pairs(Memory *m, Images_pairs *s, i64 count)
{
    s->room = borrow(m, (count * size_of_image(s) + LANES) * sizeof(u32));
    return !s->room;
}

static const T *ready_pairs(const Images_pairs *s, i64 first, i64 count, const T **end)
{
    u32 *to = s->room;
    for (i64 set = first * s->sets; set < (first + count) * s->sets; set++) for (i64 k = 0; k < s->count; k += 2, to += s->plane) {
        const float *one = s->x + (set * s->count + k) * s->plane, *two = one + s->plane;
        pair_up(one, k + 1 < s->count && two < s->end ? two : NULL, to, s->plane);
    }
    *end = (const T *)to;
    return (const T *)s->room;
}

static Ahead images_ahead_pairs(const Images_pairs *s, i64 first, i64 count, i64 times)
{
    i64 size = s->sets * s->count * s->plane, rest = s->end - s->x - first * size;
    return look_ahead(s->x + first * size, s->x + first * size + clip(rest, 0, count * size), times);
}

#include "convolution.h"
#include "channel_sums.h"
#include "position_gradient.h"
#include "dense_gradient.h"

/* Whether convolutions run on the CPU's own bfloat16 instruction. */
int convolution_bfloat16_is_fast(void) { return HAS_INSTRUCTION; }

/* n images of `channels` in `groups`, two channels of a group a pair. */
static Images_pairs by_channels(const float *x, i64 n, i64 groups, i64 channels, i64 plane)
{
    return (Images_pairs){x, x + n * groups * channels * plane, groups, channels, plane, n, NULL};
}

/* n images, two images a pair. */
static Images_pairs by_images(const float *x, i64 n, i64 size)
{
    return (Images_pairs){x, x + n * size, 1, 2, size, (n + 1) / 2, NULL};
}

/* A kernel's `sets` of `count` parts, two of them a pair. NULL without memory. */
static const T *weight_pairs(Memory *m, const float *weight, i64 sets, i64 count, i64 part)
{
    const T *end;
    Images_pairs one = by_channels(weight, 1, sets, count, part);
    return make_room_pairs(m, &one, 1) ? NULL : ready_pairs(&one, 0, 1, &end);
}

static int forward_in(Memory *m, const float *x, const float *weight, const float *bias, float *y, const Geometry *g)
{
    i64 channels = g->c / g->groups, pairs = (channels + 1) / 2, outputs = g->o / g->groups, area = g->kh * g->kw;
    Geometry of_pairs = *g;
    of_pairs.c = g->groups * pairs;
    Product_pairs product = {0};
    Room room = views_room(m, area, g->sh);
    Images_pairs images = by_channels(x, g->n, g->groups, channels, g->h * g->w);
    const T *weights = weight_pairs(m, weight, g->o, channels, area);
    if (!room.memory || !weights) return 1;
    Views s = forward_views(&of_pairs, &room, LANES, PACKED_BYTES / sizeof(T));
    return prepare_pairs(m, &product, &s, weights, outputs * pairs * area, pairs * area, area, bias)
           || multiply_all_pairs(m, &product, &s, 1, &images, y);
}

/* y (N, O, OH, OW) = x (N, C, H, W) * weight (O, C/groups, kh, kw) + bias (or NULL). */
int forward_bfloat16(const float *x, const float *weight, const float *bias, float *y, const Geometry *g, void *memory, i64 bytes,
                     i64 *wanted)
{
    Memory m = memory_of(memory, bytes);
    int failed = forward_in(&m, x, weight, bias, y, g);
    give_back(&m, wanted);
    return failed;
}

static int adjoint_in(Memory *m, const float *y, const float *weight, const float *bias, float *x, const Geometry *g)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, pairs = (outputs + 1) / 2, area = g->kh * g->kw;
    i64 phases = g->sh * g->sw;
    Geometry of_pairs = *g;
    of_pairs.o = g->groups * pairs;
    Product_pairs *product = borrow(m, phases * sizeof *product);
    Views *s = borrow(m, phases * sizeof *s);
    Images_pairs maps = by_channels(y, g->n, g->groups, outputs, g->oh * g->ow);
    const T *weights = weight_pairs(m, weight, g->groups, outputs, channels * area);     /* (groups, pairs, channels, area) */
    if (!product || !s || !weights) return 1;
    for (i64 k = 0; k < phases; k++) {
        Room room = views_room(m, area, 1);
        if (!room.memory) return 1;
        s[k] = phase_views(&of_pairs, k / g->sw, k % g->sw, &room, LANES, PACKED_BYTES / sizeof(T));
        if (s[k].oh > 0 && s[k].ow > 0
            && prepare_pairs(m, product + k, s + k, weights, pairs * channels * area, area, channels * area, bias)) return 1;
    }
    return multiply_all_pairs(m, product, s, phases, &maps, x);
}

/* x (N, C, H, W) = the adjoint of forward applied to y (N, O, OH, OW), plus bias (or NULL) of each channel of x. */
int adjoint_bfloat16(const float *y, const float *weight, const float *bias, float *x, const Geometry *g, void *memory, i64 bytes,
                     i64 *wanted)
{
    Memory m = memory_of(memory, bytes);
    int failed = adjoint_in(&m, y, weight, bias, x, g);
    give_back(&m, wanted);
    return failed;
}

static int kernel_gradient_in(Memory *m, const float *x, const float *y, float *weight, const Geometry *g)
{
    i64 outputs = g->o / g->groups, terms = g->c / g->groups * g->kh * g->kw, dense;
    i64 columns = g->ow + (g->kw - 1) * g->dw / g->sw;
    i64 tiles = (outputs + LEFT - 1) / LEFT * ((terms + RIGHT - 1) / RIGHT), parts = (g->oh * columns + LANES - 1) / LANES;
    Geometry of_pairs = *g;
    of_pairs.n = (g->n + 1) / 2;
    Channels_pairs none = {0};
    Images_pairs images = by_images(x, g->n, g->c * g->h * g->w), maps = by_images(y, g->n, g->o * g->oh * g->ow);
    best_gradient_tile_pairs(g, &dense);
    int suits = dense * g->oh * g->ow < POSITION_SLOWNESS * tiles * LEFT * RIGHT * parts;
    if (!suits) {                                                              /* as in convolution_choice.h */
        if (position_gradient_pairs(m, &images, &maps, weight, &of_pairs, &none)) return 1;
        if (!not_finite_pairs(weight, g->o * terms)) return 0;
    }
    return dense_gradient_pairs(m, &images, &maps, weight, &of_pairs, &none);
}

/* weight (O, C/groups, kh, kw) = sum over images and positions of y (N, O, OH, OW) times the window of x there; bias (or NULL) of
   each channel = the sum of y over the same, or of x where `of_x`: these are not rounded. */
int kernel_gradient_bfloat16(const float *x, const float *y, float *weight, float *bias, i64 of_x, const Geometry *g, void *memory,
                             i64 bytes, i64 *wanted)
{
    Memory m = memory_of(memory, bytes);
    Channels_pairs channels = {NULL, y, g->o, g->oh * g->ow};
    if (of_x) channels = (Channels_pairs){NULL, x, g->c, g->h * g->w};
    if (bias) channels.sums = borrow_zeros(&m, channels.channels * sizeof(double));
    int failed = (bias && !channels.sums) || kernel_gradient_in(&m, x, y, weight, g);
    for (i64 n = 0; bias && !failed && n < g->n; n++) add_image_pairs(&channels, n);
    for (i64 c = 0; bias && !failed && c < channels.channels; c++) bias[c] = (float)channels.sums[c];
    give_back(&m, wanted);
    return failed;
}
