/* Vectors of LANES floats, and the activations on them. */


#ifndef OWN_NAMES
#define OWN_NAMES
#define vf OWN(vf)
#define vf_mem OWN(vf_mem)
#define vi OWN(vi)
#define mask OWN(mask)
#define all OWN(all)
#define load OWN(load)
#define store OWN(store)
#define vmax OWN(vmax)
#define vmin OWN(vmin)
#define over OWN(over)
#define same OWN(same)
#define pick OWN(pick)
#define add_where OWN(add_where)
#define exp_parts OWN(exp_parts)
#define vexp OWN(vexp)
#define vexpm1 OWN(vexpm1)
#define vsigmoid OWN(vsigmoid)
#define vtanh OWN(vtanh)
#define verf OWN(verf)
#define gelu OWN(gelu)
#define gelu_tanh OWN(gelu_tanh)
#define activate OWN(activate)
#define clear OWN(clear)
#define finish OWN(finish)
#define mean_span OWN(mean_span)
#define patch_mean_items OWN(patch_mean_items)
#define tile OWN(tile)
#define tiles_1 OWN(tiles_1)
#define tiles_2 OWN(tiles_2)
#define turn OWN(turn)
#define pack_a OWN(pack_a)
#define pack_b OWN(pack_b)
#define blocks_of OWN(blocks_of)
#define product_tile OWN(product_tile)
#define add_dots OWN(add_dots)
#define product_block OWN(product_block)
#define product_row OWN(product_row)
#define product_pixels OWN(product_pixels)
#define window_row OWN(window_row)
#define turn_items OWN(turn_items)
#define panel_items OWN(panel_items)
#define pointwise_items OWN(pointwise_items)
#define product_rows OWN(product_rows)
#define inputs_of OWN(inputs_of)
#define taps_of OWN(taps_of)
#define of_taps OWN(of_taps)
#define outputs_of OWN(outputs_of)
#define of_outputs OWN(of_outputs)
#define pixels OWN(pixels)
#define inputs_of_line OWN(inputs_of_line)
#define taps_of_line OWN(taps_of_line)
#define of_taps_line OWN(of_taps_line)
#define outputs_of_line OWN(outputs_of_line)
#define of_outputs_line OWN(of_outputs_line)
#define winograd_tile OWN(winograd_tile)
#define winograd_tile_items OWN(winograd_tile_items)
#define winograd_gx OWN(winograd_gx)
#define winograd_turn OWN(winograd_turn)
#define winograd_gw OWN(winograd_gw)
#define winograd_panel_items OWN(winograd_panel_items)
#define product_items OWN(product_items)
#define epilogue_span OWN(epilogue_span)
#define epilogue_row OWN(epilogue_row)
#define with_stats OWN(with_stats)
#define without_stats OWN(without_stats)
#define epilogue_items OWN(epilogue_items)
#define patch_row OWN(patch_row)
#define conv_pixel OWN(conv_pixel)
#define conv_block OWN(conv_block)
#define conv_blocks OWN(conv_blocks)
#define taps_inside OWN(taps_inside)
#define conv_row OWN(conv_row)
#define depthwise_items OWN(depthwise_items)
#define grid_run OWN(grid_run)
#define grid_tile OWN(grid_tile)
#define packed_size OWN(packed_size)
#define mix OWN(mix)
#define unmix OWN(unmix)
#define pack OWN(pack)
#define grid_image OWN(grid_image)
#define grid_block OWN(grid_block)
#define grid_backward_items OWN(grid_backward_items)
#define pool_lanes OWN(pool_lanes)
#define pool_pixel OWN(pool_pixel)
#define pool_pixels OWN(pool_pixels)
#define look OWN(look)
#define max_pool_items OWN(max_pool_items)
#define pool_grid_backward_items OWN(pool_grid_backward_items)
#define slope_backward_items OWN(slope_backward_items)
#define row_dots_items OWN(row_dots_items)
#define spread_rows OWN(spread_rows)
#define spread_cell OWN(spread_cell)
#define spread_items OWN(spread_items)
/* Run `body` for c in [c0, c1), a vector at a time, with n lanes: a constant but for the last. */
#define FOR_LANES(c, c0, c1, body)                         \
    do {                                                   \
        idx c = (c0);                                      \
        for (; c + LANES <= (c1); c += LANES) body(LANES); \
        if (c < (c1)) body((c1) - c);                      \
    } while (0)
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef float vf_mem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

/* ---- vector primitives; a load or store of n < LANES floats touches no more than n ---- */

INLINE vf all(float v) { return v - (vf){0}; }

#if LANES == 16

typedef __mmask16 mask;
INLINE vf load(const float *p, idx n) {
    if (n == LANES) return *(const vf_mem *)p;
    return (vf)_mm512_maskz_loadu_ps((mask)((1u << n) - 1), p);
}
INLINE void store(float *p, vf v, idx n) {
    if (n == LANES) *(vf_mem *)p = v;
    else _mm512_mask_storeu_ps(p, (mask)((1u << n) - 1), (__m512)v);
}
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE mask over(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
INLINE mask same(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
INLINE vf pick(mask m, vf a, vf b) { return (vf)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a); }
INLINE vf add_where(mask m, vf a, vf b) {
    return (vf)_mm512_mask_add_ps((__m512)a, m, (__m512)a, (__m512)b);
}

#else

typedef vi mask;
#if LANES == 8
INLINE vf load(const float *p, idx n) {
    if (n == LANES) return *(const vf_mem *)p;
    vi keep = (vi){0, 1, 2, 3, 4, 5, 6, 7} < (int32_t)n - (vi){0};
    return (vf)_mm256_maskload_ps(p, (__m256i)keep);
}
INLINE void store(float *p, vf v, idx n) {
    if (n == LANES) {
        *(vf_mem *)p = v;
        return;
    }
    vi keep = (vi){0, 1, 2, 3, 4, 5, 6, 7} < (int32_t)n - (vi){0};
    _mm256_maskstore_ps(p, (__m256i)keep, (__m256)v);
}
/* As maxps: the second operand when either is NaN. */
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf load(const float *p, idx n) {
    if (n == LANES) return *(const vf_mem *)p;
    vf v = {p[0], n > 1 ? p[1] : 0, n > 2 ? p[2] : 0, 0};
    return v;
}
INLINE void store(float *p, vf v, idx n) {
    if (n == LANES) {
        *(vf_mem *)p = v;
        return;
    }
    p[0] = v[0];
    if (n > 1) p[1] = v[1];
    if (n > 2) p[2] = v[2];
}
#if defined(__SSE2__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
#elif defined(__ARM_NEON)
INLINE vf vmax(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf vmin(vf a, vf b) { return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b); }
#else
INLINE vf vmax(vf a, vf b) { return (vf)(((a > b) & (vi)a) | (~(a > b) & (vi)b)); }
INLINE vf vmin(vf a, vf b) { return (vf)(((a < b) & (vi)a) | (~(a < b) & (vi)b)); }
#endif
#endif
INLINE mask over(vf a, vf b) { return (mask)(a > b); }
INLINE mask same(vf a, vf b) { return (mask)(a == b); }
INLINE vf pick(mask m, vf a, vf b) { return (vf)((m & (vi)a) | (~m & (vi)b)); }
INLINE vf add_where(mask m, vf a, vf b) { return a + (vf)(m & (vi)b); }

#endif

/* ---- activations; constants come first in vmin and vmax so that NaN goes through ---- */

/* exp(x) = scale * (1 + q), x kept within what float32 can hold: Cephes' expf, about 1 ulp. */
INLINE void exp_parts(vf x, vf *q, vf *scale) {
    x = vmin(all(88.0f), vmax(all(-87.0f), x));
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits now hold the integer */
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *q = p * (r * r) + r;
    *scale = (vf)(((vi)shifted << 23) + 0x3f800000);
}

INLINE vf vexp(vf x) {
    vf q, scale;
    exp_parts(x, &q, &scale);
    return q * scale + scale;
}

INLINE vf vexpm1(vf x) {
    vf q, scale;
    exp_parts(x, &q, &scale);
    return q * scale + (scale - 1);
}

INLINE vf vsigmoid(vf z) { return 1 / (1 + vexp(-z)); }

INLINE vf vtanh(vf z) {
    vf e = vexpm1(2 * z);
    return e / (e + 2);
}

/* The odd rational approximation of erf on [-4, 4] used by Eigen and XLA. */
INLINE vf verf(vf x) {
    x = vmin(all(4.0f), vmax(all(-4.0f), x));
    vf s = x * x;
    vf p = all(-2.72614225801306e-10f);
    p = p * s + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    vf q = all(-1.45660718464996e-05f);
    q = q * s - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    return x * p / q;
}

INLINE vf gelu(vf z, vf *slopes) {
    vf half = 0.5f + 0.5f * verf(z * 0.70710678f);
    *slopes += half + z * vexp(-0.5f * z * z) * 0.39894228f;
    return z * half;
}

INLINE vf gelu_tanh(vf z, vf *slopes) {
    vf s = z * z;
    vf t = vtanh(0.79788456f * z * (1 + 0.044715f * s));
    *slopes += 0.5f * (1 + t) + 0.5f * z * (1 - t * t) * 0.79788456f * (1 + 0.134145f * s);
    return 0.5f * z * (1 + t);
}

/* f(z); adds f'(z), as PyTorch's autograd defines it at the kinks, to *slopes. `act` is a constant
 * wherever this is used. */
INLINE vf activate(const int act, vf z, float parameter, vf *slopes) {
    const vf zero = all(0), one = all(1);
    vf s, n;
    switch (act) {
    case RELU:
        *slopes = add_where(over(z, zero), *slopes, one);
        return vmax(zero, z);
    case RELU6:
        *slopes = add_where(over(z, zero) & over(all(6), z), *slopes, one);
        return vmin(all(6), vmax(zero, z));
    case HARDSWISH:
        n = pick(over(all(3), z), z * (1.0f / 3) + 0.5f, one);
        *slopes = add_where(over(z, all(-3)), *slopes, n);
        return z * vmin(all(6), vmax(zero, z + 3)) * (1.0f / 6);
    case HARDSIGMOID:
        *slopes = add_where(over(z, all(-3)) & over(all(3), z), *slopes, all(1.0f / 6));
        return vmin(all(6), vmax(zero, z + 3)) * (1.0f / 6);
    case SILU:
        s = vsigmoid(z);
        n = z * s;
        *slopes += s + n * (1 - s);
        return n;
    case SIGMOID:
        s = vsigmoid(z);
        *slopes += s * (1 - s);
        return s;
    case GELU:
        return gelu(z, slopes);
    case GELU_TANH:
        return gelu_tanh(z, slopes);
    case TANH:
        s = vtanh(z);
        *slopes += 1 - s * s;
        return s;
    case LEAKY_RELU:
        s = pick(over(z, zero), one, all(parameter));
        *slopes += s;
        return z * s;
    case ELU:
        s = parameter * vexpm1(z);
        *slopes += pick(over(z, zero), one, s + parameter);
        return pick(over(z, zero), z, s);
    case MISH: /* tanh(softplus(z)) = n / (n + 2) with n = e^z (e^z + 2); 1 in float32 from z = 20 */
        n = vexp(vmin(all(20), z));
        s = 1 / (1 + 1 / n);
        n = n * (n + 2);
        n = n / (n + 2);
        *slopes += n + z * s * (1 - n * n);
        return z * n;
    default:
        *slopes += one;
        return z;
    }
}
