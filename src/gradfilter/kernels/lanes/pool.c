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
