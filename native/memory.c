/* Memory of arrays that is kept and used again: the handler that NumPy (NEP 49) allocates with.

   Memory comes from the system in arenas. Blocks lie in an arena without gaps, each with a header of one line before its data, so
   that data begins on a line; beyond `top` nothing has been touched yet, and reads as zeros:

       base                                              top                       end
       | Arena | header, data | header, free | header, data | never touched ...    |

   Neighbours that are free are joined. Free blocks wait in bins by size, eight bins to each doubling, the last freed first, since
   its lines are still in the caches. Sizes are rounded up to classes at most an eighth apart, with the header at most 20 % more
   than was asked for. A training step asks for the same sizes in the same order, so after the first few it finds all
   it wants in bins, and no page is touched for the first time. Similar: Masmano et al., "TLSF", ECRTS 2004.

   Small and large blocks have arenas of their own: a small one that lives long would part the room of a large one.

   Arrays of less than SMALL bytes are left to NumPy's own allocator, which keeps a cache of them: what is ours is known by its
   address. One lock guards everything; who calls holds Python's lock anyway, so it is hardly ever waited for. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define LINE ((size_t)64)
#define PAGE ((size_t)4096)
#define HUGE_PAGE ((size_t)2 << 20)
#define SMALL ((size_t)1024)              /* bytes of an array; NumPy caches those below */
#define LARGE ((size_t)64 << 10)          /* bytes of a block, from which on it comes from the other heap */
#define COARSE ((size_t)1024)             /* classes are at most this far apart */
#define LARGEST ((size_t)1 << 46)
#define BINS 384
#define LOOKED_AT 32                      /* blocks of a bin: a larger one may fit where the first do not */
#define ADDRESS_BITS 48

typedef struct Arena Arena;

typedef struct Block {
    size_t size;                          /* of header and data, a multiple of LINE; the last bit: it is free */
    struct Block *before;                 /* the neighbour below; NULL for the first of its arena */
    Arena *arena;
    struct Block *next, **link;           /* of the bin, while free: link is what points to this block */
    size_t returned;                      /* bytes of a free one whose pages the system has back */
    size_t pad[2];
} Block;

struct Arena {
    Arena *next;
    int large;
    char *top, *end;
    Block *last;                          /* the one that ends at top; NULL where there is none */
    size_t pad[3];
};

_Static_assert(sizeof(Block) == LINE && sizeof(Arena) == LINE, "data begins on a line");

typedef struct {
    size_t first;                         /* bytes of the first arena; each further one doubles what there is */
    size_t reserved;
    Arena *arenas;
    uint64_t filled[BINS / 64];           /* a bit for each bin that holds something */
    Block *bins[BINS];
} Heap;

static Heap heaps[2] = {{.first = (size_t)8 << 20}, {.first = (size_t)64 << 20}};
static uint8_t ours[((size_t)1 << ADDRESS_BITS) / HUGE_PAGE / 8];        /* a bit for each huge page; zero pages cost nothing */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used, peak, touched, returned, mappings;                   /* bytes of blocks in use, their most, ...; see below */
static size_t recent;                                                    /* the most since somebody asked */
static size_t cap = SIZE_MAX;                                            /* of bytes that are free and not returned */

static int is_free(const Block *b) { return b->size & 1; }
static size_t size_of(const Block *b) { return b->size & ~(size_t)1; }
static void *data_of(Block *b) { return (char *)b + LINE; }
static Block *block_of(void *data) { return (Block *)((char *)data - LINE); }
static size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) & ~(multiple - 1); }
static int log2_of(size_t n) { return 63 - __builtin_clzll(n); }

static Block *after(Block *b)
{
    char *end = (char *)b + size_of(b);
    return end < b->arena->top ? (Block *)end : NULL;
}

/* Bytes of the block for an array of so many bytes. */
static size_t block_size(size_t bytes)
{
    size_t n = bytes + LINE, step = (size_t)1 << (log2_of(n) - 3);
    return round_up(n, step < LINE ? LINE : step > COARSE ? COARSE : step);
}

static int is_ours(const void *p)
{
    uintptr_t page = (uintptr_t)p / HUGE_PAGE;
    return page < sizeof ours * 8 && __atomic_load_n(&ours[page / 8], __ATOMIC_RELAXED) >> page % 8 & 1;
}

static void mark(Arena *a, int own)
{
    for (uintptr_t page = (uintptr_t)a / HUGE_PAGE; page < (uintptr_t)a->end / HUGE_PAGE; page++) {
        uint8_t bit = 1 << page % 8, others = ours[page / 8] & ~bit;
        __atomic_store_n(&ours[page / 8], own ? others | bit : others, __ATOMIC_RELAXED);
    }
}

/* ---- bins ----------------------------------------------------------------------------------------------------------------- */

static int bin_of(size_t size)
{
    size_t lines = size / LINE;
    if (lines < 8) return (int)lines;
    int level = log2_of(lines);
    return (level - 2) * 8 + (int)(lines >> (level - 3) & 7);
}

static void put(Heap *heap, Block *b)
{
    int i = bin_of(size_of(b));
    b->size |= 1;
    b->next = heap->bins[i];
    b->link = &heap->bins[i];
    if (b->next) b->next->link = &b->next;
    heap->bins[i] = b;
    heap->filled[i / 64] |= (uint64_t)1 << i % 64;
}

static void take(Heap *heap, Block *b)
{
    int i = bin_of(size_of(b));
    *b->link = b->next;
    if (b->next) b->next->link = b->link;
    if (!heap->bins[i]) heap->filled[i / 64] &= ~((uint64_t)1 << i % 64);
    b->size = size_of(b);
}

/* The first bin from i on that holds something; BINS where there is none. */
static int filled_bin(const Heap *heap, int i)
{
    for (int word = i / 64; word < BINS / 64; word++) {
        uint64_t bits = heap->filled[word] & (word == i / 64 ? ~(uint64_t)0 << i % 64 : ~(uint64_t)0);
        if (bits) return word * 64 + __builtin_ctzll(bits);
    }
    return BINS;
}

static Block *find(Heap *heap, size_t size)
{
    int i = bin_of(size), left = LOOKED_AT;
    Block *best = NULL;
    for (Block *b = heap->bins[i]; b && left--; b = b->next)
        if (size_of(b) >= size && (!best || size_of(b) < size_of(best))) {
            best = b;
            if (size_of(b) == size) break;
        }
    if (!best && (i = filled_bin(heap, i + 1)) < BINS) best = heap->bins[i];
    return best;
}

/* ---- blocks --------------------------------------------------------------------------------------------------------------- */

static void set_before(Arena *a, Block *neighbour, Block *b)
{
    if (neighbour) neighbour->before = b; else a->last = b;
}

/* Cuts what a block in use has beyond `size` off as a free one, in no bin yet; NULL where there is nothing. */
static Block *cut(Block *b, size_t size)
{
    size_t rest = b->size - size;
    if (!rest) return NULL;
    Block *neighbour = after(b), *new = (Block *)((char *)b + size);
    *new = (Block){.size = rest, .before = b, .arena = b->arena, .returned = b->returned < rest ? b->returned : rest - LINE};
    set_before(b->arena, neighbour, new);
    b->size = size;
    return new;
}

/* Joins a block that is in no bin with its free neighbours and puts it in its bin. */
static void release(Heap *heap, Block *b)
{
    Block *neighbour = after(b), *before = b->before;
    if (neighbour && is_free(neighbour)) {
        take(heap, neighbour);
        b->size += neighbour->size;
        b->returned += neighbour->returned;
        neighbour = after(b);
    }
    if (before && is_free(before)) {
        take(heap, before);
        before->size += b->size;
        before->returned += b->returned;
        b = before;
    }
    set_before(b->arena, neighbour, b);
    put(heap, b);
}

/* ---- arenas --------------------------------------------------------------------------------------------------------------- */

/* Memory that begins and ends between huge pages; NULL where the system has none. */
static void *map(size_t size)
{
    char *p = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    char *begin = (char *)round_up((uintptr_t)p, HUGE_PAGE);
    if (begin > p) munmap(p, begin - p);
    munmap(begin + size, p + HUGE_PAGE - begin);
    if ((uintptr_t)begin + size > (uintptr_t)1 << ADDRESS_BITS) {
        munmap(begin, size);
        return NULL;
    }
    madvise(begin, size, MADV_HUGEPAGE);             /* refused by some kernels: then pages are small */
    return begin;
}

static Arena *new_arena(Heap *heap, size_t size)
{
    size_t least = round_up(size + sizeof(Arena), HUGE_PAGE), wanted = heap->reserved ? heap->reserved : heap->first;
    Arena *a = wanted > least ? map(wanted) : NULL;
    if (a) least = wanted;
    else a = map(least);                             /* a limit on addresses may allow this much */
    if (!a) return NULL;
    *a = (Arena){.next = heap->arenas, .large = heap != heaps, .top = (char *)(a + 1), .end = (char *)a + least};
    mark(a, 1);
    heap->arenas = a;
    heap->reserved += least;
    touched += sizeof(Arena);
    mappings++;
    return a;
}

/* A block from beyond some arena's top; a free one that ends there is made larger, and then `fresh` is not set. */
static Block *extend(Heap *heap, size_t size, int *fresh)
{
    Arena *a = heap->arenas;
    for (; a; a = a->next) {
        size_t there = a->last && is_free(a->last) ? size_of(a->last) : 0;
        if ((size_t)(a->end - a->top) + there >= size) break;
    }
    if (!a && !(a = new_arena(heap, size))) return NULL;
    Block *b = a->last;
    if (b && is_free(b)) {
        take(heap, b);
    } else {
        Block *below = b;
        b = (Block *)a->top;
        *b = (Block){.before = below, .arena = a};
        a->last = b;
        *fresh = 1;
    }
    touched += size - b->size;
    a->top += size - b->size;
    b->size = size;
    return b;
}

static size_t cached(void) { return touched - used - returned; }

/* Gives the pages of a free block back to the system; at the end of an arena the room too, and the arena where it was all. */
static void give_back(Heap *heap, Block *b)
{
    Arena *a = b->arena;
    char *begin = (char *)round_up((uintptr_t)data_of(b), PAGE), *end = (char *)b + size_of(b);
    int at_top = a->last == b;
    end = at_top ? (char *)round_up((uintptr_t)end, PAGE) : (char *)((uintptr_t)end & ~(PAGE - 1));
    if (end > begin && madvise(begin, end - begin, MADV_DONTNEED)) return;       /* pages locked in memory stay */
    if (!at_top) {
        if (end <= begin) return;
        returned += end - begin - b->returned;
        b->returned = end - begin;
        return;
    }
    take(heap, b);
    returned -= b->returned;
    touched -= b->size;
    a->last = b->before;
    a->top = (char *)b;
    memset(b, 0, begin - (char *)b);
    if (a->last) return;
    Arena **link = &heap->arenas;
    while (*link != a) link = &(*link)->next;
    *link = a->next;
    size_t size = a->end - (char *)a;
    heap->reserved -= size;
    touched -= sizeof(Arena);
    mark(a, 0);
    munmap(a, size);
}

/* Gives free blocks back, the largest first, until at most `goal` bytes are kept. */
static void trim_to(size_t goal)
{
    for (int large = 1; large >= 0; large--)
        for (int i = BINS - 1; i >= 0; i--)
            for (Block *b = heaps[large].bins[i], *next; b && cached() > goal; b = next) {
                next = b->next;
                give_back(&heaps[large], b);
            }
}

/* ---- for NumPy ------------------------------------------------------------------------------------------------------------ */

typedef struct {                          /* PyDataMemAllocator, PyDataMem_Handler of numpy/ndarraytypes.h */
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t n, size_t size);
    void *(*realloc)(void *ctx, void *p, size_t size);
    void (*free)(void *ctx, void *p, size_t size);
} Allocator;

typedef struct { char name[127]; uint8_t version; Allocator allocator; } Handler;

static const Allocator *others;           /* NumPy's own */

static void *allocate(size_t bytes, int *fresh)
{
    if (bytes > LARGEST) return NULL;
    size_t size = block_size(bytes);
    Heap *heap = &heaps[size >= LARGE];
    pthread_mutex_lock(&lock);
    Block *b = find(heap, size);
    if (b) take(heap, b);
    else b = extend(heap, size, fresh);
    if (b) {
        size_t before = b->returned;
        Block *rest = cut(b, size);
        returned -= before - (rest ? rest->returned : 0);
        b->returned = 0;
        if (rest) release(heap, rest);
        used += size;
        if (used > peak) peak = used;
        if (used > recent) recent = used;
    }
    pthread_mutex_unlock(&lock);
    return b ? data_of(b) : NULL;
}

static void *memory_malloc(void *ctx, size_t size)
{
    int fresh = 0;
    return size < SMALL ? others->malloc(others->ctx, size) : allocate(size, &fresh);
}

static void *memory_calloc(void *ctx, size_t n, size_t size)
{
    size_t bytes;
    int fresh = 0;
    if (__builtin_mul_overflow(n, size, &bytes)) return NULL;
    if (bytes < SMALL) return others->calloc(others->ctx, n, size);
    void *p = allocate(bytes, &fresh);
    return p && !fresh ? memset(p, 0, bytes) : p;
}

static void memory_free(void *ctx, void *p, size_t size)
{
    if (!is_ours(p)) {
        others->free(others->ctx, p, size);
        return;
    }
    Block *b = block_of(p);
    pthread_mutex_lock(&lock);
    used -= b->size;
    release(&heaps[b->arena->large], b);
    if (cached() > cap) trim_to(cap / 4 * 3);        /* below it, so that the next one need not */
    pthread_mutex_unlock(&lock);
}

static void *memory_realloc(void *ctx, void *p, size_t size)
{
    if (!p) return memory_malloc(ctx, size);
    if (!is_ours(p)) return others->realloc(others->ctx, p, size);       /* its size is not known here: it stays there */
    size_t had = block_of(p)->size - LINE;
    if (size <= had && size >= had / 4 * 3) return p;
    void *new = memory_malloc(ctx, size < SMALL ? SMALL : size);
    if (!new) return size <= had ? p : NULL;
    memcpy(new, p, size < had ? size : had);
    memory_free(ctx, p, had);
    return new;
}

static Handler handler = {"mpitrain_pool", 1, {NULL, memory_malloc, memory_calloc, memory_realloc, memory_free}};

static void acquire(void) { pthread_mutex_lock(&lock); }
static void yield(void) { pthread_mutex_unlock(&lock); }

/* The handler, which lives as long as the process, like NumPy's own that is passed. */
void *memory_handler(Handler *numpys)
{
    if (!others) pthread_atfork(acquire, yield, yield);      /* no child begins with a lock that nobody will free */
    others = &numpys->allocator;
    return &handler;
}

/* Bytes: of blocks in use, the most there were, free and kept, had from the system; and the number of arenas asked for. */
void memory_usage(int64_t *out)
{
    acquire();
    size_t found[] = {used, peak, cached(), touched - returned, mappings};
    yield();
    for (int i = 0; i < 5; i++) out[i] = (int64_t)found[i];
}

/* The most bytes of blocks in use since the last call. */
int64_t memory_recent_peak(void)
{
    acquire();
    size_t found = recent;
    recent = used;
    yield();
    return (int64_t)found;
}

void memory_set_cap(int64_t bytes)
{
    acquire();
    cap = bytes < 0 ? SIZE_MAX : (size_t)bytes;
    if (cached() > cap) trim_to(cap);
    yield();
}

/* Gives back all that is free; how many bytes that was. */
int64_t memory_trim(void)
{
    acquire();
    size_t before = cached();
    trim_to(0);
    before -= cached();
    yield();
    return (int64_t)before;
}
