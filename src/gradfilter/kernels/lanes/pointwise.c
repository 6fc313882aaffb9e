/* ---- 1x1 convolutions, see struct pointwise_job ---- */

/* Panels of w, turned. */
static void turn_items(const void *arg, idx begin, idx end) {
    const struct pointwise_job *j = arg;
    for (idx p = begin; p < end; p++)
        turn(j->w + p * PANEL * j->K, min_idx(PANEL, j->out.C - p * PANEL), j->K, j->turned + p * PANEL * j->K);
}

/* The product for `count` pixels from the one on that is `first` in the batch, in one panel. */
INLINE void product_pixels(const struct pointwise_job *j, idx first, idx count, idx p, const float *panel) {
    const struct product_job job = {.a = j->x, .ai = j->K, .ak = 1, .N = j->out.C, .K = j->K, .alpha = 1};
    product_rows(&job, first, count, panel, PANEL, j->out.y + p * PANEL, min_idx(PANEL, j->out.C - p * PANEL));
}

/* The product up to row h of image n, with all panels turned; some pixels more where rows are short. */
static void product_row(const void *arg, idx n, idx h, idx c0, idx c1) {
    struct walk *walk = (struct walk *)arg;
    const struct pointwise_job *j = walk->job;
    const idx wanted = (n * j->out.H + h + 1) * j->out.W - walk->ready;
    if (wanted <= 0) return;
    const idx count = min_idx(max_idx(wanted, PIXELS), walk->end - walk->ready);
    for (idx c = c0; c < c1; c += PANEL)
        product_pixels(j, walk->ready, count, c / PANEL, j->turned + c * j->K);
    walk->ready += count;
}

/* Patch rows, each image row's epilogue right after its product. */
static void pointwise_items(const void *arg, idx begin, idx end) {
    const struct pointwise_job *j = arg;
    const struct epilogue_job *out = &j->out;
    const idx P = ceil_div(out->H, out->rh);
    struct walk walk = {j, (begin / P * out->H + begin % P * out->rh) * out->W,
                        (end / P * out->H + end % P * out->rh) * out->W};
    for (idx item = begin; item < end; item++) patch_row(out, item, 0, out->C, product_row, &walk);
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
        turn(j->w + p * PANEL * j->K, min_idx(PANEL, j->out.C - p * PANEL), j->K, panel);
        product_pixels(j, j->first, j->count, p, panel);
    }
    free(panel);
}
