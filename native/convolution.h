/* The body of convolution.c for one number type T. */

#define LANES ((i64)(VECTOR_BYTES / sizeof(T)))
#define V NAME(vector)
#define SLACK (VECTORS * LANES)      /* tiles read this far past the end */

typedef T V __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));

/* ROWS x (vectors * LANES) results: out[i * stride + p] = sum over r of left[r * ROWS + i] * right[offset[r] + p]. */
INLINE void NAME(tile)(const T *left, const T *right, const i64 *offset, i64 terms, T *out, i64 stride, const int vectors)
{
    V sum[ROWS][VECTORS] = {0};
    for (i64 r = 0; r < terms; r++) {
        V b[VECTORS];
        for (int v = 0; v < vectors; v++) b[v] = *(const V *)(right + offset[r] + v * LANES);
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < vectors; v++) sum[i][v] += left[r * ROWS + i] * b[v];
    }
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) *(V *)(out + i * stride + v * LANES) = sum[i][v];
}

static void NAME(tiles)(const T *left, const T *right, const i64 *offset, i64 terms, T *out, i64 stride, i64 positions)
{
    i64 p = 0;
    for (; p + (VECTORS - 1) * LANES < positions; p += VECTORS * LANES)
        NAME(tile)(left, right + p, offset, terms, out + p, stride, VECTORS);
    if (positions - p > LANES) NAME(tile)(left, right + p, offset, terms, out + p, stride, 2);
    else if (positions > p) NAME(tile)(left, right + p, offset, terms, out + p, stride, 1);
}

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
                for (int i = 0; i < LEFT; i++) sum[i][j] += a[i] * b;
            }
        }
    for (int i = 0; i < LEFT; i++)
        for (int j = 0; j < RIGHT; j++) {
            T part[LANES];
            *(V *)part = sum[i][j];
            if (LANES >= 16) for (i64 l = 0; l < 8; l++) part[l] += part[l + 8];      /* LANES is 2 to 16 */
            if (LANES >= 8) for (i64 l = 0; l < 4; l++) part[l] += part[l + 4];
            if (LANES >= 4) for (i64 l = 0; l < 2; l++) part[l] += part[l + 2];
            out[i][j] = part[0] + part[1];
        }
}

/* to[0..columns) = from[start * stride ...] in columns [start, stop), zero elsewhere: a row of a padded image. */
INLINE void NAME(pad_row)(T *restrict to, const T *restrict from, i64 start, i64 stop, i64 columns, i64 stride)
{
    for (i64 i = 0; i < start; i++) to[i] = 0;
    if (stride == 1) for (i64 i = start; i < stop; i++) to[i] = from[i];
    else for (i64 i = start; i < stop; i++) to[i] = from[i * stride];
    for (i64 i = stop; i < columns; i++) to[i] = 0;
}

/* to[i * stride] = from[i] + bias */
INLINE void NAME(store_row)(T *restrict to, const T *restrict from, i64 start, i64 stop, i64 stride, T bias)
{
    if (stride == 1) for (i64 i = start; i < stop; i++) to[i] = from[i] + bias;
    else for (i64 i = start; i < stop; i++) to[i * stride] = from[i] + bias;
}

/* One image, zero-padded, split into phases: to[c, py, px, y, x] = x[c, y*sh + py - ph, x*sw + px - pw], planes rows x columns.
   Phases that no kernel element looks at are left as they are. */
static void NAME(pack_phases)(const T *x, T *to, const Geometry *g, i64 rows, i64 columns)
{
    for (i64 c = 0; c < g->c; c++)
        for (i64 py = 0; py < g->sh; py++) for (i64 px = 0; px < g->sw; px++, to += rows * columns) {
            i64 ky = 0, kx = 0, y0, y1, x0, x1;
            while (ky < g->kh && ky * g->dh % g->sh != py) ky++;
            while (kx < g->kw && kx * g->dw % g->sw != px) kx++;
            if (ky == g->kh || kx == g->kw) continue;
            inside(py - g->ph, g->sh, g->h, rows, &y0, &y1);
            inside(px - g->pw, g->sw, g->w, columns, &x0, &x1);
            memset(to, 0, y0 * columns * sizeof(T));
            memset(to + y1 * columns, 0, (rows - y1) * columns * sizeof(T));
            for (i64 y = y0; y < y1; y++) {
                const T *from = x + (c * g->h + y * g->sh + py - g->ph) * g->w + px - g->pw;
                NAME(pad_row)(to + y * columns, from, x0, x1, columns, g->sw);
            }
        }
}

/* Planes of (from_rows, from_columns) into planes of (rows, columns), `step` apart: top left corner at (top, left), zero
   around it. */
static void NAME(pack_planes)(const T *from, i64 from_rows, i64 from_columns, T *to, i64 step, i64 rows, i64 columns,
                              i64 top, i64 left, i64 planes)
{
    i64 height = at_most(from_rows, rows - top), width = at_most(from_columns, columns - left);
    for (i64 p = 0; p < planes; p++, from += from_rows * from_columns, to += step) {
        memset(to, 0, top * columns * sizeof(T));
        for (i64 y = 0; y < height; y++) {
            const T *row = from + y * from_columns - left;
            NAME(pad_row)(to + (top + y) * columns, row, left, left + width, columns, 1);
        }
        memset(to + (top + height) * columns, 0, (rows - top - height) * columns * sizeof(T));
    }
}

/* Rows of the result done at a time: their part of the packed channels should stay in cache. */
static i64 NAME(block_rows)(i64 rows, i64 columns, i64 channels)
{
    i64 positions = clip(PACKED_BYTES / 2 / (i64)sizeof(T) / channels, 4 * SLACK, BLOCK_POSITIONS);
    i64 most = clip(positions / columns, 1, rows), blocks = (rows + most - 1) / most;
    return (rows + blocks - 1) / blocks;
}

/* y (N, O, OH, OW) = x (N, C, H, W) * weight (O, C/groups, kh, kw) + bias (or NULL). Returns 1 without memory. */
int NAME(forward)(const T *x, const T *weight, const T *bias, T *y, const Geometry *g)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, tiles = (outputs + ROWS - 1) / ROWS;
    i64 terms = channels * g->kh * g->kw;
    i64 rows = g->oh + (g->kh - 1) * g->dh / g->sh, columns = g->ow + (g->kw - 1) * g->dw / g->sw;
    i64 plane = rows * columns, phases = g->sh * g->sw, image = g->c * phases * plane;
    i64 chunk = clip(PACKED_BYTES / (i64)sizeof(T) / image, 1, at_least(g->n, 1));
    i64 block = NAME(block_rows)(g->oh, columns, channels), stride = (block * columns / LANES + 1) * LANES + SLACK;
    T *packed = aligned((chunk * image + SLACK) * sizeof(T));
    T *left = aligned(g->groups * tiles * terms * ROWS * sizeof(T));
    T *result = aligned(ROWS * stride * sizeof(T));
    i64 *offset = malloc(terms * sizeof(i64));
    int failed = !packed || !left || !result || !offset;
    if (failed) goto done;

    for (i64 c = 0, r = 0; c < channels; c++)
        for (i64 ky = 0; ky < g->kh; ky++) for (i64 kx = 0; kx < g->kw; kx++, r++) {
            i64 dy = ky * g->dh, dx = kx * g->dw;
            offset[r] = (c * phases + dy % g->sh * g->sw + dx % g->sw) * plane + dy / g->sh * columns + dx / g->sw;
        }
    for (i64 t = 0; t < g->groups * tiles; t++)
        for (i64 r = 0; r < terms; r++) for (i64 i = 0; i < ROWS; i++) {
            i64 o = t % tiles * ROWS + i;
            left[(t * terms + r) * ROWS + i] = o < outputs ? weight[(t / tiles * outputs + o) * terms + r] : 0;
        }
    for (i64 first = 0; first < g->n; first += chunk) {
        i64 images = at_most(chunk, g->n - first);
        for (i64 n = 0; n < images; n++)
            NAME(pack_phases)(x + (first + n) * g->c * g->h * g->w, packed + n * image, g, rows, columns);
        for (i64 y0 = 0; y0 < g->oh; y0 += block) for (i64 t = 0; t < g->groups * tiles; t++) for (i64 n = 0; n < images; n++) {
            i64 height = at_most(block, g->oh - y0), o0 = t % tiles * ROWS, group = t / tiles;
            const T *right = packed + n * image + group * channels * phases * plane + y0 * columns;
            NAME(tiles)(left + t * terms * ROWS, right, offset, terms, result, stride, (height - 1) * columns + g->ow);
            for (i64 i = 0; i < at_most(ROWS, outputs - o0); i++) {
                i64 o = group * outputs + o0 + i;
                T *to = y + (((first + n) * g->o + o) * g->oh + y0) * g->ow, b = bias ? bias[o] : 0;
                for (i64 r = 0; r < height; r++)
                    NAME(store_row)(to + r * g->ow, result + i * stride + r * columns, 0, g->ow, 1, b);
            }
        }
    }
done:
    free(packed); free(left); free(result); free(offset);
    return failed;
}

/* Where the rows of the right-hand matrix begin, for the pixels of phase (py, px): one for each output and each kernel
   element that meets the phase. Returns their number. */
static i64 NAME(phase_offsets)(const Geometry *g, i64 py, i64 px, i64 plane, i64 columns, i64 top, i64 edge, i64 *offset)
{
    i64 terms = 0;
    for (i64 o = 0; o < g->o / g->groups; o++) for (i64 ky = 0; ky < g->kh; ky++) for (i64 kx = 0; kx < g->kw; kx++)
        if (ky * g->dh % g->sh == py && kx * g->dw % g->sw == px)
            offset[terms++] = o * plane + (top - ky * g->dh / g->sh) * columns + edge - kx * g->dw / g->sw;
    return terms;
}

/* to[group and tile of ROWS channels, term, channel in the tile] = the weights of those elements, transposed. */
static void NAME(pack_phase_weights)(const Geometry *g, const T *weight, i64 py, i64 px, i64 terms, T *to)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, tiles = (channels + ROWS - 1) / ROWS;
    for (i64 t = 0; t < g->groups * tiles; t++) {
        i64 term = 0, c0 = t % tiles * ROWS;
        for (i64 o = 0; o < outputs; o++) for (i64 ky = 0; ky < g->kh; ky++) for (i64 kx = 0; kx < g->kw; kx++) {
            if (ky * g->dh % g->sh != py || kx * g->dw % g->sw != px) continue;
            const T *from = weight + (((t / tiles * outputs + o) * channels + c0) * g->kh + ky) * g->kw + kx;
            for (i64 i = 0; i < ROWS; i++)
                to[(t * terms + term) * ROWS + i] = c0 + i < channels ? from[i * g->kh * g->kw] : 0;
            term++;
        }
    }
}

/* Rows [y0, y0 + lines) of phase (py, px) of one channel, from rows of `columns` results, into the image; what lies in the
   padding is dropped. */
static void NAME(store_phase)(const Geometry *g, const T *from, T *x, T bias, i64 py, i64 px, i64 y0, i64 lines, i64 columns,
                              i64 width)
{
    i64 shift = py - g->ph + y0 * g->sh, r0, r1, j0, j1;
    inside(shift, g->sh, g->h, lines, &r0, &r1);
    inside(px - g->pw, g->sw, g->w, width, &j0, &j1);
    for (i64 r = r0; r < r1; r++) {
        T *line = x + (r * g->sh + shift) * g->w + px - g->pw;
        NAME(store_row)(line, from + r * columns, j0, j1, g->sw, bias);
    }
}

/* x (N, C, H, W) = the adjoint of forward applied to y (N, O, OH, OW), plus bias (or NULL) of each channel of x.
   Each phase of the image is a convolution of y with those kernel elements that meet the phase. */
int NAME(adjoint)(const T *y, const T *weight, const T *bias, T *x, const Geometry *g)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, tiles = (channels + ROWS - 1) / ROWS;
    i64 most = outputs * g->kh * g->kw;                  /* terms of all phases together */
    i64 top = (g->kh - 1) * g->dh / g->sh, edge = (g->kw - 1) * g->dw / g->sw;
    i64 height = (g->ph + g->h - 1) / g->sh + 1, width = (g->pw + g->w - 1) / g->sw + 1;      /* of a phase */
    i64 rows = height + top, columns = width + edge, plane = rows * columns, image = g->o * plane;
    i64 chunk = clip(PACKED_BYTES / (i64)sizeof(T) / image, 1, at_least(g->n, 1));
    i64 block = NAME(block_rows)(height, columns, outputs), stride = (block * columns / LANES + 1) * LANES + SLACK;
    T *packed = aligned((chunk * image + SLACK) * sizeof(T));
    T *left = aligned(g->groups * tiles * most * ROWS * sizeof(T));
    T *result = aligned(ROWS * stride * sizeof(T));
    i64 *offset = malloc(most * sizeof(i64));
    int failed = !packed || !left || !result || !offset;
    if (failed) goto done;

    for (i64 first = 0; first < g->n; first += chunk) {
        i64 images = at_most(chunk, g->n - first);
        for (i64 n = 0; n < images; n++)
            NAME(pack_planes)(y + (first + n) * g->o * g->oh * g->ow, g->oh, g->ow, packed + n * image, plane, rows,
                              columns, top, edge, g->o);
        T *tile = left;
        for (i64 py = 0; py < g->sh; py++) for (i64 px = 0; px < g->sw; px++) {
            i64 terms = NAME(phase_offsets)(g, py, px, plane, columns, top, edge, offset);
            if (first == 0) NAME(pack_phase_weights)(g, weight, py, px, terms, tile);
            for (i64 y0 = 0; y0 < height; y0 += block) for (i64 t = 0; t < g->groups * tiles; t++)
                for (i64 n = 0; n < images; n++) {
                    i64 lines = at_most(block, height - y0), c0 = t % tiles * ROWS, group = t / tiles;
                    const T *right = packed + n * image + group * outputs * plane + y0 * columns;
                    NAME(tiles)(tile + t * terms * ROWS, right, offset, terms, result, stride, (lines - 1) * columns + width);
                    for (i64 i = 0; i < at_most(ROWS, channels - c0); i++) {
                        i64 c = group * channels + c0 + i;
                        NAME(store_phase)(g, result + i * stride, x + ((first + n) * g->c + c) * g->h * g->w, bias ? bias[c] : 0,
                                          py, px, y0, lines, columns, width);
                    }
                }
            tile += g->groups * tiles * terms * ROWS;
        }
    }
done:
    free(packed); free(left); free(result); free(offset);
    return failed;
}

/* weight (O, C/groups, kh, kw) = sum over images and positions of y (N, O, OH, OW) times the window of x there. */
int NAME(kernel_gradient)(const T *x, const T *y, T *weight, const Geometry *g)
{
    i64 channels = g->c / g->groups, outputs = g->o / g->groups, padded = (outputs + LEFT - 1) / LEFT * LEFT;
    i64 terms = channels * g->kh * g->kw;
    i64 rows = g->oh + (g->kh - 1) * g->dh / g->sh, columns = g->ow + (g->kw - 1) * g->dw / g->sw;
    i64 plane = rows * columns, phases = g->sh * g->sw, image = g->c * phases * plane;
    i64 step = (g->oh * columns + LANES - 1) / LANES * LANES, maps = g->groups * padded * step;
    i64 least = GRADIENT_POSITIONS / 2 / step, most = GRADIENT_POSITIONS / step;
    i64 chunk = clip(PACKED_BYTES / (i64)sizeof(T) / (image + maps), at_least(least, 1), at_least(most, 1));
    i64 block = (at_most(g->oh, GRADIENT_POSITIONS / columns) + LANES - 1) / LANES * LANES; /* ends at a whole vector */
    block = at_least(block, LANES);
    T *packed = aligned((chunk * image + SLACK) * sizeof(T)), *left = aligned((chunk * maps + SLACK) * sizeof(T));
    i64 *offset = malloc((terms + RIGHT) * sizeof(i64));
    int failed = !packed || !left || !offset;
    if (failed) goto done;

    memset(packed, 0, (chunk * image + SLACK) * sizeof(T));  /* what is thrown away is multiplied by zero here, and zero */
    memset(left, 0, (chunk * maps + SLACK) * sizeof(T));     /* times garbage may be NaN */
    memset(weight, 0, g->o * terms * sizeof(T));
    for (i64 c = 0, r = 0; c < channels; c++)
        for (i64 ky = 0; ky < g->kh; ky++) for (i64 kx = 0; kx < g->kw; kx++, r++) {
            i64 dy = ky * g->dh, dx = kx * g->dw;
            offset[r] = (c * phases + dy % g->sh * g->sw + dx % g->sw) * plane + dy / g->sh * columns + dx / g->sw;
        }
    for (i64 r = terms; r < terms + RIGHT; r++) offset[r] = 0;
    for (i64 first = 0; first < g->n; first += chunk) {
        i64 images = at_most(chunk, g->n - first);
        for (i64 n = 0; n < images; n++) {
            NAME(pack_phases)(x + (first + n) * g->c * g->h * g->w, packed + n * image, g, rows, columns);
            for (i64 group = 0; group < g->groups; group++)
                NAME(pack_planes)(y + ((first + n) * g->o + group * outputs) * g->oh * g->ow, g->oh, g->ow,
                                  left + n * maps + group * padded * step, step, g->oh, columns, 0, 0, outputs);
        }
        for (i64 y0 = 0; y0 < g->oh; y0 += block) for (i64 group = 0; group < g->groups; group++)
            for (i64 o = 0; o < outputs; o += LEFT) for (i64 r = 0; r < terms; r += RIGHT) {
                T part[LEFT][RIGHT];
                i64 positions = at_most(block, g->oh - y0) * columns;
                NAME(inner)(left + (group * padded + o) * step + y0 * columns, maps, step,
                            packed + group * channels * phases * plane + y0 * columns, image, offset + r, images, positions,
                            part);
                for (i64 i = 0; i < at_most(LEFT, outputs - o); i++) for (i64 j = 0; j < at_most(RIGHT, terms - r); j++)
                    weight[(group * outputs + o + i) * terms + r + j] += part[i][j];
            }
    }
done:
    free(packed); free(left); free(offset);
    return failed;
}

#undef LANES
#undef V
#undef SLACK
