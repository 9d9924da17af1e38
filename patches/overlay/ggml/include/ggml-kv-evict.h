#pragma once

// Ops for evicting KV cells: attention that keeps its mass per cell, that mass alone, and moving cells inside the cache.
// Every table below stands again, line by line, as assertions in ggml-kv-evict.c.

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

    // where ggml_kv_attn and ggml_kv_mass keep their parameters, in units of op_params
    enum ggml_kv_attn_param {
        GGML_KV_ATTN_IL       = 0, // i32
        GGML_KV_ATTN_ASSIGN   = 1, // i32
        GGML_KV_ATTN_SCALE    = 2, // f32
        GGML_KV_ATTN_MAX_BIAS = 3, // f32
        GGML_KV_ATTN_SOFTCAP  = 4, // f32
        GGML_KV_ATTN_V_TRANS  = 5, // i32
        GGML_KV_ATTN_KIND     = 6, // i32, ggml_kv_mass only
        GGML_KV_ATTN_HEADS    = 7, // i32, ggml_kv_mass only
        GGML_KV_ATTN_TIME     = 8, // i64, ggml_kv_mass only: microseconds, written by the CPU op
    };

    // what ggml_kv_mass takes of a cell and a head
    enum ggml_kv_kind {
        GGML_KV_KIND_MASS       = 0,
        GGML_KV_KIND_VALUE_NORM = 1,
        GGML_KV_KIND_ENTROPY    = 2,
        GGML_KV_KIND_KEYDIFF    = 3,
        GGML_KV_KIND_KEY_NORM   = 4,
        GGML_KV_KIND_VALUE_LEN  = 5,
    };

    // how it becomes one number per cell
    enum ggml_kv_heads {
        GGML_KV_HEADS_MEAN = 0,
        GGML_KV_HEADS_MAX  = 1,
    };

    // Attention as ggml_flash_attn_ext computes it, for the shapes that a KV cache has:
    //
    //   result[t,h] = sum over cells c of softmax_c(q[t,h] . k[c,h/gqa]) v[c,h/gqa]
    //
    // As a side effect it adds the mass of selected queries to rows, as ggml_kv_mass does: rows is a source that is
    // written, and who reads it has to wait for this node.
    //
    //   q        F32      [n_embd_head_k, n_head, n_tokens]             contiguous in dim 0
    //   k        F32 F16 BF16 or quantised
    //                     [n_embd_head_k, n_head_kv, n_kv, n_stream]    n_head a multiple of n_head_kv
    //   v        as k     [n_embd_head_v, n_head_kv, n_kv, n_stream]    nb[1] <= nb[2], or transposed:
    //            F32 F16 BF16
    //                     [n_kv, n_head_kv, n_embd_head_v, n_stream]    nb[1] >  nb[2], contiguous in dim 0
    //   mask     F16 F32  [n_kv, n_tokens/n_stream, 1, n_stream]        -inf: not seen
    //   sinks    F32      [n_head] or NULL
    //   rows, coef, row_idx                                             as in ggml_kv_mass, or all NULL
    //
    //   result   F32      [n_embd_head_v, n_head, n_tokens]
    //
    // What K and V hold in a cell that no query of a stream sees may be anything. A query that sees no cell gets zeros.
    // Sums are in f32, in an order of its own: the result is not bit for bit that of other attention.
    GGML_API struct ggml_tensor * ggml_kv_attn(
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
            bool                  assign);

    // Adds what selected queries say about the cells they see to rows, in place:
    //
    //   rows[row_idx[t]][c] += coef[il] * mean or max over heads of f
    //
    //   kind         f, of query head h, with p[h] = softmax_c(q[t,h] . k[c,h/gqa])
    //   mass         p[h]
    //   value norm   p[h] |v[c,h/gqa]|
    //   entropy      p[h] g[h] / (mean or max over heads of g), g[h] = (1 - H)/H, H the entropy of p[h] over the n cells that
    //                t sees, sinks left out, divided by log(n) and kept in [0.001, 0.999]; n = 1: 0.001
    //
    //                f, of KV head h: of the query only its mask counts
    //   keydiff      1 - cos(k[c,h], mean over the cells that t sees of k[.,h]/|k[.,h]|); the cosine with 0 is 0
    //   key norm     1/(1 + |k[c,h]|): the order of -|k[c,h]|, but positive
    //   value len    |v[c,h]|
    //
    // with scale, softcap, ALiBi slope and attention sinks as in ggml_flash_attn_ext. The first layer assigns.
    // Cells at and above n_kv keep their values. A query with row_idx < 0 is not scored; if none is, the op does nothing.
    // f is never negative, and 0 for a cell that is not seen, whatever K and V hold there.
    //
    //   rows     F32      [n_cells >= n_kv, n_rows]
    //   q        F32      [n_embd_head, n_head, n_tokens]               contiguous in dim 0
    //   k        F32 F16 BF16 or quantised
    //                     [n_embd_head, n_head_kv, n_kv, n_stream]      n_head a multiple of n_head_kv
    //   v        as in ggml_kv_attn, or NULL                           value norm and value len only
    //   mask     F16 F32  [n_kv, n_tokens/n_stream, 1, n_stream]        -inf: not seen
    //   sinks    F32      [n_head] or NULL
    //   coef     F32      [n_layer]                                     il < n_layer
    //   row_idx  I32      [n_tokens]                                    < n_rows, no row twice
    //
    //   result   rows (a view)
    //
    // Queries are ordered by stream: query t belongs to stream t/(n_tokens/n_stream).
    // q may be rounded to the type that attention's dot product with k takes, so that both see the same logits.
    GGML_API struct ggml_tensor * ggml_kv_mass(
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
            bool                  assign);

    // Time that the CPU op has spent on this node since the last call, in microseconds. The counter is reset.
    // Returns a negative value if the node was not computed by the CPU backend.
    GGML_API int64_t ggml_kv_mass_take_time_us(struct ggml_tensor * a);

    // Moves cells inside a cache tensor, in place: for all i, cell idx[1][i] becomes a copy of cell idx[0][i].
    // No cell is both a source and a target, and no target stands twice, so the order does not matter.
    //
    //   a        any type [ne0, ne1, ne2, ne3]    dim 0 contiguous
    //   idx      I32      [n_move, 2]             idx[0]: from, idx[1]: to, both in [0, ne[dim])
    //   dim      1        whole rows of raw blocks move        (K, and V that is not transposed)
    //            0        single elements of every row move    (transposed V), block size 1 only
    //
    //   result   a (a view)
    GGML_API struct ggml_tensor * ggml_kv_move(
            struct ggml_context * ctx,
            struct ggml_tensor  * a,
            struct ggml_tensor  * idx,
            int                   dim);

#ifdef __cplusplus
}
#endif
