// GGML_OP_KV_MASS, see ggml-kv-evict.h. Blocks of 256 threads, nvcc 13.0 for sm_80 to sm_90, nothing is spilled:
//
//   kernel   rows of q   registers     shared memory
//   logits   1           48 to 90      1.4 KB, and 4 bytes per value and row of q
//            4           80 to 104     2.2 KB
//            8           92 to 128     3.2 KB
//   rows                 32 to 42      1.2 KB, and 8 bytes per head
//
// tests/test_cuda_build.py looks at spills.

#include "kv-mass.cuh"
#include "kv-mass-block.cuh"

template <typename body> static __global__ void __launch_bounds__(KV_MASS_THREADS, 2) kv_mass_logits_kernel(const kv_mass_args a) {
    extern __shared__ kv_float4 kv_mass_q[];
    __shared__ typename body::shared s;

    kv_block<typename body::thread> block;
    body::run(block, s, kv_mass_q, a, blockIdx.x, blockIdx.y, blockIdx.z);
}

static __global__ void __launch_bounds__(KV_MASS_THREADS) kv_mass_rows_kernel(const kv_mass_args a) {
    extern __shared__ kv_mass_rows::softmax kv_mass_heads[];
    __shared__ kv_mass_rows::shared s;

    kv_block<kv_mass_rows::thread> block;
    kv_mass_rows::run(block, s, kv_mass_heads, a, blockIdx.x, blockIdx.y);
}

// two launches per pass, one pass unless many queries are scored over a long cache: the same whatever row_idx holds, so that a
// CUDA graph may hold them, and no more than a look at row_idx if nothing is scored
void ggml_cuda_kv_mass(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * k = dst->src[2];

    kv_mass_args a = kv_mass_get_args(dst);

    ggml_cuda_pool_alloc<float>        logits(ctx.pool(), (size_t) a.n_slot*a.n_head*a.n_kv);
    ggml_cuda_pool_alloc<kv_mass_stat> stats (ctx.pool(), (size_t) a.n_slot*a.n_head*a.n_tile);

    a.logits = logits.get();
    a.stats  = stats.get();

    cudaStream_t stream = ctx.stream();

    const dim3 grid_logits(a.n_tile, k->ne[1], a.n_stream);
    const dim3 grid_rows((a.n_kv + KV_MASS_THREADS - 1)/KV_MASS_THREADS, a.n_slot);

    for (a.i_slot = 0; a.i_slot < a.n_most; a.i_slot += a.n_slot) {
        kv_mass_dispatch(k->type, a, [&](auto body) {
            const size_t n_shared = body.N_Q*a.n_embd*sizeof(float);
            kv_mass_logits_kernel<decltype(body)><<<grid_logits, KV_MASS_THREADS, n_shared, stream>>>(a);
        });
        CUDA_CHECK(cudaGetLastError());

        const size_t n_shared = a.n_head*sizeof(kv_mass_rows::softmax);
        kv_mass_rows_kernel<<<grid_rows, KV_MASS_THREADS, n_shared, stream>>>(a);
        CUDA_CHECK(cudaGetLastError());
    }
}

bool ggml_cuda_kv_mass_supported(int device, const ggml_tensor * dst) {
    GGML_UNUSED(device);

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)
    GGML_UNUSED(dst);
    return false; // never tried there
#else
    return kv_mass_is_supported(dst);
#endif
}
