#pragma once

// The threads of a CUDA block, one after the other: what ggml-cuda/kv-block.cuh asks of a block, on the host.

#include <cstring>
#include <type_traits>
#include <vector>

// Registers and shared memory start as NaN, and threads may run in either order: what a body reads before it is written, or
// without a barrier, shows in the result.
template <typename T> struct kv_block_host {
    static_assert(std::is_trivially_copyable<T>::value, "registers");

    kv_block_host(int n_threads, bool reversed) : threads(n_threads), reversed(reversed) {
        memset(threads.data(), 0xff, threads.size()*sizeof(T));
    }

    template <typename F> void each(F f) {
        const int n = (int) threads.size();
        for (int i = 0; i < n; ++i) {
            const int j = reversed ? n - 1 - i : i;
            f(j, threads[j]);
        }
    }

    template <typename F> void phase(F f) {
        each(f);
    }

    template <int width> void sum(float T::* x) {
        reduce<width>([x](T & th) -> float & { return th.*x; }, [](float a, float b) { return a + b; });
    }

    template <int width, int n> void sum(float (T::* x)[n]) {
        for (int k = 0; k < n; ++k) {
            reduce<width>([x, k](T & th) -> float & { return (th.*x)[k]; }, [](float a, float b) { return a + b; });
        }
    }

    template <int width> void max(float T::* x) {
        reduce<width>([x](T & th) -> float & { return th.*x; }, [](float a, float b) { return a < b ? b : a; });
    }

private:
    // in the order of shuffles: with the partner at distance width/2, width/4, ..., 1
    template <int width, typename Get, typename Op> void reduce(Get get, Op op) {
        for (size_t i0 = 0; i0 < threads.size(); i0 += width) {
            for (int offset = width/2; offset > 0; offset /= 2) {
                float before[width];
                for (int i = 0; i < width; ++i) {
                    before[i] = get(threads[i0 + i]);
                }
                for (int i = 0; i < width; ++i) {
                    get(threads[i0 + i]) = op(before[i], before[i ^ offset]);
                }
            }
        }
    }

    std::vector<T> threads;
    const bool     reversed;
};

// memory that holds NaN until it is written; aligned as what a CUDA kernel gets
template <typename T> struct kv_memory_host {
    explicit kv_memory_host(size_t n) : units((n*sizeof(T) + sizeof(unit) - 1)/sizeof(unit)) { poison(); }

    void poison() {
        if (!units.empty()) {
            memset(units.data(), 0xff, units.size()*sizeof(unit));
        }
    }

    T * get() { return reinterpret_cast<T *>(units.data()); }

private:
    struct alignas(16) unit {
        char data[16];
    };

    std::vector<unit> units;
};
