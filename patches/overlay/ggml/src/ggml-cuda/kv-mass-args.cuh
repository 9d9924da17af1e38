#pragma once

// Operands of GGML_OP_KV_MASS and how its work is cut into blocks: plain host code, shared with tests/native

#include "ggml-kv-evict.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

static constexpr int KV_MASS_THREADS = 256; // of a block
static constexpr int KV_MASS_SLOTS   = 32;  // most queries of a pass
static constexpr int KV_MASS_CELLS   = 64;  // a tile is a multiple of this
static constexpr int KV_MASS_TILES   = 128; // most tiles

static constexpr int64_t KV_MASS_SCRATCH = 64*1024*1024; // bytes for logits; with a single query more, if need be

// of the cells of a tile: the largest logit, and the sum of exp(logit - max)
struct kv_mass_stat {
    float max;
    float sum;
};

// Which queries are scored is known on the device only (row_idx), how many at most on the host too: no row stands twice. The
// scored ones take slots 0, 1, ... in order; a pass serves the slots [i_slot, i_slot + n_slot).
struct kv_mass_args {
    const char    * q;
    const char    * k;
    const char    * mask;
    const float   * sinks; // may be NULL
    const float   * coef;  // weight of this layer
    const int32_t * row_idx;
    char          * rows;

    float        * logits; // [n_slot][n_head][n_kv]
    kv_mass_stat * stats;  // [n_slot][n_head][n_tile]

    size_t nb_q1, nb_q2;
    size_t nb_k1, nb_k2, nb_k3;
    size_t nb_m1, nb_m3;
    size_t nb_row;

    int n_embd;
    int n_head;
    int n_gqa;
    int n_kv;
    int n_tokens;
    int n_stream;
    int n_stream_tokens;

    int n_tile;
    int n_tile_cells;

    int n_most; // queries that may be scored
    int n_slot;
    int i_slot;

    int n_head_log2; // ALiBi

    float scale;
    float max_bias;
    float softcap;

    bool mask_f16;
    bool assign;
};

static inline kv_mass_args kv_mass_get_args(const ggml_tensor * dst) {
    const ggml_tensor * rows  = dst->src[0];
    const ggml_tensor * q     = dst->src[1];
    const ggml_tensor * k     = dst->src[2];
    const ggml_tensor * mask  = dst->src[3];
    const ggml_tensor * coef  = dst->src[4];
    const ggml_tensor * idx   = dst->src[5];
    const ggml_tensor * sinks = dst->src[6];

    kv_mass_args a = {};

    a.q       = (const char *) q->data;
    a.k       = (const char *) k->data;
    a.mask    = (const char *) mask->data;
    a.sinks   = sinks ? (const float *) sinks->data : nullptr;
    a.coef    = (const float *) coef->data + ggml_get_op_params_i32(dst, GGML_KV_ATTN_IL);
    a.row_idx = (const int32_t *) idx->data;
    a.rows    = (char *) rows->data;

    a.nb_q1  = q->nb[1];
    a.nb_q2  = q->nb[2];
    a.nb_k1  = k->nb[1];
    a.nb_k2  = k->nb[2];
    a.nb_k3  = k->nb[3];
    a.nb_m1  = mask->nb[1];
    a.nb_m3  = mask->nb[3];
    a.nb_row = rows->nb[1];

    a.n_embd          = q->ne[0];
    a.n_head          = q->ne[1];
    a.n_gqa           = q->ne[1]/k->ne[1];
    a.n_kv            = k->ne[2];
    a.n_tokens        = q->ne[2];
    a.n_stream        = k->ne[3];
    a.n_stream_tokens = q->ne[2]/k->ne[3];

    const int64_t n_unit = (a.n_kv + KV_MASS_CELLS - 1)/KV_MASS_CELLS;

    a.n_tile_cells = (n_unit + KV_MASS_TILES - 1)/KV_MASS_TILES*KV_MASS_CELLS;
    a.n_tile       = (a.n_kv + a.n_tile_cells - 1)/a.n_tile_cells;

    const int64_t n_fit = KV_MASS_SCRATCH/((int64_t) sizeof(float)*a.n_head*a.n_kv);

    a.n_most = std::min(q->ne[2], rows->ne[1]);
    a.n_slot = std::max<int64_t>(1, std::min<int64_t>({ a.n_most, n_fit, KV_MASS_SLOTS }));

    a.n_head_log2 = 1 << (int) std::floor(std::log2((double) a.n_head));

    a.scale    = ggml_get_op_params_f32(dst, GGML_KV_ATTN_SCALE);
    a.max_bias = ggml_get_op_params_f32(dst, GGML_KV_ATTN_MAX_BIAS);
    a.softcap  = ggml_get_op_params_f32(dst, GGML_KV_ATTN_SOFTCAP);

    a.mask_f16 = mask->type == GGML_TYPE_F16;
    a.assign   = ggml_get_op_params_i32(dst, GGML_KV_ATTN_ASSIGN) != 0;

    return a;
}

static inline bool kv_mass_is_supported(const ggml_tensor * dst) {
    const ggml_tensor * k = dst->src[2];

    if (ggml_get_op_params_i32(dst, GGML_KV_ATTN_KIND)  != GGML_KV_KIND_MASS ||
        ggml_get_op_params_i32(dst, GGML_KV_ATTN_HEADS) != GGML_KV_HEADS_MEAN) {
        return false;
    }

    // q of a block is in shared memory
    if (k->ne[0] % 8 != 0 || k->ne[0] > 1024) {
        return false;
    }

    switch (k->type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            return k->nb[1] % 16 == 0 && k->nb[2] % 16 == 0 && k->nb[3] % 16 == 0;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
            return true;
        default:
            return false;
    }
}
