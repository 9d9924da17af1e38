#pragma once

// q.k of several query heads and cells at once, for K in floating point (see kv-evict.cpp)

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "simd-mappings.h"

#include <algorithm>

// dst[j*ld + i] = q[j] . k[i], both of n values, q in rows of f32 one after another, rows of k nb bytes apart
typedef void (*dot_tile_t)(int n, int n_q, int n_k, float * dst, int64_t ld, const char * k, size_t nb, const float * q);

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__)) || (defined(__ARM_NEON) && defined(__aarch64__) && !defined(__ARM_FEATURE_SVE))
#define KV_MASS_SIMD

#if defined(__AVX512F__)

static inline __m512 load(const float       * x) { return _mm512_loadu_ps(x); }
static inline __m512 load(const ggml_fp16_t * x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) x)); }
static inline __m512 load(const ggml_bf16_t * x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) x)), 16));
}

static inline __m256 fold(__m512 x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
}

#elif defined(__AVX2__)

static inline __m256 load(const float       * x) { return _mm256_loadu_ps(x); }
static inline __m256 load(const ggml_fp16_t * x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x)); }
static inline __m256 load(const ggml_bf16_t * x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) x)), 16));
}

static inline __m256 fold(__m256 x) { return x; }

#else

static inline float32x4_t load(const float       * x) { return vld1q_f32(x); }
static inline float32x4_t load(const ggml_fp16_t * x) { return vcvt_f32_f16(vld1_f16((const __fp16 *) x)); }
static inline float32x4_t load(const ggml_bf16_t * x) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *) x), 16)); }

#endif

static inline float to_f32(float       x) { return x; }
static inline float to_f32(ggml_fp16_t x) { return GGML_CPU_FP16_TO_FP32(x); }
static inline float to_f32(ggml_bf16_t x) { return GGML_BF16_TO_FP32(x); }

// dst[i] = sum over the lanes of x[i]
static inline void store_sums(float * dst, const GGML_F32_VEC (&x)[4]) {
#if defined(__AVX2__)
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(fold(x[0]), fold(x[1])), _mm256_hadd_ps(fold(x[2]), fold(x[3])));
    _mm_storeu_ps(dst, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
    vst1q_f32(dst, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
#endif
}

static inline void store_sums(float * dst, const GGML_F32_VEC (&x)[1]) {
    float s[4];
    store_sums(s, { x[0], x[0], x[0], x[0] });
    dst[0] = s[0];
}

// NQ queries times NK = 4 or 1 cells: query heads that share K load and convert it once
template <typename T, int NQ, int NK>
static inline void dot_block(int n, float * dst, int64_t ld, const char * k, size_t nb, const float * q) {
    GGML_F32_VEC sum[NQ][NK];
    for (int j = 0; j < NQ; ++j) {
        for (int i = 0; i < NK; ++i) {
            sum[j][i] = GGML_F32_VEC_ZERO;
        }
    }

    const int n_vec = n - n%GGML_F32_EPR;

    for (int d = 0; d < n_vec; d += GGML_F32_EPR) {
        GGML_F32_VEC qv[NQ];
        for (int j = 0; j < NQ; ++j) {
            qv[j] = load(q + j*n + d);
        }
        for (int i = 0; i < NK; ++i) {
            const GGML_F32_VEC kv = load((const T *) (k + i*nb) + d);
            for (int j = 0; j < NQ; ++j) {
                sum[j][i] = GGML_F32_VEC_FMA(sum[j][i], kv, qv[j]);
            }
        }
    }

    // no loop: the sums stay in registers
    static_assert(NQ <= 3, "one line per query");
    store_sums(dst, sum[0]);
    if (NQ > 1) { store_sums(dst +   ld, sum[NQ > 1 ? 1 : 0]); }
    if (NQ > 2) { store_sums(dst + 2*ld, sum[NQ > 2 ? 2 : 0]); }

    for (int d = n_vec; d < n; ++d) {
        for (int j = 0; j < NQ; ++j) {
            for (int i = 0; i < NK; ++i) {
                dst[j*ld + i] += to_f32(((const T *) (k + i*nb))[d])*q[j*n + d];
            }
        }
    }
}

template <typename T, int NQ>
static void dot_rows(int n, int n_k, float * dst, int64_t ld, const char * k, size_t nb, const float * q) {
    int i = 0;
    for (; i + 4 <= n_k; i += 4) {
        dot_block<T, NQ, 4>(n, dst + i, ld, k + i*nb, nb, q);
    }
    for (; i < n_k; ++i) {
        dot_block<T, NQ, 1>(n, dst + i, ld, k + i*nb, nb, q);
    }
}

template <typename T>
static void dot_tile(int n, int n_q, int n_k, float * dst, int64_t ld, const char * k, size_t nb, const float * q) {
    while (n_q > 0) {
        const int n_step = n_q == 4 ? 2 : std::min(n_q, 3);
        switch (n_step) {
            case 1: dot_rows<T, 1>(n, n_k, dst, ld, k, nb, q); break;
            case 2: dot_rows<T, 2>(n, n_k, dst, ld, k, nb, q); break;
            case 3: dot_rows<T, 3>(n, n_k, dst, ld, k, nb, q); break;
        }
        dst += n_step*ld;
        q   += n_step*n;
        n_q -= n_step;
    }
}

#endif

// NULL: the dot product of the type's own traits is used, with q in the type that it takes
static inline dot_tile_t get_dot_tile(ggml_type type) {
#if defined(KV_MASS_SIMD)
    switch (type) {
        case GGML_TYPE_F32:  return dot_tile<float>;
        case GGML_TYPE_F16:  return dot_tile<ggml_fp16_t>;
        case GGML_TYPE_BF16: return dot_tile<ggml_bf16_t>;
        default:             return nullptr;
    }
#else
    GGML_UNUSED(type);
    return nullptr;
#endif
}
