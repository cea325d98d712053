/* Of attention by blocks: dropout of the weights. Included once for each number type by flash_attention.h, after flash_scores.h.

   Weight (h, q, k) of a sample is element h * head_words + q * query_words + k, from the first word on, of the sample's row in a
   stream of random words, the one that dropout of the whole matrix of weights takes: the same are dropped, also where the weights
   here are a part of that matrix. Words are made where they are needed, in forward and
   again in backward, and not kept. */

/* Of one head of one sample: where its words are, how many lie between queries, and what a kept weight is multiplied by; nothing is
   dropped without `scale`. */
typedef struct { u64 key, row; i64 offset, query_words, least; T scale; } NAME(dropping);

/* factors[k * WIDTH + q] for the keys and queries of this block: `scale` for a weight that is kept, else 0. `room` is for
   (WIDTH, BLOCK). Keys that no query of a row sees draw nothing. */
static void NAME(draw)(const NAME(dropping) *x, const NAME(place) *at, T *room, T *factors)
{
    u32 words[BLOCK + 8], least = (u32)x->least;
    T scale = x->least <= UINT32_MAX ? x->scale : 0;
    memset(room, 0, at->queries * BLOCK * sizeof(T));
    for (i64 q = 0; q < at->queries; q++) {
        i64 from = x->offset + (at->first + q) * x->query_words + at->key, skipped = from % 4;
        i64 seen = at->causal ? clip(at->first + q + 1 - at->key, 0, at->keys) : at->keys;
        if (seen) philox_along(x->key, x->row, (u64)(from / 4), words, (skipped + seen + 3) / 4);
        for (i64 k = 0; k < seen; k++) room[q * BLOCK + k] = words[skipped + k] >= least ? scale : 0;
    }
    NAME(turned)(room, BLOCK, at->queries, BLOCK, 1, factors);
}

/* x * factors in vector v; what is dropped is 0, also where it was NaN. */
static void NAME(drop)(const NAME(place) *at, i64 v, const T *factors, T *x)
{
    i64 keys = NAME(seen)(at, v);
    for (i64 j = 0; j < keys; j++) {
        V factor = *(const V *)(factors + j * WIDTH), *to = (V *)(x + j * WIDTH);
        *to = NAME(choose)(factor != 0, *to * factor, (V){0});
    }
}
