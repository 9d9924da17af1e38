// The kernels of ggml-cuda/kv-mass.cu and kv-move.cu on the host: the same bodies, block after block, thread after thread.
// tests/test_cuda_ops.py calls it.

#include "ggml-cuda/kv-mass-block.cuh"
#include "ggml-cuda/kv-move-block.cuh"

#include "kv_block_host.h"

static int64_t place(int64_t i, int64_t n, bool reversed) {
    return reversed ? n - 1 - i : i;
}

template <typename body> static void run_logits(const kv_mass_args & a, int n_head_kv, bool reversed) {
    kv_memory_host<typename body::shared> shared(1);
    kv_memory_host<kv_float4>             q(body::N_Q*a.n_embd/4);

    const int64_t n_block = (int64_t) a.n_tile*n_head_kv*a.n_stream;
    for (int64_t i = 0; i < n_block; ++i) {
        const int64_t b = place(i, n_block, reversed);

        shared.poison();
        q.poison();

        kv_block_host<typename body::thread> block(KV_MASS_THREADS, reversed);
        body::run(block, *shared.get(), q.get(), a, b%a.n_tile, b/a.n_tile%n_head_kv, b/a.n_tile/n_head_kv);
    }
}

static void run_rows(const kv_mass_args & a, bool reversed) {
    kv_memory_host<kv_mass_rows::shared>  shared(1);
    kv_memory_host<kv_mass_rows::softmax> heads(a.n_head);

    const int64_t n_tile  = (a.n_kv + KV_MASS_THREADS - 1)/KV_MASS_THREADS;
    const int64_t n_block = n_tile*a.n_slot;
    for (int64_t i = 0; i < n_block; ++i) {
        const int64_t b = place(i, n_block, reversed);

        shared.poison();
        heads.poison();

        kv_block_host<kv_mass_rows::thread> block(KV_MASS_THREADS, reversed);
        kv_mass_rows::run(block, *shared.get(), heads.get(), a, b%n_tile, b/n_tile);
    }
}

// as ggml_cuda_kv_mass, returns the number of passes; n_slot > 0: most queries of a pass
static int run_mass(const ggml_tensor * dst, bool reversed, int n_slot) {
    const ggml_tensor * k = dst->src[2];

    kv_mass_args a = kv_mass_get_args(dst);
    if (n_slot > 0) {
        a.n_slot = std::min(a.n_slot, n_slot);
    }

    kv_memory_host<float>        logits((size_t) a.n_slot*a.n_head*a.n_kv);
    kv_memory_host<kv_mass_stat> stats ((size_t) a.n_slot*a.n_head*a.n_tile);

    a.logits = logits.get();
    a.stats  = stats.get();

    int n_pass = 0;
    for (a.i_slot = 0; a.i_slot < a.n_most; a.i_slot += a.n_slot, ++n_pass) {
        logits.poison();
        stats.poison();
        kv_mass_dispatch(k->type, a, [&](auto body) { run_logits<decltype(body)>(a, k->ne[1], reversed); });
        run_rows(a, reversed);
    }
    return n_pass;
}

template <typename T> static void run_dim_1(const ggml_tensor * dst, bool reversed) {
    const kv_move_args m = kv_move_get_args(dst, sizeof(T));

    const int64_t n_block = (m.n_move + KV_MOVE_MOVES - 1)/KV_MOVE_MOVES;
    const int64_t n       = n_block*m.n_mat*KV_MOVE_MOVES*KV_MOVE_UNITS;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t j = place(i, n, reversed);
        const int64_t b = j/KV_MOVE_UNITS/KV_MOVE_MOVES;

        kv_move_dim_1<T>(m, b%n_block, b/n_block, j%KV_MOVE_UNITS, j/KV_MOVE_UNITS%KV_MOVE_MOVES);
    }
}

template <typename T> static void run_dim_0(const ggml_tensor * dst, bool reversed) {
    const kv_move_args m = kv_move_get_args(dst, sizeof(T));

    const int64_t n = m.n_rows*(m.n_move + 7); // a block has more threads than moves
    for (int64_t i = 0; i < n; ++i) {
        const int64_t j = place(i, n, reversed);

        kv_move_dim_0<T>(m, j/(m.n_move + 7), j%(m.n_move + 7));
    }
}

static int run_move(const ggml_tensor * dst, bool reversed) {
    if (ggml_get_op_params_i32(dst, 0) == 0) {
        if (ggml_type_size(dst->src[0]->type) == 2) {
            run_dim_0<uint16_t>(dst, reversed);
        } else {
            run_dim_0<uint32_t>(dst, reversed);
        }
        return 1;
    }

    const int unit = kv_move_unit(dst);
    switch (unit) {
        case 16: run_dim_1<kv_uint4>(dst, reversed); break;
        case 8:  run_dim_1<uint64_t>(dst, reversed); break;
        case 4:  run_dim_1<uint32_t>(dst, reversed); break;
        case 2:  run_dim_1<uint16_t>(dst, reversed); break;
        default: run_dim_1<uint8_t> (dst, reversed); break;
    }
    return unit;
}

#if defined(_WIN32)
#define API extern "C" __declspec(dllexport)
#else
#define API extern "C" __attribute__((visibility("default")))
#endif

// Computes the node, whose tensors are in host memory; 0 if the CUDA backend would not take it.
// kv_mass: returns the number of passes, kv_move: the bytes that a thread copies at once (1 for single elements).
API int kv_cuda_host_compute(const ggml_tensor * dst, bool reversed, int n_slot) {
    if (dst->op == GGML_OP_KV_MOVE) {
        return kv_move_is_supported(dst) ? run_move(dst, reversed) : 0;
    }
    return dst->op == GGML_OP_KV_MASS && kv_mass_is_supported(dst) ? run_mass(dst, reversed, n_slot) : 0;
}
