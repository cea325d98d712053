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

/* A number in [0, 1) of 53 random bits, exactly: the numbers below are doubles with room to spare. */
static inline double fraction(u32 high, u32 low)
{
    return ((double)(int32_t)(high >> 5) * 67108864.0 + (double)(int32_t)(low >> 6)) * (1.0 / 9007199254740992.0);
}

/* log x for a normal number x > 0, to 1e-16 of it, and cos(2 pi u) for u in [0, 1), to 2e-16. Both without a branch, so that
   loops become vector code; the polynomials are those of fdlibm (Sun Microsystems, 1993). */
static inline double log_of(double x)
{
    u64 bits;
    double m;
    memcpy(&bits, &x, sizeof bits);
    int32_t k = (int32_t)(bits >> 52) - 1023;
    bits = (bits & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u;
    memcpy(&m, &bits, sizeof m);                                       /* in [1, 2) */
    int32_t large = m > 1.4142135623730951;
    m = large ? 0.5 * m : m;
    k += large;
    double f = m - 1.0, s = f / (2.0 + f), z = s * s, half = 0.5 * f * f, n = (double)k;
    double r = 1.479819860511658591e-01;
    r = r * z + 1.531383769920937332e-01; r = r * z + 1.818357216161805012e-01; r = r * z + 2.222219843214978396e-01;
    r = r * z + 2.857142874366239149e-01; r = r * z + 3.999999999940941908e-01; r = r * z + 6.666666666666735130e-01;
    return n * 6.93147180369123816490e-01 - ((half - (s * (half + r * z) + n * 1.90821492927058770002e-10)) - f);
}

static inline double cos_of_turns(double u)
{
    int32_t quarter = (int32_t)(4.0 * u + 0.5);                        /* the next one: 0 to 4 */
    double a = (u - 0.25 * quarter) * 6.283185307179586, z = a * a;    /* what is left, at most pi / 4 either way */
    double s = 1.58969099521155010221e-10, c = -1.13596475577881948265e-11;
    s = s * z - 2.50507602534068634195e-08; s = s * z + 2.75573137070700676789e-06; s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03; s = s * z - 1.66666666666666324348e-01;
    c = c * z + 2.08757232129817482790e-09; c = c * z - 2.75573143513906633035e-07; c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03; c = c * z + 4.16666666666666019037e-02;
    double sine = a + a * z * s, cosine = 1.0 - (0.5 * z - z * z * c);
    double result = quarter & 1 ? sine : cosine;
    return quarter == 1 || quarter == 2 ? -result : result;
}

/* Elements [start, start + n) of a stream, each from words of its own row: uniform in [0, 1), or normal (Box, Muller, 1958). */
#define ELEMENTS(NAME, VALUE)                                                                                           \
void random_##NAME(double *restrict out, i64 key, i64 start, i64 n)                                                     \
{                                                                                                                       \
    u64 rows[AT_ONCE];                                                                                                  \
    u32 words[4][AT_ONCE];                                                                                              \
    for (i64 first = 0; first < n; first += AT_ONCE) {                                                                  \
        i64 some = n - first < AT_ONCE ? n - first : AT_ONCE;                                                           \
        for (i64 i = 0; i < some; i++) rows[i] = (u64)(start + first + i);                                              \
        philox((u64)key, rows, 0, words, some);                                                                         \
        for (i64 i = 0; i < some; i++) out[first + i] = VALUE;                                                          \
    }                                                                                                                   \
}

#define U(W, I) fraction(words[W][I], words[W + 1][I])

ELEMENTS(uniform, U(0, i))
ELEMENTS(normal, __builtin_sqrt(-2.0 * log_of(1.0 - U(0, i))) * cos_of_turns(U(2, i)))

/* Dropout of x (height, width): y = x * scale where the element's word is at least `least`, else 0; plus `added`, where it is
   not NULL. Element j of row r has word rows[height + r] + j of the row's stream. Which elements are kept goes to `bits`, 8 to a byte from the lowest on, each row from a byte of its own on. 0. */
#define DROPOUT(T, NAME)                                                                                                \
int dropout_##NAME(const T *restrict x, const u64 *rows, const T *restrict added, T *restrict y,                        \
                   unsigned char *restrict bits, i64 key, i64 least, double scale, i64 height, i64 width)               \
{                                                                                                                       \
    u32 words[4 * AT_ONCE + 4], low = (u32)least;                                                                       \
    unsigned char keep[4 * AT_ONCE], any = least <= UINT32_MAX;                                                         \
    T factor = (T)scale;                                                                                                \
    for (i64 r = 0; r < height; r++, bits += (width + 7) / 8) {                                                         \
        i64 first = (i64)rows[height + r], skipped = first % 4;                                                         \
        for (i64 from = 0; from < width; from += 4 * AT_ONCE) {                                                         \
            i64 n = width - from < 4 * AT_ONCE ? width - from : 4 * AT_ONCE;                                            \
            const T *xs = x + r * width + from;                                                                         \
            T *ys = y + r * width + from;                                                                               \
            philox_along((u64)key, rows[r], (u64)((first + from) / 4), words, (skipped + n + 3) / 4);                   \
            for (i64 i = 0; i < n; i++) keep[i] = (words[skipped + i] >= low) & any;                                    \
            for (i64 i = 0; i < n; i++) ys[i] = (keep[i] ? xs[i] : 0) * factor;          /* a dropped NaN is gone */    \
            if (added) for (i64 i = 0; i < n; i++) ys[i] += added[r * width + from + i];                                \
            memset(keep + n, 0, (size_t)(-n & 7));                                                                      \
            for (i64 i = 0; i < n; i += 8) {                                                                            \
                unsigned char packed = 0;                                                                               \
                for (int j = 0; j < 8; j++) packed |= (unsigned char)(keep[i + j] << j);                                \
                bits[(from + i) / 8] = packed;                                                                          \
            }                                                                                                           \
        }                                                                                                               \
    }                                                                                                                   \
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
