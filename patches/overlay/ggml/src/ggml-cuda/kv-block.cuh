#pragma once

// A block of threads, as the bodies of our kernels see it. They are written once, for two machines: a CUDA block (below), and
// a loop over the threads of a block in a host compiler (tests/native), which checks indices, masks, tails and reductions
// where there is no GPU. Code outside of the calls is uniform: it runs in all threads alike.
//
//   each(f)                f(i, thread) in every thread i; thread: its registers. f writes nothing that other threads read.
//   phase(f)               the same, then a barrier
//   sum<n>(&T::x)          over groups of n neighbouring threads, n <= 32 a power of two; all of them get the result.
//   max<n>(&T::x)          x is a float, or an array of them

#include "ggml.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(GGML_KV_HOST)

#define KV_DEVICE       static inline
#define KV_DEVICE_CLASS inline
#define KV_UNROLL

#else

#include "common.cuh"

#define KV_DEVICE       static __device__ __forceinline__
#define KV_DEVICE_CLASS __device__ __forceinline__
#define KV_UNROLL       _Pragma("unroll")

template <typename T> struct kv_block {
    T thread;

    template <typename F> KV_DEVICE_CLASS void each(F f) {
        f((int) threadIdx.x, thread);
    }

    template <typename F> KV_DEVICE_CLASS void phase(F f) {
        f((int) threadIdx.x, thread);
        __syncthreads();
    }

    template <int width> KV_DEVICE_CLASS void sum(float T::* x) {
        thread.*x = warp_reduce_sum<width>(thread.*x);
    }

    template <int width, int n> KV_DEVICE_CLASS void sum(float (T::* x)[n]) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            (thread.*x)[i] = warp_reduce_sum<width>((thread.*x)[i]);
        }
    }

    template <int width> KV_DEVICE_CLASS void max(float T::* x) {
        thread.*x = warp_reduce_max<width>(thread.*x);
    }
};

#endif

// what one instruction loads

struct alignas(16) kv_float4 {
    float v[4];
};

struct alignas(16) kv_uint4 {
    uint32_t v[4];
};

// and their parts as floats

KV_DEVICE float kv_f16(uint16_t bits) {
#if defined(GGML_KV_HOST)
    return ggml_fp16_to_fp32(bits);
#else
    half x;
    memcpy(&x, &bits, sizeof(x));
    return __half2float(x);
#endif
}

KV_DEVICE float kv_bf16(uint16_t bits) {
    const uint32_t bits_f32 = (uint32_t) bits << 16;

    float x;
    memcpy(&x, &bits_f32, sizeof(x));
    return x;
}
