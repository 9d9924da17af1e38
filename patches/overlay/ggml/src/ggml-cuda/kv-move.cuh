#pragma once

#include "common.cuh"

void ggml_cuda_kv_move(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
bool ggml_cuda_kv_move_supported(int device, const ggml_tensor * dst);
