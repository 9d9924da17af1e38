#pragma once

// What the ways to compute ggml_kv_attn and ggml_kv_mass share: their operands

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml-kv-evict.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

// Query t, head h reads its logits from K of head h/n_gqa in the stream of t.
struct kv_attn {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;       // NULL if nothing needs it
    const ggml_tensor * mask;
    const float       * sinks;   // may be NULL
    const ggml_tensor * rows;    // NULL: nothing is scored
    const int32_t     * row_idx;
    const float       * coef;    // weight of this layer

    float * out; // [n_tokens][n_head][n_embd_v], NULL: only rows are written

    int64_t n_embd_k;
    int64_t n_embd_v;
    int64_t n_head;
    int64_t n_head_kv;
    int64_t n_gqa;
    int64_t n_kv;
    int64_t n_tokens;
    int64_t n_stream;
    int64_t n_stream_tokens;

    bool  v_trans; // rows of V are channels
    bool  round_q; // as the dot product of K's type does
    bool  assign;
    float scale;
    float max_bias;
    float softcap;

    // what rows take; ggml_kv_attn knows only the mean of the mass
    ggml_kv_kind  kind;
    ggml_kv_heads heads;

    // ALiBi
    float slope(int64_t h) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const int64_t n_head_log2 = 1ll << (int) std::floor(std::log2((double) n_head));
        return h < n_head_log2 ?
            std::pow(2.0f, -max_bias*(h + 1)/n_head_log2) :
            std::pow(2.0f, -max_bias*(2*(h - n_head_log2) + 1)/(2*n_head_log2));
    }

    bool is_mean_mass() const { return kind == GGML_KV_KIND_MASS && heads == GGML_KV_HEADS_MEAN; }

    bool is_scored(int64_t t) const { return rows && row_idx[t] >= 0; }
    bool is_used  (int64_t t) const { return out || is_scored(t); }

    bool any_scored() const {
        return rows && std::any_of(row_idx, row_idx + n_tokens, [](int32_t i) { return i >= 0; });
    }

    float * row(int64_t t) const { return (float *) ((char *) rows->data + row_idx[t]*rows->nb[1]); }

    float * out_row(int64_t t, int64_t h) const { return out + (t*n_head + h)*n_embd_v; }

    const float * q_row(int64_t t, int64_t h) const {
        return (const float *) ((const char *) q->data + h*q->nb[1] + t*q->nb[2]);
    }

    int64_t stream(int64_t t) const { return t/n_stream_tokens; }

    const char * k_row(int64_t c, int64_t h_kv, int64_t s) const {
        return (const char *) k->data + h_kv*k->nb[1] + c*k->nb[2] + s*k->nb[3];
    }

    // of a cell
    const char * v_row(int64_t c, int64_t h_kv, int64_t s) const {
        return (const char *) v->data + h_kv*v->nb[1] + c*v->nb[2] + s*v->nb[3];
    }

    // of a channel, from cell c on; V is transposed
    const char * v_channel(int64_t d, int64_t c, int64_t h_kv, int64_t s) const {
        return (const char *) v->data + c*v->nb[0] + h_kv*v->nb[1] + d*v->nb[2] + s*v->nb[3];
    }

    const char * mask_row(int64_t c, int64_t t) const {
        return (const char *) mask->data + c*mask->nb[0] + t%n_stream_tokens*mask->nb[1] + stream(t)*mask->nb[3];
    }

    void get_mask(float * dst, int64_t c, int64_t n, int64_t t) const {
        if (mask->type == GGML_TYPE_F16) {
            ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) mask_row(c, t), dst, n);
        } else {
            memcpy(dst, mask_row(c, t), n*sizeof(float));
        }
    }
};

// n values of a row
inline void kv_to_f32(const ggml_tensor * t, const char * row, float * dst, int64_t n) {
    if (t->type == GGML_TYPE_F32) {
        memcpy(dst, row, n*sizeof(float));
    } else {
        ggml_get_type_traits(t->type)->to_float(row, dst, n);
    }
}

// carves the scratch of one thread, so that no two threads write to one cache line
struct kv_scratch {
    static constexpr size_t PAD = 128;

    size_t size = 0;

    // offset of a block
    size_t take(size_t n_bytes) {
        const size_t res = size;
        size += GGML_PAD(n_bytes, PAD);
        return res;
    }

    static char * start(const ggml_compute_params * params) { return (char *) GGML_PAD((uintptr_t) params->wdata, PAD); }
};

// The spec: a query after the other, in double.
void kv_attn_ref(const ggml_compute_params * params, const kv_attn & a);

// Few queries: threads share the cells, logits are kept until their sum is known. It writes rows, too.
void   kv_attn_few          (const ggml_compute_params * params, const kv_attn & a);
size_t kv_attn_few_work_size(const kv_attn & a, int n_tasks);

// Many queries: threads take blocks of queries, cells pass in tiles. Writes no rows.
void   kv_attn_many          (const ggml_compute_params * params, const kv_attn & a);
size_t kv_attn_many_work_size(const kv_attn & a, int n_tasks);

// Rows of any kind, no output: plain code for what the ways above do not know.
void   kv_score          (const ggml_compute_params * params, const kv_attn & a);
size_t kv_score_work_size(const kv_attn & a, int n_tasks);
