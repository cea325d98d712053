/* CUDA blocks on a CPU: enough of CUDA C++ that the kernels beside this file run where there is no GPU. Tests run each of them so.

   A block's threads are fibres of one CPU thread, which are switched where they wait: at __syncthreads for all of the block, in
   warp functions for the 32 of a warp. Blocks run one after the other. What waits for somebody who has gone another way is found
   and told; races between threads that should wait for each other, mostly, are not, and neither is anything about speed.

   What it does on purpose: threads of a block run in turn from the last to the first in odd blocks, so that results which depend
   on the order differ from block to block. */
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>

struct dim3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace host {
enum State : char { fresh, runs, at_block, at_warp, done };
enum { MOST_THREADS = 1024, STACK = 1 << 18, WARP = 32, MOST_SHARED = 232448 };       // bytes: of a block on sm_90

struct Fibre { ucontext_t start; jmp_buf at; bool begun; unsigned thread; };

static Fibre fibres[MOST_THREADS];
static Fibre *of[MOST_THREADS];                          // the fibre that each thread runs on
static State state[MOST_THREADS];
static jmp_buf scheduler;
static unsigned now, next, count;                        // the thread that runs; how many have started; of how many
static Fibre *running, *idle[MOST_THREADS];
static unsigned n_idle, n_made;
static dim3 block, blocks, threads;
static uint64_t words[MOST_THREADS];                     // of warp functions
alignas(128) static unsigned char shared[MOST_SHARED];
static void (*body)();

inline void to_scheduler() { if (!_setjmp(running->at)) _longjmp(scheduler, 1); }

inline unsigned in_turn(unsigned i) { return block.x % 2 ? count - 1 - i : i; }

/* A fibre takes threads that have not started, one after the other, as long as they do not wait: a kernel without barriers
   runs on one fibre, which nothing switches. */
inline void work() {
    for (;;) {
        while (next < count) {
            Fibre *own = running;
            now = own->thread = in_turn(next++);
            of[now] = own;
            state[now] = runs;
            body();
            state[running->thread] = done;
        }
        idle[n_idle++] = running;
        to_scheduler();
    }
}

inline void resume(Fibre *fibre) {
    running = fibre;
    now = fibre->thread;
    if (_setjmp(scheduler)) return;
    if (fibre->begun) _longjmp(fibre->at, 1);
    fibre->begun = true;
    setcontext(&fibre->start);
}

inline Fibre *unused() {
    if (n_idle) return idle[--n_idle];
    Fibre *fibre = &fibres[n_made++];
    getcontext(&fibre->start);
    fibre->start.uc_stack.ss_sp = std::malloc(STACK);
    fibre->start.uc_stack.ss_size = STACK;
    fibre->start.uc_link = nullptr;
    makecontext(&fibre->start, work, 0);
    return fibre;
}

inline void wait(State why) { state[now] = why; to_scheduler(); now = running->thread; }

/* Threads go on where all that they wait for have come. Returns how many go on. */
inline unsigned release() {
    unsigned released = 0, waiting = 0, left = 0;
    for (unsigned i = 0; i < count; ++i) { left += state[i] != done; waiting += state[i] == at_block; }
    if (left && waiting == left) {
        for (unsigned i = 0; i < count; ++i) if (state[i] == at_block) { state[i] = runs; ++released; }
        return released;
    }
    for (unsigned first = 0; first < count; first += WARP) {
        const unsigned end = first + WARP < count ? first + WARP : count;
        unsigned here = 0, there = 0;
        for (unsigned i = first; i < end; ++i) { here += state[i] != done; there += state[i] == at_warp; }
        if (here && here == there) for (unsigned i = first; i < end; ++i) if (state[i] == at_warp) { state[i] = runs; ++released; }
    }
    return released;
}

/* 0; 1 where threads wait for others that never come. */
inline int run_block() {
    for (unsigned i = 0; i < count; ++i) state[i] = fresh;
    std::memset(shared, 0xff, sizeof shared < 65536 ? sizeof shared : 65536);            // NaN: nothing is there before it is written
    next = 0;
    while (next < count) resume(unused());
    for (;;) {
        if (!release()) {
            for (unsigned i = 0; i < count; ++i) if (state[i] != done) return 1;
            return 0;
        }
        for (unsigned i = 0; i < count; ++i) {
            const unsigned thread = in_turn(i);
            if (state[thread] == runs) resume(of[thread]);
        }
    }
}

enum { INTEGERS = 64 };
typedef int64_t i64;
template <std::size_t> using Integer = i64;
template <class> struct Taking;
template <std::size_t... I> struct Taking<std::index_sequence<I...>> {
    typedef void Kernel(Integer<I>..., double, double, double, double, double, double, double, double);
    static void call(Kernel *kernel, const i64 *i, const double *d) {
        kernel(i[I]..., d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
    }
};
typedef Taking<std::make_index_sequence<INTEGERS>> All;
typedef All::Kernel Kernel;
static Kernel *kernel;
static const i64 *given;
static const double *numbers;

/* Integers (pointers too) and doubles are numbered apart from each other where they are passed, so a kernel looks at as many of
   each as it has (see native/call.c, which does the same). */
inline void call() { All::call(kernel, given, numbers); }
}

/* Runs a kernel of this library with up to 64 integers or addresses and 8 doubles. 0; 1: threads wait for others that never come;
   2: no GPU would launch such a grid. */
extern "C" __attribute__((visibility("default"))) int run_on_host(host::Kernel *kernel, const unsigned *grid, const unsigned *size, int64_t shared_bytes,
                           const int64_t *integers, const double *doubles) {
    const uint64_t wanted = (uint64_t)size[0] * size[1] * size[2];
    if (!wanted || wanted > host::MOST_THREADS || size[1] != 1 || size[2] != 1 || !grid[0] || !grid[1] || !grid[2]
        || grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535 || shared_bytes > host::MOST_SHARED) return 2;
    host::kernel = kernel;
    host::given = integers;
    host::numbers = doubles;
    host::body = host::call;
    host::blocks = {grid[0], grid[1], grid[2]};
    host::threads = {size[0], size[1], size[2]};
    host::count = size[0];
    dim3 &b = host::block;
    for (b.z = 0; b.z < grid[2]; ++b.z) for (b.y = 0; b.y < grid[1]; ++b.y) for (b.x = 0; b.x < grid[0]; ++b.x)
        if (host::run_block()) return 1;
    return 0;
}

namespace host { struct Place { operator dim3() const { return {now, 0, 0}; } }; }
#define threadIdx (dim3{host::now, 0, 0})
#define blockIdx host::block
#define blockDim host::threads
#define gridDim host::blocks
#define warpSize 32
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __shared__ static
#define __constant__ static const
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(T, name) T *name = (T *)host::shared

inline void __syncthreads() { host::wait(host::at_block); }
inline void __syncwarp(unsigned = 0xffffffffu) { host::wait(host::at_warp); }
namespace host {
template <class T> T exchanged(T value, unsigned from) {
    static_assert(sizeof(T) <= 8, "words of 8 bytes at most go through a warp");
    words[now] = 0;
    std::memcpy(&words[now], &value, sizeof value);
    wait(at_warp);
    T other;
    const unsigned first = now / WARP * WARP;
    std::memcpy(&other, &words[from < first + WARP && from < count ? from : now], sizeof other);
    wait(at_warp);
    return other;
}
}
template <class T> T __shfl_xor_sync(unsigned, T value, int lanes) { return host::exchanged(value, host::now ^ lanes); }
template <class T> T __shfl_sync(unsigned, T value, int lane) { return host::exchanged(value, host::now / 32 * 32 + lane % 32); }
template <class T> T __shfl_down_sync(unsigned, T value, unsigned lanes) {
    return host::exchanged(value, host::now % 32 + lanes < 32 ? host::now + lanes : host::now);
}
template <class T> T __shfl_up_sync(unsigned, T value, unsigned lanes) {
    return host::exchanged(value, host::now % 32 >= lanes ? host::now - lanes : host::now);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned found = 0;
    for (unsigned i = 0; i < 32; ++i) found |= (unsigned)(__shfl_sync(0xffffffffu, (int)(predicate != 0), i) != 0) << i;
    return found;
}
template <class T> T atomicAdd(T *to, T value) { const T before = *to; *to = before + value; return before; }
template <class T> T atomicMax(T *to, T value) { const T before = *to; if (value > before) *to = value; return before; }
template <class T> T atomicOr(T *to, T value) { const T before = *to; *to = before | value; return before; }
template <class T> T atomicExch(T *to, T value) { const T before = *to; *to = value; return before; }
inline void __threadfence() {}

inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline long long __double_as_longlong(double x) { long long bits; std::memcpy(&bits, &x, 8); return bits; }
inline double __longlong_as_double(long long bits) { double x; std::memcpy(&x, &bits, 8); return x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
