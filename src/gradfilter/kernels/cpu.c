/* The patch-grid kernels for CPUs: float32 maps in channels-last order, [N][H][W][C] in memory.
 *
 * eager.py says what each kernel computes. Everything here is vectorised across channels with the
 * compiler's vector types; the part that depends on the vector width stands in the second half of
 * this file, which includes itself once per instruction set (x86-64: SSE2, AVX2, AVX-512; others:
 * 16-byte vectors, which are NEON on ARM). The best one the machine has is chosen at run time.
 *
 * Threads come from outside: gf_set_fork receives the fork primitive of the OpenMP runtime that
 * PyTorch already runs (GOMP_parallel), so there is one thread pool in the process, not two, and
 * no OpenMP is needed to build this. Work is cut into items that each own their outputs, so
 * results do not depend on the number of threads. Likewise gf_set_product may receive the matrix
 * product that PyTorch multiplies by, which on some processors is faster than the one here.
 */
#ifndef ISA

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef int64_t idx;

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

static idx min_idx(idx a, idx b) { return a < b ? a : b; }
static idx max_idx(idx a, idx b) { return a > b ? a : b; }
static idx ceil_div(idx a, idx b) { return (a + b - 1) / b; }

/* The activations, in the order of cpu.py's table. */
enum { NONE, RELU, RELU6, HARDSWISH, HARDSIGMOID, SILU, SIGMOID, GELU, GELU_TANH, TANH, LEAKY_RELU,
       ELU, MISH, ACTS };
#define EACH_ACT(DO) \
    DO(NONE) DO(RELU) DO(RELU6) DO(HARDSWISH) DO(HARDSIGMOID) DO(SILU) DO(SIGMOID) DO(GELU) \
    DO(GELU_TANH) DO(TANH) DO(LEAKY_RELU) DO(ELU) DO(MISH)

/* How far ahead a map is fetched, in floats: pixels are taken four at a time, an order that the
 * hardware's own prefetching does not follow well. Measured: a fifth off a map out of cache. */
#define AHEAD 1024
/* Channels that one item of slope_backward takes. */
#define SLICE 256
/* Bytes of the first cache that a depthwise convolution plans with. */
#define CACHE 40000
/* Floats of a 1x1 layer's output that one thread computes before it goes over them again, so that
 * they are still in the second cache. */
#define STRIP 98304
/* Tiles of a convolution at a time, times its input channels, see struct winograd_job. */
#define TILES 16384
/* Floats of a product's left factor that stay in the cache while all columns are computed. */
#define ROWS 16384

/* ---- threads ---- */

typedef void (*range_fn)(const void *job, idx begin, idx end);
typedef void (*fork_fn)(void (*member)(void *), void *team, unsigned threads, unsigned flags);

static fork_fn fork_team;

EXPORT void gf_set_fork(fork_fn fork) { fork_team = fork; }

struct team {
    range_fn fn;
    const void *job;
    idx items, grain, next;
};

/* Each member takes the next few items until none is left: no thread numbers are needed. */
static void member(void *arg) {
    struct team *team = arg;
    for (;;) {
        idx begin = __atomic_fetch_add(&team->next, team->grain, __ATOMIC_RELAXED);
        if (begin >= team->items) return;
        team->fn(team->job, begin, min_idx(begin + team->grain, team->items));
    }
}

/* `floats` is the amount of data touched: below a few tens of microseconds a fork costs more. */
static void run(range_fn fn, const void *job, idx items, idx floats, int threads) {
    if (!fork_team || threads <= 1 || items <= 1 || floats < 32768) {
        fn(job, 0, items);
        return;
    }
    struct team team = {fn, job, items, max_idx(1, items / (4 * threads)), 0};
    fork_team(member, &team, (unsigned)min_idx(threads, items), 0);
}

/* ---- matrix products ---- */

/* Fortran's sgemm. Its integers are passed as 64-bit ones, whose first half is the 32-bit one. */
typedef void (*product_fn)(const char *trans_a, const char *trans_b, const idx *m, const idx *n,
                           const idx *k, const float *alpha, const float *a, const idx *lda,
                           const float *b, const idx *ldb, const float *beta, float *c,
                           const idx *ldc);

static product_fn product;

EXPORT void gf_set_product(product_fn fn) { product = fn; }

/* Aligned memory, in bytes; NULL when there is none. */
static void *scratch(idx bytes) {
    return aligned_alloc(64, (size_t)ceil_div(max_idx(bytes, 1), 64) * 64);
}

/* c [M][N] = alpha * a b. a(i, k) is a[i * ai + k * ak]; b is [K][N] or, turned, [N][K]. */
struct product_job {
    const float *a, *b;
    float *c;
    idx ai, ak, M, N, K, rows; /* rows of c that an item computes, of one panel of its columns */
    float alpha;
    int turned, packed, add; /* a panel of b is copied first; c is added to */
    int *failed;
};

/* A 3x3 convolution of stride 1 and padding 1 or its gradients, by Winograd's F(4x4, 3x3): maps are
 * cut into tiles of 4 x 4 outputs; of each tile 36 combinations of its pixels are made, whose products
 * with 36 combinations of the kernel's taps tell the same as the 144 products of pixels and taps. */
struct winograd_job {
    const float *g, *x, *w; /* w is [O][3][3][C]; x NULL: no gw */
    float *gx, *gw;         /* either may be NULL; gw as w */
    int ahead;    /* the convolution itself: from g, its input, to gx, its output; w is [C][3][3][O] */
    int together; /* or, where it is ahead, [C][O][3][3] */
    /* combinations of g as input of gx [36][R][O] and as output [O / outs][36][R][outs], of x
     * [36][R][C] */
    float *seen, *given, *read;
    idx H, W, C, O, first, R; /* R tiles, from the first on */
    int *failed;
};

static void *zeroed(idx bytes) {
    void *space = scratch(bytes);
    if (space) memset(space, 0, (size_t)max_idx(bytes, 1));
    return space;
}

/* ---- jobs: the arguments of one call, shared by its items ---- */

struct epilogue_job {
    float *y;
    const float *residual, *scale, *shift; /* any may be NULL */
    float *mean, *slope;                   /* both NULL: no statistics; slope NULL for NONE */
    idx H, W, C, rh, rw;
    int act;
    float parameter;
};

/* The items of a job from `begin` on. */
struct part {
    range_fn fn;
    const void *job;
    idx begin;
};

static void part_items(const void *arg, idx begin, idx end) {
    const struct part *part = arg;
    part->fn(part->job, part->begin + begin, part->begin + end);
}

struct mean_job {
    const float *x;
    float *mean;
    idx H, W, C, rh, rw;
};

struct depthwise_job {
    struct epilogue_job out; /* the output map and what follows the convolution */
    const float *x, *w;      /* w is [C / lanes][kh][kw][lanes] here */
    idx H, W, kh, kw, sh, sw, top, left, dh, dw, chunk, ahead;
};

/* One axis of the tap tables. Each input patch q reads outputs start[q] .. start[q] + reach, which
 * may stick out at the ends; equal columns of the table share a class, so that a mixed kernel is
 * made once per class: table[class][tap][d]. */
struct axis {
    idx outs, ins, taps, reach, classes;
    idx *start, *class;
    float *table;
};

struct grid_job {
    const float *g, *x, *w;
    float *gx, *gw; /* either may be NULL */
    idx N, C;
    struct axis h, w_axis;
    int *failed;
};

struct pool_job {
    const float *y, *scale, *shift;
    float *out, *mean, *route; /* mean and route NULL: no statistics */
    const idx *first_h, *first_w;
    idx H, W, C, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw;
    idx rh_in, rw_in, rh, rw, D1, D2;
    int act;
    float parameter;
    int *failed;
};

struct pool_grid_job {
    const float *g, *route;
    const idx *first_h, *first_w;
    float *gx;
    idx P1, P2, D1, D2, Q1, Q2, C;
};

struct slope_job {
    const float *g, *slope, *scale, *area; /* all but g may be NULL; area is per cell */
    float *z, *scaled, *sum;               /* any may be NULL */
    idx N, cells, C;
    float whole; /* the area of every cell when `area` is NULL */
    int act;     /* RELU or RELU6: `slope` is the map f(z), which tells f' */
};

struct spread_job {
    const float *g, *taps_h, *taps_w;
    float *seen;
    idx O, P1, P2, Q1, Q2, kh, kw;
    int *failed;
};

struct dots_job {
    const float *a, *b;
    float *dots;
    idx K;
};

/* A run of one row of a map, for the functions that are compiled once per activation. */
struct row {
    float *y;
    const float *residual, *scale, *shift;
    float *mean, *slope;
    idx W, C, rw, c0, c1;
    idx rows; /* of the patches this row lies in, of which it may be the first or the last */
    int first, last;
    idx ahead;
    float parameter;
};
typedef void (*row_fn)(const struct row *);

struct window {
    idx at;     /* where the pixel is, in floats from the image's start */
    float cell; /* which input patch it lies in, as d1 * D2 + d2 */
};
struct pixel {
    const float *y, *scale, *shift;
    float *out, *mean, *route; /* of this pixel and of its output patch */
    const struct window *window;
    idx count, C, D2, d1_first, d1_last, d2_first, d2_last;
    float parameter;
};
typedef void (*pixel_fn)(const struct pixel *);

struct isa {
    const char *name;
    range_fn patch_mean, epilogue, depthwise, grid_backward, max_pool, pool_grid_backward;
    range_fn slope_backward, row_dots, spread, product, winograd_tiles, winograd_panels;
    idx lanes, panel; /* columns of c that a product takes at a time */
    idx breadth, outs; /* channels, and rows of gw, that winograd takes at a time */
};

/* ---- the second half of this file, once per instruction set ---- */

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define OWN(name) PASTE(name, ISA)
#define QUOTE_(a) #a
#define QUOTE(a) QUOTE_(a)

#if defined(__x86_64__)

#define ISA sse2
#define LANES 4
#include "cpu.c"
#undef ISA
#undef LANES

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define ISA avx2
#define LANES 8
#include "cpu.c"
#undef ISA
#undef LANES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")
#endif
#define ISA avx512
#define LANES 16
#include "cpu.c"
#undef ISA
#undef LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static const struct isa *const all_isas[] = {&isa_avx512, &isa_avx2, &isa_sse2};

static int machine_has(const struct isa *isa) {
    __builtin_cpu_init();
    if (isa == &isa_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (isa == &isa_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return 1;
}

#else

#define ISA plain
#define LANES 4
#include "cpu.c"
#undef ISA
#undef LANES

static const struct isa *const all_isas[] = {&isa_plain};

static int machine_has(const struct isa *isa) { return isa != NULL; }

#endif

static const struct isa *chosen;

/* Use one instruction set by name, or the best there is when name is NULL. Returns the name in
 * use, NULL when the machine lacks what was asked for. */
EXPORT const char *gf_select(const char *name) {
    for (size_t i = 0; i < sizeof all_isas / sizeof *all_isas; i++)
        if (machine_has(all_isas[i]) && (!name || !strcmp(name, all_isas[i]->name)))
            return (chosen = all_isas[i])->name;
    return NULL;
}

__attribute__((constructor)) static void choose_best(void) { gf_select(NULL); }

#ifndef SOURCE_HASH
#define SOURCE_HASH "unknown"
#endif
/* Which source this was built from, so that cpu_library.py can tell a stale build. */
EXPORT const char *gf_source(void) { return SOURCE_HASH; }

/* setuptools builds this as a Python extension module, and some linkers want the init symbol;
 * nobody imports it: cpu_library.py opens the file with ctypes. */
EXPORT void *PyInit__cpu(void) { return NULL; }

/* Whether PyTorch's own product (MKL, on x86) is to be preferred: it is made for Intel's. */
EXPORT int gf_wants_product(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return 0;
#endif
}

/* See struct product_job; ai or ak is 1. */
static int multiply(const float *a, idx ai, idx ak, const float *b, int turned, float *c, idx M,
                    idx N, idx K, float alpha, int threads) {
    if (product) { /* columns first: c^T = b^T a^T */
        const float beta = 0;
        const idx ldb = turned ? K : N, lda = ak == 1 ? ai : ak;
        product(turned ? "T" : "N", ak == 1 ? "N" : "T", &N, &M, &K, &alpha, b, &ldb, a, &lda, &beta,
                c, &N);
        return 0;
    }
    int failed = 0;
    /* Rows of b that lie far apart are worth a copy where many rows of c read them. */
    const int packed = turned || (ak == 1 && K >= 512 && M >= 96 && N > chosen->panel);
    const idx rows = max_idx(24, packed ? 256 : ROWS / max_idx(K, 1));
    struct product_job job = {a, b, c, ai, ak, M, N, K, rows, alpha, turned, packed, 0, &failed};
    run(chosen->product, &job, ceil_div(M, rows) * ceil_div(N, chosen->panel), M * N * K / 8, threads);
    return failed ? -1 : 0;
}

/* ---- the exported kernels; all return 0, or -1 when memory ran out ---- */

EXPORT int gf_patch_mean(const float *x, float *mean, idx N, idx H, idx W, idx C, idx rh, idx rw,
                         int threads) {
    struct mean_job job = {x, mean, H, W, C, rh, rw};
    run(chosen->patch_mean, &job, N * ceil_div(H, rh), N * H * W * C, threads);
    return 0;
}

EXPORT int gf_epilogue(float *y, const float *residual, const float *scale, const float *shift,
                       float *mean, float *slope, idx N, idx H, idx W, idx C, idx rh, idx rw,
                       int act, float parameter, int threads) {
    if (!mean) rh = 4; /* no statistics: any strip of rows will do */
    struct epilogue_job job = {y, residual, scale, shift, mean, slope, H, W, C, rh, rw, act, parameter};
    run(chosen->epilogue, &job, N * ceil_div(H, rh), N * H * W * C, threads);
    return 0;
}

/* y[pixel] = w x[pixel], w [C][K], then the epilogue; a few patch rows at a time. */
EXPORT int gf_pointwise(const float *x, const float *w, const float *residual, const float *scale,
                        const float *shift, float *y, float *mean, float *slope, idx N, idx H, idx W,
                        idx K, idx C, idx rh, idx rw, int act, float parameter, int threads) {
    if (!mean) rh = 4;
    const idx P = ceil_div(H, rh), tile = max_idx(1, threads * STRIP / (rh * W * C));
    struct epilogue_job job = {y, residual, scale, shift, mean, slope, H, W, C, rh, rw, act, parameter};
    for (idx item = 0; item < N * P; item += tile) {
        const idx end = min_idx(item + tile, N * P);
        const idx first = item / P * H + item % P * rh, last = end / P * H + end % P * rh;
        if (multiply(x + first * W * K, K, 1, w, 1, y + first * W * C, (last - first) * W, C, K, 1,
                     threads))
            return -1;
        struct part part = {chosen->epilogue, &job, item};
        run(part_items, &part, end - item, (last - first) * W * C, threads);
    }
    return 0;
}

/* c [M][N] = a b; a(i, k) is a[i * ai + k * ak], where ai or ak is 1; b is [K][N]. */
EXPORT int gf_product(const float *a, const float *b, float *c, idx ai, idx ak, idx M, idx N, idx K,
                      int threads) {
    return multiply(a, ai, ak, b, 0, c, M, N, K, 1, threads);
}

/* See struct winograd_job. */
EXPORT int gf_winograd(const float *g, const float *x, const float *w, float *gx, float *gw, idx N,
                       idx H, idx W, idx C, idx O, int threads) {
    int failed = 0;
    const idx R = N * ceil_div(H, 4) * ceil_div(W, 4), seen = 36 * R * O, read = 36 * R * C;
    const idx given = 36 * R * ceil_div(O, chosen->outs) * chosen->outs;
    float *space = scratch(((gx ? seen : 0) + (gw ? given + read : 0)) * 4);
    if (!space) return -1;
    float *next = space + (gx ? seen : 0);
    struct winograd_job job = {g, x, w, gx, gw, 0, 0, space, next, next + given, H, W, C, O, 0, R, &failed};
    run(chosen->winograd_tiles, &job, R, R * (O + C) * 36, threads);
    run(chosen->winograd_panels, &job, ceil_div(C, chosen->breadth), 36 * O * C, threads);
    free(space);
    return failed ? -1 : 0;
}

/* y [N][H][W][C] = x [N][H][W][K] * w [C][3][3][K] or, together, [C][K][3][3], see struct
 * winograd_job; a few tiles at a time. */
EXPORT int gf_winograd_forward(const float *x, const float *w, float *y, idx N, idx H, idx W, idx K,
                               idx C, int together, int threads) {
    int failed = 0;
    const idx all = N * ceil_div(H, 4) * ceil_div(W, 4), most = min_idx(all, max_idx(48, TILES / K));
    float *space = scratch(36 * most * K * 4);
    if (!space) return -1;
    for (idx first = 0; first < all; first += most) {
        const idx R = min_idx(most, all - first);
        struct winograd_job job = {x, NULL, w, y, NULL, 1, together, space, NULL, NULL, H, W, C, K, first,
                                   R, &failed};
        run(chosen->winograd_tiles, &job, R, R * K * 36, threads);
        run(chosen->winograd_panels, &job, ceil_div(C, chosen->panel), 36 * K * C, threads);
    }
    free(space);
    return failed ? -1 : 0;
}

/* geometry: kh kw sh sw top left dh dw, see struct depthwise_job */
EXPORT int gf_depthwise(const float *x, const float *w, const float *scale, const float *shift,
                        float *y, float *mean, float *slope, idx N, idx H, idx W, idx C, idx OH,
                        idx OW, const idx *geometry, idx rh, idx rw, int act, float parameter,
                        int threads) {
    const idx *k = geometry;
    idx taps = k[0] * k[1];
    idx lanes = chosen->lanes, padded = ceil_div(C, lanes) * lanes;
    float *packed = scratch(taps * padded * 4);
    if (!packed) return -1;
    for (idx c = 0; c < padded; c++)
        for (idx t = 0; t < taps; t++)
            packed[(c / lanes * taps + t) * lanes + c % lanes] = c < C ? w[c * taps + t] : 0;
    if (!mean) rh = 4;
    struct epilogue_job out = {y, NULL, scale, shift, mean, slope, OH, OW, C, rh, rw, act, parameter};
    /* Channels at a time: few enough for the rows at work to stay in the first cache; but pieces of
     * less than three cache lines stream badly, and then it is better to take all channels. */
    idx chunk = CACHE / (4 * ((k[0] + k[2]) * W + OW)) / lanes * lanes;
    int stream = chunk < 48;
    struct depthwise_job job = {out, x, packed, H, W, k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7],
                                stream ? padded : chunk, stream ? AHEAD : 0};
    run(chosen->depthwise, &job, N * ceil_div(OH, rh) * ceil_div(C, job.chunk), N * OH * OW * C,
        threads);
    free(packed);
    return 0;
}

static void free_axis(struct axis *axis) {
    free(axis->start);
    free(axis->class);
    free(axis->table);
}

/* Does column q of taps [k][outs][ins] equal class i wherever both know a value? A class knows
 * nothing of outputs beyond the map; `known` marks the rest. */
static int fits(const struct axis *axis, const float *taps, const char *known, idx i, idx q) {
    for (idx d = 0; d < axis->reach; d++) {
        idx p = axis->start[q] + d;
        if (p < 0 || p >= axis->outs || !known[i * axis->reach + d]) continue;
        for (idx a = 0; a < axis->taps; a++)
            if (axis->table[(i * axis->taps + a) * axis->reach + d] !=
                taps[(a * axis->outs + p) * axis->ins + q])
                return 0;
    }
    return 1;
}

static void join(struct axis *axis, const float *taps, char *known, idx i, idx q) {
    axis->class[q] = i;
    for (idx d = 0; d < axis->reach; d++) {
        idx p = axis->start[q] + d;
        if (p < 0 || p >= axis->outs) continue;
        known[i * axis->reach + d] = 1;
        for (idx a = 0; a < axis->taps; a++)
            axis->table[(i * axis->taps + a) * axis->reach + d] =
                taps[(a * axis->outs + p) * axis->ins + q];
    }
}

/* The outputs [*low, *high) that read input patch q through any tap. */
static void band(const float *taps, idx k, idx outs, idx ins, idx q, idx *low, idx *high) {
    *low = outs;
    *high = 0;
    for (idx p = 0; p < outs; p++)
        for (idx a = 0; a < k; a++)
            if (taps[(a * outs + p) * ins + q] != 0) {
                *low = min_idx(*low, p);
                *high = p + 1;
            }
    if (*low > *high) *low = *high; /* no output reads q */
}

static int make_axis(struct axis *axis, const float *taps, idx k, idx outs, idx ins) {
    *axis = (struct axis){outs, ins, k, 1, 0, NULL, NULL, NULL};
    for (idx q = 0, low, high; q < ins; q++) {
        band(taps, k, outs, ins, q, &low, &high);
        axis->reach = max_idx(axis->reach, high - low);
    }
    char *known = zeroed(ins * axis->reach);
    axis->start = zeroed(ins * (idx)sizeof(idx));
    axis->class = zeroed(ins * (idx)sizeof(idx));
    axis->table = zeroed(ins * k * axis->reach * (idx)sizeof(float));
    if (!known || !axis->start || !axis->class || !axis->table) {
        free(known);
        free_axis(axis);
        return -1;
    }
    for (idx q = 0, low, high; q < ins; q++) {
        band(taps, k, outs, ins, q, &low, &high);
        /* A band cut off by the near edge keeps its far end, so that it can share the class of
         * the uncut bands. */
        axis->start[q] = low == 0 && high > 0 ? high - axis->reach : low;
        idx i = 0;
        while (i < axis->classes && !fits(axis, taps, known, i, q)) i++;
        if (i == axis->classes) axis->classes++;
        join(axis, taps, known, i, q);
    }
    free(known);
    return 0;
}

EXPORT int gf_grid_backward(const float *g, const float *x, const float *w, const float *taps_h,
                            const float *taps_w, float *gx, float *gw, idx N, idx C, idx P1, idx P2,
                            idx Q1, idx Q2, idx kh, idx kw, int threads) {
    int failed = 0;
    struct grid_job job = {g, x, w, gx, gw, N, C, {0}, {0}, &failed};
    if (make_axis(&job.h, taps_h, kh, P1, Q1)) return -1;
    if (make_axis(&job.w_axis, taps_w, kw, P2, Q2)) {
        free_axis(&job.h);
        return -1;
    }
    run(chosen->grid_backward, &job, ceil_div(C, chosen->lanes), 4 * N * C * Q1 * Q2, threads);
    free_axis(&job.h);
    free_axis(&job.w_axis);
    return failed ? -1 : 0;
}

EXPORT int gf_slope_backward(const float *g, const float *slope, const float *scale,
                             const float *area, float whole, float *z, float *scaled, float *sum,
                             idx N, idx cells, idx C, int act, int threads) {
    struct slope_job job = {g, slope, scale, area, z, scaled, sum, N, cells, C, whole, act};
    if (sum) memset(sum, 0, (size_t)C * sizeof(float));
    run(chosen->slope_backward, &job, ceil_div(C, SLICE), 3 * N * cells * C, threads);
    return 0;
}

EXPORT int gf_row_dots(const float *a, const float *b, float *dots, idx rows, idx K, int threads) {
    struct dots_job job = {a, b, dots, K};
    run(chosen->row_dots, &job, rows, 2 * rows * K, threads);
    return 0;
}

/* Of a 1x1 layer w [C][K] whose patches match one to one: slope_backward (without z and area), then
 * from its result s: gx = into_gx s w, gw = into_gw s^T x, dots = <gw, w> by rows of w. Any of
 * z, sum, gx, gw and dots may be NULL, dots must be where gw is. */
EXPORT int gf_pointwise_backward(const float *g, const float *slope, const float *scale, float whole,
                                 float *z, float *sum, const float *x, const float *w, float *gx,
                                 float *gw, float *dots, float into_gx, float into_gw, idx N,
                                 idx cells, idx K, idx C, int act, int threads) {
    float *space = NULL, *sloped = z;
    if (scale || (slope && !z)) {
        space = scratch(N * cells * C * 4);
        if (!space) return -1;
        if (!scale) sloped = space;
    }
    const float *s = scale ? space : slope ? sloped : g;
    if (slope || scale || sum)
        gf_slope_backward(g, slope, scale, NULL, whole, sloped, scale ? space : NULL, sum, N, cells,
                          C, act, threads);
    int failed = 0;
    if (gx) failed |= multiply(s, C, 1, w, 0, gx, N * cells, K, C, into_gx, threads);
    if (gw) failed |= multiply(s, 1, C, x, 0, gw, C, K, N * cells, into_gw, threads);
    if (dots) gf_row_dots(gw, w, dots, C, K, threads);
    free(space);
    return failed;
}

EXPORT int gf_spread(const float *g, const float *taps_h, const float *taps_w, float *seen, idx N,
                     idx O, idx P1, idx P2, idx Q1, idx Q2, idx kh, idx kw, int threads) {
    int failed = 0;
    struct spread_job job = {g, taps_h, taps_w, seen, O, P1, P2, Q1, Q2, kh, kw, &failed};
    run(chosen->spread, &job, N * Q1, N * Q1 * Q2 * O * kh * kw, threads);
    return failed ? -1 : 0;
}

/* geometry: kh kw sh sw ph pw dh dw rh_in rw_in rh_out rw_out D1 D2 */
EXPORT int gf_max_pool(const float *y, const float *scale, const float *shift, float *out,
                       float *mean, float *route, const idx *first_h, const idx *first_w, idx N,
                       idx H, idx W, idx C, idx OH, idx OW, const idx *geometry, int act,
                       float parameter, int threads) {
    int failed = 0;
    const idx *k = geometry;
    struct pool_job job = {y, scale, shift, out, mean, route, first_h, first_w, H, W, C, OH, OW,
                           k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8], k[9],
                           mean ? k[10] : 4, k[11], k[12], k[13], act, parameter, &failed};
    run(chosen->max_pool, &job, N * ceil_div(OH, job.rh), N * H * W * C, threads);
    return failed ? -1 : 0;
}

EXPORT int gf_pool_grid_backward(const float *g, const float *route, const idx *first_h,
                                 const idx *first_w, float *gx, idx N, idx C, idx P1, idx P2,
                                 idx D1, idx D2, idx Q1, idx Q2, int threads) {
    struct pool_grid_job job = {g, route, first_h, first_w, gx, P1, P2, D1, D2, Q1, Q2, C};
    run(chosen->pool_grid_backward, &job, N, N * C * P1 * P2 * D1 * D2, threads);
    return 0;
}

/* ---- tapes: many of the calls above, written down once ---- */

EXPORT int gf_add(const float *a, const float *b, float *sum, idx count) {
    for (idx i = 0; i < count; i++) sum[i] = a[i] + b[i];
    return 0;
}

/* y[n][cell][c] = x * factors[cell], or * factor where `factors` is NULL; y may be x. */
EXPORT int gf_weigh(const float *x, const float *factors, float *y, float factor, idx N, idx cells,
                    idx C) {
    for (idx i = 0; i < N * cells; i++) {
        const float f = factors ? factors[i % cells] : factor;
        for (idx c = 0; c < C; c++) y[i * C + c] = x[i * C + c] * f;
    }
    return 0;
}

/* The images [first, first + count) of a batch, and where the tape's slots are. A place on a tape is
 * a slot, floats from its begin on for each of the slot's `scale`, and floats for each image before
 * the first. */
struct playing {
    char *const *bases;
    const idx *scales;
    idx first, count;
    int threads;
};

static void *place(const struct playing *p, const idx *word) {
    if (word[0] < 0) return NULL;
    return p->bases[word[0]] + 4 * (word[1] * p->scales[word[0]] + word[2] * p->first);
}

static float real(idx word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* The kernels a tape may call, in the order of tape.py's table. */
enum { PATCH_MEAN, POINTWISE, DEPTHWISE, ADD, POINTWISE_BACKWARD, SLOPE_BACKWARD, GRID_BACKWARD,
       ROW_DOTS, WEIGH };

/* One call: its pointers, three words each, stand before its numbers. The number of images is not
 * among them. */
static int play(const struct playing *p, idx kernel, const idx *words) {
    const idx n = p->count;
    const int threads = p->threads;
#define AT(i) place(p, words + 3 * (i))
    switch (kernel) {
    case PATCH_MEAN: {
        const idx *k = words + 6;
        return gf_patch_mean(AT(0), AT(1), n, k[0], k[1], k[2], k[3], k[4], threads);
    }
    case POINTWISE: {
        const idx *k = words + 24;
        return gf_pointwise(AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), AT(7), n, k[0], k[1],
                            k[2], k[3], k[4], k[5], (int)k[6], real(k[7]), threads);
    }
    case DEPTHWISE: {
        const idx *k = words + 24;
        return gf_depthwise(AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), n, k[0], k[1], k[2],
                            k[3], k[4], AT(7), k[5], k[6], (int)k[7], real(k[8]), threads);
    }
    case ADD:
        return gf_add(AT(0), AT(1), AT(2), n * words[9]);
    case POINTWISE_BACKWARD: {
        const idx *k = words + 30;
        return gf_pointwise_backward(AT(0), AT(1), AT(2), real(k[0]), AT(3), AT(4), AT(5), AT(6),
                                     AT(7), AT(8), AT(9), real(k[1]), real(k[2]), n, k[3], k[4],
                                     k[5], (int)k[6], threads);
    }
    case SLOPE_BACKWARD: {
        const idx *k = words + 21;
        return gf_slope_backward(AT(0), AT(1), AT(2), AT(3), real(k[0]), AT(4), AT(5), AT(6), n,
                                 k[1], k[2], (int)k[3], threads);
    }
    case GRID_BACKWARD: {
        const idx *k = words + 21;
        return gf_grid_backward(AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), n, k[0], k[1],
                                k[2], k[3], k[4], k[5], k[6], threads);
    }
    case ROW_DOTS:
        return gf_row_dots(AT(0), AT(1), AT(2), words[9], words[10], threads);
    case WEIGH: {
        const idx *k = words + 9;
        return gf_weigh(AT(0), AT(1), AT(2), real(k[0]), n, k[1], k[2]);
    }
    }
    return -2;
#undef AT
}

/* A tape of `length` words, each call after its kernel's number and its own length, for `at_once` of
 * the N images at a time. */
EXPORT int gf_play(const idx *tape, idx length, char *const *bases, const idx *scales, idx N,
                   idx at_once, int threads) {
    for (idx first = 0; first < N; first += at_once) {
        const struct playing p = {bases, scales, first, min_idx(at_once, N - first), threads};
        for (idx at = 0; at < length; at += tape[at + 1]) {
            const int failed = play(&p, tape[at], tape + at + 2);
            if (failed) return failed;
        }
    }
    return 0;
}

/* ---- cc -DSELF_TEST cpu.c -lm: every kernel, on every instruction set the machine has, against
 * naive loops in double; for machines without PyTorch, such as an emulator ---- */
#ifdef SELF_TEST
#include <stdio.h>

static unsigned long long seed = 1;
static int mismatches;

static float draw(void) { /* uniform in [-4, 4) */
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (float)((seed >> 40) / 16777216.0 * 8 - 4);
}

static float *drawn(idx count) {
    float *p = scratch(count * 4);
    for (idx i = 0; i < count; i++) p[i] = draw();
    return p;
}

static float *poison(idx count) {
    float *p = scratch(count * 4);
    for (idx i = 0; i < count; i++) p[i] = NAN;
    return p;
}

/* Equal to rounding, measured by the largest value: many are sums that cancel. Frees both. */
static void compare(const char *what, float *got, double *want, idx count) {
    double largest = 1;
    for (idx i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
    for (idx i = 0; i < count; i++)
        if (!(fabs(got[i] - want[i]) <= 1e-5 * largest)) {
            printf("%s %s: [%lld] is %g, should be %g\n", chosen->name, what, (long long)i, got[i],
                   want[i]);
            mismatches++;
            break;
        }
    free(got);
    free(want);
}

static double logistic(double z) { return 1 / (1 + exp(-z)); }

static double naive_act(int act, double z, double p, double *slope) {
    const double s = logistic(z), cut = fmin(6, fmax(0, z + 3)), t = tanh(z), e = exp(z);
    const double normal = 0.5 * (1 + erf(z / sqrt(2))), k = sqrt(2 / M_PI);
    const double u = tanh(k * (z + 0.044715 * z * z * z)), m = tanh(log1p(e));
    switch (act) {
    case RELU: *slope = z > 0; return fmax(0, z);
    case RELU6: *slope = z > 0 && z < 6; return fmin(6, fmax(0, z));
    case HARDSWISH: *slope = z <= -3 ? 0 : z < 3 ? z / 3 + 0.5 : 1; return z * cut / 6;
    case HARDSIGMOID: *slope = z > -3 && z < 3 ? 1.0 / 6 : 0; return cut / 6;
    case SILU: *slope = s * (1 + z * (1 - s)); return z * s;
    case SIGMOID: *slope = s * (1 - s); return s;
    case GELU: *slope = normal + z * exp(-z * z / 2) / sqrt(2 * M_PI); return z * normal;
    case GELU_TANH:
        *slope = 0.5 * (1 + u) + 0.5 * z * (1 - u * u) * k * (1 + 3 * 0.044715 * z * z);
        return 0.5 * z * (1 + u);
    case TANH: *slope = 1 - t * t; return t;
    case LEAKY_RELU: *slope = z > 0 ? 1 : p; return z > 0 ? z : p * z;
    case ELU: *slope = z > 0 ? 1 : p * e; return z > 0 ? z : p * (e - 1);
    case MISH: *slope = m + z * s * (1 - m * m); return z * m;
    default: *slope = 1; return z;
    }
}

struct geometry {
    idx N, C, H, W, k, s, d, before, after, r_in, r_out;
    int act;
};

static idx out_size(const struct geometry *t, idx size) {
    return (size + t->before + t->after - t->d * (t->k - 1) - 1) / t->s + 1;
}

static double *naive_mean(const double *x, idx N, idx C, idx H, idx W, idx r) {
    const idx P = ceil_div(H, r), Q = ceil_div(W, r);
    double *mean = zeroed(N * P * Q * C * 8);
    for (idx n = 0; n < N; n++)
        for (idx h = 0; h < H; h++)
            for (idx w = 0; w < W; w++)
                for (idx c = 0; c < C; c++) {
                    const idx rows = min_idx(r, H - h / r * r), columns = min_idx(r, W - w / r * r);
                    mean[((n * P + h / r) * Q + w / r) * C + c] +=
                        x[((n * H + h) * W + w) * C + c] / (double)(rows * columns);
                }
    return mean;
}

/* Checks a = f(y * scale + shift + residual) and its two means; frees everything but the inputs. */
static void check_stats(const char *what, const struct geometry *t, const double *y, idx H, idx W,
                        const float *scale, const float *shift, const float *residual, float *a,
                        float *mean, float *slope) {
    const idx count = t->N * H * W * t->C, r = t->r_out;
    const idx cells = t->N * ceil_div(H, r) * ceil_div(W, r) * t->C;
    double *f = scratch(count * 8), *df = scratch(count * 8);
    for (idx i = 0; i < count; i++) {
        const double z = y[i] * scale[i % t->C] + shift[i % t->C] + (residual ? residual[i] : 0);
        f[i] = naive_act(t->act, z, 0.1, &df[i]);
    }
    compare(what, mean, naive_mean(f, t->N, t->C, H, W, r), cells);
    if (t->act != NONE) compare(what, slope, naive_mean(df, t->N, t->C, H, W, r), cells);
    else free(slope);
    compare(what, a, f, count);
    free(df);
}

static void test_epilogue(const struct geometry *t) {
    const idx count = t->N * t->H * t->W * t->C;
    const idx cells = t->N * ceil_div(t->H, t->r_out) * ceil_div(t->W, t->r_out) * t->C;
    float *y = drawn(count), *residual = drawn(count), *scale = drawn(t->C), *shift = drawn(t->C);
    float *mean = poison(cells), *slope = poison(cells), *means = poison(cells);
    double *before = scratch(count * 8);
    for (idx i = 0; i < count; i++) before[i] = y[i];
    gf_patch_mean(y, means, t->N, t->H, t->W, t->C, t->r_out, t->r_out, 1);
    compare("patch_mean", means, naive_mean(before, t->N, t->C, t->H, t->W, t->r_out), cells);
    gf_epilogue(y, residual, scale, shift, mean, t->act == NONE ? NULL : slope, t->N, t->H, t->W, t->C,
                t->r_out, t->r_out, t->act, 0.1f, 1);
    check_stats("epilogue", t, before, t->H, t->W, scale, shift, residual, y, mean, slope);
    free(residual), free(scale), free(shift), free(before);
}

static void test_depthwise(const struct geometry *t) {
    const idx OH = out_size(t, t->H), OW = out_size(t, t->W), count = t->N * OH * OW * t->C;
    const idx cells = t->N * ceil_div(OH, t->r_out) * ceil_div(OW, t->r_out) * t->C;
    float *x = drawn(t->N * t->H * t->W * t->C), *w = drawn(t->C * t->k * t->k);
    float *scale = drawn(t->C), *shift = drawn(t->C);
    float *a = poison(count), *mean = poison(cells), *slope = poison(cells);
    double *y = zeroed(count * 8);
    for (idx i = 0; i < count * t->k * t->k; i++) {
        const idx o = i / (t->k * t->k), tap = i % (t->k * t->k), c = o % t->C, pixel = o / t->C;
        const idx h = pixel / OW % OH * t->s + tap / t->k * t->d - t->before;
        const idx v = pixel % OW * t->s + tap % t->k * t->d - t->before;
        if (h < 0 || h >= t->H || v < 0 || v >= t->W) continue;
        y[o] += (double)w[c * t->k * t->k + tap] *
                x[((pixel / OW / OH * t->H + h) * t->W + v) * t->C + c];
    }
    const idx geometry[] = {t->k, t->k, t->s, t->s, t->before, t->before, t->d, t->d};
    gf_depthwise(x, w, scale, shift, a, mean, t->act == NONE ? NULL : slope, t->N, t->H, t->W, t->C, OH,
                 OW, geometry, t->r_out, t->r_out, t->act, 0.1f, 1);
    check_stats("depthwise", t, y, OH, OW, scale, shift, NULL, a, mean, slope);
    free(x), free(w), free(scale), free(shift), free(y);
}

static float *tap_table(const struct geometry *t, idx size) {
    const idx out = out_size(t, size), P = ceil_div(out, t->r_out), Q = ceil_div(size, t->r_in);
    float *table = zeroed(t->k * P * Q * 4);
    for (idx a = 0; a < t->k; a++)
        for (idx i = 0; i < out; i++) {
            const idx at = i * t->s + a * t->d - t->before;
            if (at >= 0 && at < size) table[(a * P + i / t->r_out) * Q + at / t->r_in]++;
        }
    return table;
}

static void test_grid_backward(const struct geometry *t) {
    const idx P1 = ceil_div(out_size(t, t->H), t->r_out), P2 = ceil_div(out_size(t, t->W), t->r_out);
    const idx Q1 = ceil_div(t->H, t->r_in), Q2 = ceil_div(t->W, t->r_in), C = t->C, k = t->k;
    float *g = drawn(t->N * P1 * P2 * C), *x = drawn(t->N * Q1 * Q2 * C), *w = drawn(C * k * k);
    float *th = tap_table(t, t->H), *tw = tap_table(t, t->W);
    float *gx = poison(t->N * Q1 * Q2 * C), *gw = poison(C * k * k);
    double *want_gx = zeroed(t->N * Q1 * Q2 * C * 8);
    double *want_gw = zeroed(C * k * k * 8);
    for (idx n = 0; n < t->N; n++)
        for (idx i = 0; i < P1 * P2 * Q1 * Q2 * k * k; i++) {
            const idx tap = i % (k * k), q = i / (k * k) % (Q1 * Q2), p = i / (k * k) / (Q1 * Q2);
            const double factor = (double)th[(tap / k * P1 + p / P2) * Q1 + q / Q2] *
                                  tw[(tap % k * P2 + p % P2) * Q2 + q % Q2];
            for (idx c = 0; factor != 0 && c < C; c++) {
                const double grad = g[(n * P1 * P2 + p) * C + c] * factor;
                want_gx[(n * Q1 * Q2 + q) * C + c] += grad * w[c * k * k + tap];
                want_gw[c * k * k + tap] += grad * x[(n * Q1 * Q2 + q) * C + c];
            }
        }
    gf_grid_backward(g, x, w, th, tw, gx, gw, t->N, C, P1, P2, Q1, Q2, k, k, 1);
    compare("grid_backward gx", gx, want_gx, t->N * Q1 * Q2 * C);
    compare("grid_backward gw", gw, want_gw, C * k * k);
    free(g), free(x), free(w), free(th), free(tw);
}

static void test_slope_backward(const struct geometry *t) {
    const idx cells = t->H * t->W, C = t->C, count = t->N * cells * C;
    float *g = drawn(count), *slope = drawn(count), *scale = drawn(C), *area = drawn(cells);
    float *z = poison(count), *scaled = poison(count), *sum = poison(C), *dots = poison(t->N);
    double *want_z = scratch(count * 8), *want_scaled = scratch(count * 8);
    double *want_sum = zeroed(C * 8), *want_dots = zeroed(t->N * 8);
    for (idx i = 0; i < count; i++) {
        want_z[i] = (double)g[i] * slope[i];
        want_scaled[i] = want_z[i] * scale[i % C];
        want_sum[i % C] += want_z[i] * area[i / C % cells];
        want_dots[i / (cells * C)] += (double)g[i] * g[i]; /* no terms that cancel */
    }
    gf_slope_backward(g, slope, scale, area, 0, z, scaled, sum, t->N, cells, C, NONE, 1);
    gf_row_dots(g, g, dots, t->N, cells * C, 1);
    compare("slope_backward z", z, want_z, count);
    compare("slope_backward scaled", scaled, want_scaled, count);
    compare("slope_backward sum", sum, want_sum, C);
    compare("row_dots", dots, want_dots, t->N);
    float *masked = poison(count);
    double *want_masked = scratch(count * 8);
    for (idx i = 0; i < count; i++) want_masked[i] = slope[i] > 0 && slope[i] < 6 ? g[i] : 0;
    gf_slope_backward(g, slope, NULL, area, 0, masked, NULL, NULL, t->N, cells, C, RELU6, 1);
    compare("slope_backward of an output", masked, want_masked, count);
    free(g), free(slope), free(scale), free(area);
}

static void test_pointwise(const struct geometry *t) {
    const idx C = t->C, K = t->k + 4, pixels = t->N * t->H * t->W, count = pixels * C;
    const idx cells = t->N * ceil_div(t->H, t->r_out) * ceil_div(t->W, t->r_out) * C;
    float *x = drawn(pixels * K), *w = drawn(C * K), *residual = drawn(count);
    float *scale = drawn(C), *shift = drawn(C);
    float *a = poison(count), *mean = poison(cells), *slope = poison(cells);
    double *y = zeroed(count * 8);
    for (idx i = 0; i < count * K; i++)
        y[i / K] += (double)x[i / K / C * K + i % K] * w[i / K % C * K + i % K];
    gf_pointwise(x, w, residual, scale, shift, a, mean, t->act == NONE ? NULL : slope, t->N, t->H,
                 t->W, K, C, t->r_out, t->r_out, t->act, 0.1f, 1);
    check_stats("pointwise", t, y, t->H, t->W, scale, shift, residual, a, mean, slope);
    free(residual), free(shift), free(y);

    float *g = drawn(count), *df = drawn(count), *gx = poison(pixels * K), *gw = poison(C * K);
    float *z = poison(count), *sum = poison(C), *dots = poison(C);
    double *want_z = zeroed(count * 8), *want_sum = zeroed(C * 8), *want_dots = zeroed(C * 8);
    double *want_gx = zeroed(pixels * K * 8), *want_gw = zeroed(C * K * 8);
    for (idx i = 0; i < count; i++) {
        want_z[i] = (double)g[i] * df[i];
        want_sum[i % C] += want_z[i] * 4;
        for (idx k = 0; k < K; k++) {
            const double s = want_z[i] * scale[i % C];
            want_gx[i / C * K + k] += 2 * s * w[i % C * K + k];
            want_gw[i % C * K + k] += 3 * s * x[i / C * K + k];
        }
    }
    for (idx i = 0; i < C * K; i++) want_dots[i / K] += want_gw[i] * w[i];
    gf_pointwise_backward(g, df, scale, 4, z, sum, x, w, gx, gw, dots, 2, 3, t->N, t->H * t->W, K, C,
                          NONE, 1);
    compare("pointwise_backward z", z, want_z, count);
    compare("pointwise_backward sum", sum, want_sum, C);
    compare("pointwise_backward gx", gx, want_gx, pixels * K);
    compare("pointwise_backward gw", gw, want_gw, C * K);
    compare("pointwise_backward dots", dots, want_dots, C);
    free(x), free(w), free(scale), free(g), free(df);
}

/* A 3x3 convolution with more outputs than are taken at a time, and its gradients. */
static void test_winograd(const struct geometry *t) {
    const idx C = t->C, O = t->k + 66, H = t->H, W = t->W, pixels = t->N * H * W;
    float *x = drawn(pixels * C), *g = drawn(pixels * O), *w = drawn(O * 9 * C), *apart = drawn(O * 9 * C);
    float *y = poison(pixels * O), *again = poison(pixels * O);
    float *gx = poison(pixels * C), *gw = poison(O * 9 * C);
    double *want_y = zeroed(pixels * O * 8), *want_again = zeroed(pixels * O * 8);
    double *want_gx = zeroed(pixels * C * 8), *want_gw = zeroed(O * 9 * C * 8);
    for (idx i = 0; i < O * 9 * C; i++) apart[i / C / 9 * 9 * C + i % C * 9 + i / C % 9] = w[i];
    for (idx i = 0; i < pixels * 9; i++) {
        const idx p = i / 9, tap = i % 9, h = p / W % H + tap / 3 - 1, v = p % W + tap % 3 - 1;
        if (h < 0 || h >= H || v < 0 || v >= W) continue;
        const idx q = p / (H * W) * H * W + h * W + v; /* the input pixel under this tap */
        for (idx o = 0; o < O; o++)
            for (idx c = 0; c < C; c++) {
                const double own = w[(o * 9 + tap) * C + c];
                want_y[p * O + o] += own * x[q * C + c];
                want_gx[q * C + c] += own * g[p * O + o];
                want_gw[(o * 9 + tap) * C + c] += (double)g[p * O + o] * x[q * C + c];
            }
    }
    memcpy(want_again, want_y, (size_t)(pixels * O) * 8);
    gf_winograd_forward(x, w, y, t->N, H, W, C, O, 0, 1);
    gf_winograd_forward(x, apart, again, t->N, H, W, C, O, 1, 1);
    gf_winograd(g, x, w, gx, gw, t->N, H, W, C, O, 1);
    compare("winograd y", y, want_y, pixels * O);
    compare("winograd y, taps together", again, want_again, pixels * O);
    compare("winograd gx", gx, want_gx, pixels * C);
    compare("winograd gw", gw, want_gw, O * 9 * C);
    free(x), free(g), free(w), free(apart);
}

static void test_spread(const struct geometry *t) {
    const idx P1 = ceil_div(out_size(t, t->H), t->r_out), P2 = ceil_div(out_size(t, t->W), t->r_out);
    const idx Q1 = ceil_div(t->H, t->r_in), Q2 = ceil_div(t->W, t->r_in), C = t->C, k = t->k;
    const idx count = t->N * Q1 * Q2 * C * k * k;
    float *g = drawn(t->N * P1 * P2 * C), *th = tap_table(t, t->H), *tw = tap_table(t, t->W);
    float *seen = poison(count);
    double *want = zeroed(count * 8);
    for (idx i = 0; i < count; i++) {
        const idx tap = i % (k * k), c = i / (k * k) % C, q = i / (k * k * C) % (Q1 * Q2);
        const float *image = g + i / (k * k * C * Q1 * Q2) * P1 * P2 * C;
        for (idx p = 0; p < P1 * P2; p++)
            want[i] += (double)image[p * C + c] * th[(tap / k * P1 + p / P2) * Q1 + q / Q2] *
                       tw[(tap % k * P2 + p % P2) * Q2 + q % Q2];
    }
    gf_spread(g, th, tw, seen, t->N, C, P1, P2, Q1, Q2, k, k, 1);
    compare("spread", seen, want, count);
    free(g), free(th), free(tw);
}

/* A pool with as much padding as half its kernel; one cell takes the whole map in, so that route is
 * the sum of f' at the maxima, which the backward then hands back times g. */
static void test_max_pool(const struct geometry *t) {
    struct geometry half = *t;
    half.before = half.after = t->k / 2;
    if (t->act == GELU || t->act == GELU_TANH) half.act = RELU; /* their far tails are flat */
    const idx OH = out_size(&half, t->H), OW = out_size(&half, t->W), C = t->C, zero = 0;
    const idx side_in = max_idx(t->H, t->W), side_out = max_idx(OH, OW), pad = half.before;
    float *y = drawn(t->N * t->H * t->W * C), *scale = drawn(C), *shift = drawn(C), *g = drawn(t->N * C);
    float *out = poison(t->N * OH * OW * C), *mean = poison(t->N * C), *route = poison(t->N * C);
    float *gx = poison(t->N * C);
    double *want = scratch(t->N * OH * OW * C * 8);
    double *want_gx = zeroed(t->N * C * 8);
    for (idx i = 0; i < t->N * OH * OW * C; i++) {
        const idx c = i % C, pixel = i / C, n = pixel / OW / OH;
        double best = -INFINITY, slope, best_slope = 0;
        for (idx tap = 0; tap < t->k * t->k; tap++) {
            const idx h = pixel / OW % OH * t->s + tap / t->k * t->d - pad;
            const idx w = pixel % OW * t->s + tap % t->k * t->d - pad;
            if (h < 0 || h >= t->H || w < 0 || w >= t->W) continue;
            const double z = (double)y[((n * t->H + h) * t->W + w) * C + c] * scale[c] + shift[c];
            const double a = naive_act(half.act, z, 0.1, &slope);
            if (a > best) best = a, best_slope = slope;
        }
        want[i] = best;
        want_gx[n * C + c] += best_slope * g[n * C + c];
    }
    const idx geometry[] = {t->k, t->k, t->s, t->s, pad, pad, t->d, t->d, side_in, side_in,
                            side_out, side_out, 1, 1};
    gf_max_pool(y, scale, shift, out, mean, route, &zero, &zero, t->N, t->H, t->W, C, OH, OW, geometry,
                half.act, 0.1f, 1);
    gf_pool_grid_backward(g, route, &zero, &zero, gx, t->N, C, 1, 1, 1, 1, 1, 1, 1);
    compare("max_pool mean", mean, naive_mean(want, t->N, C, OH, OW, side_out), t->N * C);
    compare("max_pool", out, want, t->N * OH * OW * C);
    compare("max_pool backward", gx, want_gx, t->N * C);
    free(y), free(scale), free(shift), free(g), free(route);
}

int main(void) {
    const struct geometry cases[] = {
        /* N   C   H   W  k  s  d before after r_in r_out act */
        {2, 16, 14, 14, 3, 1, 1, 1, 1, 2, 2, RELU6},  {1, 37, 15, 11, 3, 2, 1, 1, 1, 4, 2, SILU},
        {2, 3, 9, 13, 5, 1, 1, 2, 2, 3, 3, HARDSWISH}, {1, 24, 17, 16, 5, 2, 1, 1, 2, 5, 3, GELU},
        {1, 1, 8, 9, 7, 1, 1, 3, 3, 2, 2, NONE},      {3, 5, 12, 7, 3, 1, 2, 2, 2, 1, 1, TANH},
        {1, 40, 6, 6, 2, 2, 1, 0, 1, 2, 1, ELU},      {1, 19, 5, 4, 1, 1, 1, 0, 0, 8, 8, MISH},
        {1, 8, 10, 10, 3, 3, 1, 0, 0, 3, 3, RELU},    {1, 6, 4, 30, 3, 1, 1, 1, 1, 7, 7, SIGMOID},
        {1, 33, 7, 7, 3, 1, 1, 1, 1, 1, 1, GELU_TANH}, {1, 9, 7, 8, 3, 2, 1, 0, 1, 2, 2, HARDSIGMOID},
        {2, 12, 56, 9, 3, 1, 1, 1, 1, 8, 8, LEAKY_RELU},
    };
    for (size_t i = 0; i < sizeof all_isas / sizeof *all_isas; i++) {
        if (!gf_select(all_isas[i]->name)) continue;
        for (size_t j = 0; j < sizeof cases / sizeof *cases; j++) {
            test_epilogue(&cases[j]);
            test_depthwise(&cases[j]);
            test_grid_backward(&cases[j]);
            test_slope_backward(&cases[j]);
            test_pointwise(&cases[j]);
            test_winograd(&cases[j]);
            test_spread(&cases[j]);
            test_max_pool(&cases[j]);
        }
        printf("%s: %d mismatches\n", all_isas[i]->name, mismatches);
    }
    return mismatches != 0;
}
#endif

#else /* ISA: what follows is compiled once per instruction set, with vectors of LANES floats */

#ifndef OWN_NAMES
#define OWN_NAMES
#define vf OWN(vf)
#define vf_mem OWN(vf_mem)
#define vi OWN(vi)
#define mask OWN(mask)
#define all OWN(all)
#define load OWN(load)
#define store OWN(store)
#define vmax OWN(vmax)
#define vmin OWN(vmin)
#define over OWN(over)
#define same OWN(same)
#define pick OWN(pick)
#define add_where OWN(add_where)
#define exp_parts OWN(exp_parts)
#define vexp OWN(vexp)
#define vexpm1 OWN(vexpm1)
#define vsigmoid OWN(vsigmoid)
#define vtanh OWN(vtanh)
#define verf OWN(verf)
#define gelu OWN(gelu)
#define gelu_tanh OWN(gelu_tanh)
#define activate OWN(activate)
#define clear OWN(clear)
#define finish OWN(finish)
#define mean_span OWN(mean_span)
#define patch_mean_items OWN(patch_mean_items)
#define tile OWN(tile)
#define tiles_1 OWN(tiles_1)
#define tiles_2 OWN(tiles_2)
#define turn OWN(turn)
#define copy OWN(copy)
#define product_rows OWN(product_rows)
#define inputs_of OWN(inputs_of)
#define taps_of OWN(taps_of)
#define of_taps OWN(of_taps)
#define outputs_of OWN(outputs_of)
#define of_outputs OWN(of_outputs)
#define pixels OWN(pixels)
#define inputs_of_line OWN(inputs_of_line)
#define taps_of_line OWN(taps_of_line)
#define of_taps_line OWN(of_taps_line)
#define outputs_of_line OWN(outputs_of_line)
#define of_outputs_line OWN(of_outputs_line)
#define winograd_tile OWN(winograd_tile)
#define winograd_tile_items OWN(winograd_tile_items)
#define winograd_gx OWN(winograd_gx)
#define winograd_gw OWN(winograd_gw)
#define winograd_panel_items OWN(winograd_panel_items)
#define product_items OWN(product_items)
#define epilogue_span OWN(epilogue_span)
#define epilogue_row OWN(epilogue_row)
#define with_stats OWN(with_stats)
#define without_stats OWN(without_stats)
#define epilogue_items OWN(epilogue_items)
#define patch_row OWN(patch_row)
#define conv_pixel OWN(conv_pixel)
#define conv_block OWN(conv_block)
#define conv_blocks OWN(conv_blocks)
#define taps_inside OWN(taps_inside)
#define conv_row OWN(conv_row)
#define depthwise_items OWN(depthwise_items)
#define grid_run OWN(grid_run)
#define grid_tile OWN(grid_tile)
#define packed_size OWN(packed_size)
#define mix OWN(mix)
#define unmix OWN(unmix)
#define pack OWN(pack)
#define grid_image OWN(grid_image)
#define grid_block OWN(grid_block)
#define grid_backward_items OWN(grid_backward_items)
#define pool_lanes OWN(pool_lanes)
#define pool_pixel OWN(pool_pixel)
#define pool_pixels OWN(pool_pixels)
#define look OWN(look)
#define max_pool_items OWN(max_pool_items)
#define pool_grid_backward_items OWN(pool_grid_backward_items)
#define slope_backward_items OWN(slope_backward_items)
#define row_dots_items OWN(row_dots_items)
#define spread_rows OWN(spread_rows)
#define spread_cell OWN(spread_cell)
#define spread_items OWN(spread_items)
/* Run `body` for c in [c0, c1), a vector at a time, with n lanes: a constant but for the last. */
#define FOR_LANES(c, c0, c1, body)                         \
    do {                                                   \
        idx c = (c0);                                      \
        for (; c + LANES <= (c1); c += LANES) body(LANES); \
        if (c < (c1)) body((c1) - c);                      \
    } while (0)
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef float vf_mem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

/* ---- vector primitives; a load or store of n < LANES floats touches no more than n ---- */

INLINE vf all(float v) { return v - (vf){0}; }

#if LANES == 16

typedef __mmask16 mask;
INLINE vf load(const float *p, idx n) {
    if (n == LANES) return *(const vf_mem *)p;
    return (vf)_mm512_maskz_loadu_ps((mask)((1u << n) - 1), p);
}
INLINE void store(float *p, vf v, idx n) {
    if (n == LANES) *(vf_mem *)p = v;
    else _mm512_mask_storeu_ps(p, (mask)((1u << n) - 1), (__m512)v);
}
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE mask over(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
INLINE mask same(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
INLINE vf pick(mask m, vf a, vf b) { return (vf)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a); }
INLINE vf add_where(mask m, vf a, vf b) {
    return (vf)_mm512_mask_add_ps((__m512)a, m, (__m512)a, (__m512)b);
}

#else

typedef vi mask;
#if LANES == 8
INLINE vf load(const float *p, idx n) {
    if (n == LANES) return *(const vf_mem *)p;
    vi keep = (vi){0, 1, 2, 3, 4, 5, 6, 7} < (int32_t)n - (vi){0};
    return (vf)_mm256_maskload_ps(p, (__m256i)keep);
}
INLINE void store(float *p, vf v, idx n) {
    if (n == LANES) {
        *(vf_mem *)p = v;
        return;
    }
    vi keep = (vi){0, 1, 2, 3, 4, 5, 6, 7} < (int32_t)n - (vi){0};
    _mm256_maskstore_ps(p, (__m256i)keep, (__m256)v);
}
/* As maxps: the second operand when either is NaN. */
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf load(const float *p, idx n) {
    if (n == LANES) return *(const vf_mem *)p;
    vf v = {p[0], n > 1 ? p[1] : 0, n > 2 ? p[2] : 0, 0};
    return v;
}
INLINE void store(float *p, vf v, idx n) {
    if (n == LANES) {
        *(vf_mem *)p = v;
        return;
    }
    p[0] = v[0];
    if (n > 1) p[1] = v[1];
    if (n > 2) p[2] = v[2];
}
#if defined(__SSE2__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
#elif defined(__ARM_NEON)
INLINE vf vmax(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf vmin(vf a, vf b) { return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b); }
#else
INLINE vf vmax(vf a, vf b) { return (vf)(((a > b) & (vi)a) | (~(a > b) & (vi)b)); }
INLINE vf vmin(vf a, vf b) { return (vf)(((a < b) & (vi)a) | (~(a < b) & (vi)b)); }
#endif
#endif
INLINE mask over(vf a, vf b) { return (mask)(a > b); }
INLINE mask same(vf a, vf b) { return (mask)(a == b); }
INLINE vf pick(mask m, vf a, vf b) { return (vf)((m & (vi)a) | (~m & (vi)b)); }
INLINE vf add_where(mask m, vf a, vf b) { return a + (vf)(m & (vi)b); }

#endif

/* ---- activations; constants come first in vmin and vmax so that NaN goes through ---- */

/* exp(x) = scale * (1 + q), x kept within what float32 can hold: Cephes' expf, about 1 ulp. */
INLINE void exp_parts(vf x, vf *q, vf *scale) {
    x = vmin(all(88.0f), vmax(all(-87.0f), x));
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits now hold the integer */
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *q = p * (r * r) + r;
    *scale = (vf)(((vi)shifted << 23) + 0x3f800000);
}

INLINE vf vexp(vf x) {
    vf q, scale;
    exp_parts(x, &q, &scale);
    return q * scale + scale;
}

INLINE vf vexpm1(vf x) {
    vf q, scale;
    exp_parts(x, &q, &scale);
    return q * scale + (scale - 1);
}

INLINE vf vsigmoid(vf z) { return 1 / (1 + vexp(-z)); }

INLINE vf vtanh(vf z) {
    vf e = vexpm1(2 * z);
    return e / (e + 2);
}

/* The odd rational approximation of erf on [-4, 4] used by Eigen and XLA. */
INLINE vf verf(vf x) {
    x = vmin(all(4.0f), vmax(all(-4.0f), x));
    vf s = x * x;
    vf p = all(-2.72614225801306e-10f);
    p = p * s + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    vf q = all(-1.45660718464996e-05f);
    q = q * s - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    return x * p / q;
}

INLINE vf gelu(vf z, vf *slopes) {
    vf half = 0.5f + 0.5f * verf(z * 0.70710678f);
    *slopes += half + z * vexp(-0.5f * z * z) * 0.39894228f;
    return z * half;
}

INLINE vf gelu_tanh(vf z, vf *slopes) {
    vf s = z * z;
    vf t = vtanh(0.79788456f * z * (1 + 0.044715f * s));
    *slopes += 0.5f * (1 + t) + 0.5f * z * (1 - t * t) * 0.79788456f * (1 + 0.134145f * s);
    return 0.5f * z * (1 + t);
}

/* f(z); adds f'(z), as PyTorch's autograd defines it at the kinks, to *slopes. `act` is a constant
 * wherever this is used. */
INLINE vf activate(const int act, vf z, float parameter, vf *slopes) {
    const vf zero = all(0), one = all(1);
    vf s, n;
    switch (act) {
    case RELU:
        *slopes = add_where(over(z, zero), *slopes, one);
        return vmax(zero, z);
    case RELU6:
        *slopes = add_where(over(z, zero) & over(all(6), z), *slopes, one);
        return vmin(all(6), vmax(zero, z));
    case HARDSWISH:
        n = pick(over(all(3), z), z * (1.0f / 3) + 0.5f, one);
        *slopes = add_where(over(z, all(-3)), *slopes, n);
        return z * vmin(all(6), vmax(zero, z + 3)) * (1.0f / 6);
    case HARDSIGMOID:
        *slopes = add_where(over(z, all(-3)) & over(all(3), z), *slopes, all(1.0f / 6));
        return vmin(all(6), vmax(zero, z + 3)) * (1.0f / 6);
    case SILU:
        s = vsigmoid(z);
        n = z * s;
        *slopes += s + n * (1 - s);
        return n;
    case SIGMOID:
        s = vsigmoid(z);
        *slopes += s * (1 - s);
        return s;
    case GELU:
        return gelu(z, slopes);
    case GELU_TANH:
        return gelu_tanh(z, slopes);
    case TANH:
        s = vtanh(z);
        *slopes += 1 - s * s;
        return s;
    case LEAKY_RELU:
        s = pick(over(z, zero), one, all(parameter));
        *slopes += s;
        return z * s;
    case ELU:
        s = parameter * vexpm1(z);
        *slopes += pick(over(z, zero), one, s + parameter);
        return pick(over(z, zero), z, s);
    case MISH: /* tanh(softplus(z)) = n / (n + 2) with n = e^z (e^z + 2); 1 in float32 from z = 20 */
        n = vexp(vmin(all(20), z));
        s = 1 / (1 + 1 / n);
        n = n * (n + 2);
        n = n / (n + 2);
        *slopes += n + z * s * (1 - n * n);
        return z * n;
    default:
        *slopes += one;
        return z;
    }
}

/* ---- matrix products ---- */

#define PANEL (2 * LANES)
/* Rows of a tile: its sums, two vectors each, stay in the registers. */
#if LANES == 16 || defined(__ARM_NEON)
#define TALL 12
#else
#define TALL 6
#endif

/* `tall` rows of c and `wide` vectors of its columns, of which the last has `last` lanes. */
INLINE void tile(const int tall, const int wide, const struct product_job *j, const float *a,
                 const float *b, idx pitch, float *c, const idx last) {
    vf sum[TALL][2];
#pragma GCC unroll 12
    for (int i = 0; i < tall; i++)
        for (int v = 0; v < wide; v++) sum[i][v] = all(0);
    for (idx k = 0; k < j->K; k++, a += j->ak, b += pitch) {
        const vf first = load(b, wide == 1 ? last : LANES);
        const vf second = wide == 1 ? first : load(b + LANES, last);
#pragma GCC unroll 12
        for (int i = 0; i < tall; i++) {
            const vf factor = all(a[i * j->ai]);
            sum[i][0] += factor * first;
            if (wide == 2) sum[i][1] += factor * second;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < tall; i++)
        for (int v = 0; v < wide; v++) {
            float *to = c + i * j->N + v * LANES;
            const idx n = v == wide - 1 ? last : LANES;
            const vf product = sum[i][v] * j->alpha;
            store(to, j->add ? load(to, n) + product : product, n);
        }
}

#define CASE(tall, wide)                                                        \
    case tall:                                                                  \
        if (last == LANES) tile(tall, wide, j, a, b, pitch, c, LANES);          \
        else tile(tall, wide, j, a, b, pitch, c, last);                         \
        break;
#define EACH_HEIGHT(wide) CASE(1, wide) CASE(2, wide) CASE(3, wide) CASE(4, wide) CASE(5, wide) CASE(6, wide)
#define EACH_TALL(wide)                                                                           \
    CASE(7, wide) CASE(8, wide) CASE(9, wide) CASE(10, wide) CASE(11, wide) CASE(12, wide)
#if TALL == 6
#undef EACH_TALL
#define EACH_TALL(wide)
#endif
#define DEFINE(wide)                                                                            \
    static void tiles_##wide(idx tall, const struct product_job *j, const float *a, const float *b, \
                             idx pitch, float *c, idx last) {                                   \
        switch (tall) { EACH_HEIGHT(wide) EACH_TALL(wide) }                                     \
    }
DEFINE(1)
DEFINE(2)
#undef DEFINE
#undef EACH_TALL
#undef EACH_HEIGHT
#undef CASE

/* `n` rows of b, turned, as columns of a panel. [n][K] -> [K][PANEL] */
static void turn(const float *b, idx n, idx K, float *panel) {
    idx i = 0;
#if LANES == 16
    for (; i + 16 <= n; i += 16) {
        idx k = 0;
        for (; k + 16 <= K; k += 16) {
            __m512 r[16], t[16];
            for (int l = 0; l < 16; l++) r[l] = _mm512_loadu_ps(b + (i + l) * K + k);
            for (int l = 0; l < 16; l += 2) {
                t[l] = _mm512_unpacklo_ps(r[l], r[l + 1]);
                t[l + 1] = _mm512_unpackhi_ps(r[l], r[l + 1]);
            }
            for (int l = 0; l < 16; l += 4)
                for (int h = 0; h < 2; h++) {
                    const __m512d even = (__m512d)t[l + h], odd = (__m512d)t[l + h + 2];
                    r[l + 2 * h] = (__m512)_mm512_unpacklo_pd(even, odd);
                    r[l + 2 * h + 1] = (__m512)_mm512_unpackhi_pd(even, odd);
                }
            for (int l = 0; l < 4; l++)
                for (int h = 0; h < 2; h++) {
                    t[l + 8 * h] = _mm512_shuffle_f32x4(r[l + 8 * h], r[l + 8 * h + 4], 0x88);
                    t[l + 8 * h + 4] = _mm512_shuffle_f32x4(r[l + 8 * h], r[l + 8 * h + 4], 0xdd);
                }
            for (int l = 0; l < 8; l++) {
                float *to = panel + (k + l) * PANEL + i;
                _mm512_storeu_ps(to, _mm512_shuffle_f32x4(t[l], t[l + 8], 0x88));
                _mm512_storeu_ps(to + 8 * PANEL, _mm512_shuffle_f32x4(t[l], t[l + 8], 0xdd));
            }
        }
        for (; k < K; k++)
            for (int l = 0; l < 16; l++) panel[k * PANEL + i + l] = b[(i + l) * K + k];
    }
#endif
    for (; i < n; i++)
        for (idx k = 0; k < K; k++) panel[k * PANEL + i] = b[i * K + k];
}

/* Columns `first` to `first` + n of b. [K][N] -> [K][PANEL] */
static void copy(const struct product_job *j, idx first, idx n, float *panel) {
    for (idx k = 0; k < j->K; k++) memcpy(panel + k * PANEL, j->b + k * j->N + first, (size_t)n * 4);
}

/* `left` rows of c from `first` on and n of its columns, at most a panel; b and c are theirs. */
INLINE void product_rows(const struct product_job *j, idx first, idx left, const float *b, idx pitch,
                         float *c, idx n) {
    const idx blocks = ceil_div(left, TALL);
    for (idx block = 0; block < blocks; block++) {
        const idx i = first + block * left / blocks, tall = first + (block + 1) * left / blocks - i;
        const float *a = j->a + i * j->ai;
        if (n > LANES) tiles_2(tall, j, a, b, pitch, c + i * j->N, n - LANES);
        else tiles_1(tall, j, a, b, pitch, c + i * j->N, n);
    }
}

/* An item is some rows of c in one panel; those of one panel follow each other where b is packed. */
static void product_items(const void *arg, idx begin, idx end) {
    const struct product_job *j = arg;
    const idx heights = ceil_div(j->M, j->rows), panels = ceil_div(j->N, PANEL);
    float *space = j->packed ? scratch(j->K * PANEL * (idx)sizeof(float)) : NULL;
    if (j->packed && !space) {
        *j->failed = 1;
        return;
    }
    for (idx item = begin, ready = -1; item < end; item++) {
        const idx p = j->packed ? item / heights : item % panels, column = p * PANEL;
        const idx n = min_idx(PANEL, j->N - column);
        const idx first = (j->packed ? item % heights : item / panels) * j->rows;
        const idx left = min_idx(j->rows, j->M - first);
        const float *b = j->packed ? space : j->b + column;
        if (j->packed && ready != p) {
            if (j->turned) turn(j->b + column * j->K, n, j->K, space);
            else copy(j, column, n, space);
        }
        ready = p;
        product_rows(j, first, left, b, j->packed ? PANEL : j->N, j->c + column, n);
    }
    free(space);
}

/* ---- Winograd's way to the gradients of a 3x3 convolution ---- */

/* Rows of gw at a time, whole vectors. */
#if LANES == 16
#define OUTS 16
#elif defined(__ARM_NEON)
#define OUTS 12
#else
#define OUTS 8
#endif
/* Channels at a time: rows of weights lie far apart, and shorter pieces of them stream badly. */
#define BREADTH (4 * LANES)
/* Outputs whose combined taps lie in the cache while they are multiplied. */
#define TAPS 64

/* Transforms of one axis: B^T (of inputs), G (of taps) and A (of outputs), and their transposes. */
INLINE void inputs_of_line(const vf *d, int s, vf *t, int u) {
    const vf a = d[4 * s] - 4 * d[2 * s], b = d[3 * s] - 4 * d[s];
    const vf c = d[4 * s] - d[2 * s], e = 2 * (d[3 * s] - d[s]);
    t[0] = 4 * d[0] - 5 * d[2 * s] + d[4 * s];
    t[u] = a + b;
    t[2 * u] = a - b;
    t[3 * u] = c + e;
    t[4 * u] = c - e;
    t[5 * u] = 4 * d[s] - 5 * d[3 * s] + d[5 * s];
}
INLINE void taps_of_line(const vf *w, int s, vf *t, int u) {
    const vf a = (w[0] + w[2 * s]) * (-1.0f / 6), b = w[s] * (1.0f / 6);
    const vf c = w[0] * (1.0f / 24) + w[2 * s] * (1.0f / 6), e = w[s] * (1.0f / 12);
    t[0] = w[0] * 0.25f;
    t[u] = a - b;
    t[2 * u] = a + b;
    t[3 * u] = c + e;
    t[4 * u] = c - e;
    t[5 * u] = w[2 * s];
}
INLINE void of_taps_line(const vf *m, int s, vf *t, int u) { /* G^T */
    const vf a = m[s] + m[2 * s], b = m[2 * s] - m[s], c = m[3 * s] + m[4 * s], e = m[3 * s] - m[4 * s];
    t[0] = m[0] * 0.25f - a * (1.0f / 6) + c * (1.0f / 24);
    t[u] = b * (1.0f / 6) + e * (1.0f / 12);
    t[2 * u] = (c - a) * (1.0f / 6) + m[5 * s];
}
INLINE void outputs_of_line(const vf *y, int s, vf *t, int u) { /* A */
    const vf a = y[0] + y[2 * s], b = y[s] + y[3 * s];
    const vf c = y[0] + 4 * y[2 * s], e = 2 * y[s] + 8 * y[3 * s];
    t[0] = y[0];
    t[u] = a + b;
    t[2 * u] = a - b;
    t[3 * u] = c + e;
    t[4 * u] = c - e;
    t[5 * u] = y[3 * s];
}
INLINE void of_outputs_line(const vf *m, int s, vf *t, int u) { /* A^T */
    const vf a = m[s] + m[2 * s], b = m[s] - m[2 * s], c = m[3 * s] + m[4 * s], e = m[3 * s] - m[4 * s];
    t[0] = m[0] + a + c;
    t[u] = b + 2 * e;
    t[2 * u] = a + 4 * c;
    t[3 * u] = b + 8 * e + m[5 * s];
}
#define BOTH_AXES(name, ins, outs)                                                           \
    INLINE void name(const vf *from, vf *to) {                                               \
        vf half[outs * ins];                                                                 \
        for (int i = 0; i < ins; i++) name##_line(from + i, ins, half + i, ins);             \
        for (int i = 0; i < outs; i++) name##_line(half + i * ins, 1, to + i * outs, 1);     \
    }
BOTH_AXES(inputs_of, 6, 6)
BOTH_AXES(taps_of, 3, 6)
BOTH_AXES(of_taps, 6, 3)
BOTH_AXES(outputs_of, 4, 6)
BOTH_AXES(of_outputs, 6, 4)
#undef BOTH_AXES

/* `size` x `size` pixels of a map from (h0, w0) on, zero beyond it. */
INLINE void pixels(const float *x, const struct winograd_job *j, idx C, int size, idx h0, idx w0,
                   vf *to, const idx n) {
    for (int a = 0; a < size; a++)
        for (int b = 0; b < size; b++) {
            const idx h = h0 + a, w = w0 + b;
            const int inside = h >= 0 && h < j->H && w >= 0 && w < j->W;
            to[a * size + b] = inside ? load(x + (h * j->W + w) * C, n) : all(0);
        }
}

/* The combinations of one tile of a map, for n channels: of the 6 x 6 pixels that its 4 x 4 outputs
 * read, or of its own. */
INLINE void winograd_tile(const float *map, float *to, idx pitch, const struct winograd_job *j, idx C,
                          idx tile, int as_output, const idx n) {
    const idx across = ceil_div(j->W, 4), down = ceil_div(j->H, 4), at = j->first + tile;
    const idx image = at / (across * down), h = at / across % down * 4, w = at % across * 4;
    const float *own = map + image * j->H * j->W * C;
    vf in[36], out[36];
    if (as_output) {
        pixels(own, j, C, 4, h, w, in, n);
        outputs_of(in, out);
    } else {
        pixels(own, j, C, 6, h - 1, w - 1, in, n);
        inputs_of(in, out);
    }
    for (idx p = 0; p < 36; p++) store(to + (p * j->R + tile) * pitch, out[p], n);
}

static void winograd_tile_items(const void *arg, idx begin, idx end) {
    const struct winograd_job *j = arg;
    for (idx tile = begin; tile < end; tile++) {
#define SEEN(n) winograd_tile(j->g + c, j->seen + c, j->O, j, j->O, tile, 0, n)
#define GIVEN(n)                                                                              \
    winograd_tile(j->g + c, j->given + c / OUTS * OUTS * 36 * j->R + c % OUTS, OUTS, j, j->O, tile, 1, n)
#define READ(n) winograd_tile(j->x + c, j->read + c, j->C, j, j->C, tile, 0, n)
        if (j->gx) FOR_LANES(c, 0, j->O, SEEN);
        if (j->gw) FOR_LANES(c, 0, j->O, GIVEN);
        if (j->gw) FOR_LANES(c, 0, j->C, READ);
#undef READ
#undef GIVEN
#undef SEEN
    }
}

/* gx for some channels. w(o, t) is at w + o * step_o + t * step_t. `space` holds [36][TAPS][BREADTH]
 * and [36][R][BREADTH]. */
static void winograd_gx(const struct winograd_job *j, idx first, idx count, const float *w, idx step_o,
                        idx step_t, float *space) {
    const idx C = j->C, O = j->O, R = j->R, across = ceil_div(j->W, 4), down = ceil_div(j->H, 4);
    float *products = space + 36 * TAPS * BREADTH;
    for (idx o0 = 0; o0 < O; o0 += TAPS) {
        const idx some = min_idx(TAPS, O - o0);
        for (idx o = 0; o < some; o++) {
            vf taps[9], out[36];
#define BODY(n)                                                                                 \
    {                                                                                           \
        const float *own = w + (o0 + o) * step_o + c;                                           \
        for (int t = 0; t < 9; t++) taps[t] = load(own + t * step_t, n);                        \
        taps_of(taps, out);                                                                     \
        for (idx p = 0; p < 36; p++) store(space + (p * TAPS + o) * BREADTH + c, out[p], n);      \
    }
            FOR_LANES(c, 0, count, BODY);
#undef BODY
        }
        for (idx p = 0; p < 36; p++) {
            const struct product_job job = {.a = j->seen + p * R * O + o0, .ai = O, .ak = 1,
                                            .N = BREADTH, .K = some, .alpha = 1, .add = o0 > 0};
            for (idx c = 0; c < count; c += PANEL)
                product_rows(&job, 0, R, space + p * TAPS * BREADTH + c, BREADTH,
                             products + p * R * BREADTH + c, min_idx(PANEL, count - c));
        }
    }
    for (idx tile = 0; tile < R; tile++) {
        const idx at = j->first + tile, h0 = at / across % down * 4, w0 = at % across * 4;
        float *gx = j->gx + at / (across * down) * j->H * j->W * C + first;
        vf m[36], out[16];
#define BODY(n)                                                                                   \
    {                                                                                             \
        for (idx p = 0; p < 36; p++) m[p] = load(products + (p * R + tile) * BREADTH + c, n);       \
        of_outputs(m, out);                                                                       \
        for (idx h = h0; h < min_idx(h0 + 4, j->H); h++)                                          \
            for (idx w = w0; w < min_idx(w0 + 4, j->W); w++)                                      \
                store(gx + (h * j->W + w) * C + c, out[(h - h0) * 4 + w - w0], n);                \
    }
        FOR_LANES(c, 0, count, BODY);
#undef BODY
    }
}

/* gw for the channels of a panel, a few outputs at a time. `space` holds [36][OUTS][BREADTH]. */
static void winograd_gw(const struct winograd_job *j, idx first, idx count, float *space) {
    for (idx o0 = 0; o0 < j->O; o0 += OUTS) {
        const idx tall = min_idx(OUTS, j->O - o0);
        for (idx p = 0; p < 36; p++) {
            const struct product_job job = {.a = j->given + (o0 * 36 + p * OUTS) * j->R, .ai = 1,
                                            .ak = OUTS, .N = BREADTH, .K = j->R, .alpha = 1};
            for (idx c = 0; c < count; c += PANEL)
                product_rows(&job, 0, tall, j->read + p * j->R * j->C + first + c, j->C,
                             space + p * OUTS * BREADTH + c, min_idx(PANEL, count - c));
        }
        for (idx o = 0; o < tall; o++) {
            vf m[36], taps[9];
#define BODY(n)                                                                                 \
    {                                                                                           \
        for (idx p = 0; p < 36; p++) m[p] = load(space + (p * OUTS + o) * BREADTH + c, n);        \
        of_taps(m, taps);                                                                       \
        for (int t = 0; t < 9; t++) store(j->gw + ((o0 + o) * 9 + t) * j->C + first + c, taps[t], n); \
    }
            FOR_LANES(c, 0, count, BODY);
#undef BODY
        }
    }
}

static void winograd_panel_items(const void *arg, idx begin, idx end) {
    const struct winograd_job *j = arg;
    const idx rows = max_idx(j->gx ? TAPS + j->R : 0, OUTS), K = j->O, breadth = j->ahead ? PANEL : BREADTH;
    float *space = scratch(36 * rows * BREADTH * (idx)sizeof(float));
    float *turned = j->ahead ? scratch(9 * K * PANEL * (idx)sizeof(float)) : NULL;
    if (!space || (j->ahead && !turned)) {
        free(space), free(turned);
        *j->failed = 1;
        return;
    }
    for (idx panel = begin; panel < end; panel++) {
        const idx first = panel * breadth, count = min_idx(breadth, j->C - first);
        if (j->ahead) {
            turn(j->w + first * 9 * K, count, 9 * K, turned);
            const idx step_o = j->together ? 9 * PANEL : PANEL, step_t = j->together ? PANEL : K * PANEL;
            winograd_gx(j, first, count, turned, step_o, step_t, space);
        } else if (j->gx) { /* the kernel turned round */
            winograd_gx(j, first, count, j->w + 8 * j->C + first, 9 * j->C, -j->C, space);
        }
        if (j->gw) winograd_gw(j, first, count, space);
    }
    free(space), free(turned);
}
#undef TALL

/* ---- patch means ---- */

/* Channels c0 to c1 of one row of patches [Q][C]: zero, and later turn sums into means; the patches
 * are `rows` pixels high. NULL when nobody wants them. */
static void clear(float *sums, idx W, idx C, idx rw, idx c0, idx c1) {
    for (idx q = 0; sums && q * rw < W; q++)
        memset(sums + q * C + c0, 0, (size_t)(c1 - c0) * sizeof(float));
}

static void finish(float *sums, idx rows, idx W, idx C, idx rw, idx c0, idx c1) {
    for (idx q = 0; sums && q * rw < W; q++) {
        const float inverse = 1.0f / (float)(rows * min_idx(rw, W - q * rw));
        float *s = sums + q * C;
#define BODY(n) store(s + c, load(s + c, n) * inverse, n)
        FOR_LANES(c, c0, c1, BODY);
#undef BODY
    }
}

INLINE void mean_span(const float *x, float *sums, idx pixels, idx C, const idx n) {
    vf sum = all(0);
    for (idx w = 0; w < pixels; w++) sum += load(x + w * C, n);
    store(sums, load(sums, n) + sum, n);
}

static void patch_mean_items(const void *arg, idx begin, idx end) {
    const struct mean_job *j = arg;
    const idx P = ceil_div(j->H, j->rh), Q = ceil_div(j->W, j->rw), C = j->C;
    for (idx item = begin; item < end; item++) {
        const idx n = item / P, h0 = item % P * j->rh, h1 = min_idx(h0 + j->rh, j->H);
        float *mean = j->mean + item * Q * C;
        clear(mean, j->W, C, j->rw, 0, C);
        for (idx h = h0; h < h1; h++)
            for (idx q = 0; q < Q; q++) {
                const float *x = j->x + ((n * j->H + h) * j->W + q * j->rw) * C;
                const idx pixels = min_idx(j->rw, j->W - q * j->rw);
#define BODY(n) mean_span(x + c, mean + q * C + c, pixels, C, n)
                FOR_LANES(c, 0, C, BODY);
#undef BODY
            }
        finish(mean, h1 - h0, j->W, C, j->rw, 0, C);
    }
}

/* ---- epilogue ---- */

/* `pixels` neighbours of one patch, all channels: the row is read in order, and the sums, which
 * stay in the first cache, are touched once for all of them. `first` and `last` say whether the
 * patch's sums begin or end here; `inverse` turns sums into means. */
INLINE void epilogue_span(const int act, const int stats, const int pixels, const struct row *r,
                          float *y, const float *residual, idx patch, int first, int last,
                          float inverse, idx c, const idx n) {
    const idx C = r->C;
    const vf scale = r->scale ? load(r->scale + c, n) : all(1);
    const vf shift = r->shift ? load(r->shift + c, n) : all(0);
    vf sum = all(0), slopes = all(0);
#pragma GCC unroll 4
    for (int i = 0; i < pixels; i++) {
        vf z = load(y + i * C + c, n) * scale + shift;
        __builtin_prefetch(y + i * C + c + r->ahead);
        if (residual) z += load(residual + i * C + c, n);
        const vf a = activate(act, z, r->parameter, &slopes);
        store(y + i * C + c, a, n);
        sum += a;
    }
    if (!stats) return;
    if (!first) sum += load(r->mean + patch + c, n);
    store(r->mean + patch + c, last ? sum * inverse : sum, n);
    if (act == NONE) return;
    if (!first) slopes += load(r->slope + patch + c, n);
    store(r->slope + patch + c, last ? slopes * inverse : slopes, n);
}

INLINE void epilogue_row(const int act, const int stats, const struct row *r) {
    /* Where an exponential is the work, more than two pixels at once gain nothing. */
    const int light = act <= HARDSIGMOID || act == LEAKY_RELU;
    for (idx q = 0; q * r->rw < r->W; q++) {
        const idx w0 = q * r->rw, w1 = min_idx(w0 + r->rw, r->W);
        const float inverse = 1.0f / (float)(r->rows * (w1 - w0));
        for (idx w = w0, step; w < w1; w += step) {
            float *y = r->y + w * r->C;
            const float *residual = r->residual ? r->residual + w * r->C : NULL;
            step = light && w1 - w >= 4 ? 4 : w1 - w >= 2 ? 2 : 1;
            const int first = r->first && w == w0, last = r->last && w + step == w1;
#define SPAN(pixels, n) \
    epilogue_span(act, stats, pixels, r, y, residual, q * r->C, first, last, inverse, c, n)
#define BODY4(n) SPAN(4, n)
#define BODY2(n) SPAN(2, n)
#define BODY1(n) SPAN(1, n)
            if (light && step == 4) FOR_LANES(c, r->c0, r->c1, BODY4);
            else if (step == 2) FOR_LANES(c, r->c0, r->c1, BODY2);
            else FOR_LANES(c, r->c0, r->c1, BODY1);
#undef BODY1
#undef BODY2
#undef BODY4
#undef SPAN
        }
    }
}

#define DEFINE(ACT)                                                                           \
    static void OWN(row_stats_##ACT)(const struct row *r) { epilogue_row(ACT, 1, r); }        \
    static void OWN(row_##ACT)(const struct row *r) { epilogue_row(ACT, 0, r); }
EACH_ACT(DEFINE)
#undef DEFINE
#define LIST(ACT) [ACT] = OWN(row_stats_##ACT),
static const row_fn with_stats[ACTS] = {EACH_ACT(LIST)};
#undef LIST
#define LIST(ACT) [ACT] = OWN(row_##ACT),
static const row_fn without_stats[ACTS] = {EACH_ACT(LIST)};
#undef LIST

/* One patch row of the map, channels c0 to c1, and its statistics. `before` fills a row before it is
 * read (the depthwise convolution), or is NULL. */
INLINE void patch_row(const struct epilogue_job *j, idx item, idx c0, idx c1,
                      void (*before)(const void *, idx, idx, idx, idx), const void *arg) {
    const idx P = ceil_div(j->H, j->rh), patches = item * ceil_div(j->W, j->rw) * j->C;
    const idx n = item / P, h0 = item % P * j->rh, h1 = min_idx(h0 + j->rh, j->H);
    const row_fn row = (j->mean ? with_stats : without_stats)[j->act];
    struct row r = {NULL, NULL, j->scale, j->shift, j->mean ? j->mean + patches : NULL,
                    j->slope ? j->slope + patches : NULL, j->W, j->C, j->rw, c0, c1, h1 - h0, 0, 0,
                    before ? 0 : AHEAD, j->parameter};
    for (idx h = h0; h < h1; h++) {
        const idx at = (n * j->H + h) * j->W * j->C;
        if (before) before(arg, n, h, c0, c1);
        r.y = j->y + at;
        r.residual = j->residual ? j->residual + at : NULL;
        r.first = h == h0;
        r.last = h == h1 - 1;
        row(&r);
    }
}

static void epilogue_items(const void *arg, idx begin, idx end) {
    const struct epilogue_job *j = arg;
    for (idx item = begin; item < end; item++) patch_row(j, item, 0, j->C, NULL, NULL);
}

/* ---- depthwise convolution ---- */

/* Any one output pixel: tap rows a0 to a1 and columns b0 to b1 are the ones inside the map; x is
 * where tap (0, 0) would be. */
static void conv_pixel(const struct depthwise_job *j, const float *x, float *y, idx a0, idx a1,
                       idx b0, idx b1, idx c0, idx c1) {
    const idx C = j->out.C, down = j->dh * j->W * C, right = j->dw * C, taps = j->kh * j->kw;
#define BODY(n)                                                                \
    {                                                                          \
        const vf_mem *w = (const vf_mem *)(j->w + c * taps);                   \
        vf sum = all(0);                                                       \
        for (idx a = a0; a < a1; a++)                                          \
            for (idx b = b0; b < b1; b++)                                      \
                sum += load(x + a * down + b * right + c, n) * w[a * j->kw + b]; \
        store(y + c, sum, n);                                                  \
    }
    FOR_LANES(c, c0, c1, BODY);
#undef BODY
}

/* BLOCK neighbouring output pixels, K tap columns, stride S, `rows` tap rows: each input vector is
 * loaded once per tap row, each tap once per block. Of the input columns only [low, high) lie inside
 * the map; `inside` says that all do. The loop over rows stays a loop: unrolled, its addresses do
 * not fit the registers. */
#define BLOCK 4
INLINE void conv_block(const int K, const int S, const int inside, const float *x, const float *w,
                       float *y, idx row, idx C, idx rows, idx low, idx high, idx ahead, const idx n) {
    vf sum[BLOCK];
    for (int i = 0; i < BLOCK; i++) sum[i] = all(0);
    for (int a = 1; ahead && a <= S; a++)
#pragma GCC unroll 16
        for (int i = 0; i < BLOCK * S; i++) __builtin_prefetch(x + (rows - a) * row + i * C + ahead);
#pragma GCC unroll 1
    for (idx a = 0; a < rows; a++, x += row, w += K * LANES) {
        vf in[(BLOCK - 1) * 2 + 5];
#pragma GCC unroll 16
        for (int i = 0; i < (BLOCK - 1) * S + K; i++)
            in[i] = inside || (low <= i && i < high) ? load(x + i * C, n) : all(0);
#pragma GCC unroll 16
        for (int b = 0; b < K; b++) {
            const vf tap = *(const vf_mem *)(w + b * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < BLOCK; i++) sum[i] += in[i * S + b] * tap;
        }
    }
    for (int i = 0; i < BLOCK; i++) store(y + i * C, sum[i], n);
}

/* One output row by blocks, the last one shifted back to end with the row; x is where tap (0, 0) of
 * the first output would be. */
INLINE void conv_blocks(const int K, const int S, const struct depthwise_job *j, const float *x,
                        const float *w, float *y, idx rows, idx c0, idx c1) {
    const idx C = j->out.C, row = j->W * C, taps = j->kh * K, columns = (BLOCK - 1) * S + K;
    for (idx start = 0; start < j->out.W; start += BLOCK) {
        const idx at = min_idx(start, j->out.W - BLOCK), left = at * S - j->left;
        const idx low = max_idx(0, -left), high = min_idx(columns, j->W - left);
        const float *xs = x + at * S * C;
        float *ys = y + at * C;
#define BLOCKS(inside, n) \
    conv_block(K, S, inside, xs + c, w + c * taps, ys + c, row, C, rows, low, high, j->ahead, n)
#define INNER(n) BLOCKS(1, n)
#define EDGE(n) BLOCKS(0, n)
        if (low == 0 && high == columns) FOR_LANES(c, c0, c1, INNER);
        else FOR_LANES(c, c0, c1, EDGE);
#undef EDGE
#undef INNER
#undef BLOCKS
    }
}

/* The taps [*first, *last) of k that fall inside [0, size) when tap 0 falls on `start`. */
static void taps_inside(idx start, idx k, idx dilation, idx size, idx *first, idx *last) {
    *first = min_idx(k, start < 0 ? ceil_div(-start, dilation) : 0);
    *last = max_idx(*first, min_idx(k, start < size ? ceil_div(size - start, dilation) : 0));
}

/* Output row h of image n, channels c0 to c1, before the epilogue. */
static void conv_row(const void *arg, idx n, idx h, idx c0, idx c1) {
    const struct depthwise_job *j = arg;
    const idx C = j->out.C, top = h * j->sh - j->top;
    const float *x = j->x + ((n * j->H + top) * j->W - j->left) * C;
    float *y = j->out.y + (n * j->out.H + h) * j->out.W * C;
    idx a0, a1, b0, b1;
    taps_inside(top, j->kh, j->dh, j->H, &a0, &a1);
    const float *xa = x + a0 * j->W * C, *wa = j->w + a0 * j->kw * LANES;
    switch (j->dh * j->dw == 1 && j->out.W >= BLOCK ? j->kw * 10 + j->sw : 0) {
    case 31: conv_blocks(3, 1, j, xa, wa, y, a1 - a0, c0, c1); return;
    case 32: conv_blocks(3, 2, j, xa, wa, y, a1 - a0, c0, c1); return;
    case 51: conv_blocks(5, 1, j, xa, wa, y, a1 - a0, c0, c1); return;
    case 52: conv_blocks(5, 2, j, xa, wa, y, a1 - a0, c0, c1); return;
    }
    for (idx w = 0; w < j->out.W; w++) {
        taps_inside(w * j->sw - j->left, j->kw, j->dw, j->W, &b0, &b1);
        conv_pixel(j, x + w * j->sw * C, y + w * C, a0, a1, b0, b1, c0, c1);
    }
}

static void depthwise_items(const void *arg, idx begin, idx end) {
    const struct depthwise_job *j = arg;
    const idx chunks = ceil_div(j->out.C, j->chunk);
    for (idx item = begin; item < end; item++) {
        const idx c0 = item % chunks * j->chunk, c1 = min_idx(c0 + j->chunk, j->out.C);
        patch_row(&j->out, item / chunks, c0, c1, conv_row, j);
    }
}

/* ---- depthwise gradients on the patch grid, one vector of channels at a time ---- */

/* Input patches [q0, q1) of one row, all of one class, against a tile of D1 x D2 outputs: gx += M g
 * (or = for the first tile), R += g x. Kernels and sums lie `pitch` vectors a row. */
INLINE void grid_tile(const int D1, const int D2, const float *g, idx row, const idx *start, idx q0,
                      idx q1, const vf *M, vf *R, idx pitch, const float *x, float *gx, int first,
                      int gw_too, idx C, const idx n) {
    vf m[9], r[9];
#pragma GCC unroll 9
    for (int d = 0; d < D1 * D2; d++) {
        m[d] = M[d / D2 * pitch + d % D2];
        r[d] = R[d / D2 * pitch + d % D2];
    }
    for (idx q = q0; q < q1; q++) {
        const float *window = g + start[q] * LANES;
        if (gw_too) { /* before gx: x read after it would often wait for a store 4096 bytes apart */
            const vf input = load(x + q * C, n);
#pragma GCC unroll 9
            for (int d = 0; d < D1 * D2; d++)
                r[d] += input * *(const vf_mem *)(window + d / D2 * row + d % D2 * LANES);
        }
        if (gx) {
            vf sum = first ? all(0) : load(gx + q * C, n);
#pragma GCC unroll 9
            for (int d = 0; d < D1 * D2; d++)
                sum += m[d] * *(const vf_mem *)(window + d / D2 * row + d % D2 * LANES);
            store(gx + q * C, sum, n);
        }
    }
#pragma GCC unroll 9
    for (int d = 0; d < D1 * D2; d++) R[d / D2 * pitch + d % D2] = r[d];
}

/* As grid_tile for any D1 x D2: tiles of at most 3 x 3, whose kernels and sums fit the registers. */
INLINE void grid_run(idx D1, idx D2, const float *g, idx row, const idx *start, idx q0, idx q1,
                     const vf *M, vf *R, const float *x, float *gx, int gw_too, idx C, const idx n) {
    for (idx i = 0, high; i < D1; i += high) {
        high = min_idx(3, D1 - i);
        for (idx j = 0, wide; j < D2; j += wide) {
            wide = min_idx(3, D2 - j);
#define TILE(a, b)                                                                               \
    case a * 10 + b:                                                                             \
        grid_tile(a, b, g + i * row + j * LANES, row, start, q0, q1, M + i * D2 + j, R + i * D2 + j, \
                  D2, x, gx, i + j == 0, gw_too, C, n);                                          \
        break;
            switch (high * 10 + wide) {
                TILE(1, 1) TILE(1, 2) TILE(1, 3) TILE(2, 1) TILE(2, 2) TILE(2, 3) TILE(3, 1)
                TILE(3, 2) TILE(3, 3)
            }
#undef TILE
        }
    }
}

/* The kernels on the grid: M[d1][d2] = sum over taps of table_h[a][d1] table_w[b][d2] w[a][b]. */
static void mix(const float *table_h, const float *table_w, const struct grid_job *j, const vf *w,
                vf *half, vf *M) {
    const idx D1 = j->h.reach, D2 = j->w_axis.reach, kh = j->h.taps, kw = j->w_axis.taps;
    for (idx d1 = 0; d1 < D1; d1++)
        for (idx b = 0; b < kw; b++) {
            half[b] = all(0);
            for (idx a = 0; a < kh; a++)
                if (table_h[a * D1 + d1] != 0) half[b] += table_h[a * D1 + d1] * w[a * kw + b];
            for (idx d2 = 0; b == kw - 1 && d2 < D2; d2++) {
                vf sum = all(0);
                for (idx i = 0; i < kw; i++)
                    if (table_w[i * D2 + d2] != 0) sum += table_w[i * D2 + d2] * half[i];
                M[d1 * D2 + d2] = sum;
            }
        }
}

/* The transpose: gw[a][b] += sum over d of table_h[a][d1] table_w[b][d2] R[d1][d2]. */
static void unmix(const float *table_h, const float *table_w, const struct grid_job *j, const vf *R,
                  vf *gw) {
    const idx D1 = j->h.reach, D2 = j->w_axis.reach, kh = j->h.taps, kw = j->w_axis.taps;
    for (idx d1 = 0; d1 < D1; d1++)
        for (idx b = 0; b < kw; b++) {
            vf sum = all(0);
            for (idx d2 = 0; d2 < D2; d2++)
                if (table_w[b * D2 + d2] != 0) sum += table_w[b * D2 + d2] * R[d1 * D2 + d2];
            for (idx a = 0; a < kh; a++)
                if (table_h[a * D1 + d1] != 0) gw[a * kw + b] += table_h[a * D1 + d1] * sum;
        }
}

/* One image's g for one vector of channels, side by side within a margin of zeros. */
INLINE void pack(const struct grid_job *j, const float *g, vf *packed, const idx n) {
    const idx P1 = j->h.outs, P2 = j->w_axis.outs, width = P2 + 2 * (j->w_axis.reach - 1);
    packed += (j->h.reach - 1) * width + j->w_axis.reach - 1;
    for (idx p1 = 0; p1 < P1; p1++)
        for (idx p2 = 0; p2 < P2; p2++)
            packed[p1 * width + p2] = load(g + (p1 * P2 + p2) * j->C, n);
}

/* All input patches of one image: x and gx point at its first channel of this block. */
INLINE void grid_image(const struct grid_job *j, const vf *packed, const vf *M, vf *R, const float *x,
                       float *gx, const idx n) {
    const struct axis *h = &j->h, *w = &j->w_axis;
    const idx D1 = h->reach, D2 = w->reach, width = w->outs + 2 * (D2 - 1), line = w->ins * j->C;
    for (idx q1 = 0; q1 < h->ins; q1++)
        for (idx q0 = 0, q2; q0 < w->ins; q0 = q2) {
            for (q2 = q0 + 1; q2 < w->ins && w->class[q2] == w->class[q0];) q2++;
            const idx kernel = (h->class[q1] * w->classes + w->class[q0]) * D1 * D2;
            const vf *g = packed + (h->start[q1] + D1 - 1) * width + D2 - 1;
            grid_run(D1, D2, (const float *)g, width * LANES, w->start, q0, q2, M + kernel, R + kernel,
                     x + q1 * line, gx ? gx + q1 * line : NULL, j->gw != NULL, j->C, n);
        }
}

/* Vectors of packed g, with its margin. */
static idx packed_size(const struct grid_job *j) {
    return (j->h.outs + 2 * (j->h.reach - 1)) * (j->w_axis.outs + 2 * (j->w_axis.reach - 1));
}

/* Channels c to c + n, every image. `space` holds, in vectors: packed g, w, gw, half, M, R. */
INLINE void grid_block(const struct grid_job *j, vf *space, idx c, const idx n) {
    const struct axis *h = &j->h, *w = &j->w_axis;
    const idx taps = h->taps * w->taps, kernel = h->reach * w->reach, kinds = h->classes * w->classes;
    vf *taps_in = space + packed_size(j), *taps_out = taps_in + taps, *half = taps_out + taps;
    vf *M = half + w->taps, *R = M + kinds * kernel;
    for (idx t = 0; t < taps; t++) {
        taps_in[t] = taps_out[t] = all(0);
        for (idx i = 0; i < n; i++) ((float *)&taps_in[t])[i] = j->w[(c + i) * taps + t];
    }
    for (idx i = 0; i < kinds; i++)
        mix(h->table + i / w->classes * h->taps * h->reach,
            w->table + i % w->classes * w->taps * w->reach, j, taps_in, half, M + i * kernel);
    for (idx i = 0; i < kinds * kernel; i++) R[i] = all(0);
    for (idx image = 0; image < j->N; image++) {
        const idx at = image * h->ins * w->ins * j->C + c;
        pack(j, j->g + image * h->outs * w->outs * j->C + c, space, n);
        grid_image(j, space, M, R, j->x + at, j->gx ? j->gx + at : NULL, n);
    }
    if (!j->gw) return;
    for (idx i = 0; i < kinds; i++)
        unmix(h->table + i / w->classes * h->taps * h->reach,
              w->table + i % w->classes * w->taps * w->reach, j, R + i * kernel, taps_out);
    for (idx t = 0; t < taps; t++)
        for (idx i = 0; i < n; i++) j->gw[(c + i) * taps + t] = ((float *)&taps_out[t])[i];
}

static void grid_backward_items(const void *arg, idx begin, idx end) {
    const struct grid_job *j = arg;
    const struct axis *h = &j->h, *w = &j->w_axis;
    const idx kernels = h->classes * w->classes * h->reach * w->reach;
    const idx vectors = packed_size(j) + 2 * h->taps * w->taps + w->taps + 2 * kernels;
    vf *space = zeroed(vectors * (idx)sizeof(vf)); /* the margin of packed g stays zero */
    if (!space) {
        *j->failed = 1;
        return;
    }
    for (idx item = begin; item < end; item++) {
        const idx c = item * LANES;
        if (c + LANES <= j->C) grid_block(j, space, c, LANES);
        else grid_block(j, space, c, j->C - c);
    }
    free(space);
}

/* ---- between the convolutions ---- */

/* z = g * slope, its sum over all pixels, and z * scale, for a slice of the channels. */
static void slope_backward_items(const void *arg, idx begin, idx end) {
    const struct slope_job *j = arg;
    const idx c0 = begin * SLICE, c1 = min_idx(end * SLICE, j->C);
    for (idx n = 0; n < j->N; n++)
        for (idx cell = 0; cell < j->cells; cell++) {
            const idx at = (n * j->cells + cell) * j->C;
            const vf area = all(j->area ? j->area[cell] : j->whole);
#define BODY(n)                                                                    \
    do {                                                                           \
        vf z = load(j->g + at + c, n);                                             \
        if (j->slope) {                                                            \
            vf kept = load(j->slope + at + c, n), slope = j->act ? all(0) : kept;  \
            if (j->act == RELU) activate(RELU, kept, 0, &slope);                   \
            if (j->act == RELU6) activate(RELU6, kept, 0, &slope);                 \
            z *= slope;                                                            \
        }                                                                          \
        if (j->z) store(j->z + at + c, z, n);                                      \
        if (j->sum) store(j->sum + c, load(j->sum + c, n) + z * area, n);          \
        if (j->scaled) store(j->scaled + at + c, z * load(j->scale + c, n), n);    \
    } while (0)
            FOR_LANES(c, c0, c1, BODY);
#undef BODY
        }
}

static void row_dots_items(const void *arg, idx begin, idx end) {
    const struct dots_job *j = arg;
    for (idx row = begin; row < end; row++) {
        const float *a = j->a + row * j->K, *b = j->b + row * j->K;
        vf sums[4] = {all(0), all(0), all(0), all(0)};
        idx k = 0;
        for (; k + 4 * LANES <= j->K; k += 4 * LANES)
            for (int i = 0; i < 4; i++)
                sums[i] += load(a + k + i * LANES, LANES) * load(b + k + i * LANES, LANES);
        const vf sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        float total = 0;
        for (int i = 0; i < LANES; i++) total += ((const float *)&sum)[i];
        for (; k < j->K; k++) total += a[k] * b[k];
        j->dots[row] = total;
    }
}

/* ---- g as every tap of a dense convolution sees it ---- */

/* tall[a][p2][o] = sum over p1 of taps_h[a][p1][q1] g[p1][p2][o]: one row of x patches. */
static void spread_rows(const struct spread_job *j, const float *g, idx q1, float *tall) {
    const idx row = j->P2 * j->O;
    memset(tall, 0, (size_t)(j->kh * row) * sizeof(float));
    for (idx a = 0; a < j->kh; a++)
        for (idx p1 = 0; p1 < j->P1; p1++) {
            const float count = j->taps_h[(a * j->P1 + p1) * j->Q1 + q1];
            if (count == 0) continue;
#define BODY(n) \
    store(tall + a * row + c, load(tall + a * row + c, n) + count * load(g + p1 * row + c, n), n)
            FOR_LANES(c, 0, row, BODY);
#undef BODY
        }
}

/* seen[o][a][b] of one x patch, for n channels from o on: summed over p2, then turned round. */
INLINE void spread_cell(const struct spread_job *j, const float *tall, idx q2, idx o, const idx n,
                        float *seen, vf *sums) {
    const idx taps = j->kh * j->kw;
    for (idx t = 0; t < taps; t++) sums[t] = all(0);
    for (idx b = 0; b < j->kw; b++)
        for (idx p2 = 0; p2 < j->P2; p2++) {
            const float count = j->taps_w[(b * j->P2 + p2) * j->Q2 + q2];
            if (count == 0) continue;
            for (idx a = 0; a < j->kh; a++)
                sums[a * j->kw + b] += count * load(tall + (a * j->P2 + p2) * j->O + o, n);
        }
    const float *from = (const float *)sums;
    float *to = seen + o * taps;
    for (idx i = 0; i < n; i++)
        for (idx t = 0; t < taps; t++) *to++ = from[t * LANES + i];
}

static void spread_items(const void *arg, idx begin, idx end) {
    const struct spread_job *j = arg;
    const idx taps = j->kh * j->kw, cell = j->O * taps;
    vf *sums = scratch(taps * (idx)sizeof(vf));
    float *tall = scratch(j->kh * j->P2 * j->O * (idx)sizeof(float));
    if (sums && tall)
        for (idx item = begin; item < end; item++) {
            const idx n = item / j->Q1;
            spread_rows(j, j->g + n * j->P1 * j->P2 * j->O, item % j->Q1, tall);
            for (idx q2 = 0; q2 < j->Q2; q2++) {
                float *seen = j->seen + (item * j->Q2 + q2) * cell;
                idx o = 0;
                for (; o + LANES <= j->O; o += LANES)
                    spread_cell(j, tall, q2, o, LANES, seen, sums);
                if (o < j->O) spread_cell(j, tall, q2, o, j->O - o, seen, sums);
            }
        }
    else *j->failed = 1;
    free(sums), free(tall);
}

/* ---- max-pool ---- */

/* One output pixel, channels c to c + n: the maximum of f(z) over the window, first one wins, and
 * f' there added to the cell of the input patch it lies in. */
INLINE void pool_lanes(const int act, const struct pixel *p, idx c, const idx n) {
    const vf scale = p->scale ? load(p->scale + c, n) : all(1);
    const vf shift = p->shift ? load(p->shift + c, n) : all(0);
    vf best = all(0), z_best = all(0), cell = all(0), unused = all(0), slope = all(0);
    for (idx i = 0; i < p->count; i++) {
        const vf z = load(p->y + p->window[i].at + c, n) * scale + shift;
        const vf a = activate(act, z, p->parameter, &unused);
        const mask better = i == 0 ? same(all(0), all(0)) : over(a, best) | ~same(a, a);
        best = pick(better, a, best);
        z_best = pick(better, z, z_best);
        cell = pick(better, all(p->window[i].cell), cell);
    }
    store(p->out + c, best, n);
    if (!p->mean) return;
    store(p->mean + c, load(p->mean + c, n) + best, n);
    activate(act, z_best, p->parameter, &slope);
    for (idx d1 = p->d1_first; d1 <= p->d1_last; d1++)
        for (idx d2 = p->d2_first; d2 <= p->d2_last; d2++) {
            float *route = p->route + (d1 * p->D2 + d2) * p->C + c;
            const vf here = pick(same(cell, all((float)(d1 * p->D2 + d2))), slope, all(0));
            store(route, load(route, n) + here, n);
        }
}

INLINE void pool_pixel(const int act, const struct pixel *p) {
#define BODY(n) pool_lanes(act, p, c, n)
    FOR_LANES(c, 0, p->C, BODY);
#undef BODY
}

#define DEFINE(ACT) \
    static void OWN(pool_##ACT)(const struct pixel *p) { pool_pixel(ACT, p); }
EACH_ACT(DEFINE)
#undef DEFINE
#define LIST(ACT) [ACT] = OWN(pool_##ACT),
static const pixel_fn pool_pixels[ACTS] = {EACH_ACT(LIST)};
#undef LIST

/* The window of output pixel (h, w): its pixels inside the map in scan order, and their cells. */
static void look(const struct pool_job *j, idx h, idx w, idx p1, idx p2, struct window *window,
                 struct pixel *p) {
    p->count = 0;
    for (idx a = 0; a < j->kh; a++) {
        const idx row = h * j->sh - j->ph + a * j->dh;
        if (row < 0 || row >= j->H) continue;
        const idx d1 = j->mean ? row / j->rh_in - j->first_h[p1] : 0;
        for (idx b = 0; b < j->kw; b++) {
            const idx column = w * j->sw - j->pw + b * j->dw;
            if (column < 0 || column >= j->W) continue;
            const idx d2 = j->mean ? column / j->rw_in - j->first_w[p2] : 0;
            if (p->count == 0) p->d1_first = d1, p->d2_first = d2;
            p->d1_last = d1;
            p->d2_last = d2;
            window[p->count++] = (struct window){(row * j->W + column) * j->C,
                                                 (float)(d1 * j->D2 + d2)};
        }
    }
}

static void max_pool_items(const void *arg, idx begin, idx end) {
    const struct pool_job *j = arg;
    const idx C = j->C, P = ceil_div(j->OH, j->rh), Q = ceil_div(j->OW, j->rw), D = j->D1 * j->D2;
    struct window *window = scratch(j->kh * j->kw * (idx)sizeof *window);
    if (!window) {
        *j->failed = 1;
        return;
    }
    for (idx item = begin; item < end; item++) {
        const idx n = item / P, p1 = item % P, h1 = min_idx((p1 + 1) * j->rh, j->OH);
        float *mean = j->mean ? j->mean + item * Q * C : NULL;
        struct pixel p = {.y = j->y + n * j->H * j->W * C, .scale = j->scale, .shift = j->shift,
                          .window = window, .C = C, .D2 = j->D2, .parameter = j->parameter};
        clear(mean, j->OW, C, j->rw, 0, C);
        if (mean) memset(j->route + item * Q * D * C, 0, (size_t)(Q * D * C) * sizeof(float));
        for (idx h = p1 * j->rh; h < h1; h++)
            for (idx w = 0; w < j->OW; w++) {
                const idx p2 = w / j->rw;
                look(j, h, w, p1, p2, window, &p);
                p.out = j->out + ((n * j->OH + h) * j->OW + w) * C;
                p.mean = mean ? mean + p2 * C : NULL;
                p.route = mean ? j->route + (item * Q + p2) * D * C : NULL;
                pool_pixels[j->act](&p);
            }
        finish(mean, h1 - p1 * j->rh, j->OW, C, j->rw, 0, C);
    }
    free(window);
}

static void pool_grid_backward_items(const void *arg, idx begin, idx end) {
    const struct pool_grid_job *j = arg;
    const idx C = j->C, image = j->Q1 * j->Q2 * C, cells = j->D1 * j->D2;
    for (idx n = begin; n < end; n++) {
        memset(j->gx + n * image, 0, (size_t)image * sizeof(float));
        for (idx p = 0; p < j->P1 * j->P2; p++)
            for (idx d = 0; d < cells; d++) {
                const idx q1 = j->first_h[p / j->P2] + d / j->D2;
                const idx q2 = j->first_w[p % j->P2] + d % j->D2;
                if (q1 >= j->Q1 || q2 >= j->Q2) continue; /* an edge patch reaches fewer */
                const float *g = j->g + (n * j->P1 * j->P2 + p) * C;
                const float *route = j->route + ((n * j->P1 * j->P2 + p) * cells + d) * C;
                float *gx = j->gx + n * image + (q1 * j->Q2 + q2) * C;
#define BODY(n) store(gx + c, load(gx + c, n) + load(g + c, n) * load(route + c, n), n)
                FOR_LANES(c, 0, C, BODY);
#undef BODY
            }
    }
}

static const struct isa OWN(isa) = {
    QUOTE(ISA), patch_mean_items, epilogue_items, depthwise_items, grid_backward_items,
    max_pool_items, pool_grid_backward_items, slope_backward_items, row_dots_items,
    spread_items, product_items, winograd_tile_items, winograd_panel_items, LANES, PANEL, BREADTH, OUTS};
#undef OUTS

#endif
