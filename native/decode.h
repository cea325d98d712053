/* The body of decode.c for one number type T. What a block has is told as addresses; NULL where there is no such thing. */

typedef struct { const T *weight, *bias; } NAME(Norm);
typedef struct { i64 way; const void *weight, *scale; const T *bias; const float *of_rows; } NAME(Product);
typedef struct {
    NAME(Norm) norm1; NAME(Product) qkv, out;
    NAME(Norm) norm2; NAME(Product) wide, narrow;
    T *keys, *values;
} NAME(Block);

/* The functions of other libraries: layer_norm.c, product.c, lowbit.c, flash_attention.c and pointwise.c. */
typedef struct {
    void (*norm)(const T *, const T *, T *, const T *, const T *, T *, T *, T *, double, i64, i64, i64, const uint64_t *,
                 unsigned char *, i64, i64, i64, double);
    void (*floats)(const T *, const void *, const T *, T *, i64, i64, i64);
    void (*packed)(const T *, const void *, const T *, T *, i64, i64, i64);
    void (*int8)(const T *, const void *, const void *, const T *, T *, i64, i64, i64);
    void (*int4)(const T *, const void *, const void *, const T *, T *, i64, i64, i64, i64);
    void (*rows)(const T *, void *, float *, int32_t *, i64, i64, i64, double);
    void (*int8_integers)(const void *, const float *, const int32_t *, const void *, const void *, const T *, T *, i64, i64, i64,
                          i64);
    void (*int4_integers)(const void *, const float *, const void *, const void *, const T *, T *, i64, i64, i64, i64, i64);
    int (*attention)(const T *, T *, T *, T *, const i64 *, const i64 *, T *, i64, i64, i64, i64, i64, double);
    int (*activation)(const T *, T *, i64);
} NAME(Functions);

/* y (m, n) = x (m, k) w' + bias in the way of w; `room` has m (k + 136) bytes. */
static void NAME(multiply)(const NAME(Functions) *f, const NAME(Product) *w, const T *x, T *y, char *room, i64 m, i64 n, i64 k)
{
    const i64 groups = (k + GROUP - 1) / GROUP, unit = w->way == INT4_INTEGERS ? 4 * GROUP : 2 * GROUP;
    const i64 padded = (k + unit - 1) / unit * unit;
    float *scales = (float *)room;
    int32_t *sums = (int32_t *)(scales + m);
    void *q = sums + m;
    if (w->way == INT8_INTEGERS || w->way == INT4_INTEGERS)
        f->rows(x, q, scales, sums, m, k, padded, w->of_rows ? *w->of_rows : -1);
    switch (w->way) {
    case FLOATS: f->floats(x, w->weight, w->bias, y, m, n, k); break;
    case PACKED: f->packed(x, w->weight, w->bias, y, m, n, k); break;
    case INT8: f->int8(x, w->weight, w->scale, w->bias, y, m, n, k); break;
    case INT4: f->int4(x, w->weight, w->scale, w->bias, y, m, n, k, groups); break;
    case INT8_INTEGERS: f->int8_integers(q, scales, sums, w->weight, w->scale, w->bias, y, m, n, k, padded); break;
    case INT4_INTEGERS: f->int4_integers(q, scales, w->weight, w->scale, w->bias, y, m, n, groups * GROUP, groups, padded); break;
    }
}

/* x (rows, d) after `layers` blocks, in its place. */
int NAME(blocks)(T *x, const i64 *table, const i64 *functions, const i64 *slot, const i64 *at, T *numbers, char *room, i64 rows,
                 i64 d, i64 heads, i64 width, i64 hidden, i64 layers, i64 slots, i64 capacity, double eps, double scale)
{
    const NAME(Functions) *f = (const NAME(Functions) *)functions;
    const i64 e = heads * width;
    T *normed = numbers, *qkv = normed + rows * d, *mixed = qkv + 3 * rows * e, *made = mixed + rows * e;
    T *total = made + rows * d, *inner = total + rows * d, *means = inner + rows * hidden, *rest = means + 2 * rows;
    for (const NAME(Block) *of = (const NAME(Block) *)table, *end = of + layers; of < end; of++) {
        f->norm(x, 0, 0, of->norm1.weight, of->norm1.bias, normed, means, means + rows, eps, rows, d, 1, 0, 0, 0, 0, 1, 0);
        NAME(multiply)(f, &of->qkv, normed, qkv, room, rows, 3 * e, d);
        const int wrong = f->attention(qkv, of->keys, of->values, mixed, slot, at, rest, rows, heads, width, slots, capacity,
                                       scale);
        if (wrong) return wrong;
        NAME(multiply)(f, &of->out, mixed, made, room, rows, d, e);
        f->norm(x, made, total, of->norm2.weight, of->norm2.bias, normed, means, means + rows, eps, rows, d, 1, 0, 0, 0, 0, 1, 0);
        NAME(multiply)(f, &of->wide, normed, inner, room, rows, hidden, d);
        if (f->activation) f->activation(inner, inner, rows * hidden);
        NAME(multiply)(f, &of->narrow, inner, made, room, rows, d, hidden);
        for (i64 i = 0; i < rows * d; i++) x[i] = total[i] + made[i];
    }
    return 0;
}

/* y (rows, n): the logits of x (rows, d). The table has a norm and a product. */
void NAME(head)(const T *x, const i64 *table, const i64 *functions, T *y, T *numbers, char *room, i64 rows, i64 d, i64 n,
                double eps)
{
    const struct { NAME(Norm) norm; NAME(Product) product; } *of = (const void *)table;
    const NAME(Functions) *f = (const NAME(Functions) *)functions;
    T *normed = numbers, *means = normed + rows * d;
    f->norm(x, 0, 0, of->norm.weight, of->norm.bias, normed, means, means + rows, eps, rows, d, 1, 0, 0, 0, 0, 1, 0);
    NAME(multiply)(f, &of->product, normed, y, room, rows, n, d);
}
