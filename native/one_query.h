/* Attention of one new position of each of some texts, whose keys and values lie in a cache: flash_attention.h's arithmetic for one
   query, in the order in which that adds for a query at the same position of a whole text.

   There queries are the lanes of vectors, and the last keys of a text are added apart for each vector, from where the vector before
   it sees no more. Here keys are the lanes of scores, and numbers of a value those of the sum, so that nothing is computed for
   queries that are not there. */

#define SPAN (VECTORS * LANES)                   /* queries at a time, there */

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif

/* s[j] = q k_j for `keys` rows of k, and for what is missing in a vector, anything. */
static __attribute__((noinline)) void NAME(one_scores)(const T *q, const T *k, i64 keys, i64 width, T *s)
{
#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#endif
    for (i64 j = 0; j < keys; j += LANES, k += LANES * width) {
        V sum = {0}, row[LANES];
        for (i64 d = 0; d < width; d += LANES) {
            const i64 there = at_most(keys - j, LANES), left = at_most(width - d, LANES);
            for (int l = 0; l < LANES; l++) row[l] = (V){0};
            if (left == LANES) for (int l = 0; l < there; l++) row[l] = *(const V *)(k + l * width + d);
            else for (int l = 0; l < there; l++) memcpy(&row[l], k + l * width + d, left * sizeof(T));
            NAME(shuffled)(row, LANES);
            for (i64 l = 0; l < left; l++) sum = ADD_SCALED(sum, q[d + l], row[l]);
        }
        *(V *)(s + j) = sum;
    }
}

/* c += (or =) the sum of values [from, to), each times its weight. */
static __attribute__((noinline)) void NAME(one_sum)(const T *v, const T *s, i64 from, i64 to, i64 width, T *c, int add)
{
#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#endif
    i64 e = 0;
    for (; e + 4 * LANES <= width; e += 4 * LANES) {
        V sum[4] = {0};
        for (i64 r = from; r < to; r++)
            for (int p = 0; p < 4; p++) sum[p] = ADD_SCALED(sum[p], s[r], *(const V *)(v + r * width + e + p * LANES));
        for (int p = 0; p < 4; p++) {
            if (add) sum[p] += *(const V *)(c + e + p * LANES);
            *(V *)(c + e + p * LANES) = sum[p];
        }
    }
    for (; e < width; e += LANES) {
        const i64 size = at_most(width - e, LANES) * sizeof(T);
        V sum = {0}, before = {0}, row = {0};
        for (i64 r = from; r < to; r++) {
            memcpy(&row, v + r * width + e, size);
            sum = ADD_SCALED(sum, s[r], row);
        }
        memcpy(&before, c + e, size);
        if (add) sum += before;
        memcpy(c + e, &sum, size);
    }
}

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC pop_options
#endif

/* The query at position `at` of a text and its keys and values 0..at; `room` is for a query and BLOCK scores. */
static void NAME(one_query)(const T *q, const T *k, const T *v, T *out, i64 at, i64 width, T scale, T *room)
{
    T *s = room, *scaled = room + BLOCK + LANES, top = -INFINITY, sum = 0;
    const i64 first = at / SPAN * SPAN, vector = (at - first) / LANES, all = at + 1;
    for (i64 d = 0; d < width; d++) scaled[d] = q[d] * scale;
    for (i64 key = 0; key < all; key += BLOCK, k += BLOCK * width, v += BLOCK * width) {
        const i64 keys = at_most(BLOCK, all - key);
        T most = top, part[4] = {0};
        NAME(one_scores)(scaled, k, keys, width, s);
        for (i64 j = 0; j < keys; j++) most = s[j] > most ? s[j] : most;
        const T base = most == -INFINITY ? 0 : most, factor = NAME(exp_of_negative)(top - base);
        for (i64 j = 0; j < keys; j++) s[j] = NAME(exp_of_negative)(s[j] - base);
        top = most;
        for (i64 j = 0; j < keys; j++) part[j % 4] += s[j];
        sum = sum * factor + ((part[0] + part[1]) + (part[2] + part[3]));
        if (key) for (i64 e = 0; e < width; e++) out[e] *= factor;
        for (i64 u = 0, from = 0; u <= vector; u++) {
            const i64 to = u == vector ? keys : clip(first + (u + 1) * LANES - key, 0, keys);
            if (from < to) NAME(one_sum)(v, s, from, to, width, out, key > 0 || u > 0);
            from = at_least(from, to);
        }
    }
    const T inverse = sum == 0 ? 0 : 1 / sum;
    for (i64 e = 0; e < width; e++) out[e] *= inverse;
}

/* qkv (rows, 3, heads, width): each row's key and value go to place at[r] of its slot in keys and values (slots, heads, capacity,
   width), and what its query makes of all up to there to out (rows, heads, width). 2 where there is no such slot or place. */
int NAME(cached_attention)(const T *qkv, T *keys, T *values, T *out, const i64 *slot, const i64 *at, T *room, i64 rows, i64 heads,
                           i64 width, i64 slots, i64 capacity, double scale)
{
    for (i64 r = 0; r < rows; r++)
        if (slot[r] < 0 || slot[r] >= slots || at[r] < 0 || at[r] >= capacity) return 2;
    for (i64 r = 0; r < rows; r++) for (i64 h = 0; h < heads; h++) {
        const T *q = qkv + (r * 3 * heads + h) * width, *k = q + heads * width, *v = k + heads * width;
        const i64 begin = (slot[r] * heads + h) * capacity * width;
        memcpy(keys + begin + at[r] * width, k, width * sizeof(T));
        memcpy(values + begin + at[r] * width, v, width * sizeof(T));
        NAME(one_query)(q, keys + begin, values + begin, out + (r * heads + h) * width, at[r], width, (T)scale, room);
    }
    return 0;
}

#undef SPAN
