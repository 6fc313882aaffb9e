/* Matrix products, see struct product_job. */

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
