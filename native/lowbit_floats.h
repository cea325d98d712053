/* Products of floats with weights in few bits, for lowbit.c: y = x w' * scales + bias.

   Weights become floats, whose products with x are added as `dot` does: number l of LANES partial sums has the terms r with
   r % LANES = l, in order and fused, and `folded` adds the partial sums as one fixed tree. For one row of x, weights become
   floats in registers. For more, a panel of COLUMNS rows of w becomes floats on the stack, in the L1 cache, and rows of x go
   along it two by two: a conversion for each number of w, not for each product. */

#define COLUMNS 8                   /* rows of w at a time, and numbers of y in a row of a tile */
#define PART 800                    /* terms at a time: COLUMNS rows of so many floats are 24 KiB */
#define BLOCK 128                   /* rows of x that go along the same floats of w */
#define EACH_COLUMN UNROLL for (int c = 0; c < COLUMNS; c++)

/* w (n, k): in int8 with scales `by` of its rows, in int4 with `scales` of `groups` a row. */
typedef struct { const u8 *w; const float *by; const u16 *scales; i64 n, k, groups; } Weights;

/* Terms r to r + count of row j of w as floats. In int4 r is a multiple of GROUP; four bits times a float16 are exact. */
static void widen(const Weights *f, i64 j, i64 r, i64 count, float *to)
{
    if (!f->scales) {
        for (i64 i = 0; i < count; i++) to[i] = ((const i8 *)f->w)[j * f->k + r + i];
        return;
    }
    for (i64 i = 0; i < count; i++) {
        const i64 g = j * f->groups + (r + i) / GROUP, place = i % GROUP;
        const u8 both = f->w[g * HALF + place % HALF];
        to[i] = (float)((place < HALF ? both & 15 : both >> 4) - 8) * unpack_float16_1(f->scales[g]);
    }
}

/* Adds products of `count` numbers to LANES sums. */
INLINE void dot(const float *x, const float *w, i64 count, float *sum)
{
    for (; count >= LANES; count -= LANES, x += LANES, w += LANES)
        for (int l = 0; l < LANES; l++) sum[l] = __builtin_fmaf(x[l], w[l], sum[l]);
    for (int l = 0; l < count; l++) sum[l] = __builtin_fmaf(x[l], w[l], sum[l]);
}

/* All of y, number by number. */
static void plain(const Weights *f, const float *x, const float *bias, float *y, i64 m)
{
    float wide[PART], sum[BLOCK][LANES];
    for (i64 i0 = 0; i0 < m; i0 += BLOCK)
        for (i64 c = 0; c < f->n; c++) {
            const i64 rows = least(BLOCK, m - i0);
            memset(sum, 0, sizeof sum);
            for (i64 r = 0; r < f->k; r += PART) {
                widen(f, c, r, least(PART, f->k - r), wide);
                for (i64 i = 0; i < rows; i++) dot(x + (i0 + i) * f->k + r, wide, least(PART, f->k - r), sum[i]);
            }
            for (i64 i = 0; i < rows; i++) {
                float made = f->by ? folded(sum[i]) * f->by[c] : folded(sum[i]);
                y[(i0 + i) * f->n + c] = bias ? made + bias[c] : made;
            }
        }
}

#ifdef WIDE
/* Half of two vectors' sums: in the low half a's, in the high one b's. */
INLINE V halves(V a, V b)
{
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}

/* In quarter t of a vector the quarter sums of v[t]. */
INLINE V quarters_of(const V *v)
{
    V a = halves(v[0], v[1]), b = halves(v[2], v[3]);
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

INLINE V pairs_of(V a, V b) { return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }

/* The folded sums of 16 vectors. */
INLINE V sixteen_folded(const V *v)
{
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    V low = pairs_of(quarters_of(v), quarters_of(v + 4)), high = pairs_of(quarters_of(v + 8), quarters_of(v + 12));
    return _mm512_permutexvar_ps(turned, pairs_of(low, high));
}

INLINE V as_floats(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
INLINE V table_of_nibbles(void) { return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE __mmask16 first(i64 count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

INLINE V int8_at(const u8 *w) { return as_floats(_mm_loadu_si128((const __m128i *)w)); }

/* The two halves of a group as floats: `table` has the 16 values of four bits times the scale. */
INLINE void int4_of(const u8 *w, V table, V *low, V *high)
{
    __m512i nibbles = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)w));
    *low = _mm512_permutexvar_ps(nibbles, table);
    *high = _mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 4), table);
}

INLINE void int4_at(const u8 *w, u16 scale, V *low, V *high)
{
    int4_of(w, _mm512_mul_ps(table_of_nibbles(), _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(scale)))), low, high);
}

/* x times a number in memory; GCC loads that before, and moves it through the lanes. */
INLINE V times(V x, const float *number)
{
    V y;
    __asm__("vmulps %2%{1to16%}, %1, %0" : "=v"(y) : "v"(x), "m"(*number));
    return y;
}

/* Writes sums * scales + bias of `rows` rows of COLUMNS numbers, from column j on, without fusing. */
INLINE void put(const Weights *f, const V *sum, const float *bias, float *y, i64 j, const int rows)
{
    V made = sixteen_folded(sum);
    if (f->by) made = _mm512_mul_ps(made, _mm512_broadcast_f32x8(_mm256_loadu_ps(f->by + j)));
    if (bias) made = _mm512_add_ps(made, _mm512_broadcast_f32x8(_mm256_loadu_ps(bias + j)));
    _mm256_storeu_ps(y + j, _mm512_castps512_ps256(made));
    if (rows == 2) _mm256_storeu_ps(y + f->n + j, _mm512_extractf32x8_ps(made, 1));
}

/* COLUMNS numbers of a row of y, with weights made floats in registers. */
static void one_row(const Weights *f, const float *x, const float *bias, float *y, i64 j)
{
    const i64 k = f->k, groups = f->groups;
    V sum[2 * COLUMNS];
    UNROLL for (int c = 0; c < 2 * COLUMNS; c++) sum[c] = _mm512_setzero_ps();
    if (f->scales) {
        const u8 *w = f->w + j * groups * HALF;
        const u16 *scales = f->scales + j * groups;
        float by[COLUMNS][4];
        i64 g = 0;
        for (; g + 4 <= k / GROUP; g += 4) {                 /* scales of four groups become floats at once: a fifth less time */
            EACH_COLUMN NEXT(w + (c * groups + g) * HALF, COLUMNS * groups * HALF);
            EACH_COLUMN _mm_storeu_ps(by[c], _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(scales + c * groups + g))));
            UNROLL for (int part = 0; part < 4; part++) {
                V left = _mm512_loadu_ps(x + (g + part) * GROUP), right = _mm512_loadu_ps(x + (g + part) * GROUP + HALF), low, high;
                EACH_COLUMN {
                    int4_of(w + (c * groups + g + part) * HALF, times(table_of_nibbles(), &by[c][part]), &low, &high);
                    sum[c] = _mm512_fmadd_ps(right, high, _mm512_fmadd_ps(left, low, sum[c]));
                }
            }
        }
        for (; g < groups; g++) {
            const float *from = x + g * GROUP;
            const i64 rest = k - g * GROUP;
            V left = _mm512_maskz_loadu_ps(first(rest), from), right = _mm512_maskz_loadu_ps(first(rest - HALF), from + HALF);
            EACH_COLUMN {
                V low, high;
                int4_at(w + (c * groups + g) * HALF, scales[c * groups + g], &low, &high);
                sum[c] = _mm512_fmadd_ps(right, high, _mm512_fmadd_ps(left, low, sum[c]));
            }
        }
    } else {
        const u8 *w = f->w + j * k;
        i64 r = 0;
        for (; r + 4 * LANES <= k; r += 4 * LANES) {
            EACH_COLUMN NEXT(w + c * k + r, COLUMNS * k);
            UNROLL for (int part = 0; part < 4 * LANES; part += LANES) {
                V left = _mm512_loadu_ps(x + r + part);
                EACH_COLUMN sum[c] = _mm512_fmadd_ps(left, int8_at(w + c * k + r + part), sum[c]);
            }
        }
        for (; r < k; r += LANES) {
            V left = _mm512_maskz_loadu_ps(first(k - r), x + r);
            EACH_COLUMN sum[c] = _mm512_fmadd_ps(left, as_floats(_mm_maskz_loadu_epi8(first(k - r), w + c * k + r)), sum[c]);
        }
    }
    put(f, sum, bias, y, j, 1);
}

/* `count` terms from r on of COLUMNS rows of w: vector v of row c is to[v * COLUMNS + c], zeros behind the last term. */
static void panel(const Weights *f, i64 j, i64 r, i64 count, V *to)
{
    const i64 k = f->k, groups = f->groups;
    if (f->scales) {
        const i64 at = j * groups + r / GROUP;
        for (i64 g = 0; g * GROUP < count; g++, to += 2 * COLUMNS)
            EACH_COLUMN {
                if (g % 4 == 0) NEXT(f->w + (at + c * groups + g) * HALF, COLUMNS * groups * HALF);
                int4_at(f->w + (at + c * groups + g) * HALF, f->scales[at + c * groups + g], to + c, to + COLUMNS + c);
            }
        return;
    }
    const u8 *w = f->w + j * k + r;
    for (i64 i = 0; i < count; i += LANES, to += COLUMNS)
        EACH_COLUMN {
            if (i % 64 == 0) NEXT(w + c * k + i, COLUMNS * k);
            to[c] = i + LANES <= count ? int8_at(w + c * k + i)
                                       : as_floats(_mm_maskz_loadu_epi8(first(count - i), w + c * k + i));
        }
}

/* A part of k of a tile, whose sums are `kept` for the next one; `begins` and `ends`: it is the first, and the last. */
typedef struct { const float *x; const V *wide; i64 count; V *kept; int begins, ends; const float *bias; float *y; i64 j; } Part;

/* `rows` rows of x by a panel. */
INLINE void tile(const Weights *f, const Part *p, const int rows)
{
    V sum[2 * COLUMNS], left[2];
    const float *x = p->x;
    const V *wide = p->wide;
    i64 count = p->count;
    UNROLL for (int s = 0; s < 2 * COLUMNS; s++) sum[s] = p->begins || s >= rows * COLUMNS ? _mm512_setzero_ps() : p->kept[s];
    for (; count >= LANES; count -= LANES, x += LANES, wide += COLUMNS) {
        UNROLL for (int i = 0; i < rows; i++) left[i] = _mm512_loadu_ps(x + i * f->k);
        UNROLL for (int i = 0; i < rows; i++) NEXT(x + (i + rows) * f->k, 0);
        EACH_COLUMN {
            V right = wide[c];
            __asm__("" : "+v"(right));                       /* GCC would load it once for each row: a fifth more time */
            UNROLL for (int i = 0; i < rows; i++)
                sum[i * COLUMNS + c] = _mm512_fmadd_ps(left[i], right, sum[i * COLUMNS + c]);
        }
    }
    if (count > 0) {
        UNROLL for (int i = 0; i < rows; i++) left[i] = _mm512_maskz_loadu_ps(first(count), x + i * f->k);
        EACH_COLUMN UNROLL for (int i = 0; i < rows; i++)
            sum[i * COLUMNS + c] = _mm512_fmadd_ps(left[i], wide[c], sum[i * COLUMNS + c]);
    }
    if (p->ends) put(f, sum, p->bias, p->y, p->j, rows);
    else UNROLL for (int s = 0; s < rows * COLUMNS; s++) p->kept[s] = sum[s];
}

static __attribute__((noinline)) void tile_2(const Weights *f, const Part *p) { tile(f, p, 2); }
static __attribute__((noinline)) void tile_1(const Weights *f, const Part *p) { tile(f, p, 1); }

/* COLUMNS columns of y, from j on. */
static void many_rows(const Weights *f, const float *x, const float *bias, float *y, i64 m, i64 j)
{
    V wide[PART / LANES * COLUMNS], sum[BLOCK / 2][2 * COLUMNS];
    for (i64 i0 = 0; i0 < m; i0 += BLOCK)
        for (i64 r = 0; r < f->k; r += PART) {
            const i64 count = least(PART, f->k - r), end = least(m, i0 + BLOCK);
            panel(f, j, r, count, wide);
            Part p = {x + i0 * f->k + r, wide, count, sum[0], r == 0, r + PART >= f->k, bias, y + i0 * f->n, j};
            for (i64 i = i0; i < end; i += 2, p.x += 2 * f->k, p.kept += 2 * COLUMNS, p.y += 2 * f->n)
                (i + 2 <= end ? tile_2 : tile_1)(f, &p);
        }
}
#endif

/* Where columns are left, the last ones begin earlier, and some are written again with the same bits. */
static void multiply_floats(const Weights *f, const float *x, const float *bias, float *y, i64 m)
{
#ifdef WIDE
    for (i64 j = 0; j < f->n && f->n >= COLUMNS && f->k > 0; j += COLUMNS) {
        const i64 from = least(j, f->n - COLUMNS);
        if (m == 1) one_row(f, x, bias, y, from);
        else many_rows(f, x, bias, y, m, from);
    }
    if (f->n >= COLUMNS && f->k > 0) return;
#endif
    plain(f, x, bias, y, m);
}
