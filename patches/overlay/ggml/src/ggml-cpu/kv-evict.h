#pragma once

// CPU side of ggml_kv_attn, ggml_kv_mass and ggml_kv_move (shapes: ggml-kv-evict.h)

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>

struct ggml_compute_params;

#ifdef __cplusplus
extern "C" {
#endif

// any of the three ops
void ggml_compute_forward_kv_evict(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// bytes of scratch that the op needs for n_tasks threads
size_t ggml_kv_evict_work_size(const struct ggml_tensor * dst, int n_tasks);

// false where ggml_kv_attn was compiled without SIMD: other attention is faster
bool ggml_kv_attn_is_fast(void);

#ifdef __cplusplus
}
#endif
