#include "ggml-kv-evict.h"

#include "ggml-impl.h"

// what ggml_kv_attn and ggml_kv_mass have in common

static void assert_attention(
        const struct ggml_tensor * q,
        const struct ggml_tensor * k,
        const struct ggml_tensor * mask,
        const struct ggml_tensor * sinks) {
    const int64_t n_head   = q->ne[1];
    const int64_t n_tokens = q->ne[2];
    const int64_t n_kv     = k->ne[2];
    const int64_t n_stream = k->ne[3];

    GGML_ASSERT(q->type == GGML_TYPE_F32);
    GGML_ASSERT(q->ne[3] == 1);
    GGML_ASSERT(ggml_is_contiguous_rows(q));

    GGML_ASSERT(k->type == GGML_TYPE_F32 || k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_BF16 || ggml_is_quantized(k->type));
    GGML_ASSERT(k->ne[0] == q->ne[0]);
    GGML_ASSERT(n_head % k->ne[1] == 0);
    GGML_ASSERT(ggml_is_contiguous_rows(k));

    GGML_ASSERT(mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32);
    GGML_ASSERT(mask->ne[0] == n_kv);
    GGML_ASSERT(mask->ne[1]*n_stream == n_tokens);
    GGML_ASSERT(mask->ne[2] == 1);
    GGML_ASSERT(mask->ne[3] == n_stream);
    GGML_ASSERT(ggml_is_contiguous_rows(mask));

    if (sinks) {
        GGML_ASSERT(sinks->type == GGML_TYPE_F32);
        GGML_ASSERT(sinks->ne[0] == n_head);
        GGML_ASSERT(ggml_is_vector(sinks) && ggml_is_contiguous(sinks));
    }
}

static bool is_v_trans(const struct ggml_tensor * v) {
    return v->nb[1] > v->nb[2];
}

static void assert_v(const struct ggml_tensor * v, const struct ggml_tensor * k) {
    const bool v_trans = is_v_trans(v);

    GGML_ASSERT(v->type == GGML_TYPE_F32 || v->type == GGML_TYPE_F16 || v->type == GGML_TYPE_BF16 || ggml_is_quantized(v->type));
    GGML_ASSERT(v->ne[1] == k->ne[1]);
    GGML_ASSERT(v->ne[v_trans ? 0 : 2] == k->ne[2]);
    GGML_ASSERT(v->ne[3] == k->ne[3]);
    GGML_ASSERT(ggml_is_contiguous_rows(v));
    GGML_ASSERT(!v_trans || ggml_blck_size(v->type) == 1);
}

static void assert_rows(
        const struct ggml_tensor * rows,
        const struct ggml_tensor * coef,
        const struct ggml_tensor * row_idx,
        int                        il,
        int64_t                    n_kv,
        int64_t                    n_tokens) {
    GGML_ASSERT(rows->type == GGML_TYPE_F32);
    GGML_ASSERT(rows->ne[0] >= n_kv);
    GGML_ASSERT(rows->ne[2] == 1 && rows->ne[3] == 1);
    GGML_ASSERT(ggml_is_contiguous_rows(rows));

    GGML_ASSERT(coef->type == GGML_TYPE_F32);
    GGML_ASSERT(il >= 0 && il < coef->ne[0]);
    GGML_ASSERT(ggml_is_vector(coef) && ggml_is_contiguous(coef));

    GGML_ASSERT(row_idx->type == GGML_TYPE_I32);
    GGML_ASSERT(row_idx->ne[0] == n_tokens);
    GGML_ASSERT(ggml_is_vector(row_idx) && ggml_is_contiguous(row_idx));
}

static void set_params(
        struct ggml_tensor * a,
        int                  il,
        bool                 assign,
        float                scale,
        float                max_bias,
        float                logit_softcap) {
    ggml_set_op_params_i32(a, GGML_KV_ATTN_IL,       il);
    ggml_set_op_params_i32(a, GGML_KV_ATTN_ASSIGN,   assign);
    ggml_set_op_params_f32(a, GGML_KV_ATTN_SCALE,    scale);
    ggml_set_op_params_f32(a, GGML_KV_ATTN_MAX_BIAS, max_bias);
    ggml_set_op_params_f32(a, GGML_KV_ATTN_SOFTCAP,  logit_softcap);
}

// ggml_kv_attn

struct ggml_tensor * ggml_kv_attn(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * mask,
        struct ggml_tensor  * sinks,
        struct ggml_tensor  * rows,
        struct ggml_tensor  * coef,
        struct ggml_tensor  * row_idx,
        int                   il,
        float                 scale,
        float                 max_bias,
        float                 logit_softcap,
        bool                  assign) {
    const bool v_trans = is_v_trans(v);

    const int64_t n_embd_v = v->ne[v_trans ? 2 : 0];

    assert_attention(q, k, mask, sinks);
    assert_v(v, k);

    GGML_ASSERT(!rows == !coef && !rows == !row_idx);
    if (rows) {
        assert_rows(rows, coef, row_idx, il, k->ne[2], q->ne[2]);
    }

    struct ggml_tensor * result = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_embd_v, q->ne[1], q->ne[2]);

    set_params(result, il, assign, scale, max_bias, logit_softcap);
    ggml_set_op_params_i32(result, GGML_KV_ATTN_V_TRANS, v_trans);

    // what may be NULL last: some loops over sources stop there
    result->op     = GGML_OP_KV_ATTN;
    result->src[0] = q;
    result->src[1] = k;
    result->src[2] = v;
    result->src[3] = mask;
    result->src[4] = rows;
    result->src[5] = coef;
    result->src[6] = row_idx;
    result->src[7] = sinks;

    return result;
}

// ggml_kv_mass

struct ggml_tensor * ggml_kv_mass(
        struct ggml_context * ctx,
        struct ggml_tensor  * rows,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * mask,
        struct ggml_tensor  * sinks,
        struct ggml_tensor  * coef,
        struct ggml_tensor  * row_idx,
        enum ggml_kv_kind     kind,
        enum ggml_kv_heads    heads,
        int                   il,
        float                 scale,
        float                 max_bias,
        float                 logit_softcap,
        bool                  assign) {
    assert_attention(q, k, mask, sinks);
    assert_rows(rows, coef, row_idx, il, k->ne[2], q->ne[2]);

    GGML_ASSERT((kind == GGML_KV_KIND_VALUE_NORM || kind == GGML_KV_KIND_VALUE_LEN) == (v != NULL));
    if (v) {
        assert_v(v, k);
    }

    struct ggml_tensor * result = ggml_view_tensor(ctx, rows);

    set_params(result, il, assign, scale, max_bias, logit_softcap);
    ggml_set_op_params_i32(result, GGML_KV_ATTN_V_TRANS, v && is_v_trans(v));
    ggml_set_op_params_i32(result, GGML_KV_ATTN_KIND,    kind);
    ggml_set_op_params_i32(result, GGML_KV_ATTN_HEADS,   heads);

    const int64_t t_never = -1;
    memcpy(result->op_params + GGML_KV_ATTN_TIME, &t_never, sizeof(t_never));

    // what may be NULL last: some loops over sources stop there
    result->op     = GGML_OP_KV_MASS;
    result->src[0] = rows;
    result->src[1] = q;
    result->src[2] = k;
    result->src[3] = mask;
    result->src[4] = coef;
    result->src[5] = row_idx;
    result->src[6] = sinks;
    result->src[7] = v;

    return result;
}

int64_t ggml_kv_mass_take_time_us(struct ggml_tensor * a) {
    GGML_ASSERT(a->op == GGML_OP_KV_MASS);

    int64_t t_us;
    memcpy(&t_us, a->op_params + GGML_KV_ATTN_TIME, sizeof(t_us));

    if (t_us > 0) {
        memset(a->op_params + GGML_KV_ATTN_TIME, 0, sizeof(t_us));
    }

    return t_us;
}

// ggml_kv_move

struct ggml_tensor * ggml_kv_move(
        struct ggml_context * ctx,
        struct ggml_tensor  * a,
        struct ggml_tensor  * idx,
        int                   dim) {
    GGML_ASSERT(ggml_is_contiguous_rows(a));

    GGML_ASSERT(idx->type == GGML_TYPE_I32);
    GGML_ASSERT(idx->ne[1] == 2);
    GGML_ASSERT(idx->ne[2] == 1 && idx->ne[3] == 1);
    GGML_ASSERT(ggml_is_contiguous_rows(idx));

    GGML_ASSERT(dim == 1 || (dim == 0 && ggml_blck_size(a->type) == 1));

    struct ggml_tensor * result = ggml_view_tensor(ctx, a);

    ggml_set_op_params_i32(result, 0, dim);

    result->op     = GGML_OP_KV_MOVE;
    result->src[0] = a;
    result->src[1] = idx;

    return result;
}
