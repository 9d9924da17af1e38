#include "kv-evict.h"
#include "kv-attn.h"
#include "kv-simd.h"

// ggml_kv_attn and ggml_kv_mass

// from this many queries of a stream on, tiles pay
static constexpr int64_t N_MANY = 9;

static kv_attn get_operands(const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * mask, const ggml_tensor * sinks,
        const ggml_tensor * rows, const ggml_tensor * coef, const ggml_tensor * row_idx, const ggml_tensor * dst) {
    kv_attn a = {};

    a.q       = q;
    a.k       = k;
    a.mask    = mask;
    a.sinks   = sinks   ? (const float   *) sinks->data   : nullptr;
    a.rows    = rows;
    a.row_idx = row_idx ? (const int32_t *) row_idx->data : nullptr;
    a.coef    = coef    ? (const float   *) coef->data + ggml_get_op_params_i32(dst, GGML_KV_ATTN_IL) : nullptr;

    a.n_embd_k  = q->ne[0];
    a.n_head    = q->ne[1];
    a.n_head_kv = k->ne[1];
    a.n_gqa     = a.n_head/a.n_head_kv;
    a.n_kv      = k->ne[2];
    a.n_tokens  = q->ne[2];
    a.n_stream  = k->ne[3];
    a.n_stream_tokens = a.n_tokens/a.n_stream;

    a.assign   = ggml_get_op_params_i32(dst, GGML_KV_ATTN_ASSIGN) != 0;
    a.scale    = ggml_get_op_params_f32(dst, GGML_KV_ATTN_SCALE);
    a.max_bias = ggml_get_op_params_f32(dst, GGML_KV_ATTN_MAX_BIAS);
    a.softcap  = ggml_get_op_params_f32(dst, GGML_KV_ATTN_SOFTCAP);

    return a;
}

static kv_attn get_operands(const ggml_tensor * dst) {
    const auto & src = dst->src;

    if (dst->op == GGML_OP_KV_MASS) {
        kv_attn a = get_operands(src[1], src[2], src[3], src[6], src[0], src[4], src[5], dst);
        a.v        = src[7];
        a.v_trans  = ggml_get_op_params_i32(dst, GGML_KV_ATTN_V_TRANS) != 0;
        a.n_embd_v = a.v ? a.v->ne[a.v_trans ? 2 : 0] : 0;
        a.round_q  = true;
        a.kind     = (ggml_kv_kind)  ggml_get_op_params_i32(dst, GGML_KV_ATTN_KIND);
        a.heads    = (ggml_kv_heads) ggml_get_op_params_i32(dst, GGML_KV_ATTN_HEADS);
        return a;
    }

    kv_attn a = get_operands(src[0], src[1], src[3], src[7], src[4], src[5], src[6], dst);
    a.v        = src[2];
    a.v_trans  = ggml_get_op_params_i32(dst, GGML_KV_ATTN_V_TRANS) != 0;
    a.n_embd_v = dst->ne[0];
    a.out      = (float *) dst->data;
    return a;
}

static void kv_attn_compute(const ggml_compute_params * params, kv_attn a) {
    if (params->use_ref) {
        kv_attn_ref(params, a);
        return;
    }
    if (a.out && a.n_stream_tokens >= N_MANY) {
        kv_attn_many(params, a);
        if (!a.any_scored()) {
            return;
        }
        ggml_barrier(params->threadpool); // both have the same scratch
        a.out = nullptr;
    }
    kv_attn_few(params, a);
}

static void kv_mass_compute(const ggml_compute_params * params, ggml_tensor * dst) {
    const kv_attn a = get_operands(dst);

    const bool    any     = a.any_scored();
    const int64_t t_start = any && params->ith == 0 ? ggml_time_us() : 0;

    if (any && a.is_mean_mass()) {
        kv_attn_compute(params, a);
    } else if (any) {
        kv_score(params, a);
    }

    if (params->ith == 0) {
        int64_t t_us;
        memcpy(&t_us, dst->op_params + GGML_KV_ATTN_TIME, sizeof(t_us));
        t_us = std::max<int64_t>(t_us, 0) + (any ? ggml_time_us() - t_start : 0);
        memcpy(dst->op_params + GGML_KV_ATTN_TIME, &t_us, sizeof(t_us));
    }
}

// ggml_kv_move

// elements of type T within each row, rows in turn over threads
template <typename T>
static void kv_move_dim_0(const ggml_compute_params * params, const ggml_tensor * a, const int32_t * from, const int32_t * to, int64_t n_move) {
    for (int64_t r = params->ith; r < ggml_nrows(a); r += params->nth) {
        const int64_t i1 = r%a->ne[1];
        const int64_t i2 = r/a->ne[1]%a->ne[2];
        const int64_t i3 = r/a->ne[1]/a->ne[2];

        T * row = (T *) ((char *) a->data + i1*a->nb[1] + i2*a->nb[2] + i3*a->nb[3]);
        for (int64_t i = 0; i < n_move; ++i) {
            row[to[i]] = row[from[i]];
        }
    }
}

// raw rows, moves in turn over threads
static void kv_move_dim_1(const ggml_compute_params * params, const ggml_tensor * a, const int32_t * from, const int32_t * to, int64_t n_move) {
    const size_t size = ggml_row_size(a->type, a->ne[0]);

    for (int64_t i3 = 0; i3 < a->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < a->ne[2]; ++i2) {
            char * data = (char *) a->data + i2*a->nb[2] + i3*a->nb[3];
            for (int64_t i = params->ith; i < n_move; i += params->nth) {
                memcpy(data + to[i]*a->nb[1], data + from[i]*a->nb[1], size);
            }
        }
    }
}

static void kv_move_compute(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * a   = dst->src[0];
    const ggml_tensor * idx = dst->src[1];

    const int32_t * from   = (const int32_t *) idx->data;
    const int32_t * to     = (const int32_t *) ((const char *) idx->data + idx->nb[1]);
    const int64_t   n_move = idx->ne[0];

    if (ggml_get_op_params_i32(dst, 0) == 1) {
        kv_move_dim_1(params, a, from, to, n_move);
        return;
    }

    switch (ggml_type_size(a->type)) {
        case 1: kv_move_dim_0<uint8_t> (params, a, from, to, n_move); break;
        case 2: kv_move_dim_0<uint16_t>(params, a, from, to, n_move); break;
        case 4: kv_move_dim_0<uint32_t>(params, a, from, to, n_move); break;
        case 8: kv_move_dim_0<uint64_t>(params, a, from, to, n_move); break;
        default: GGML_ABORT("fatal error");
    }
}

// interface

void ggml_compute_forward_kv_evict(const ggml_compute_params * params, ggml_tensor * dst) {
    switch (dst->op) {
        case GGML_OP_KV_ATTN: kv_attn_compute(params, get_operands(dst)); break;
        case GGML_OP_KV_MASS: kv_mass_compute(params, dst); break;
        case GGML_OP_KV_MOVE: kv_move_compute(params, dst); break;
        default: GGML_ABORT("fatal error");
    }
}

size_t ggml_kv_evict_work_size(const ggml_tensor * dst, int n_tasks) {
    const kv_attn a = get_operands(dst);
    if (!a.is_mean_mass()) {
        return kv_score_work_size(a, n_tasks);
    }
    const size_t  few  = kv_attn_few_work_size(a, n_tasks);
    const size_t  many = dst->op == GGML_OP_KV_ATTN ? kv_attn_many_work_size(a, n_tasks) : 0;
    return std::max(few, many);
}

bool ggml_kv_attn_is_fast(void) {
#if defined(KV_SIMD)
    return true;
#else
    return false;
#endif
}
