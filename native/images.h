/* The images that the loops of convolutions pack, for one number type T: as they lie in memory, one after the other. Those of
   convolution_bfloat16.c are made when they are wanted. */

typedef struct { const T *x; i64 size, n; } NAME(Images);

/* Room for `count` images that are ready at the same time. Returns 1 without memory. */
static int NAME(make_room)(Memory *m, NAME(Images) *images, i64 count) { (void)m, (void)images, (void)count; return 0; }

/* Images [first, first + count), and where the memory ends that may be read. */
INLINE const T *NAME(ready)(const NAME(Images) *images, i64 first, i64 count, const T **end)
{
    (void)count;
    *end = images->x + images->n * images->size;
    return images->x + first * images->size;
}

/* The memory of at most `count` images from `first` on, for look_ahead(). */
INLINE Ahead NAME(images_ahead)(const NAME(Images) *images, i64 first, i64 count, i64 times)
{
    const T *from = images->x + first * images->size;
    return look_ahead(from, from + clip(images->n - first, 0, count) * images->size, times);
}
