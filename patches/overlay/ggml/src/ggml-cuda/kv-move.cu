// GGML_OP_KV_MOVE, see ggml-kv-evict.h. One launch, 22 to 34 registers, no shared memory.

#include "kv-move.cuh"
#include "kv-move-block.cuh"

template <typename T> static __global__ void kv_move_dim_1_kernel(const kv_move_args m) {
    kv_move_dim_1<T>(m, blockIdx.x, blockIdx.y, threadIdx.x, threadIdx.y);
}

template <typename T> static __global__ void kv_move_dim_0_kernel(const kv_move_args m) {
    for (int64_t i_row = blockIdx.y; i_row < m.n_rows; i_row += gridDim.y) {
        kv_move_dim_0<T>(m, i_row, blockIdx.x*blockDim.x + threadIdx.x);
    }
}

template <typename T> static void launch_dim_1(const ggml_tensor * dst, cudaStream_t stream) {
    const kv_move_args m = kv_move_get_args(dst, sizeof(T));

    const dim3 grid((m.n_move + KV_MOVE_MOVES - 1)/KV_MOVE_MOVES, m.n_mat);
    kv_move_dim_1_kernel<T><<<grid, dim3(KV_MOVE_UNITS, KV_MOVE_MOVES), 0, stream>>>(m);
}

template <typename T> static void launch_dim_0(const ggml_tensor * dst, cudaStream_t stream) {
    const kv_move_args m = kv_move_get_args(dst, sizeof(T));

    const int  n_threads = KV_MOVE_UNITS*KV_MOVE_MOVES;
    const dim3 grid((m.n_move + n_threads - 1)/n_threads, std::min<int64_t>(m.n_rows, 65535));
    kv_move_dim_0_kernel<T><<<grid, n_threads, 0, stream>>>(m);
}

void ggml_cuda_kv_move(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    cudaStream_t stream = ctx.stream();

    if (dst->src[1]->ne[0] == 0) {
        return;
    }

    if (ggml_get_op_params_i32(dst, 0) == 1) {
        switch (kv_move_unit(dst)) {
            case 16: launch_dim_1<kv_uint4>(dst, stream); break;
            case 8:  launch_dim_1<uint64_t>(dst, stream); break;
            case 4:  launch_dim_1<uint32_t>(dst, stream); break;
            case 2:  launch_dim_1<uint16_t>(dst, stream); break;
            default: launch_dim_1<uint8_t> (dst, stream); break;
        }
    } else {
        switch (ggml_type_size(dst->src[0]->type)) {
            case 2:  launch_dim_0<uint16_t>(dst, stream); break;
            case 4:  launch_dim_0<uint32_t>(dst, stream); break;
            default: GGML_ABORT("fatal error");
        }
    }

    CUDA_CHECK(cudaGetLastError());
}

bool ggml_cuda_kv_move_supported(int device, const ggml_tensor * dst) {
    GGML_UNUSED(device);

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)
    GGML_UNUSED(dst);
    return false; // never tried there
#else
    return kv_move_is_supported(dst);
#endif
}
