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
       ROW_DOTS, WEIGH, CONVOLVE, WINDOWS };

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
    case CONVOLVE: {
        const idx *k = words + 24;
        return gf_convolve(AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), n, k[0], k[1], k[2], k[3],
                           k[4], k[5], AT(7), k[6], k[7], (int)k[8], real(k[9]), threads);
    }
    case WINDOWS: {
        const idx *k = words + 12;
        return gf_windows(AT(0), AT(1), AT(2), AT(3), n, k[0], k[1], k[2], k[3], k[4], k[5], k[6]);
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
