/* The transpose of small squares in registers, for vectors V of LANES numbers of type T, shuffled by MASK. */

/* Turns `rows` vectors round: number j of vector i goes to place j * rows + i. Take the vectors as a deck of cards. LOW and
   HIGH of vectors i and i + rows/2 are one perfect shuffle of it, which moves the first bit of a card's place to the end; the
   bits of i come first, so log2(rows) shuffles put j first. (Stone, "Parallel processing with the perfect shuffle", IEEE
   Trans. Computers C-20, 1971.) `rows` is a power of two, at most LANES. */
INLINE void NAME(turn)(const T *x, i64 x_step, T *y, i64 y_step, const int rows)
{
    V row[LANES], next[LANES];
    for (int i = 0; i < rows; i++) row[i] = *(const V *)(x + i * x_step);
    for (int done = 1; done < rows; done *= 2) {
        for (int i = 0; i < rows / 2; i++) {
            next[2 * i] = PICK(MASK, row[i], row[i + rows / 2], ORDER(LOW, LANES));
            next[2 * i + 1] = PICK(MASK, row[i], row[i + rows / 2], ORDER(HIGH, LANES));
        }
        for (int i = 0; i < rows; i++) row[i] = next[i];
    }
    for (int i = 0; i < rows; i++) *(V *)(y + i * y_step) = row[i];
}
