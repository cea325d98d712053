/* The body of shared.c for one number type: T as stored, A as added up.

   fold runs a postfix program over sources, a block at a time so that what is on the stack stays in the L1 cache: an entry i >= 0
   pushes source i, -1 replaces the two topmost by their sum (the lower one on the left). The program alone decides the order
   of additions: every element has the same bits whatever the block, the slice, or the width of vectors. */

typedef A NAME(vector) __attribute__((vector_size(LINE), aligned(sizeof(A)), may_alias));
#define LANES ((i64)(LINE / sizeof(A)))

INLINE void NAME(add)(const A *a, const A *b, A *to, i64 n)
{
    i64 i = 0;
    for (; i + LANES <= n; i += LANES)
        *(NAME(vector) *)(to + i) = *(const NAME(vector) *)(a + i) + *(const NAME(vector) *)(b + i);
    for (; i < n; i++) to[i] = a[i] + b[i];
}

/* Two sources, two destinations, as on two ranks: one pass, nothing on a stack. A line that another core has written is fetched
   to be written here, once: reading it first leaves it shared, and asking for it again to write it took twice as long as both. */
#if !NARROW
static void NAME(add_two)(const T *a, const T *b, T *to, T *too, i64 n)
{
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) {
        __builtin_prefetch(to + i + AHEAD * LANES, 1);
        __builtin_prefetch(too + i + AHEAD * LANES, 1);
        NAME(vector) sum = *(const NAME(vector) *)(a + i) + *(const NAME(vector) *)(b + i);
        *(NAME(vector) *)(to + i) = sum;
        *(NAME(vector) *)(too + i) = sum;
    }
    for (; i < n; i++) to[i] = too[i] = a[i] + b[i];
}
#endif

static void NAME(fold)(const char *const *sources, const int32_t *program, i64 length, char *const *destinations, i64 targets,
                       i64 start, i64 stop)
{
    A held[DEPTH][BLOCK] __attribute__((aligned(LINE)));
    const A *top[DEPTH];
#if !NARROW
    if (length == 3 && targets == 2 && program[2] < 0) {
        const T *a = (const T *)sources[program[0]] + start, *b = (const T *)sources[program[1]] + start;
        NAME(add_two)(a, b, (T *)destinations[0] + start, (T *)destinations[1] + start, stop - start);
        return;
    }
    if (length == 3 && targets == 1 && program[2] < 0) {
        NAME(add)((const T *)sources[program[0]] + start, (const T *)sources[program[1]] + start, (T *)destinations[0] + start,
                  stop - start);
        return;
    }
#endif
    for (i64 from = start, next; from < stop; from = next) {
        next = from + BLOCK - (i64)((uintptr_t)((const T *)destinations[0] + from) / sizeof(T) % BLOCK);
        if (next > stop) next = stop;
        i64 n = next - from;
        int depth = 0;
        for (i64 p = 0; p < length; p++) {
            if (program[p] >= 0) {
                const T *source = (const T *)sources[program[p]] + from;
#if NARROW
                NAME(widen)(source, held[depth], n);
                top[depth] = held[depth];
#else
                top[depth] = source;
#endif
                depth++;
            } else {
                depth--;
                NAME(add)(top[depth - 1], top[depth], held[depth - 1], n);
                top[depth - 1] = held[depth - 1];
            }
        }
#if NARROW
        T result[BLOCK] __attribute__((aligned(LINE)));
        NAME(narrow)(top[0], result, n);
#else
        const T *result = top[0];
#endif
        for (i64 k = 0; k < targets; k++) {
            T *to = (T *)destinations[k] + from;
            if (to != result) memcpy(to, result, n * sizeof(T));
        }
    }
}

#undef LANES
