#pragma once

// What the eviction engine adds to graphs. The hooks call these; without an engine they do nothing.

#include "llama-graph.h"

class llama_kv_cache_context;

// After the attention of layer il: add its mass to the rows of the scored queries.
// Layer weights and row indices are inputs, so the graph has the same shape whether a query is scored or not.
void build_kv_mass(
        const llm_graph_context      & graph,
        const llama_kv_cache_context * mctx,
        ggml_tensor * q,       // [n_embd_head, n_head, n_tokens]
        ggml_tensor * k,       // [n_embd_head, n_head_kv, n_kv, n_stream]
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float         kq_scale,
        int           il);
