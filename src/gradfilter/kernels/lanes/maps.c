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
