#pragma once

// What a block of each of the two kernels of GGML_OP_KV_MASS does

#include "kv-block.cuh"
#include "kv-mass-args.cuh"

#include <type_traits>

// K: a chunk is 8 values, loaded by one thread. Value e of a row is value place(e)%8 of chunk place(e)/8.
// Blocks of q8_0 (34 bytes) and q4_0 (18) are aligned to 2 bytes only, and so are the loads.

template <ggml_type type> struct kv_mass_k;

template <> struct kv_mass_k<GGML_TYPE_F32> {
    static KV_DEVICE_CLASS int place(int e) { return e; }

    static KV_DEVICE_CLASS void load(const char * row, int chunk, float * k) {
        const kv_float4 * x = (const kv_float4 *) row + 2*chunk;
        KV_UNROLL
        for (int i = 0; i < 8; ++i) {
            k[i] = x[i/4].v[i%4];
        }
    }
};

template <> struct kv_mass_k<GGML_TYPE_F16> {
    static KV_DEVICE_CLASS int place(int e) { return e; }

    static KV_DEVICE_CLASS void load(const char * row, int chunk, float * k) {
        const kv_uint4 x = ((const kv_uint4 *) row)[chunk];
        KV_UNROLL
        for (int i = 0; i < 8; ++i) {
            k[i] = kv_f16((uint16_t) (x.v[i/2] >> (i%2*16)));
        }
    }
};

template <> struct kv_mass_k<GGML_TYPE_BF16> {
    static KV_DEVICE_CLASS int place(int e) { return e; }

    static KV_DEVICE_CLASS void load(const char * row, int chunk, float * k) {
        const kv_uint4 x = ((const kv_uint4 *) row)[chunk];
        KV_UNROLL
        for (int i = 0; i < 8; ++i) {
            k[i] = kv_bf16((uint16_t) (x.v[i/2] >> (i%2*16)));
        }
    }
};

template <> struct kv_mass_k<GGML_TYPE_Q8_0> {
    static KV_DEVICE_CLASS int place(int e) { return e; }

    static KV_DEVICE_CLASS void load(const char * row, int chunk, float * k) {
        const uint16_t * x  = (const uint16_t *) (row + chunk/4*34);
        const uint16_t * qs = x + 1 + chunk%4*4;

        const float d = kv_f16(x[0]);
        KV_UNROLL
        for (int i = 0; i < 8; ++i) {
            k[i] = d*(int8_t) (qs[i/2] >> (i%2*8));
        }
    }
};

// byte j of a block holds its values j and j + 16
template <> struct kv_mass_k<GGML_TYPE_Q4_0> {
    static KV_DEVICE_CLASS int place(int e) { return e/32*32 + e%16/4*8 + e%32/16*4 + e%4; }

    static KV_DEVICE_CLASS void load(const char * row, int chunk, float * k) {
        const uint16_t * x  = (const uint16_t *) (row + chunk/4*18);
        const uint16_t * qs = x + 1 + chunk%4*2;

        const float d = kv_f16(x[0]);
        KV_UNROLL
        for (int i = 0; i < 4; ++i) {
            const int byte = qs[i/2] >> (i%2*8);
            k[i]     = d*((byte      & 0xf) - 8);
            k[i + 4] = d*((byte >> 4 & 0xf) - 8);
        }
    }
};

// the queries of a pass, shared memory
struct kv_mass_queries {
    int count[KV_MASS_THREADS]; // scored ones among the tokens of a thread
    int token[KV_MASS_SLOTS];
    int n;
};

// tokens of a thread: few threads with some are few counts to add
KV_DEVICE int kv_mass_part(int n_tokens) {
    const int n = (n_tokens + KV_MASS_THREADS - 1)/KV_MASS_THREADS;
    return n < 8 ? 8 : n;
}

template <typename Block> KV_DEVICE void kv_mass_find_queries(Block & block, kv_mass_queries & s, const kv_mass_args & a) {
    const int n_part = kv_mass_part(a.n_tokens);
    const int n_used = (a.n_tokens + n_part - 1)/n_part; // threads that have some

    block.phase([&](int i, auto &) {
        int n = 0;
        for (int t = i*n_part; t < (i + 1)*n_part && t < a.n_tokens; ++t) {
            n += a.row_idx[t] >= 0;
        }
        s.count[i] = n;
    });

    block.phase([&](int i, auto &) {
        int slot = -a.i_slot;
        for (int j = 0; j < i && j < n_used; ++j) {
            slot += s.count[j];
        }
        for (int t = i*n_part; t < (i + 1)*n_part && t < a.n_tokens; ++t) {
            if (a.row_idx[t] >= 0) {
                if (slot >= 0 && slot < a.n_slot) {
                    s.token[slot] = t;
                }
                ++slot;
            }
        }
        if (i == KV_MASS_THREADS - 1) {
            s.n = slot < 0 ? 0 : slot < a.n_slot ? slot : a.n_slot;
        }
    });
}

KV_DEVICE float kv_mass_slope(const kv_mass_args & a, int h) {
    if (a.max_bias <= 0.0f) {
        return 1.0f;
    }
    return h < a.n_head_log2 ?
        exp2f(-a.max_bias*(h + 1)/a.n_head_log2) :
        exp2f(-a.max_bias*(2*(h - a.n_head_log2) + 1)/(2*a.n_head_log2));
}

// tanhf of -use_fast_math is off by up to 2^-11, which a softcap of 30 would make 1.5 % of a mass
KV_DEVICE float kv_mass_tanh(float x) {
    return 1.0f - 2.0f/(1.0f + expf(2.0f*x));
}

// a masked cell's logit is chosen, not added to: what its K holds may be anything
KV_DEVICE float kv_mass_logit(const kv_mass_args & a, float dot, float mask, float slope) {
    if (mask == -INFINITY) {
        return -INFINITY;
    }
    float x = dot*a.scale;
    if (a.softcap != 0.0f) {
        x = a.softcap*kv_mass_tanh(x/a.softcap);
    }
    return x + slope*mask;
}

KV_DEVICE float kv_mass_mask(const kv_mass_args & a, int t, int c) {
    const char * row = a.mask + t%a.n_stream_tokens*a.nb_m1 + t/a.n_stream_tokens*a.nb_m3;

    return a.mask_f16 ? kv_f16(((const uint16_t *) row)[c]) : ((const float *) row)[c];
}

// First kernel: logits and their statistics. A block has the cells of a tile and one KV head of a stream. A K row is read
// once for n_row rows of q, which are the query heads that share it, for one or several queries.
template <ggml_type type, int n_lane, int n_row> struct kv_mass_logits {
    static constexpr int N_WARP  = KV_MASS_THREADS/32;
    static constexpr int N_GROUP = KV_MASS_THREADS/n_lane;         // groups of threads that share a K row
    static constexpr int N_OWN   = n_lane <= 8 ? 2 : 4;            // K rows that a group has in flight
    static constexpr int N_CELL  = N_GROUP*N_OWN;                  // cells of a step
    static constexpr int N_X     = N_CELL/32;                      // logits of a thread, a warp has a row of q

    static_assert(n_row <= N_WARP,               "a warp finishes the logits of one row of q");
    static_assert(KV_MASS_CELLS % N_CELL == 0,   "a tile is a number of whole steps");

    struct shared {
        kv_mass_queries queries;

        float dot[n_row][N_CELL];
    };

    struct thread {
        float dot[n_row*N_OWN];
        float x[N_X];
        float max; // of the cells so far
        float sum;
        float max_new;
        float sum_new;
    };

    static constexpr int N_Q = n_row; // rows of q in shared memory

    // of a row of q, of all streams' queries in this pass
    static KV_DEVICE_CLASS int slot(const kv_mass_args & a, int first, int row) { return first + row/a.n_gqa; }
    static KV_DEVICE_CLASS int head(const kv_mass_args & a, int h_kv,  int row) { return h_kv*a.n_gqa + row%a.n_gqa; }

    // q: [n_row][2][n_embd/8] in shared memory, the two halves of a chunk apart: neighbouring threads read neighbouring banks
    template <typename Block> static KV_DEVICE_CLASS void run(
            Block & block, shared & s, kv_float4 * q, const kv_mass_args & a, int tile, int h_kv, int stream) {
        kv_mass_find_queries(block, s.queries, a);

        int first = 0;
        while (first < s.queries.n && s.queries.token[first] < stream*a.n_stream_tokens) {
            ++first;
        }
        int last = first;
        while (last < s.queries.n && s.queries.token[last] < (stream + 1)*a.n_stream_tokens) {
            ++last;
        }

        const int rows    = (last - first)*a.n_gqa;
        const int n_chunk = a.n_embd/8;

        const int c_first = tile*a.n_tile_cells;
        const int c_end   = c_first + a.n_tile_cells < a.n_kv ? c_first + a.n_tile_cells : a.n_kv;

        const char * k_first = a.k + h_kv*a.nb_k1 + stream*a.nb_k3;

        for (int r0 = 0; r0 < rows; r0 += n_row) {
            block.phase([&](int i, thread & th) {
                for (int j = i; j < n_row*a.n_embd; j += KV_MASS_THREADS) {
                    const int r = j/a.n_embd;
                    const int e = j%a.n_embd;
                    const int p = kv_mass_k<type>::place(e);

                    float value = 0.0f;
                    if (r0 + r < rows) {
                        const int t = s.queries.token[slot(a, first, r0 + r)];
                        value = ((const float *) (a.q + head(a, h_kv, r0 + r)*a.nb_q1 + t*a.nb_q2))[e];
                    }
                    q[(2*r + p%8/4)*n_chunk + p/8].v[p%4] = value;
                }
                th.max = -INFINITY;
                th.sum = 0.0f;
            });

            for (int c0 = c_first; c0 < c_end; c0 += N_CELL) {
                block.each([&](int i, thread & th) {
                    const int group = i/n_lane;
                    const int lane  = i%n_lane;

                    KV_UNROLL
                    for (int j = 0; j < n_row*N_OWN; ++j) {
                        th.dot[j] = 0.0f;
                    }
                    for (int chunk = lane; chunk < n_chunk; chunk += n_lane) {
                        float k[N_OWN][8];
                        KV_UNROLL
                        for (int o = 0; o < N_OWN; ++o) {
                            const int c = c0 + o*N_GROUP + group;
                            kv_mass_k<type>::load(k_first + (c < c_end ? c : c_end - 1)*a.nb_k2, chunk, k[o]);
                        }
                        KV_UNROLL
                        for (int r = 0; r < n_row; ++r) {
                            const kv_float4 q0 = q[(2*r + 0)*n_chunk + chunk];
                            const kv_float4 q1 = q[(2*r + 1)*n_chunk + chunk];
                            KV_UNROLL
                            for (int o = 0; o < N_OWN; ++o) {
                                KV_UNROLL
                                for (int j = 0; j < 4; ++j) {
                                    th.dot[r*N_OWN + o] += q0.v[j]*k[o][j];
                                    th.dot[r*N_OWN + o] += q1.v[j]*k[o][j + 4];
                                }
                            }
                        }
                    }
                });

                block.template sum<n_lane>(&thread::dot);

                block.phase([&](int i, thread & th) {
                    if (i%n_lane == 0) {
                        KV_UNROLL
                        for (int j = 0; j < n_row*N_OWN; ++j) {
                            s.dot[j/N_OWN][j%N_OWN*N_GROUP + i/n_lane] = th.dot[j];
                        }
                    }
                });

                // from here on warp r has row r
                block.phase([&](int i, thread & th) {
                    const int r = r0 + i/32;

                    th.max_new = th.max;
                    if (i/32 >= n_row || r >= rows) {
                        KV_UNROLL
                        for (int j = 0; j < N_X; ++j) {
                            th.x[j] = -INFINITY;
                        }
                        return;
                    }

                    const int   t     = s.queries.token[slot(a, first, r)];
                    const int   h     = head(a, h_kv, r);
                    const float slope = kv_mass_slope(a, h);

                    float * logits = a.logits + ((size_t) slot(a, first, r)*a.n_head + h)*a.n_kv;
                    KV_UNROLL
                    for (int j = 0; j < N_X; ++j) {
                        const int i_cell = j*32 + i%32;
                        const int c      = c0 + i_cell;

                        th.x[j] = -INFINITY;
                        if (c < c_end) {
                            th.x[j]    = kv_mass_logit(a, s.dot[i/32][i_cell], kv_mass_mask(a, t, c), slope);
                            logits[c]  = th.x[j];
                            th.max_new = fmaxf(th.max_new, th.x[j]);
                        }
                    }
                });

                block.template max<32>(&thread::max_new);

                block.each([&](int, thread & th) {
                    th.sum_new = 0.0f;
                    KV_UNROLL
                    for (int j = 0; j < N_X; ++j) {
                        th.sum_new += th.x[j] == -INFINITY ? 0.0f : expf(th.x[j] - th.max_new);
                    }
                });

                block.template sum<32>(&thread::sum_new);

                block.each([&](int, thread & th) {
                    th.sum = (th.sum == 0.0f ? 0.0f : th.sum*expf(th.max - th.max_new)) + th.sum_new;
                    th.max = th.max_new;
                });
            }

            block.each([&](int i, thread & th) {
                const int r = r0 + i/32;
                if (i%32 == 0 && i/32 < n_row && r < rows) {
                    a.stats[((size_t) slot(a, first, r)*a.n_head + head(a, h_kv, r))*a.n_tile + tile] = { th.max, th.sum };
                }
            });
        }
    }
};

// Second kernel: masses, their mean over heads, the row. A block has KV_MASS_THREADS cells of one slot.
struct kv_mass_rows {
    static constexpr int N_WARP = KV_MASS_THREADS/32;

    struct shared {
        kv_mass_queries queries;
    };

    struct thread {
        float max;
        float sum;
    };

    // of a head: p = exp(logit - max)*scale
    struct softmax {
        float max;
        float scale;
    };

    // heads: [n_head] in shared memory
    template <typename Block> static KV_DEVICE_CLASS void run(
            Block & block, shared & s, softmax * heads, const kv_mass_args & a, int tile, int slot) {
        kv_mass_find_queries(block, s.queries, a);

        if (slot >= s.queries.n) {
            return;
        }

        const int t = s.queries.token[slot];

        // a warp has a head
        for (int h0 = 0; h0 < a.n_head; h0 += N_WARP) {
            block.each([&](int i, thread & th) {
                const int h = h0 + i/32;

                th.max = -INFINITY;
                for (int j = i%32; h < a.n_head && j < a.n_tile; j += 32) {
                    th.max = fmaxf(th.max, a.stats[((size_t) slot*a.n_head + h)*a.n_tile + j].max);
                }
            });

            block.template max<32>(&thread::max);

            block.each([&](int i, thread & th) {
                const int h = h0 + i/32;

                if (a.sinks && h < a.n_head) {
                    th.max = fmaxf(th.max, a.sinks[h]);
                }
                th.sum = 0.0f;
                for (int j = i%32; h < a.n_head && j < a.n_tile; j += 32) {
                    const kv_mass_stat stat = a.stats[((size_t) slot*a.n_head + h)*a.n_tile + j];
                    th.sum += stat.sum == 0.0f ? 0.0f : stat.sum*expf(stat.max - th.max);
                }
            });

            block.template sum<32>(&thread::sum);

            block.phase([&](int i, thread & th) {
                const int h = h0 + i/32;

                if (i%32 == 0 && h < a.n_head) {
                    const float sum = th.sum + (a.sinks ? expf(a.sinks[h] - th.max) : 0.0f);
                    // a query that sees nothing
                    heads[h] = sum > 0.0f ? softmax { th.max, 1.0f/sum } : softmax { 0.0f, 0.0f };
                }
            });
        }

        block.each([&](int i, thread &) {
            const int c = tile*KV_MASS_THREADS + i;
            if (c >= a.n_kv) {
                return;
            }

            const float * logits = a.logits + (size_t) slot*a.n_head*a.n_kv + c;

            float mass = 0.0f;
            for (int h = 0; h < a.n_head; ++h) {
                mass += expf(logits[(size_t) h*a.n_kv] - heads[h].max)*heads[h].scale;
            }

            float * row = (float *) (a.rows + a.row_idx[t]*a.nb_row);
            row[c] = (a.assign ? 0.0f : row[c]) + *a.coef*(mass/a.n_head);
        });
    }
};

// calls f(body) with the kv_mass_logits for K of this type and these many rows of q that share a K row
template <typename F> static void kv_mass_dispatch(ggml_type type, const kv_mass_args & a, F f) {
    const int n_lane = a.n_embd <= 64 ? 8 : a.n_embd <= 128 ? 16 : 32;
    const int n_row  = a.n_gqa*std::min(a.n_most, a.n_stream_tokens);

    const auto by_row = [&](auto type_, auto lane) {
        constexpr ggml_type T = decltype(type_)::value;
        constexpr int       L = decltype(lane)::value;
        if (n_row <= 1) {
            f(kv_mass_logits<T, L, 1>());
        } else if (n_row <= 4) {
            f(kv_mass_logits<T, L, 4>());
        } else {
            f(kv_mass_logits<T, L, 8>());
        }
    };

    const auto by_lane = [&](auto type_) {
        switch (n_lane) {
            case 8:  by_row(type_, std::integral_constant<int, 8>());  break;
            case 16: by_row(type_, std::integral_constant<int, 16>()); break;
            default: by_row(type_, std::integral_constant<int, 32>()); break;
        }
    };

    switch (type) {
        case GGML_TYPE_F32:  by_lane(std::integral_constant<ggml_type, GGML_TYPE_F32>());  break;
        case GGML_TYPE_F16:  by_lane(std::integral_constant<ggml_type, GGML_TYPE_F16>());  break;
        case GGML_TYPE_BF16: by_lane(std::integral_constant<ggml_type, GGML_TYPE_BF16>()); break;
        case GGML_TYPE_Q8_0: by_lane(std::integral_constant<ggml_type, GGML_TYPE_Q8_0>()); break;
        case GGML_TYPE_Q4_0: by_lane(std::integral_constant<ggml_type, GGML_TYPE_Q4_0>()); break;
        default: GGML_ABORT("fatal error");
    }
}
