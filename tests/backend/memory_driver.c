/* Threads without Python's lock that allocate, resize, free each other's blocks, trim and fork; contents and structure checked. */

#include "../../native/memory.c"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define KEPT 200
#define SHARED 64
#define THREADS 4

static void *plain_malloc(void *ctx, size_t size) { return malloc(size); }
static void *plain_calloc(void *ctx, size_t n, size_t size) { return calloc(n, size); }
static void *plain_realloc(void *ctx, void *p, size_t size) { return realloc(p, size); }
static void plain_free(void *ctx, void *p, size_t size) { free(p); }
static Handler plain = {"plain", 1, {NULL, plain_malloc, plain_calloc, plain_realloc, plain_free}};

typedef struct { unsigned char *p; size_t size; int seed; } Owned;
static Owned box[SHARED];
static pthread_mutex_t box_lock = PTHREAD_MUTEX_INITIALIZER;
static int rounds;

/* Arenas without gaps, links both ways, free neighbours joined, each free block in its bin, zeros beyond the top, right sums. */
static void check_structure(void)
{
    acquire();
    size_t all = 0, in_use = 0;
    for (Heap *heap = heaps; heap < heaps + 2; heap++) {
        int free_blocks = 0, in_bins = 0;
        for (Arena *a = heap->arenas; a; a = a->next) {
            Block *before = NULL;
            char *at = (char *)(a + 1);
            for (; at < a->top; at += size_of(before)) {
                Block *b = (Block *)at;
                assert(b->arena == a && b->before == before && size_of(b) % LINE == 0 && is_ours(b));
                assert(!before || !is_free(before) || !is_free(b));
                if (is_free(b)) free_blocks++; else in_use += b->size;
                before = b;
            }
            assert(at == a->top && a->last == before && a->top <= a->end);
            for (char *p = at; p < a->end && p < at + 2 * PAGE; p++) assert(*p == 0);
            all += a->top - (char *)a;
        }
        for (int i = 0; i < BINS; i++) {
            assert(!heap->bins[i] == !(heap->filled[i / 64] >> i % 64 & 1));
            for (Block *b = heap->bins[i]; b; b = b->next, in_bins++) assert(is_free(b) && bin_of(size_of(b)) == i && *b->link == b);
        }
        assert(free_blocks == in_bins);
    }
    assert(all == touched && in_use == used && used <= peak && returned <= touched - used);
    yield();
}

static void write_to(Owned *o)
{
    for (size_t i = 0; i < o->size; i += 97) o->p[i] = (unsigned char)(o->seed + i);
}

static void check(const Owned *o, size_t size)
{
    for (size_t i = 0; i < size; i += 97) assert(o->p[i] == (unsigned char)(o->seed + i));
}

static void drop(Owned *o)
{
    if (!o->p) return;
    check(o, o->size);
    memory_free(NULL, o->p, o->size);
    o->p = NULL;
}

static void *work(void *number)
{
    unsigned state = (unsigned)(size_t)number * 7919 + 1;
    Owned kept[KEPT] = {0};
    for (int i = 0; i < rounds; i++) {
        Owned *o = &kept[rand_r(&state) % KEPT];
        int what = rand_r(&state) % 8, kind = rand_r(&state) % 10;
        size_t size = rand_r(&state) % (kind < 6 ? 20000 : kind < 9 ? 200000 : 2000000);
        if (!o->p) {
            *o = (Owned){what ? memory_malloc(NULL, size) : memory_calloc(NULL, size, 1), size, i};
            assert(o->p && (size < SMALL || (uintptr_t)o->p % LINE == 0));
            for (size_t j = 0; !what && j < size; j++) assert(o->p[j] == 0);
        } else if (what == 1 && size) {
            o->p = memory_realloc(NULL, o->p, size);
            assert(o->p);
            check(o, size < o->size ? size : o->size);
            o->size = size;
        } else if (what == 2) {
            Owned *place = &box[rand_r(&state) % SHARED];
            pthread_mutex_lock(&box_lock);
            Owned other = *place;
            *place = *o;
            pthread_mutex_unlock(&box_lock);
            *o = other;
            drop(o);
        } else {
            if (what == 3 && kind == 9) memory_trim();
            drop(o);
        }
        if (o->p) write_to(o);
    }
    for (int k = 0; k < KEPT; k++) drop(&kept[k]);
    return NULL;
}

static void fork_and_use(void)
{
    pid_t child = fork();
    if (child == 0) {
        Owned o = {memory_malloc(NULL, 100000), 100000, 3};
        write_to(&o);
        drop(&o);
        check_structure();
        _exit(0);
    }
    int status;
    assert(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv)
{
    rounds = argc > 1 ? atoi(argv[1]) : 2000;
    assert(memory_handler(&plain) == &handler);
    for (size_t n = SMALL; n < 4 << 20; n += n < 8192 ? 1 : 977) {
        size_t size = block_size(n);
        assert(size % LINE == 0 && size >= n + LINE && size * 5 <= n * 6);
    }
    assert(!memory_calloc(NULL, (size_t)1 << 40, (size_t)1 << 40) && !memory_malloc(NULL, ~(size_t)0));
    for (int pass = 0; pass < 3; pass++) {
        pthread_t threads[THREADS];
        memory_set_cap(pass == 1 ? 1 << 20 : -1);
        for (size_t i = 0; i < THREADS; i++) assert(!pthread_create(&threads[i], NULL, work, (void *)(i + pass * THREADS)));
        for (int i = 0; pass == 0 && i < 10; i++) fork_and_use();
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
        check_structure();
        assert(pass != 1 || cached() <= 1 << 20);
    }
    for (int i = 0; i < SHARED; i++) drop(&box[i]);
    memory_trim();
    check_structure();
    assert(used == 0 && touched == 0 && returned == 0 && !heaps[0].arenas && !heaps[1].arenas);
    puts("done");
    return 0;
}
