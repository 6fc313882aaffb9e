/* ---- 1x1 convolutions, and those of few channels, see struct pointwise_job ---- */

/* Panels of w, turned. */
static void turn_items(const void *arg, idx begin, idx end) {
    const struct pointwise_job *j = arg;
    for (idx p = begin; p < end; p++)
        turn(j->w + p * PANEL * j->K, j->K, min_idx(PANEL, j->out.C - p * PANEL), j->K, j->turned + p * PANEL * j->K);
}

/* The product of `count` pixels' rows, of which the first is pixel `first` of the batch, in one panel. */
INLINE void product_pixels(const struct pointwise_job *j, const float *rows, idx first, idx count, idx p,
                           const float *panel) {
    const struct product_job job = {.a = rows, .ai = j->K, .ak = 1, .N = j->out.C, .K = j->K, .alpha = 1};
    float *y = j->out.y + first * j->out.C + p * PANEL;
    product_rows(&job, 0, count, panel, PANEL, y, min_idx(PANEL, j->out.C - p * PANEL));
}

/* What the window of output pixel (h, w) of an image sees, tap by tap; zero beyond the map. */
static void window_row(const struct pointwise_job *j, const float *x, idx h, idx w, float *row) {
    const idx *k = j->geometry, C = j->IC; /* kh kw sh sw top left dh dw */
    for (idx a = 0; a < k[0]; a++) {
        const idx at_h = h * k[2] - k[4] + a * k[6], at_w = w * k[3] - k[5];
        const int in_h = at_h >= 0 && at_h < j->IH;
        if (in_h && k[7] == 1 && at_w >= 0 && at_w + k[1] <= j->IW) {
            const float *from = x + (at_h * j->IW + at_w) * C;
#define BODY(n) store(row + i, load(from + i, n), n)
            FOR_LANES(i, 0, k[1] * C, BODY);
#undef BODY
            row += k[1] * C;
            continue;
        }
        for (idx b = 0; b < k[1]; b++, row += C) {
            const idx v = at_w + b * k[7];
            const int inside = in_h && v >= 0 && v < j->IW;
            for (idx c = 0; c < C; c++) row[c] = inside ? x[(at_h * j->IW + v) * C + c] : 0;
        }
    }
}

/* The product up to row h of image n, with all panels turned; some pixels more where rows are short. */
static void product_row(const void *arg, idx n, idx h, idx c0, idx c1) {
    struct walk *walk = (struct walk *)arg;
    const struct pointwise_job *j = walk->job;
    const idx W = j->out.W, size = j->out.H * W, wanted = (n * j->out.H + h + 1) * W - walk->ready;
    if (wanted <= 0) return;
    const idx count = min_idx(max_idx(wanted, PIXELS), walk->end - walk->ready);
    const float *rows = j->x + walk->ready * j->K;
    if (walk->space) {
        rows = walk->space;
        idx image = walk->ready / size, at_h = walk->ready % size / W, at_w = walk->ready % W;
        for (idx i = 0; i < count; i++) {
            window_row(j, j->x + image * j->IH * j->IW * j->IC, at_h, at_w, walk->space + i * j->K);
            if (++at_w == W) at_w = 0, at_h++;
            if (at_h == j->out.H) at_h = 0, image++;
        }
    }
    for (idx c = c0; c < c1; c += PANEL)
        product_pixels(j, rows, walk->ready, count, c / PANEL, j->turned + c * j->K);
    walk->ready += count;
}

/* Patch rows, each image row's epilogue right after its product. */
static void pointwise_items(const void *arg, idx begin, idx end) {
    const struct pointwise_job *j = arg;
    const struct epilogue_job *out = &j->out;
    const idx P = ceil_div(out->H, out->rh), pixels = max_idx(out->W, PIXELS);
    float *space = j->geometry ? scratch(pixels * j->K * (idx)sizeof(float)) : NULL;
    if (j->geometry && !space) {
        *j->failed = 1;
        return;
    }
    struct walk walk = {j, space, (begin / P * out->H + begin % P * out->rh) * out->W,
                        (end / P * out->H + end % P * out->rh) * out->W};
    for (idx item = begin; item < end; item++) patch_row(out, item, 0, out->C, product_row, &walk);
    free(space);
}

/* Panels of some pixels, each turned when it is its turn. */
static void panel_items(const void *arg, idx begin, idx end) {
    const struct pointwise_job *j = arg;
    float *panel = scratch(j->K * PANEL * (idx)sizeof(float));
    if (!panel) {
        *j->failed = 1;
        return;
    }
    for (idx p = begin; p < end; p++) {
        turn(j->w + p * PANEL * j->K, j->K, min_idx(PANEL, j->out.C - p * PANEL), j->K, panel);
        product_pixels(j, j->x + j->first * j->K, j->first, j->count, p, panel);
    }
    free(panel);
}
