/* A product, and a linear layer y = f(x w' + bias) with its gradients, each one call. x is (m, k), w (n, k), y (m, n), all without gaps.

   The activation f is a number: its place in the tables below. `work` holds product_work_bytes() bytes from a cache line on. */

static int (*const NAME(value_of)[])(const T *, T *, i64) = {
    NULL, NAME(relu), NAME(sigmoid), NAME(gelu), NAME(gelu_tanh), NAME(silu)};
static int (*const NAME(value_and_slope_of)[])(const T *, T *, T *, i64) = {
    NULL, NULL, NULL, NAME(gelu_and_slope), NAME(gelu_tanh_and_slope), NAME(silu_and_slope)};
static int (*const NAME(gradient_of)[])(const T *, const T *, T *, T *, i64, i64) = {
    NULL, NAME(relu_grad), NAME(sigmoid_grad), NAME(slope_grad), NAME(slope_grad), NAME(slope_grad)};

void NAME(product)(const T *a, const T *b, const T *bias, T *c, T *work, i64 m, i64 n, i64 k, i64 a_row, i64 a_term, i64 b_term,
                   i64 b_column)
{
    NAME(multiply)(a, b, NULL, bias, c, work, m, n, k, a_row, a_term, b_term, b_column, NULL);
}

/* Where `slope` is not NULL it takes the derivative of f. */
void NAME(linear)(const T *x, const T *w, const T *bias, T *y, T *slope, T *work, i64 m, i64 n, i64 k, i64 activation)
{
    NAME(Finish) f = {NAME(value_of)[activation], slope ? NAME(value_and_slope_of)[activation] : NULL, y};
    NAME(multiply)(x, w, NULL, bias, slope ? slope : y, work, m, n, k, k, 1, 1, k, activation ? &f : NULL);
}

/* The same without a slope, for a w that `pack` has packed. */
void NAME(linear_packed)(const T *x, const T *packed, const T *bias, T *y, T *work, i64 m, i64 n, i64 k, i64 activation)
{
    NAME(Finish) f = {NAME(value_of)[activation], NULL, y};
    NAME(multiply)(x, NULL, packed, bias, y, work, m, n, k, k, 1, 1, k, activation ? &f : NULL);
}

static void NAME(sum_rows)(const T *g, T *restrict sums, i64 rows, i64 n)
{
    memset(sums, 0, n * sizeof(T));
    for (i64 r = 0; r < rows; r++, g += n) for (i64 j = 0; j < n; j++) sums[j] += g[j];
}

/* From the gradient g of y and what f kept of it (its slope, or y; NULL: there is no f) the gradients of the product (`made`,
   which may be the memory of `kept`; where there is no f it is g), bias, x and w; all but the first where they are not NULL. */
void NAME(linear_gradients)(const T *g, const T *kept, const T *x, const T *w, T *made, T *by_bias, T *by_x, T *by_w, T *work,
                            i64 m, i64 n, i64 k, i64 activation)
{
    if (kept && by_bias) NAME(gradient_of)[activation](kept, g, made, by_bias, m, n);
    else if (kept) NAME(gradient_of)[activation](kept, g, made, NULL, 1, m * n);
    else if (by_bias) NAME(sum_rows)(g, by_bias, m, n);
    const T *from = kept ? made : g;
    if (by_x) NAME(multiply)(from, w, NULL, NULL, by_x, work, m, k, n, n, 1, k, 1, NULL);
    if (by_w) NAME(multiply)(from, x, NULL, NULL, by_w, work, n, k, m, 1, n, k, 1, NULL);
}
