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

/* See kernel_gradient(). */
static int NAME(position_gradient)(const T *x, const T *y, T *weight, const Geometry *g)
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
