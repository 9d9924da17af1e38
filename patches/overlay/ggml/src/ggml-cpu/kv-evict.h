#pragma once

// CPU side of ggml_kv_mass and ggml_kv_move (shapes: ggml-kv-evict.h)

#include "ggml.h"

#include <stddef.h>

struct ggml_compute_params;

#ifdef __cplusplus
extern "C" {
#endif

void ggml_compute_forward_kv_mass(const struct ggml_compute_params * params, struct ggml_tensor * dst);
void ggml_compute_forward_kv_move(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// bytes of scratch that ggml_kv_mass needs for n_tasks threads
size_t ggml_kv_mass_work_size(const struct ggml_tensor * dst, int n_tasks);

#ifdef __cplusplus
}
#endif
