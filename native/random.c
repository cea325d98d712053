/* Random words by row and place, and dropout of a matrix. */

#include <string.h>

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "philox.h"

enum { AT_ONCE = 256 };

/* Words [4 block, 4 block + 4) of `n` rows; out[w][i] is word w of row i. */
static void philox(u64 key, const u64 *rows, u64 block, u32 out[4][AT_ONCE], i64 n)
{
    for (i64 i = 0; i < n; i++) {
        u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = (u32)rows[i], c3 = (u32)(rows[i] >> 32);
        MIX(key, c0, c1, c2, c3);
        out[0][i] = c0;
        out[1][i] = c1;
        out[2][i] = c2;
        out[3][i] = c3;
    }
}

/* out (height, width): the first `width` words of each row's stream. */
void random_words(u64 key, const u64 *rows, u32 *out, i64 height, i64 width)
{
    u32 words[4][AT_ONCE];
    for (i64 first = 0; first < height; first += AT_ONCE) {
        i64 n = height - first < AT_ONCE ? height - first : AT_ONCE;
        for (i64 from = 0; from < width; from += 4) {
            philox(key, rows + first, (u64)(from / 4), words, n);
            for (i64 i = 0; i < n; i++)
                for (i64 w = from; w < from + 4 && w < width; w++) out[(first + i) * width + w] = words[w - from][i];
        }
    }
}

/* Dropout of x (height, width): y = x * scale where the element's word is at least `least`, else 0; plus `added`, where it is
   not NULL. Which elements are kept goes to `bits`, 8 to a byte from the lowest on, each row from a byte of its own on. 0. */
#define DROPOUT(T, NAME)                                                                                                \
int dropout_##NAME(const T *restrict x, const u64 *rows, const T *restrict added, T *restrict y,                        \
                   unsigned char *restrict bits, i64 key, i64 least, double scale, i64 height, i64 width)               \
{                                                                                                                       \
    u32 words[4 * AT_ONCE], low = (u32)least;                                                                           \
    unsigned char keep[4 * AT_ONCE], any = least <= UINT32_MAX;                                                         \
    T factor = (T)scale;                                                                                                \
    for (i64 r = 0; r < height; r++, bits += (width + 7) / 8)                                                           \
        for (i64 from = 0; from < width; from += 4 * AT_ONCE) {                                                         \
            i64 n = width - from < 4 * AT_ONCE ? width - from : 4 * AT_ONCE;                                            \
            const T *xs = x + r * width + from;                                                                         \
            T *ys = y + r * width + from;                                                                               \
            philox_along((u64)key, rows[r], (u64)(from / 4), words, (n + 3) / 4);                                       \
            for (i64 i = 0; i < n; i++) keep[i] = (words[i] >= low) & any;                                              \
            for (i64 i = 0; i < n; i++) ys[i] = (keep[i] ? xs[i] : 0) * factor;          /* a dropped NaN is gone */    \
            if (added) for (i64 i = 0; i < n; i++) ys[i] += added[r * width + from + i];                                \
            memset(keep + n, 0, (size_t)(-n & 7));                                                                      \
            for (i64 i = 0; i < n; i += 8) {                                                                            \
                unsigned char packed = 0;                                                                               \
                for (int j = 0; j < 8; j++) packed |= (unsigned char)(keep[i + j] << j);                                \
                bits[(from + i) / 8] = packed;                                                                          \
            }                                                                                                           \
        }                                                                                                               \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
int dropout_grad_##NAME(const T *restrict g, const unsigned char *restrict bits, T *restrict dx, double scale,          \
                        i64 height, i64 width)                                                                          \
{                                                                                                                       \
    T factor = (T)scale;                                                                                                \
    for (i64 r = 0; r < height; r++, bits += (width + 7) / 8, g += width, dx += width) {                                \
        i64 i = 0;                                                                                                      \
        for (; i + 8 <= width; i += 8) {                                                                                \
            unsigned packed = bits[i / 8];                                                                              \
            for (int j = 0; j < 8; j++) dx[i + j] = (packed >> j & 1 ? g[i + j] : 0) * factor;                          \
        }                                                                                                               \
        for (; i < width; i++) dx[i] = (bits[i / 8] >> (i & 7) & 1 ? g[i] : 0) * factor;                                \
    }                                                                                                                   \
    return 0;                                                                                                           \
}

DROPOUT(float, float32)
DROPOUT(double, float64)
