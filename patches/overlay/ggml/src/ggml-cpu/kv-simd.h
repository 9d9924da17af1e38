#pragma once

// Vectors of f32, rows of K and V as such vectors, and what attention of few queries does with them

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "simd-mappings.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// one element of a row

static inline float get_f32(const float       * x, int i) { return x[i]; }
static inline float get_f32(const ggml_fp16_t * x, int i) { return GGML_CPU_FP16_TO_FP32(x[i]); }
static inline float get_f32(const ggml_bf16_t * x, int i) { return GGML_BF16_TO_FP32(x[i]); }
static inline float get_f32(const block_q8_0  * x, int i) { return GGML_CPU_FP16_TO_FP32(x[i/QK8_0].d)*x[i/QK8_0].qs[i%QK8_0]; }

//
// vectors: one float without SIMD, so that everything below is written once
//
// vec_load   VEC elements of a row, i a multiple of VEC
// vec_sums   dst[i] = sum over the lanes of x[i]
//

#if defined(__AVX512F__) && defined(__AVX512DQ__)

#define KV_SIMD

typedef __m512 vec;

static constexpr int VEC = 16;

static inline vec  vec_set(float x)               { return _mm512_set1_ps(x); }
static inline vec  vec_add(vec x, vec y)          { return _mm512_add_ps(x, y); }
static inline vec  vec_sub(vec x, vec y)          { return _mm512_sub_ps(x, y); }
static inline vec  vec_mul(vec x, vec y)          { return _mm512_mul_ps(x, y); }
static inline vec  vec_max(vec x, vec y)          { return _mm512_max_ps(x, y); }
static inline vec  vec_exp(vec x)                 { return ggml_v_expf(x); }
static inline vec  vec_fma(vec sum, vec x, vec y) { return _mm512_fmadd_ps(x, y, sum); }
static inline void vec_store(float * dst, vec x)  { _mm512_storeu_ps(dst, x); }

static inline vec vec_load(const float       * x, int i) { return _mm512_loadu_ps(x + i); }
static inline vec vec_load(const ggml_fp16_t * x, int i) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (x + i))); }
static inline vec vec_load(const ggml_bf16_t * x, int i) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) (x + i))), 16));
}
static inline vec vec_load(const block_q8_0 * x, int i) {
    const vec q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) (x[i/QK8_0].qs + i%QK8_0))));
    return vec_mul(q, vec_set(GGML_CPU_FP16_TO_FP32(x[i/QK8_0].d)));
}

static inline __m128 vec_fold(vec x) {
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define KV_SIMD

typedef __m256 vec;

static constexpr int VEC = 8;

static inline vec  vec_set(float x)               { return _mm256_set1_ps(x); }
static inline vec  vec_add(vec x, vec y)          { return _mm256_add_ps(x, y); }
static inline vec  vec_sub(vec x, vec y)          { return _mm256_sub_ps(x, y); }
static inline vec  vec_mul(vec x, vec y)          { return _mm256_mul_ps(x, y); }
static inline vec  vec_max(vec x, vec y)          { return _mm256_max_ps(x, y); }
static inline vec  vec_exp(vec x)                 { return ggml_v_expf(x); }
static inline vec  vec_fma(vec sum, vec x, vec y) { return _mm256_fmadd_ps(x, y, sum); }
static inline void vec_store(float * dst, vec x)  { _mm256_storeu_ps(dst, x); }

static inline vec vec_load(const float       * x, int i) { return _mm256_loadu_ps(x + i); }
static inline vec vec_load(const ggml_fp16_t * x, int i) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (x + i))); }
static inline vec vec_load(const ggml_bf16_t * x, int i) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) (x + i))), 16));
}
static inline vec vec_load(const block_q8_0 * x, int i) {
    const vec q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (x[i/QK8_0].qs + i%QK8_0))));
    return vec_mul(q, vec_set(GGML_CPU_FP16_TO_FP32(x[i/QK8_0].d)));
}

static inline __m128 vec_fold(vec x) {
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(__ARM_FEATURE_SVE)

#define KV_SIMD

typedef float32x4_t vec;

static constexpr int VEC = 4;

static inline vec  vec_set(float x)               { return vdupq_n_f32(x); }
static inline vec  vec_add(vec x, vec y)          { return vaddq_f32(x, y); }
static inline vec  vec_sub(vec x, vec y)          { return vsubq_f32(x, y); }
static inline vec  vec_mul(vec x, vec y)          { return vmulq_f32(x, y); }
static inline vec  vec_max(vec x, vec y)          { return vmaxq_f32(x, y); }
static inline vec  vec_exp(vec x)                 { return ggml_v_expf(x); }
static inline vec  vec_fma(vec sum, vec x, vec y) { return vfmaq_f32(sum, x, y); }
static inline void vec_store(float * dst, vec x)  { vst1q_f32(dst, x); }

static inline vec vec_load(const float       * x, int i) { return vld1q_f32(x + i); }
static inline vec vec_load(const ggml_fp16_t * x, int i) { return vcvt_f32_f16(vld1_f16((const __fp16 *) (x + i))); }
static inline vec vec_load(const ggml_bf16_t * x, int i) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *) (x + i)), 16));
}
static inline vec vec_load(const block_q8_0 * x, int i) {
    int32_t q;
    memcpy(&q, x[i/QK8_0].qs + i%QK8_0, sizeof(q));
    const int16x8_t q16 = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(q)));
    return vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(q16))), GGML_CPU_FP16_TO_FP32(x[i/QK8_0].d));
}

static inline void vec_sums(float * dst, const vec (&x)[4]) {
    vst1q_f32(dst, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
}

#else

typedef float vec;

static constexpr int VEC = 1;

static inline vec  vec_set(float x)               { return x; }
static inline vec  vec_add(vec x, vec y)          { return x + y; }
static inline vec  vec_sub(vec x, vec y)          { return x - y; }
static inline vec  vec_mul(vec x, vec y)          { return x*y; }
static inline vec  vec_max(vec x, vec y)          { return x > y ? x : y; }
static inline vec  vec_exp(vec x)                 { return expf(x); }
static inline vec  vec_fma(vec sum, vec x, vec y) { return sum + x*y; }
static inline void vec_store(float * dst, vec x)  { *dst = x; }

template <typename T>
static inline vec vec_load(const T * x, int i) { return get_f32(x, i); }

static inline void vec_sums(float * dst, const vec (&x)[4]) { std::copy(x, x + 4, dst); }

#endif

#if defined(KV_SIMD) && defined(__AVX2__)

static inline void vec_sums(float * dst, const vec (&x)[4]) {
    const __m128 a = vec_fold(x[0]);
    const __m128 b = vec_fold(x[1]);
    const __m128 c = vec_fold(x[2]);
    const __m128 d = vec_fold(x[3]);

    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b)); // a02 b02 a13 b13
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));

    _mm_storeu_ps(dst, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}

#endif

static inline float vec_sum(vec x) {
    float s[4];
    vec_sums(s, { x, x, x, x });
    return s[0];
}

static inline void vec_sums(float * dst, const vec (&x)[1]) {
    *dst = vec_sum(x[0]);
}

#if defined(__GNUC__)
#define KV_PREFETCH(p) __builtin_prefetch(p)
#else
#define KV_PREFETCH(p) GGML_UNUSED(p)
#endif

//
// few queries: NQ of them that share K and V load and convert a row once
//

// rows of K or V are fetched this many ahead
static constexpr int N_AHEAD = 16;

// rows of K or V, nb bytes apart
struct row_block {
    const char * data;
    size_t       nb;
    int64_t      n_fetch; // rows that may be fetched, those of others included

    template <typename T>
    const T * row(int i) const { return (const T *) (data + i*nb); }

    void fetch(int i, size_t size) const {
        for (size_t pos = 0; i < n_fetch && pos < size; pos += 64) {
            KV_PREFETCH(data + i*nb + pos);
        }
    }
};

template <typename T> static size_t row_size(int n)             { return n*sizeof(T); }
template <>                  size_t row_size<block_q8_0>(int n) { return n/QK8_0*sizeof(block_q8_0); }

// dst[j*ld + i] = q[j*ldq ...] . k[i], of n values, for NK rows from k0 on
template <typename T, int NQ, int NK>
static inline void dot_block(int n, int k0, float * dst, int64_t ld, const row_block & k, const float * q, int64_t ldq) {
    vec sum[NQ][NK];
    for (int j = 0; j < NQ; ++j) {
        for (int i = 0; i < NK; ++i) {
            sum[j][i] = vec_set(0.0f);
        }
    }

    const int n_vec = n - n%VEC;

    for (int d = 0; d < n_vec; d += VEC) {
        vec qv[NQ];
        for (int j = 0; j < NQ; ++j) {
            qv[j] = vec_load(q + j*ldq, d);
        }
        for (int i = 0; i < NK; ++i) {
            const vec kv = vec_load(k.row<T>(k0 + i), d);
            for (int j = 0; j < NQ; ++j) {
                sum[j][i] = vec_fma(sum[j][i], kv, qv[j]);
            }
        }
    }

    // no loop: the sums stay in registers
    static_assert(NQ <= 3, "one line per query");
    dst += k0;
    vec_sums(dst, sum[0]);
    if (NQ > 1) { vec_sums(dst +   ld, sum[NQ > 1 ? 1 : 0]); }
    if (NQ > 2) { vec_sums(dst + 2*ld, sum[NQ > 2 ? 2 : 0]); }

    for (int d = n_vec; d < n; ++d) {
        for (int j = 0; j < NQ; ++j) {
            for (int i = 0; i < NK; ++i) {
                dst[j*ld + i] += get_f32(k.row<T>(k0 + i), d)*q[j*ldq + d];
            }
        }
    }
}

struct dot_op {
    template <typename T, int NQ>
    static void rows(int n, int n_k, float * dst, int64_t ld, const row_block & k, const float * q, int64_t ldq) {
        int i = 0;
        for (; i + 4 <= n_k; i += 4) {
            for (int j = 0; j < 4; ++j) {
                k.fetch(i + j + N_AHEAD, row_size<T>(n));
            }
            dot_block<T, NQ, 4>(n, i, dst, ld, k, q, ldq);
        }
        for (; i < n_k; ++i) {
            dot_block<T, NQ, 1>(n, i, dst, ld, k, q, ldq);
        }
    }
};

// dst[j*ld + d] += sum over n_k rows of w[j*ldw + i] v[i][d], for NV vectors from d on; size: of a row to be fetched
template <typename T, int NQ, int NV>
static inline void mad_block(int d, int n_k, float * dst, int64_t ld, const row_block & v, const float * w, int64_t ldw, size_t size) {
    vec sum[NQ][NV];
    for (int j = 0; j < NQ; ++j) {
        for (int i = 0; i < NV; ++i) {
            sum[j][i] = vec_load(dst + j*ld, d + i*VEC);
        }
    }

    for (int c = 0; c < n_k; ++c) {
        v.fetch(c + N_AHEAD, size);

        vec wv[NQ];
        for (int j = 0; j < NQ; ++j) {
            wv[j] = vec_set(w[j*ldw + c]);
        }
        for (int i = 0; i < NV; ++i) {
            const vec vv = vec_load(v.row<T>(c), d + i*VEC);
            for (int j = 0; j < NQ; ++j) {
                sum[j][i] = vec_fma(sum[j][i], vv, wv[j]);
            }
        }
    }

    for (int j = 0; j < NQ; ++j) {
        for (int i = 0; i < NV; ++i) {
            vec_store(dst + j*ld + d + i*VEC, sum[j][i]);
        }
    }
}

struct mad_op {
    template <typename T, int NQ>
    static void rows(int n, int n_k, float * dst, int64_t ld, const row_block & v, const float * w, int64_t ldw) {
        constexpr int NV = NQ == 1 ? 8 : 4; // enough sums to hide the latency of an addition

        int d = 0;
        for (; d + NV*VEC <= n; d += NV*VEC) {
            mad_block<T, NQ, NV>(d, n_k, dst, ld, v, w, ldw, d == 0 ? row_size<T>(n) : 0);
        }
        for (; d + VEC <= n; d += VEC) {
            mad_block<T, NQ, 1>(d, n_k, dst, ld, v, w, ldw, 0);
        }
        for (; d < n; ++d) {
            for (int j = 0; j < NQ; ++j) {
                for (int c = 0; c < n_k; ++c) {
                    dst[j*ld + d] += w[j*ldw + c]*get_f32(v.row<T>(c), d);
                }
            }
        }
    }
};

static constexpr int MAX_NQ = 3;

// op::rows over n_q queries, x has a row of ldx for each
template <typename op, typename T>
static void all_rows(int n, int n_q, int n_k, float * dst, int64_t ld, const row_block & rows, const float * x, int64_t ldx) {
    while (n_q > 0) {
        const int n_step = n_q == 4 ? 2 : std::min(n_q, MAX_NQ);
        switch (n_step) {
            case 1: op::template rows<T, 1>(n, n_k, dst, ld, rows, x, ldx); break;
            case 2: op::template rows<T, 2>(n, n_k, dst, ld, rows, x, ldx); break;
            case 3: op::template rows<T, 3>(n, n_k, dst, ld, rows, x, ldx); break;
        }
        dst += n_step*ld;
        x   += n_step*ldx;
        n_q -= n_step;
    }
}

template <typename T>
static void row_to_f32(const void * x, float * y, int64_t n) {
    int64_t i = 0;
    for (; i + VEC <= n; i += VEC) {
        vec_store(y + i, vec_load((const T *) x, i));
    }
    for (; i < n; ++i) {
        y[i] = get_f32((const T *) x, i);
    }
}

// what can be done with rows of a type
struct row_kernels {
    typedef void (*rows_t)(int n, int n_q, int n_k, float * dst, int64_t ld, const row_block & rows, const float * x, int64_t ldx);

    rows_t dot; // dst[j*ld + i]  = x[j*ldx ...] . rows[i], of n values; NULL: take to_f32, then the kernel of f32
    rows_t mad; // dst[j*ld ...] += sum over i of x[j*ldx + i] rows[i], of n values; NULL as above

    ggml_to_float_t to_f32;
};

template <typename T>
static row_kernels get_kernels() {
    return { all_rows<dot_op, T>, all_rows<mad_op, T>, row_to_f32<T> };
}

static row_kernels get_kernels(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:  return get_kernels<float>();
        case GGML_TYPE_F16:  return get_kernels<ggml_fp16_t>();
        case GGML_TYPE_BF16: return get_kernels<ggml_bf16_t>();
        case GGML_TYPE_Q8_0: return get_kernels<block_q8_0>();
        default:             return { nullptr, nullptr, ggml_get_type_traits(type)->to_float };
    }
}
