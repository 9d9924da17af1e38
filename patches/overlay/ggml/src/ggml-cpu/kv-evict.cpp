#include "kv-evict.h"
#include "kv-evict-dot.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml-kv-evict.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

// cells that are scored together; threads take tiles in turn, which spreads masked regions evenly
// (loops over 32 are vectorised by compilers, loops over 16 are unrolled instead)
static constexpr int N_TILE = 32;

// queries that are scored between two barriers, and the scratch for their logits that they may take
static constexpr int64_t N_BLOCK      = 8;
static constexpr int64_t MAX_LOGITS   = 4*1024*1024;
static constexpr size_t  SCRATCH_PAD  = 128; // no two threads write to one cache line

// ggml_kv_mass

namespace {

struct kv_mass {
    explicit kv_mass(const ggml_tensor * dst) :
        rows   (dst->src[0]),
        q      (dst->src[1]),
        k      (dst->src[2]),
        mask   (dst->src[3]),
        sinks  (dst->src[6] ? (const float *) dst->src[6]->data : nullptr),
        row_idx((const int32_t *) dst->src[5]->data),
        n_embd    (q->ne[0]),
        n_head    (q->ne[1]),
        n_head_kv (k->ne[1]),
        n_gqa     (n_head/n_head_kv),
        n_kv      (k->ne[2]),
        n_tokens  (q->ne[2]),
        n_stream_tokens(n_tokens/k->ne[3]),
        assign        (ggml_get_op_params_i32(dst, GGML_KV_MASS_ASSIGN) != 0),
        scale         (ggml_get_op_params_f32(dst, GGML_KV_MASS_SCALE)),
        max_bias      (ggml_get_op_params_f32(dst, GGML_KV_MASS_MAX_BIAS)),
        softcap       (ggml_get_op_params_f32(dst, GGML_KV_MASS_SOFTCAP)) {
    }

    const ggml_tensor * rows;
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * mask;
    const float       * sinks;
    const int32_t     * row_idx;

    const int64_t n_embd;
    const int64_t n_head;
    const int64_t n_head_kv;
    const int64_t n_gqa;
    const int64_t n_kv;
    const int64_t n_tokens;
    const int64_t n_stream_tokens;

    const bool  assign;
    const float scale;
    const float max_bias;
    const float softcap;

    // ALiBi
    float slope(int64_t h) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const int64_t n_head_log2 = 1ll << (int) std::floor(std::log2((double) n_head));
        return h < n_head_log2 ?
            std::pow(2.0f, -max_bias*(h + 1)/n_head_log2) :
            std::pow(2.0f, -max_bias*(2*(h - n_head_log2) + 1)/(2*n_head_log2));
    }

    bool is_scored(int64_t t) const { return row_idx[t] >= 0; }

    float * row(int64_t t) const { return (float *) ((char *) rows->data + row_idx[t]*rows->nb[1]); }

    const float * q_row(int64_t t, int64_t h) const {
        return (const float *) ((const char *) q->data + h*q->nb[1] + t*q->nb[2]);
    }

    int64_t stream(int64_t t) const { return t/n_stream_tokens; }

    const char * k_row(int64_t c, int64_t h_kv, int64_t s) const {
        return (const char *) k->data + h_kv*k->nb[1] + c*k->nb[2] + s*k->nb[3];
    }

    void get_mask(float * dst, int64_t c, int64_t n, int64_t t) const {
        const char * src = (const char *) mask->data + t%n_stream_tokens*mask->nb[1] + stream(t)*mask->nb[3];
        if (mask->type == GGML_TYPE_F16) {
            ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) src + c, dst, n);
        } else {
            memcpy(dst, (const float *) src + c, n*sizeof(float));
        }
    }
};

} // namespace

// the spec: one thread per query, everything in double

static void kv_mass_ref(const ggml_compute_params * params, const kv_mass & a, float coef) {
    const ggml_to_float_t to_float = ggml_get_type_traits(a.k->type)->to_float;

    std::vector<float>  k_f32(a.n_embd);
    std::vector<float>  mask(a.n_kv);
    std::vector<double> logits(a.n_kv);
    std::vector<double> mass(a.n_kv);

    for (int64_t t = params->ith; t < a.n_tokens; t += params->nth) {
        if (!a.is_scored(t)) {
            continue;
        }

        a.get_mask(mask.data(), 0, a.n_kv, t);
        std::fill(mass.begin(), mass.end(), 0.0);

        for (int64_t h = 0; h < a.n_head; ++h) {
            const float * q = a.q_row(t, h);
            const float slope = a.slope(h);

            double max = a.sinks ? a.sinks[h] : -INFINITY;

            for (int64_t c = 0; c < a.n_kv; ++c) {
                logits[c] = -INFINITY;
                if (mask[c] == -INFINITY) {
                    continue;
                }

                const char * k = a.k_row(c, h/a.n_gqa, a.stream(t));
                if (to_float) {
                    to_float(k, k_f32.data(), a.n_embd);
                } else {
                    memcpy(k_f32.data(), k, a.n_embd*sizeof(float));
                }

                double dot = 0.0;
                for (int64_t i = 0; i < a.n_embd; ++i) {
                    dot += (double) q[i]*k_f32[i];
                }

                double x = dot*a.scale;
                if (a.softcap != 0.0f) {
                    x = a.softcap*std::tanh(x/a.softcap);
                }

                logits[c] = x + slope*mask[c];
                max       = std::max(max, logits[c]);
            }

            double sum = a.sinks ? std::exp(a.sinks[h] - max) : 0.0;
            for (int64_t c = 0; c < a.n_kv; ++c) {
                if (logits[c] != -INFINITY) {
                    sum += std::exp(logits[c] - max);
                }
            }
            for (int64_t c = 0; c < a.n_kv; ++c) {
                if (logits[c] != -INFINITY) {
                    mass[c] += std::exp(logits[c] - max)/sum;
                }
            }
        }

        float * row = a.row(t);
        for (int64_t c = 0; c < a.n_kv; ++c) {
            row[c] = (a.assign ? 0.0f : row[c]) + coef*mass[c]/a.n_head;
        }
    }
}

// fast path

// masked cells are chosen, not added: what their K holds may be anything
static void finish_logits(float * GGML_RESTRICT x, const float * GGML_RESTRICT mask, float scale, float softcap, float slope) {
    for (int i = 0; i < N_TILE; ++i) {
        x[i] *= scale;
    }
    if (softcap != 0.0f) {
        for (int i = 0; i < N_TILE; ++i) {
            x[i] = softcap*tanhf(x[i]/softcap);
        }
    }
    for (int i = 0; i < N_TILE; ++i) {
        x[i] += slope*mask[i];
    }
    for (int i = 0; i < N_TILE; ++i) {
        x[i] = mask[i] == -INFINITY ? -INFINITY : x[i];
    }
}

namespace {

// max and sum of exp(logit - max) over the cells of one thread
struct kv_mass_stat {
    float max;
    float sum;
};

// scratch of one thread, in bytes from its start, and the whole
struct kv_mass_layout {
    kv_mass_layout(const kv_mass & a, int nth) {
        // q as f32 is never smaller than q as the type of a dot product
        const size_t q_size = a.n_embd*sizeof(float);

        n_block = std::max<int64_t>(1, std::min(N_BLOCK, MAX_LOGITS/(a.n_head*a.n_kv)));
        n_block = std::min({ n_block, a.rows->ne[1], a.n_tokens });
        n_q     = n_block*a.n_head;
        n_cells = ((a.n_kv + N_TILE - 1)/N_TILE + nth - 1)/nth*N_TILE;

        size_t pos = 0;
        auto take = [&pos](size_t size) {
            const size_t res = pos;
            pos += GGML_PAD(size, SCRATCH_PAD);
            return res;
        };

        q      = take(q_size*n_q);
        q_tmp  = take(q_size);
        mask   = take(sizeof(float)*N_TILE*n_block);
        slope  = take(sizeof(float)*a.n_head);
        logits = take(sizeof(float)*n_q*n_cells);
        stat   = take(sizeof(kv_mass_stat)*n_q*2); // two, used in turn: one barrier per block is enough
        total  = pos;
    }

    int64_t n_block;
    int64_t n_q;
    int64_t n_cells;

    size_t q, q_tmp, mask, slope, logits, stat, total;
};

// the scored queries of a block, all of one stream
struct kv_mass_block {
    int     n;
    int64_t t[N_BLOCK];
};

} // namespace

size_t ggml_kv_mass_work_size(const ggml_tensor * dst, int n_tasks) {
    const kv_mass a(dst);

    // fewer threads than planned need less in total, but for the rounding of n_cells
    const kv_mass_layout l(a, n_tasks);
    return SCRATCH_PAD + n_tasks*(l.total + sizeof(float)*l.n_q*N_TILE + SCRATCH_PAD);
}

// Row r of a block is query b, head h: r = (h_kv*n + b)*n_gqa + h%n_gqa, so that rows that share K are neighbours.
struct kv_mass_worker {
    kv_mass_worker(const ggml_compute_params * params, const kv_mass & a, float coef) :
        a(a), l(a, params->nth), coef(coef), ith(params->ith), nth(params->nth), params(params) {
        // vectors must not straddle cache lines
        data = (char *) GGML_PAD((uintptr_t) params->wdata, SCRATCH_PAD);
        GGML_ASSERT(data + l.total*nth <= (char *) params->wdata + params->wsize);

        dot_tile = get_dot_tile(a.k->type);
        vec_dot  = ggml_get_type_traits_cpu(a.k->type)->vec_dot;
        q_type   = ggml_get_type_traits_cpu(a.k->type)->vec_dot_type;
        q_size   = dot_tile ? a.n_embd*sizeof(float) : ggml_row_size(q_type, a.n_embd);

        for (int64_t h = 0; h < a.n_head; ++h) {
            scratch(l.slope)[h] = a.slope(h);
        }
    }

    const kv_mass & a;

    const kv_mass_layout l;

    const float coef;
    const int   ith;
    const int   nth;

    const ggml_compute_params * params;

    char * data; // scratch of all threads

    dot_tile_t     dot_tile;
    ggml_vec_dot_t vec_dot;
    ggml_type      q_type;
    size_t         q_size;

    float * scratch(size_t pos) const { return scratch(pos, ith); }

    float * scratch(size_t pos, int thread) const {
        return (float *) (data + l.total*thread + pos);
    }

    // rounded as attention rounds it
    void set_q(const kv_mass_block & block) {
        const ggml_from_float_t from_float = ggml_get_type_traits_cpu(q_type)->from_float;
        const ggml_to_float_t   to_float   = ggml_get_type_traits(q_type)->to_float;

        char * dst = (char *) scratch(l.q);
        for (int64_t h_kv = 0; h_kv < a.n_head_kv; ++h_kv) {
            for (int b = 0; b < block.n; ++b) {
                for (int64_t j = 0; j < a.n_gqa; ++j, dst += q_size) {
                    const float * q = a.q_row(block.t[b], h_kv*a.n_gqa + j);
                    if (q_type == GGML_TYPE_F32) {
                        memcpy(dst, q, q_size);
                    } else if (dot_tile) {
                        from_float(q, scratch(l.q_tmp), a.n_embd);
                        to_float(scratch(l.q_tmp), (float *) dst, a.n_embd);
                    } else {
                        from_float(q, dst, a.n_embd);
                    }
                }
            }
        }
    }

    // q.k of n_q rows and n_k cells
    void dot(float * dst, int64_t h_kv, int n_q, int64_t c, int n_k, int64_t s) const {
        const char * k = a.k_row(c, h_kv, s);
        const char * q = (const char *) scratch(l.q) + h_kv*n_q*q_size;

        if (dot_tile) {
            dot_tile(a.n_embd, n_q, n_k, dst, l.n_cells, k, a.k->nb[2], (const float *) q);
            return;
        }
        for (int i = 0; i < n_k; ++i) {
            for (int j = 0; j < n_q; ++j) {
                vec_dot(a.n_embd, dst + j*l.n_cells + i, 0, k + i*a.k->nb[2], 0, q + j*q_size, 0, 1);
            }
        }
    }

    // returns false if no query of the block sees a cell of the tile
    bool set_mask(const kv_mass_block & block, int64_t c, int n) {
        bool any = false;
        for (int b = 0; b < block.n; ++b) {
            float * mask = scratch(l.mask) + b*N_TILE;
            a.get_mask(mask, c, n, block.t[b]);
            std::fill(mask + n, mask + N_TILE, -INFINITY);
            any = any || std::any_of(mask, mask + n, [](float x) { return x != -INFINITY; });
        }
        return any;
    }

    // logits of this thread's cells; returns how many, a multiple of N_TILE
    int64_t set_logits(const kv_mass_block & block) {
        int64_t pos = 0;
        for (int64_t c = (int64_t) ith*N_TILE; c < a.n_kv; c += (int64_t) nth*N_TILE, pos += N_TILE) {
            const int  n   = std::min<int64_t>(N_TILE, a.n_kv - c);
            const int  n_q = block.n*a.n_gqa;
            const bool any = set_mask(block, c, n);

            for (int64_t h_kv = 0; h_kv < a.n_head_kv; ++h_kv) {
                float * x = scratch(l.logits) + h_kv*n_q*l.n_cells + pos;
                if (any) {
                    dot(x, h_kv, n_q, c, n, a.stream(block.t[0]));
                }
                for (int j = 0; j < n_q; ++j, x += l.n_cells) {
                    if (any) {
                        const float slope = scratch(l.slope)[h_kv*a.n_gqa + j%a.n_gqa];
                        finish_logits(x, scratch(l.mask) + j/a.n_gqa*N_TILE, a.scale, a.softcap, slope);
                    } else {
                        std::fill(x, x + N_TILE, -INFINITY);
                    }
                }
            }
        }
        return pos;
    }

    // x becomes exp(x - max)
    static kv_mass_stat exp_logits(float * x, int64_t n) {
        float max[N_TILE];
        std::fill(max, max + N_TILE, -INFINITY);
        for (int64_t c = 0; c < n; c += N_TILE) {
            for (int i = 0; i < N_TILE; ++i) {
                max[i] = x[c + i] > max[i] ? x[c + i] : max[i];
            }
        }

        kv_mass_stat res = { *std::max_element(max, max + N_TILE), 0.0f };
        if (res.max == -INFINITY) {
            std::fill(x, x + n, 0.0f);
        } else {
            res.sum = ggml_vec_soft_max_f32(n, x, x, res.max);
        }
        return res;
    }

    const kv_mass_stat * stats(int thread, int turn) const { return (const kv_mass_stat *) scratch(l.stat, thread) + turn*l.n_q; }

    // what turns this thread's exp(x - max) of row r into its share of the mass
    float get_weight(int r, int turn, int64_t h) const {
        float max = a.sinks ? a.sinks[h] : -INFINITY;
        for (int i = 0; i < nth; ++i) {
            max = std::max(max, stats(i, turn)[r].max);
        }
        if (max == -INFINITY) {
            return 0.0f;
        }

        float sum = a.sinks ? expf(a.sinks[h] - max) : 0.0f;
        for (int i = 0; i < nth; ++i) {
            sum += stats(i, turn)[r].sum*expf(stats(i, turn)[r].max - max);
        }
        return coef/a.n_head*expf(stats(ith, turn)[r].max - max)/sum;
    }

    // the weighted sum over heads gathers in the place of the query's first head
    void add_mass(const kv_mass_block & block, int64_t n_cells, int turn) {
        for (int b = 0; b < block.n; ++b) {
            float * mass = nullptr;
            for (int64_t h = 0; h < a.n_head; ++h) {
                const int64_t r = (h/a.n_gqa*block.n + b)*a.n_gqa + h%a.n_gqa;
                const float   w = get_weight(r, turn, h);

                float * p = scratch(l.logits) + r*l.n_cells;
                if (h == 0) {
                    mass = p;
                    ggml_vec_scale_f32(n_cells, mass, w);
                } else {
                    ggml_vec_mad_f32(n_cells, mass, p, w);
                }
            }

            float * row = a.row(block.t[b]);
            for (int64_t c = (int64_t) ith*N_TILE; c < a.n_kv; c += (int64_t) nth*N_TILE, mass += N_TILE) {
                const int n = std::min<int64_t>(N_TILE, a.n_kv - c);
                if (a.assign) {
                    ggml_vec_cpy_f32(n, row + c, mass);
                } else {
                    ggml_vec_acc_f32(n, row + c, mass);
                }
            }
        }
    }

    void add_block(const kv_mass_block & block, int turn) {
        set_q(block);

        const int64_t n_cells = set_logits(block);
        const int     n_rows  = block.n*a.n_head;

        kv_mass_stat * stat = (kv_mass_stat *) scratch(l.stat) + turn*l.n_q;
        for (int r = 0; r < n_rows; ++r) {
            stat[r] = exp_logits(scratch(l.logits) + r*l.n_cells, n_cells);
        }

        ggml_barrier(params->threadpool);

        add_mass(block, n_cells, turn);
    }

    void add_all() {
        int64_t t    = 0;
        int     turn = 0;

        for (;;) {
            kv_mass_block block = { 0, {} };
            for (; t < a.n_tokens && block.n < l.n_block; ++t) {
                if (!a.is_scored(t)) {
                    continue;
                }
                if (block.n > 0 && a.stream(t) != a.stream(block.t[0])) {
                    break;
                }
                block.t[block.n++] = t;
            }
            if (block.n == 0) {
                return;
            }
            add_block(block, turn);
            turn = 1 - turn;
        }
    }
};

void ggml_compute_forward_kv_mass(const ggml_compute_params * params, ggml_tensor * dst) {
    const kv_mass a(dst);
    const float   coef = ((const float *) dst->src[4]->data)[ggml_get_op_params_i32(dst, GGML_KV_MASS_IL)];

    const bool    any     = std::any_of(a.row_idx, a.row_idx + a.n_tokens, [](int32_t i) { return i >= 0; });
    const int64_t t_start = any && params->ith == 0 ? ggml_time_us() : 0;

    if (any && params->use_ref) {
        kv_mass_ref(params, a, coef);
    } else if (any) {
        kv_mass_worker(params, a, coef).add_all();
    }

    if (params->ith == 0) {
        int64_t t_us;
        memcpy(&t_us, dst->op_params + GGML_KV_MASS_TIME, sizeof(t_us));
        t_us = std::max<int64_t>(t_us, 0) + (any ? ggml_time_us() - t_start : 0);
        memcpy(dst->op_params + GGML_KV_MASS_TIME, &t_us, sizeof(t_us));
    }
}

// ggml_kv_move

// elements of type T within each row, rows in turn over threads
template <typename T>
static void kv_move_dim_0(const ggml_compute_params * params, const ggml_tensor * a, const int32_t * from, const int32_t * to, int64_t n_move) {
    for (int64_t r = params->ith; r < ggml_nrows(a); r += params->nth) {
        const int64_t i1 = r%a->ne[1];
        const int64_t i2 = r/a->ne[1]%a->ne[2];
        const int64_t i3 = r/a->ne[1]/a->ne[2];

        T * row = (T *) ((char *) a->data + i1*a->nb[1] + i2*a->nb[2] + i3*a->nb[3]);
        for (int64_t i = 0; i < n_move; ++i) {
            row[to[i]] = row[from[i]];
        }
    }
}

// raw rows, moves in turn over threads
static void kv_move_dim_1(const ggml_compute_params * params, const ggml_tensor * a, const int32_t * from, const int32_t * to, int64_t n_move) {
    const size_t size = ggml_row_size(a->type, a->ne[0]);

    for (int64_t i3 = 0; i3 < a->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < a->ne[2]; ++i2) {
            char * data = (char *) a->data + i2*a->nb[2] + i3*a->nb[3];
            for (int64_t i = params->ith; i < n_move; i += params->nth) {
                memcpy(data + to[i]*a->nb[1], data + from[i]*a->nb[1], size);
            }
        }
    }
}

void ggml_compute_forward_kv_move(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * a   = dst->src[0];
    const ggml_tensor * idx = dst->src[1];

    const int32_t * from   = (const int32_t *) idx->data;
    const int32_t * to     = (const int32_t *) ((const char *) idx->data + idx->nb[1]);
    const int64_t   n_move = idx->ne[0];

    if (ggml_get_op_params_i32(dst, 0) == 1) {
        kv_move_dim_1(params, a, from, to, n_move);
        return;
    }

    switch (ggml_type_size(a->type)) {
        case 1: kv_move_dim_0<uint8_t> (params, a, from, to, n_move); break;
        case 2: kv_move_dim_0<uint16_t>(params, a, from, to, n_move); break;
        case 4: kv_move_dim_0<uint32_t>(params, a, from, to, n_move); break;
        case 8: kv_move_dim_0<uint64_t>(params, a, from, to, n_move); break;
        default: GGML_ABORT("fatal error");
    }
}
