/* 3x3 convolutions and their gradients, see struct winograd_job. */

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
/* How far the 36 combinations of `rows` rows lie apart. */
#define APART(rows) ((rows) * BREADTH + GAP)

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
    for (idx p = 0; p < 36; p++) store(to + p * (j->R * pitch + GAP) + tile * pitch, out[p], n);
}

static void winograd_tile_items(const void *arg, idx begin, idx end) {
    const struct winograd_job *j = arg;
    for (idx tile = begin; tile < end; tile++) {
#define SEEN(n) winograd_tile(j->g + c, j->seen + c, j->O, j, j->O, tile, 0, n)
#define GIVEN(n)                                                                              \
    winograd_tile(j->g + c, j->given + c / OUTS * 36 * (OUTS * j->R + GAP) + c % OUTS, OUTS, j, j->O, tile, 1, n)
#define READ(n) winograd_tile(j->x + c, j->read + c, j->C, j, j->C, tile, 0, n)
        if (j->gx) FOR_LANES(c, 0, j->O, SEEN);
        if (j->gw) FOR_LANES(c, 0, j->O, GIVEN);
        if (j->gw) FOR_LANES(c, 0, j->C, READ);
#undef READ
#undef GIVEN
#undef SEEN
    }
}

/* The taps of inputs [o0, o0 + some) for some outputs as columns, panel by panel: w(o, t) is in row
 * 9 * o + t or, not together, TAPS * t + o. */
static void winograd_turn(const struct winograd_job *j, idx first, idx count, idx o0, idx some, float *to) {
    const idx K = j->O;
    for (idx c = 0; c < count; c += PANEL, to += 9 * TAPS * PANEL) {
        const float *w = j->w + (first + c) * 9 * K;
        const idx n = min_idx(PANEL, count - c);
        if (j->together) turn(w + 9 * o0, 9 * K, n, 9 * some, to);
        else
            for (idx t = 0; t < 9; t++) turn(w + t * K + o0, 9 * K, n, some, to + t * TAPS * PANEL);
    }
}

/* gx for some channels. `turned` holds [panels][9 * TAPS][PANEL] where it is ahead, `space`
 * [36][TAPS][BREADTH] and [36][R][BREADTH], each with a gap. */
static void winograd_gx(const struct winograd_job *j, idx first, idx count, float *turned, float *space) {
    const idx C = j->C, O = j->O, R = j->R, across = ceil_div(j->W, 4), down = ceil_div(j->H, 4);
    const int ahead = j->ahead;
    const idx step_o = !ahead ? 9 * C : j->together ? 9 * PANEL : PANEL;
    const idx step_t = !ahead ? -C : j->together ? PANEL : TAPS * PANEL; /* the kernel turned round */
    const idx step_panel = ahead ? 9 * TAPS * PANEL : PANEL;
    float *products = space + 36 * APART(TAPS);
    for (idx o0 = 0; o0 < O; o0 += TAPS) {
        const idx some = min_idx(TAPS, O - o0);
        const float *w = ahead ? turned : j->w + (9 * o0 + 8) * C + first;
        if (ahead) winograd_turn(j, first, count, o0, some, turned);
        for (idx o = 0; o < some; o++) {
            vf taps[9], out[36];
#define BODY(n)                                                                                 \
    {                                                                                           \
        const float *own = w + o * step_o + c / PANEL * step_panel + c % PANEL;                 \
        for (int t = 0; t < 9; t++) taps[t] = load(own + t * step_t, n);                        \
        taps_of(taps, out);                                                                     \
        for (idx p = 0; p < 36; p++) store(space + p * APART(TAPS) + o * BREADTH + c, out[p], n); \
    }
            FOR_LANES(c, 0, count, BODY);
#undef BODY
        }
        for (idx p = 0; p < 36; p++) {
            const struct product_job job = {.a = j->seen + p * (R * O + GAP) + o0, .ai = O, .ak = 1,
                                            .N = BREADTH, .K = some, .alpha = 1, .add = o0 > 0};
            for (idx c = 0; c < count; c += PANEL)
                product_rows(&job, 0, R, space + p * APART(TAPS) + c, BREADTH,
                             products + p * APART(R) + c, min_idx(PANEL, count - c));
        }
    }
    for (idx tile = 0; tile < R; tile++) {
        const idx at = j->first + tile, h0 = at / across % down * 4, w0 = at % across * 4;
        float *gx = j->gx + at / (across * down) * j->H * j->W * C + first;
        vf m[36], out[16];
#define BODY(n)                                                                                   \
    {                                                                                             \
        for (idx p = 0; p < 36; p++) m[p] = load(products + p * APART(R) + tile * BREADTH + c, n);  \
        of_outputs(m, out);                                                                       \
        for (idx h = h0; h < min_idx(h0 + 4, j->H); h++)                                          \
            for (idx w = w0; w < min_idx(w0 + 4, j->W); w++)                                      \
                store(gx + (h * j->W + w) * C + c, out[(h - h0) * 4 + w - w0], n);                \
    }
        FOR_LANES(c, 0, count, BODY);
#undef BODY
    }
}

/* gw for the channels of a panel, a few outputs at a time. `space` holds [36][OUTS][BREADTH],
 * with gaps. */
static void winograd_gw(const struct winograd_job *j, idx first, idx count, float *space) {
    for (idx o0 = 0; o0 < j->O; o0 += OUTS) {
        const idx tall = min_idx(OUTS, j->O - o0);
        for (idx p = 0; p < 36; p++) {
            const struct product_job job = {.a = j->given + (o0 / OUTS * 36 + p) * (OUTS * j->R + GAP), .ai = 1,
                                            .ak = OUTS, .N = BREADTH, .K = j->R, .alpha = 1};
            for (idx c = 0; c < count; c += PANEL)
                product_rows(&job, 0, tall, j->read + p * (j->R * j->C + GAP) + first + c, j->C,
                             space + p * APART(OUTS) + c, min_idx(PANEL, count - c));
        }
        for (idx o = 0; o < tall; o++) {
            vf m[36], taps[9];
#define BODY(n)                                                                                 \
    {                                                                                           \
        for (idx p = 0; p < 36; p++) m[p] = load(space + p * APART(OUTS) + o * BREADTH + c, n);   \
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
    const idx room = max_idx(j->gx ? APART(TAPS) + APART(j->R) : 0, APART(OUTS));
    float *space = scratch(36 * room * (idx)sizeof(float));
    float *turned = j->ahead ? scratch(9 * TAPS * BREADTH * (idx)sizeof(float)) : NULL;
    if (!space || (j->ahead && !turned)) {
        free(space), free(turned);
        *j->failed = 1;
        return;
    }
    for (idx panel = begin; panel < end; panel++) {
        const idx first = panel * j->breadth, count = min_idx(j->breadth, j->C - first);
        if (j->gx) winograd_gx(j, first, count, turned, space);
        if (j->gw) winograd_gw(j, first, count, space);
    }
    free(space), free(turned);
}
