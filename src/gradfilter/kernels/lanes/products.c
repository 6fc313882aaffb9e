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

/* `n` rows of b, which lie `pitch` apart, turned, as columns of a panel. [n][K] -> [K][PANEL] */
static void turn(const float *b, idx pitch, idx n, idx K, float *panel) {
    idx i = 0;
#if LANES == 16
    for (; i + 16 <= n; i += 16) {
        idx k = 0;
        for (; k + 16 <= K; k += 16) {
            __m512 r[16], t[16];
            for (int l = 0; l < 16; l++) r[l] = _mm512_loadu_ps(b + (i + l) * pitch + k);
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
            for (int l = 0; l < 16; l++) panel[k * PANEL + i + l] = b[(i + l) * pitch + k];
    }
#endif
    for (; i < n; i++)
        for (idx k = 0; k < K; k++) panel[k * PANEL + i] = b[i * pitch + k];
}

#define EARLY 8 /* rows that are asked for before they are read */

/* `deep` rows of b from its row k0 on and n of its columns, panel by panel; read in order, for rows
 * may lie a page apart. [K][N] -> [panels][deep][PANEL] */
static void pack_b(const struct product_job *j, idx k0, idx deep, idx column, idx n, float *to) {
    for (idx k = 0; k < deep; k++) {
        const float *row = j->b + (k0 + k) * j->N + column;
        for (idx c = 0; k + EARLY < deep && c < n; c += 16) __builtin_prefetch(row + EARLY * j->N + c);
#define BODY(n) store(to + (c / PANEL * deep + k) * PANEL + c % PANEL, load(row + c, n), n)
        FOR_LANES(c, 0, n, BODY);
#undef BODY
    }
}

/* Rows are taken in blocks of at most TALL, as alike as can be: the first `more` of them have one more
 * than the others. (Divisions take as long as a row of a tile.) */
struct OWN(blocks) { idx size, more; };
static struct OWN(blocks) blocks_of(idx rows) {
    const idx count = max_idx(1, ceil_div(rows, TALL));
    return (struct OWN(blocks)){rows / count, rows % count};
}
#define EACH_BLOCK(rows, row, tall) \
    for (idx row = 0, i = 0, tall; row < (rows) && (tall = blocks.size + (i < blocks.more), 1); row += tall, i++)

/* The rows of a, which lie in columns, block by block. [K][M] -> [blocks][deep][rows of a block] */
static void pack_a(const struct product_job *j, idx first, idx rows, idx k0, idx deep, float *to) {
    const struct OWN(blocks) blocks = blocks_of(rows);
    EACH_BLOCK(rows, row, tall) {
        const float *from = j->a + first + row + k0 * j->ak;
        for (idx k = 0; k < deep; k++, from += j->ak, to += tall) {
#define BODY(n) store(to + r, load(from + r, n), n)
            FOR_LANES(r, 0, tall, BODY);
#undef BODY
        }
    }
}

/* dots[row] += <c, w> over n columns of some rows. */
static void add_dots(const float *c, const float *w, idx rows, idx pitch, idx n, float *dots) {
    for (idx i = 0; i < rows; i++, c += pitch, w += pitch) {
        vf sum = all(0);
#define BODY(n) sum += load(c + k, n) * load(w + k, n)
        FOR_LANES(k, 0, n, BODY);
#undef BODY
        store(dots + i * LANES, load(dots + i * LANES, LANES) + sum, LANES);
    }
}

INLINE void product_tile(const struct product_job *j, idx tall, const float *a, const float *b,
                         idx pitch, float *c, idx n) {
    if (n > LANES) tiles_2(tall, j, a, b, pitch, c, n - LANES);
    else tiles_1(tall, j, a, b, pitch, c, n);
}

/* `left` rows of c from `first` on and n of its columns, at most a panel; b and c are theirs. */
INLINE void product_rows(const struct product_job *j, idx first, idx left, const float *b, idx pitch,
                         float *c, idx n) {
    const struct OWN(blocks) blocks = blocks_of(left);
    const float *a = j->a + first * j->ai;
    c += first * j->N;
    EACH_BLOCK(left, row, tall) product_tile(j, tall, a + row * j->ai, b, pitch, c + row * j->N, n);
}

/* Rows [first, first + rows) of c in the columns from `column` on, for `deep` terms of its sums. `a`
 * and `b` are packed, or NULL. */
static void product_block(const struct product_job *j, idx first, idx rows, idx column, idx columns,
                          idx k0, idx deep, const float *a, const float *b, float *dots) {
    struct product_job part = *j;
    part.K = deep;
    part.add = k0 > 0;
    const int large = j->M * j->N > LARGE;
    const struct OWN(blocks) blocks = blocks_of(rows);
    for (idx c = 0; c < columns; c += PANEL) {
        const idx n = min_idx(PANEL, columns - c);
        const float *panel = b ? b + c * deep : j->b + k0 * j->N + column + c;
        float *to = j->c + first * j->N + column + c;
        EACH_BLOCK(rows, row, tall) {
            const float *own = a ? a + row * deep : j->a + (first + row) * j->ai + k0 * j->ak;
            if (a) part.ak = tall;
            /* c and w may not be in the cache: they are asked for ahead */
            for (idx r = row; large && r < row + tall; r++)
                for (idx k = 0; k < n; k += 16) __builtin_prefetch(to + r * j->N + k, 1);
            const float *w = dots ? j->w + (first + row) * j->N + column + c : NULL;
            for (idx r = 0; dots && r < tall; r++)
                for (idx k = 0; k < n; k += 16) __builtin_prefetch(w + r * j->N + k);
            product_tile(&part, tall, own, panel, b ? PANEL : j->N, to + row * j->N, n);
            if (dots && k0 + deep == j->K)
                add_dots(to + row * j->N, j->w + first * j->N + column + c + row * j->N, tall, j->N,
                         n, dots + row * LANES);
        }
    }
}

/* An item is some rows of c and some of its columns. */
static void product_items(const void *arg, idx begin, idx end) {
    const struct product_job *j = arg;
    const idx across = ceil_div(j->N, j->columns);
    const int packs_b = j->rows >= 2 * TALL && j->N > PANEL, packs_a = j->ai == 1 && j->N > PANEL;
    const idx size_b = packs_b ? min_idx(DEEP, j->K) * ceil_div(j->columns, PANEL) * PANEL : 0;
    const idx size_a = packs_a ? j->rows * min_idx(DEEP, j->K) : 0;
    float *space = scratch((size_b + size_a + (j->dots ? j->rows * LANES : 0)) * 4);
    if (!space) {
        *j->failed = 1;
        return;
    }
    float *a = packs_a ? space + size_b : NULL, *b = packs_b ? space : NULL;
    float *dots = j->dots ? space + size_b + size_a : NULL;
    for (idx item = begin; item < end; item++) {
        const idx first = item / across * j->rows, column = item % across * j->columns;
        const idx rows = min_idx(j->rows, j->M - first), n = min_idx(j->columns, j->N - column);
        if (dots) memset(dots, 0, (size_t)(rows * LANES) * 4);
        for (idx k0 = 0; k0 < j->K; k0 += DEEP) {
            const idx deep = min_idx(DEEP, j->K - k0);
            if (b) pack_b(j, k0, deep, column, n, b);
            if (a) pack_a(j, first, rows, k0, deep, a);
            product_block(j, first, rows, column, n, k0, deep, a, b, dots);
        }
        for (idx i = 0; dots && i < rows; i++) {
            float total = 0;
            for (int l = 0; l < LANES; l++) total += dots[i * LANES + l];
            j->dots[first + i] = total;
        }
    }
    free(space);
}
