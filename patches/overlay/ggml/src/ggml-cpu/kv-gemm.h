#pragma once

// The matrix product of ggml_kv_attn's tiles, in registers

#include "kv-simd.h"

static constexpr int GEMM_M = 6; // rows, times
#if defined(KV_SIMD) && !defined(__AVX512F__) && defined(__AVX2__)
static constexpr int GEMM_N = 2; // vectors: 12 sums, 2 of b and 1 of a fill 16 registers
#else
static constexpr int GEMM_N = 4; // 24, 4 and 1 of 32
#endif

// c[i][j] = keep[j]*c[i][j] + sum over l of a(i, l)*b[l][j], without keep: the sum alone
// a(i, l) is a[i*lda + l], or with A_COLS a[l*lda + i]
template <int M, int N, bool A_COLS>
static inline void gemm_block(int k, float * c, int64_t ldc, const float * a, int64_t lda, const float * b, int64_t ldb, const float * keep) {
    vec sum[M][N];
    for (int i = 0; i < M; ++i) {
        for (int j = 0; j < N; ++j) {
            sum[i][j] = keep ? vec_mul(vec_load(c + i*ldc, j*VEC), vec_load(keep, j*VEC)) : vec_set(0.0f);
        }
    }

    for (int l = 0; l < k; ++l) {
        vec bv[N];
        for (int j = 0; j < N; ++j) {
            bv[j] = vec_load(b + l*ldb, j*VEC);
        }
        for (int i = 0; i < M; ++i) {
            const vec av = vec_set(A_COLS ? a[l*lda + i] : a[i*lda + l]);
            for (int j = 0; j < N; ++j) {
                sum[i][j] = vec_fma(sum[i][j], av, bv[j]);
            }
        }
    }

    for (int i = 0; i < M; ++i) {
        for (int j = 0; j < N; ++j) {
            vec_store(c + i*ldc + j*VEC, sum[i][j]);
        }
    }
}

template <int N, bool A_COLS>
static void gemm_rows(int m, int k, float * c, int64_t ldc, const float * a, int64_t lda, const float * b, int64_t ldb, const float * keep) {
    const int64_t step = A_COLS ? 1 : lda;

    int i = 0;
    for (; i + GEMM_M <= m; i += GEMM_M) {
        gemm_block<GEMM_M, N, A_COLS>(k, c + i*ldc, ldc, a + i*step, lda, b, ldb, keep);
    }
    c += i*ldc;
    a += i*step;
    switch (m - i) {
        case 5: gemm_block<5, N, A_COLS>(k, c, ldc, a, lda, b, ldb, keep); break;
        case 4: gemm_block<4, N, A_COLS>(k, c, ldc, a, lda, b, ldb, keep); break;
        case 3: gemm_block<3, N, A_COLS>(k, c, ldc, a, lda, b, ldb, keep); break;
        case 2: gemm_block<2, N, A_COLS>(k, c, ldc, a, lda, b, ldb, keep); break;
        case 1: gemm_block<1, N, A_COLS>(k, c, ldc, a, lda, b, ldb, keep); break;
    }
}

// c is m x n, n a multiple of VEC
template <bool A_COLS>
static void gemm(int m, int n, int k, float * c, int64_t ldc, const float * a, int64_t lda, const float * b, int64_t ldb, const float * keep) {
    int j = 0;
    for (; j + GEMM_N*VEC <= n; j += GEMM_N*VEC) {
        gemm_rows<GEMM_N, A_COLS>(m, k, c + j, ldc, a, lda, b + j, ldb, keep ? keep + j : nullptr);
    }
    for (; j < n; j += VEC) {
        gemm_rows<1, A_COLS>(m, k, c + j, ldc, a, lda, b + j, ldb, keep ? keep + j : nullptr);
    }
}
