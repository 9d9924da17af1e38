#pragma once

// What the eviction engine adds to graphs. The hooks call these; without an engine they do nothing.

#include "llama-graph.h"

class llama_kv_cache_context;

// The attention of layer il and its mass in one op, [n_embd_head_v*n_head, n_tokens]: once a cut was made, on CPUs.
// NULL otherwise: llama.cpp's attention and build_kv_mass take its place.
// The layers of a sliding window have attention alone: their cache has no engine and no scores.
ggml_tensor * build_kv_attn(
        const llm_graph_context      & graph,
        const llama_kv_cache_context * mctx,      // the layer's cache
        const llama_kv_cache_context * mctx_base, // the cache that may have an engine
        ggml_tensor * q,       // [n_embd_head_k, n_head, n_tokens]
        ggml_tensor * k,       // [n_embd_head_k, n_head_kv, n_kv, n_stream]
        ggml_tensor * v,       // [n_embd_head_v, n_head_kv, n_kv, n_stream], or transposed as the cache holds it
        ggml_tensor * kq_b,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        ggml_tensor * v_mla,
        float         kq_scale,
        int           il);

// After the attention of layer il: add its mass, or what another scorer takes, to the rows of the scored queries.
// Layer weights and row indices are inputs, so the graph has the same shape whether a query is scored or not.
void build_kv_mass(
        const llm_graph_context      & graph,
        const llama_kv_cache_context * mctx,
        ggml_tensor * q,       // [n_embd_head, n_head, n_tokens]
        ggml_tensor * k,       // [n_embd_head, n_head_kv, n_kv, n_stream]
        ggml_tensor * v,       // as in build_kv_attn
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float         kq_scale,
        int           il);
