/* cc -DSELF_TEST cpu.c -lm: every kernel, on every instruction set the machine has, against naive
 * loops in double; for machines without PyTorch, such as an emulator. */
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
static void compare_to(double tolerance, const char *what, float *got, double *want, idx count) {
    double largest = 1;
    for (idx i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
    for (idx i = 0; i < count; i++)
        if (!(fabs(got[i] - want[i]) <= tolerance * largest)) {
            printf("%s %s: [%lld] is %g, should be %g\n", chosen->name, what, (long long)i, got[i],
                   want[i]);
            mismatches++;
            break;
        }
    free(got);
    free(want);
}

static void compare(const char *what, float *got, double *want, idx count) {
    compare_to(1e-5, what, got, want, count);
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

/* A layer of three input channels. */
static void test_convolve(const struct geometry *t) {
    const idx OH = out_size(t, t->H), OW = out_size(t, t->W), C = t->C, taps = t->k * t->k;
    const idx count = t->N * OH * OW * C;
    const idx cells = t->N * ceil_div(OH, t->r_out) * ceil_div(OW, t->r_out) * C;
    float *x = drawn(t->N * t->H * t->W * 3), *w = drawn(C * taps * 3);
    float *scale = drawn(C), *shift = drawn(C);
    float *a = poison(count), *mean = poison(cells), *slope = poison(cells);
    double *y = zeroed(count * 8);
    for (idx i = 0; i < count * taps; i++) {
        const idx o = i / taps, tap = i % taps, c = o % C, pixel = o / C;
        const idx h = pixel / OW % OH * t->s + tap / t->k * t->d - t->before;
        const idx v = pixel % OW * t->s + tap % t->k * t->d - t->before;
        if (h < 0 || h >= t->H || v < 0 || v >= t->W) continue;
        for (idx k = 0; k < 3; k++)
            y[o] += (double)w[(c * taps + tap) * 3 + k] *
                    x[((pixel / OW / OH * t->H + h) * t->W + v) * 3 + k];
    }
    const idx geometry[] = {t->k, t->k, t->s, t->s, t->before, t->before, t->d, t->d};
    gf_convolve(x, w, scale, shift, a, mean, t->act == NONE ? NULL : slope, t->N, t->H, t->W, 3, C, OH,
                OW, geometry, t->r_out, t->r_out, t->act, 0.1f, 1);
    check_stats("convolve", t, y, OH, OW, scale, shift, NULL, a, mean, slope);
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

static void test_windows(const struct geometry *t) {
    const idx P1 = ceil_div(out_size(t, t->H), t->r_out), P2 = ceil_div(out_size(t, t->W), t->r_out);
    const idx Q1 = ceil_div(t->H, t->r_in), Q2 = ceil_div(t->W, t->r_in), C = t->C, k = t->k;
    const idx count = t->N * P1 * P2 * k * k * C;
    float *x = drawn(t->N * Q1 * Q2 * C), *th = tap_table(t, t->H), *tw = tap_table(t, t->W);
    float *seen = poison(count);
    double *want = zeroed(count * 8);
    for (idx i = 0; i < count; i++) {
        const idx c = i % C, tap = i / C % (k * k), p = i / (C * k * k) % (P1 * P2);
        const float *image = x + i / (C * k * k * P1 * P2) * Q1 * Q2 * C;
        for (idx q = 0; q < Q1 * Q2; q++)
            want[i] += (double)image[q * C + c] * th[(tap / k * P1 + p / P2) * Q1 + q / Q2] *
                       tw[(tap % k * P2 + p % P2) * Q2 + q % Q2];
    }
    gf_windows(x, th, tw, seen, t->N, C, P1, P2, Q1, Q2, k, k);
    compare("windows", seen, want, count);
    free(x), free(th), free(tw);
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

static void test_pointwise(const struct geometry *t, idx K) {
    const idx C = t->C, pixels = t->N * t->H * t->W, count = pixels * C;
    const idx cells = t->N * ceil_div(t->H, t->r_out) * ceil_div(t->W, t->r_out) * C;
    float *x = drawn(pixels * K), *w = drawn(C * K), *residual = drawn(count);
    for (idx i = 0; i < C * K; i++) w[i] /= (float)K; /* or long sums would only round more */
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

/* A 3x3 convolution with more outputs, and sometimes inputs, than are taken at a time; its gradients. */
static void test_winograd(const struct geometry *t) {
    const idx C = t->C > 36 ? t->C + 93 : t->C, O = t->k + 66, H = t->H, W = t->W, pixels = t->N * H * W;
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
    const double more = 2e-5; /* its sums and differences of tiles round too */
    compare_to(more, "winograd y", y, want_y, pixels * O);
    compare_to(more, "winograd y, taps together", again, want_again, pixels * O);
    compare_to(more, "winograd gx", gx, want_gx, pixels * C);
    compare_to(more, "winograd gw", gw, want_gw, O * 9 * C);
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
#define TEST(name, ...) seed = 1 + j, test_##name(&cases[j] __VA_OPT__(, ) __VA_ARGS__)
        for (size_t j = 0; j < sizeof cases / sizeof *cases; j++) {
            TEST(epilogue);
            TEST(depthwise);
            TEST(convolve);
            TEST(grid_backward);
            TEST(windows);
            TEST(slope_backward);
            TEST(pointwise, cases[j].k + 4);
            if (cases[j].C > 36) TEST(pointwise, 1000); /* weights that are not light */
            TEST(winograd);
            TEST(spread);
            TEST(max_pool);
        }
#undef TEST
        printf("%s: %d mismatches\n", all_isas[i]->name, mismatches);
    }
    return mismatches != 0;
}
