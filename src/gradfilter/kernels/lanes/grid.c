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
