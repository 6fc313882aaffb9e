/* The patch-grid kernels for CPUs: float32 maps in channels-last order, [N][H][W][C] in memory.
 *
 * eager.py says what each kernel computes. Everything is vectorised across channels with the
 * compiler's vector types; what depends on the vector width stands in lanes/, which is included once
 * per instruction set (x86-64: SSE2, AVX2, AVX-512; others: 16-byte vectors, which are NEON on ARM).
 * The best one the machine has is chosen at run time. Here are threads, jobs, and the functions that
 * Python calls; cpu_tape.c calls many of them at once.
 *
 * Threads come from outside: gf_set_fork receives the fork primitive of the OpenMP runtime that
 * PyTorch already runs (GOMP_parallel), so there is one thread pool in the process, not two, and
 * no OpenMP is needed to build this. Work is cut into items that each own their outputs, so
 * results do not depend on the number of threads. Likewise gf_set_product may receive the matrix
 * product that PyTorch multiplies by, which on some processors is faster than the one here.
 */
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
/* Floats of a 1x1 layer's weight that are turned at once and stay in the cache; then so many pixels are
 * computed before the epilogue goes over them. Of others so many floats of its output are, which are
 * then still in the second cache. */
#define LIGHT 32768
#define PIXELS 48
#define STRIP 98304
/* Tiles of a convolution at a time, times its input channels, see struct winograd_job. */
#define TILES 16384
/* Floats between their combinations, which would else lie in the same few places of the first cache. */
#define GAP 16
/* Rows, columns and terms of a product at a time: what is copied of both factors stays in the cache. */
#define ROWS 384
#define COLUMNS 384
#define DEEP 192
/* Floats of a product that do not stay in the second cache. */
#define LARGE 98304

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

/* c [M][N] = alpha * a b. a(i, k) is a[i * ai + k * ak]; b is [K][N]. */
struct product_job {
    const float *a, *b;
    float *c;
    idx ai, ak, M, N, K, rows, columns; /* rows and columns of c that an item computes */
    float alpha;
    int add; /* c is added to */
    const float *w;
    float *dots; /* of each row of c with that of w [M][N]; NULL: none */
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
     * [36][R][C], each with a gap */
    float *seen, *given, *read;
    idx H, W, C, O, first, R; /* R tiles, from the first on */
    idx breadth;              /* channels of gx, and gw, that an item takes */
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

/* A 1x1 convolution: y[pixel] = w x[pixel], w [C][K], then the epilogue. With a geometry (see struct
 * depthwise_job) any other, of an input [IH][IW][IC]: a pixel's row is what its window sees, tap by tap. */
struct pointwise_job {
    struct epilogue_job out;
    const float *x, *w;
    idx K;
    const idx *geometry;
    idx IH, IW, IC;
    float *turned; /* w, in panels: [C / panel][K][panel] */
    idx first, count; /* or the pixels for which panels are turned one by one */
    int *failed;
};

/* How far its product has come, in pixels of the batch. */
struct walk {
    const struct pointwise_job *job;
    float *space; /* for rows of windows */
    idx ready, end;
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
    range_fn patch_mean, epilogue, turns, pointwise, panels, depthwise, grid_backward, max_pool, pool_grid_backward;
    range_fn slope_backward, row_dots, spread, product, winograd_tiles, winograd_panels;
    idx lanes, panel; /* columns of c that a product takes at a time */
    idx breadth, outs; /* channels, and rows of gw, that winograd takes at a time */
};

/* ---- lanes/, once per instruction set ---- */

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define OWN(name) PASTE(name, ISA)
#define QUOTE_(a) #a
#define QUOTE(a) QUOTE_(a)

#if defined(__x86_64__)

#define ISA sse2
#define LANES 4
#include "lanes/all.c"
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
#include "lanes/all.c"
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
#include "lanes/all.c"
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
#include "lanes/all.c"
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

EXPORT int gf_row_dots(const float *a, const float *b, float *dots, idx rows, idx K, int threads);

/* See struct product_job; ai or ak is 1. */
static int multiply(const float *a, idx ai, idx ak, const float *b, float *c, idx M, idx N, idx K,
                    float alpha, const float *w, float *dots, int threads) {
    if (!K) { /* an empty sum */
        memset(c, 0, (size_t)(M * N) * 4);
        if (dots) memset(dots, 0, (size_t)M * 4);
        return 0;
    }
    if (product) { /* columns first: c^T = b^T a^T */
        const float beta = 0;
        const idx lda = ak == 1 ? max_idx(ai, K) : max_idx(ak, M); /* of one row ai may be 1 */
        product("N", ak == 1 ? "N" : "T", &N, &M, &K, &alpha, b, &N, a, &lda, &beta, c, &N);
        if (dots) gf_row_dots(c, w, dots, M, N, threads);
        return 0;
    }
    int failed = 0;
    const idx panels = ceil_div(N, chosen->panel);
    const idx columns = ceil_div(panels, dots ? 1 : ceil_div(N, COLUMNS)) * chosen->panel;
    const idx rows = max_idx(24, min_idx(ROWS, ceil_div(M, threads)));
    struct product_job job = {a, b, c, ai, ak, M, N, K, rows, columns, alpha, 0, w, dots, &failed};
    run(chosen->product, &job, ceil_div(M, rows) * ceil_div(N, columns), M * N * K / 8, threads);
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

/* A job whose weight stays in the cache. */
static int light_layer(struct pointwise_job *job, idx N, int threads) {
    const struct epilogue_job *out = &job->out;
    const idx panels = ceil_div(out->C, chosen->panel), pixels = N * out->H * out->W;
    job->turned = scratch(panels * chosen->panel * job->K * 4);
    if (!job->turned) return -1;
    chosen->turns(job, 0, panels);
    run(chosen->pointwise, job, N * ceil_div(out->H, out->rh), pixels * (out->C + job->K), threads);
    free(job->turned);
    return *job->failed ? -1 : 0;
}

EXPORT int gf_pointwise(const float *x, const float *w, const float *residual, const float *scale,
                        const float *shift, float *y, float *mean, float *slope, idx N, idx H, idx W,
                        idx K, idx C, idx rh, idx rw, int act, float parameter, int threads) {
    int failed = 0;
    if (!mean) rh = min_idx(4, H);
    struct pointwise_job job = {
        .out = {y, residual, scale, shift, mean, slope, H, W, C, rh, rw, act, parameter},
        .x = x, .w = w, .K = K, .failed = &failed};
    const idx P = ceil_div(H, rh), panels = ceil_div(C, chosen->panel);
    if (panels * chosen->panel * K <= LIGHT) return light_layer(&job, N, threads);
    const idx strip = max_idx(1, threads * STRIP / (rh * W * C));
    for (idx item = 0; item < N * P && !failed; item += strip) {
        const idx end = min_idx(item + strip, N * P), last = (end / P * H + end % P * rh) * W;
        job.first = (item / P * H + item % P * rh) * W, job.count = last - job.first;
        run(chosen->panels, &job, panels, job.count * C * K / 8, threads);
        struct part part = {chosen->epilogue, &job.out, item};
        run(part_items, &part, end - item, job.count * C, threads);
    }
    return failed ? -1 : 0;
}

/* A convolution of few channels, w [C][kh][kw][IC], then the epilogue. */
EXPORT int gf_convolve(const float *x, const float *w, const float *scale, const float *shift, float *y,
                       float *mean, float *slope, idx N, idx IH, idx IW, idx IC, idx C, idx H, idx W,
                       const idx *geometry, idx rh, idx rw, int act, float parameter, int threads) {
    int failed = 0;
    if (!mean) rh = min_idx(4, H);
    struct pointwise_job job = {
        .out = {y, NULL, scale, shift, mean, slope, H, W, C, rh, rw, act, parameter},
        .x = x, .w = w, .K = geometry[0] * geometry[1] * IC, .geometry = geometry,
        .IH = IH, .IW = IW, .IC = IC, .failed = &failed};
    return light_layer(&job, N, threads);
}

/* Where taps[tap][p][q] is not 0, as the first q and the one after the last: [k][P][2] */
static idx *bounds(const float *taps, idx k, idx P, idx Q) {
    idx *found = scratch(2 * k * P * (idx)sizeof(idx));
    for (idx i = 0; found && i < k * P; i++) {
        idx *own = found + 2 * i;
        for (own[0] = 0; own[0] < Q && taps[i * Q + own[0]] == 0;) own[0]++;
        for (own[1] = Q; own[1] > own[0] && taps[i * Q + own[1] - 1] == 0;) own[1]--;
    }
    return found;
}

/* What every tap sees of a map of patches [Q1][Q2][C]: seen [P1][P2][kh][kw][C], the sums over q of
 * taps_h[a][p1][q1] taps_w[b][p2][q2] x[q1][q2]. */
EXPORT int gf_windows(const float *x, const float *taps_h, const float *taps_w, float *seen, idx N,
                      idx C, idx P1, idx P2, idx Q1, idx Q2, idx kh, idx kw) {
    idx *tall = bounds(taps_h, kh, P1, Q1), *wide = bounds(taps_w, kw, P2, Q2);
    if (tall && wide) memset(seen, 0, (size_t)(N * P1 * P2 * kh * kw * C) * sizeof(float));
    for (idx n = 0; tall && wide && n < N; n++, x += Q1 * Q2 * C)
        for (idx p = 0; p < P1 * P2; p++)
            for (idx tap = 0; tap < kh * kw; tap++, seen += C) {
                const idx at_h = tap / kw * P1 + p / P2, at_w = tap % kw * P2 + p % P2;
                for (idx q1 = tall[2 * at_h]; q1 < tall[2 * at_h + 1]; q1++)
                    for (idx q2 = wide[2 * at_w]; q2 < wide[2 * at_w + 1]; q2++) {
                        const float count = taps_h[at_h * Q1 + q1] * taps_w[at_w * Q2 + q2];
                        for (idx c = 0; c < C; c++) seen[c] += count * x[(q1 * Q2 + q2) * C + c];
                    }
            }
    const int failed = !tall || !wide;
    free(tall), free(wide);
    return -failed;
}

/* c [M][N] = a b; a(i, k) is a[i * ai + k * ak], where ai or ak is 1; b is [K][N]. */
EXPORT int gf_product(const float *a, const float *b, float *c, idx ai, idx ak, idx M, idx N, idx K,
                      int threads) {
    return multiply(a, ai, ak, b, c, M, N, K, 1, NULL, NULL, threads);
}

/* See struct winograd_job. */
EXPORT int gf_winograd(const float *g, const float *x, const float *w, float *gx, float *gw, idx N,
                       idx H, idx W, idx C, idx O, int threads) {
    int failed = 0;
    const idx R = N * ceil_div(H, 4) * ceil_div(W, 4), seen = 36 * (R * O + GAP);
    const idx read = 36 * (R * C + GAP), given = ceil_div(O, chosen->outs) * 36 * (R * chosen->outs + GAP);
    float *space = scratch(((gx ? seen : 0) + (gw ? given + read : 0)) * 4);
    if (!space) return -1;
    float *next = space + (gx ? seen : 0);
    struct winograd_job job = {g, x, w, gx, gw, 0, 0, space, next, next + given, H, W, C, O, 0, R,
                               chosen->breadth, &failed};
    run(chosen->winograd_tiles, &job, R, R * (O + C) * 36, threads);
    run(chosen->winograd_panels, &job, ceil_div(C, job.breadth), 36 * O * C, threads);
    free(space);
    return failed ? -1 : 0;
}

/* y [N][H][W][C] = x [N][H][W][K] * w [C][3][3][K] or, together, [C][K][3][3], see struct
 * winograd_job; a few tiles at a time. */
EXPORT int gf_winograd_forward(const float *x, const float *w, float *y, idx N, idx H, idx W, idx K,
                               idx C, int together, int threads) {
    int failed = 0;
    const idx tiles = N * ceil_div(H, 4) * ceil_div(W, 4);
    const idx most = min_idx(tiles, max_idx(48, TILES / K));
    const idx breadth = ceil_div(C, chosen->breadth) < threads ? chosen->panel : chosen->breadth;
    float *space = scratch(36 * (most * K + GAP) * 4);
    if (!space) return -1;
    for (idx first = 0; first < tiles; first += most) {
        const idx R = min_idx(most, tiles - first);
        struct winograd_job job = {x, NULL, w, y, NULL, 1, together, space, NULL, NULL, H, W, C, K, first,
                                   R, breadth, &failed};
        run(chosen->winograd_tiles, &job, R, R * K * 36, threads);
        run(chosen->winograd_panels, &job, ceil_div(C, breadth), 36 * K * C, threads);
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
    if (gx) failed |= multiply(s, C, 1, w, gx, N * cells, K, C, into_gx, NULL, NULL, threads);
    if (gw) failed |= multiply(s, 1, C, x, gw, C, K, N * cells, into_gw, w, dots, threads);
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

#include "cpu_tape.c"
#ifdef SELF_TEST
#include "cpu_test.c"
#endif
