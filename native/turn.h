/* Vectors V of LANES numbers T, masks of INTEGER beside them, and transposing. Included once for each number type;
   who includes it undefines V and MASK at its end. */

#define V NAME(vector)
#define MASK NAME(mask)

typedef T V __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
typedef INTEGER MASK __attribute__((vector_size(VECTOR_BYTES)));

/* Turns `rows` vectors round: number j of vector i goes to place j * rows + i. Take the vectors as a deck of cards. LOW and
   HIGH of vectors i and i + rows/2 are one perfect shuffle of it, which moves the first bit of a card's place to the end; the
   bits of i come first, so log2(rows) shuffles put j first. (Stone, "Parallel processing with the perfect shuffle", IEEE
   Trans. Computers C-20, 1971.) `rows` is a power of two, at most LANES. */
INLINE void NAME(shuffled)(V *row, const int rows)
{
    V next[LANES];
    for (int done = 1; done < rows; done *= 2) {
        for (int i = 0; i < rows / 2; i++) {
            next[2 * i] = PICK(MASK, row[i], row[i + rows / 2], ORDER(LOW, LANES));
            next[2 * i + 1] = PICK(MASK, row[i], row[i + rows / 2], ORDER(HIGH, LANES));
        }
        for (int i = 0; i < rows; i++) row[i] = next[i];
    }
}

INLINE void NAME(turn)(const T *x, i64 x_step, T *y, i64 y_step, const int rows)
{
    V row[LANES];
    for (int i = 0; i < rows; i++) row[i] = *(const V *)(x + i * x_step);
    NAME(shuffled)(row, rows);
    for (int i = 0; i < rows; i++) *(V *)(y + i * y_step) = row[i];
}
