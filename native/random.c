/* Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, 2011): four words of 32 bits for each counter, whatever was drawn before. */

#include <stdint.h>
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

typedef int64_t i64;
typedef uint32_t u32;
typedef uint64_t u64;

enum { ROUNDS = 10, AT_ONCE = 256 };

/* Words [4 block, 4 block + 4) of `n` rows; out[w][i] is word w of row i. */
static void philox(u64 key, const u64 *rows, u64 block, u32 out[4][AT_ONCE], i64 n)
{
    for (i64 i = 0; i < n; i++) {
        u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = (u32)rows[i], c3 = (u32)(rows[i] >> 32);
        u32 k0 = (u32)key, k1 = (u32)(key >> 32);
        for (int round = 0; round < ROUNDS; round++) {
            u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
            c0 = (u32)(b >> 32) ^ c1 ^ k0;
            c1 = (u32)b;
            c2 = (u32)(a >> 32) ^ c3 ^ k1;
            c3 = (u32)a;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
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
