#include "kv-attn.h"
#include "kv-simd.h"

// cells whose logits are finished together (a constant, so that compilers vectorise the loops over them)
static constexpr int N_TILE = 64;

// threads take multiples of this many cells: no two of them write to one cache line of a row
static constexpr int N_SPLIT = 16;

// queries that are computed between two barriers, and the scratch for their logits that they may take
static constexpr int64_t N_BLOCK    = 8;
static constexpr int64_t MAX_LOGITS = 4*1024*1024;

// masked cells are chosen, not added: what their K holds may be anything
static void finish_logits(float * GGML_RESTRICT x, const float * GGML_RESTRICT mask, float scale, float softcap, float slope) {
    if (softcap != 0.0f) {
        for (int i = 0; i < N_TILE; ++i) {
            x[i] = softcap*tanhf(x[i]*scale/softcap);
        }
        scale = 1.0f;
    }
    for (int i = 0; i < N_TILE; ++i) {
        const float sum = x[i]*scale + slope*mask[i]; // not below: a condition would keep compilers from vectors
        x[i] = mask[i] == -INFINITY ? -INFINITY : sum;
    }
}

namespace {

// of the cells of one thread: the largest logit, and the sum of exp(logit - max)
struct part_stat {
    float max;
    float sum;
};

// scratch of one thread
struct few_layout : kv_scratch {
    few_layout(const kv_attn & a, int nth) {
        n_block = std::max<int64_t>(1, std::min({ N_BLOCK, MAX_LOGITS/(a.n_head*a.n_kv), a.n_tokens }));
        n_q     = n_block*a.n_head;
        n_cells = GGML_PAD(GGML_PAD((a.n_kv + nth - 1)/nth, N_SPLIT), N_TILE);

        const int64_t n_embd = std::max(a.n_embd_k, a.n_embd_v);

        q      = take(sizeof(float)*n_q*a.n_embd_k); // q as the type of a dot product is no larger
        mask   = take(sizeof(float)*N_TILE*n_block);
        seen   = take(n_cells);
        tile   = take(sizeof(float)*std::max(N_TILE*n_embd, n_cells));
        slope  = take(sizeof(float)*a.n_head);
        logits = take(sizeof(float)*n_q*n_cells);
        // two of what other threads read, used in turn: one barrier per block is enough
        stat   = take(sizeof(part_stat)*n_q*2);
        values = take(sizeof(float)*n_q*a.n_embd_v*2);
    }

    int64_t n_block;
    int64_t n_q;
    int64_t n_cells;

    size_t q, mask, seen, tile, slope, logits, stat, values;
};

// queries that are computed together, all of one stream
struct query_block {
    int     n = 0;
    int64_t t[N_BLOCK];
};

// Row r of a block is query b, head h: r = (h_kv*n + b)*n_gqa + h%n_gqa, so that rows that share K and V are neighbours.
struct few_worker {
    few_worker(const ggml_compute_params * params, const kv_attn & a) :
        a(a), l(a, params->nth), ith(params->ith), nth(params->nth), threadpool(params->threadpool),
        data(kv_scratch::start(params)),
        kernels_k(get_kernels(a.k->type)), kernels_v(get_kernels(a.v ? a.v->type : GGML_TYPE_F32)), kernels_f32(get_kernels(GGML_TYPE_F32)) {
        GGML_ASSERT(data + l.size*nth <= (char *) params->wdata + params->wsize);

        if (a.round_q) {
            q_type = ggml_get_type_traits_cpu(a.k->type)->vec_dot_type;
        }
#if defined(KV_SIMD)
        const bool has_kernel = !ggml_is_quantized(q_type);
#else
        const bool has_kernel = !a.round_q;
#endif
        vec_dot = has_kernel ? nullptr : ggml_get_type_traits_cpu(a.k->type)->vec_dot;
        q_size  = has_kernel ? a.n_embd_k*sizeof(float) : ggml_row_size(q_type, a.n_embd_k);

        for (int64_t h = 0; h < a.n_head; ++h) {
            scratch(l.slope)[h] = a.slope(h);
        }
    }

    const kv_attn & a;

    const few_layout l;

    const int ith;
    const int nth;

    ggml_threadpool * threadpool;

    char * data; // scratch of all threads

    const row_kernels kernels_k;
    const row_kernels kernels_v;
    const row_kernels kernels_f32;

    ggml_type      q_type = GGML_TYPE_F32; // that q is rounded to
    size_t         q_size;
    ggml_vec_dot_t vec_dot;                // if set: of K and q in q_type

    // the cells of this thread, and where those of the one before end
    int64_t c0     = 0;
    int64_t c1     = 0;
    int64_t c_prev = 0;

    float * scratch(size_t pos) const { return scratch(pos, ith); }

    float * scratch(size_t pos, int thread) const { return (float *) (data + l.size*thread + pos); }

    uint8_t * seen() const { return (uint8_t *) scratch(l.seen); }

    // of the first row that reads K and V of this head, and the number of such rows
    float * logits(const query_block & block, int64_t h_kv) const { return scratch(l.logits) + h_kv*block.n*a.n_gqa*l.n_cells; }

    int n_rows(const query_block & block) const { return block.n*a.n_gqa; }

    part_stat * stats(int thread, int turn) const { return (part_stat *) scratch(l.stat, thread) + turn*l.n_q; }

    float * values(int thread, int turn) const { return scratch(l.values, thread) + turn*l.n_q*a.n_embd_v; }

    // some query sees some cell of [c, c + N_SPLIT)
    bool is_seen(const query_block & block, int64_t c) const {
        const int n = std::min<int64_t>(N_SPLIT, a.n_kv - c);

        float mask[N_SPLIT];
        return std::any_of(block.t, block.t + block.n, [&](int64_t t) {
            a.get_mask(mask, c, n, t);
            return std::any_of(mask, mask + n, [](float x) { return x != -INFINITY; });
        });
    }

    // Each thread takes as many cells that are seen: those of a window may all stand in one half of the cache.
    // If that makes a part too large for the scratch, all parts are of one size.
    void set_part(const query_block & block) {
        int64_t n_seen = 0;
        for (int64_t c = 0; c < a.n_kv; c += N_SPLIT) {
            n_seen += is_seen(block, c);
        }
        const int64_t n_part = std::max<int64_t>(1, (n_seen + nth - 1)/nth);

        bool    fits  = true;
        int64_t i     = 0;
        int64_t begin = 0;

        c_prev = c0 = c1 = 0;
        for (int64_t c = 0; c < a.n_kv; c += N_SPLIT) {
            if (!is_seen(block, c)) {
                continue;
            }
            if (i%n_part == 0) {
                begin = c;
            }
            const int64_t end = std::min<int64_t>(c + N_SPLIT, a.n_kv);
            fits = fits && end - begin <= l.n_cells;

            const int64_t thread = i++/n_part;
            if (thread < ith) {
                c_prev = c0 = c1 = end;
            } else if (thread == ith) {
                c0 = begin;
                c1 = end;
            }
        }

        if (!fits) {
            const int64_t n = GGML_PAD((a.n_kv + nth - 1)/nth, N_SPLIT);
            c_prev = c0 = std::min(a.n_kv, n*ith);
            c1     = std::min(a.n_kv, n*(ith + 1));
        }
    }

    void set_q(const query_block & block) {
        const ggml_from_float_t from_float = ggml_get_type_traits_cpu(q_type)->from_float;
        const ggml_to_float_t   to_float   = ggml_get_type_traits(q_type)->to_float;

        char * dst = (char *) scratch(l.q);
        for (int64_t h_kv = 0; h_kv < a.n_head_kv; ++h_kv) {
            for (int b = 0; b < block.n; ++b) {
                for (int64_t j = 0; j < a.n_gqa; ++j, dst += q_size) {
                    const float * q = a.q_row(block.t[b], h_kv*a.n_gqa + j);
                    if (q_type == GGML_TYPE_F32) {
                        memcpy(dst, q, q_size);
                    } else if (vec_dot) {
                        from_float(q, dst, a.n_embd_k);
                    } else {
                        from_float(q, scratch(l.tile), a.n_embd_k);
                        to_float(scratch(l.tile), (float *) dst, a.n_embd_k);
                    }
                }
            }
        }
    }

    // returns false if no query sees a cell of the tile
    bool set_mask(const query_block & block, int64_t c, int n) {
        uint8_t * any = seen() + (c - c0);
        std::fill(any, any + n, 0);

        for (int b = 0; b < block.n; ++b) {
            float * mask = scratch(l.mask) + b*N_TILE;
            a.get_mask(mask, c, n, block.t[b]);
            std::fill(mask + n, mask + N_TILE, -INFINITY);
            for (int i = 0; i < n; ++i) {
                any[i] |= mask[i] != -INFINITY;
            }
        }
        return std::any_of(any, any + n, [](uint8_t x) { return x; });
    }

    // f(i, n) for each run of cells in the tile that some query sees: what the others hold must not be touched
    template <typename F>
    void for_seen(int64_t c, int n, F f) const {
        const uint8_t * any = seen() + (c - c0);
        for (int i = 0; i < n; ) {
            int end = i;
            while (end < n && any[end]) {
                ++end;
            }
            if (end > i) {
                f(i, end - i);
            }
            i = end + 1;
        }
    }

    // rows that meet more queries than a kernel takes are converted once
    static bool is_direct(row_kernels::rows_t kernel, int n_q) { return kernel && n_q <= MAX_NQ; }

    void apply(row_kernels::rows_t row_kernels::* op, const row_kernels & kernels, int n, int n_q, int n_k,
               float * dst, int64_t ld, const row_block & rows, const float * x, int64_t ldx) const {
        if (is_direct(kernels.*op, n_q)) {
            (kernels.*op)(n, n_q, n_k, dst, ld, rows, x, ldx);
            return;
        }
        float * tile = scratch(l.tile);
        for (int i = 0; i < n_k; ++i) {
            kernels.to_f32(rows.data + i*rows.nb, tile + i*n, n);
        }
        (kernels_f32.*op)(n, n_q, n_k, dst, ld, { (const char *) tile, n*sizeof(float), 0 }, x, ldx);
    }

    row_block k_rows(int64_t c, int64_t h_kv, int64_t s) const { return { a.k_row(c, h_kv, s), a.k->nb[2], c1 - c }; }
    row_block v_rows(int64_t c, int64_t h_kv, int64_t s) const { return { a.v_row(c, h_kv, s), a.v->nb[2], c1 - c }; }

    // those that nothing fetches ahead
    void fetch_first(const row_block & rows) const {
        for (int i = 0; i < N_AHEAD; ++i) {
            rows.fetch(i, rows.nb);
        }
    }

    // q.k of the rows of a head and n cells
    void dot(float * dst, int64_t h_kv, int n_q, const row_block & k, int n) const {
        const char * q = (const char *) scratch(l.q) + h_kv*n_q*q_size;

        if (!vec_dot) {
            apply(&row_kernels::dot, kernels_k, a.n_embd_k, n_q, n, dst, l.n_cells, k, (const float *) q, a.n_embd_k);
            return;
        }
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j < n_q; ++j) {
                vec_dot(a.n_embd_k, dst + j*l.n_cells + i, 0, k.data + i*k.nb, 0, q + j*q_size, 0, 1);
            }
        }
    }

    // of this thread's cells, in whole tiles: those of none are masked
    void set_logits(const query_block & block) {
        const int64_t s = a.stream(block.t[0]);

        for (int64_t c = c0; c < c1; c += N_TILE) {
            const int  n   = std::min<int64_t>(N_TILE, c1 - c);
            const bool any = set_mask(block, c, n);

            for (int64_t h_kv = 0; h_kv < a.n_head_kv; ++h_kv) {
                float * x = logits(block, h_kv) + (c - c0);
                if (!any) {
                    for (int r = 0; r < n_rows(block); ++r) {
                        std::fill(x + r*l.n_cells, x + r*l.n_cells + N_TILE, -INFINITY);
                    }
                    continue;
                }

                for_seen(c, n, [&](int i, int n) { dot(x + i, h_kv, n_rows(block), k_rows(c + i, h_kv, s), n); });

                for (int b = 0; b < block.n; ++b) {
                    for (int64_t j = 0; j < a.n_gqa; ++j, x += l.n_cells) {
                        const float slope = scratch(l.slope)[h_kv*a.n_gqa + j];
                        finish_logits(x, scratch(l.mask) + b*N_TILE, a.scale, a.softcap, slope);
                    }
                }
            }
        }
    }

    // x becomes exp(x - max)
    static part_stat exp_logits(float * x, int64_t n) {
        static_assert(N_TILE%(4*VEC) == 0, "whole vectors");

        vec max[4];
        std::fill(max, max + 4, vec_set(-INFINITY));
        for (int64_t c = 0; c < n; c += 4*VEC) {
            for (int i = 0; i < 4; ++i) {
                max[i] = vec_max(max[i], vec_load(x + c, i*VEC));
            }
        }
        float lanes[VEC];
        vec_store(lanes, vec_max(vec_max(max[0], max[1]), vec_max(max[2], max[3])));

        part_stat res = { *std::max_element(lanes, lanes + VEC), 0.0f };
        if (res.max == -INFINITY) {
            std::fill(x, x + n, 0.0f);
            return res;
        }

        vec sum = vec_set(0.0f);
        for (int64_t c = 0; c < n; c += VEC) {
            const vec e = vec_exp(vec_sub(vec_load(x, c), vec_set(res.max)));
            vec_store(x + c, e);
            sum = vec_add(sum, e);
        }
        res.sum = vec_sum(sum);
        return res;
    }

    // sum over this thread's cells of exp(logit - max) V
    void set_values(const query_block & block, int turn) {
        const int64_t s = a.stream(block.t[0]);

        std::fill(values(ith, turn), values(ith, turn) + block.n*a.n_head*a.n_embd_v, 0.0f);

        if (a.v_trans) {
            set_values_trans(block, turn, s);
            return;
        }

        const int64_t n_step = is_direct(kernels_v.mad, n_rows(block)) ? std::max<int64_t>(1, c1 - c0) : N_TILE;

        for (int64_t h_kv = 0; h_kv < a.n_head_kv; ++h_kv) {
            float * dst = values(ith, turn) + h_kv*n_rows(block)*a.n_embd_v;

            for (int64_t c = c0; c < c1; c += n_step) {
                const float * x = logits(block, h_kv) + (c - c0);

                for_seen(c, std::min(n_step, c1 - c), [&](int i, int n) {
                    apply(&row_kernels::mad, kernels_v, a.n_embd_v, n_rows(block), n, dst, a.n_embd_v,
                        v_rows(c + i, h_kv, s), x + i, l.n_cells);
                });
            }
        }
    }

    // a channel of V holds all cells: dot products
    void set_values_trans(const query_block & block, int turn, int64_t s) {
        const int64_t n   = c1 - c0;
        const bool    all = std::all_of(seen(), seen() + n, [](uint8_t x) { return x; });

        for (int64_t h_kv = 0; h_kv < a.n_head_kv; ++h_kv) {
            const float * x   = logits(block, h_kv);
            float       * dst = values(ith, turn) + h_kv*n_rows(block)*a.n_embd_v;

            if (all) {
                const row_block channels = { a.v_channel(0, c0, h_kv, s), a.v->nb[2], a.n_embd_v };
                kernels_v.dot(n, n_rows(block), a.n_embd_v, dst, a.n_embd_v, channels, x, l.n_cells);
                continue;
            }
            for (int64_t d = 0; d < a.n_embd_v; ++d) {
                float * channel = scratch(l.tile);
                kernels_v.to_f32(a.v_channel(d, c0, h_kv, s), channel, n);
                for (int64_t i = 0; i < n; ++i) {
                    channel[i] = seen()[i] ? channel[i] : 0.0f;
                }
                kernels_f32.dot(n, n_rows(block), 1, dst + d, a.n_embd_v, { (const char *) channel, 0, 0 }, x, l.n_cells);
            }
        }
    }

    // the softmax over all threads: the factor of a thread's exp(logit - max)
    struct total {
        float max;
        float inv_sum;

        float weight(const part_stat & stat) const { return stat.sum == 0.0f ? 0.0f : inv_sum*expf(stat.max - max); }
    };

    total get_total(int64_t r, int64_t h, int turn) const {
        float max = a.sinks ? a.sinks[h] : -INFINITY;
        for (int i = 0; i < nth; ++i) {
            max = std::max(max, stats(i, turn)[r].max);
        }

        float sum = a.sinks ? expf(a.sinks[h] - max) : 0.0f;
        for (int i = 0; i < nth; ++i) {
            const part_stat & stat = stats(i, turn)[r];
            sum += stat.sum == 0.0f ? 0.0f : stat.sum*expf(stat.max - max);
        }
        return { max, sum == 0.0f ? 0.0f : 1.0f/sum };
    }

    // f(b, h, r), see above
    template <typename F>
    void for_rows(const query_block & block, F f) const {
        int64_t r = 0;
        for (int64_t h_kv = 0; h_kv < a.n_head_kv; ++h_kv) {
            for (int b = 0; b < block.n; ++b) {
                for (int64_t j = 0; j < a.n_gqa; ++j, ++r) {
                    f(b, h_kv*a.n_gqa + j, r);
                }
            }
        }
    }

    void write_out(const query_block & block, int turn) {
        for_rows(block, [&](int b, int64_t h, int64_t r) {
            if (r%nth != ith) {
                return;
            }
            const total sum = get_total(r, h, turn);

            float * dst = a.out_row(block.t[b], h);
            std::fill(dst, dst + a.n_embd_v, 0.0f);
            for (int i = 0; i < nth; ++i) {
                ggml_vec_mad_f32(a.n_embd_v, dst, values(i, turn) + r*a.n_embd_v, sum.weight(stats(i, turn)[r]));
            }
        });
    }

    // the weighted sum over heads gathers in the place of the query's first row
    void add_mass(const query_block & block, int turn) {
        const int64_t n = c1 - c0;

        for_rows(block, [&](int b, int64_t h, int64_t r) {
            if (!a.is_scored(block.t[b])) {
                return;
            }
            const float w = *a.coef/a.n_head*get_total(r, h, turn).weight(stats(ith, turn)[r]);

            float * x    = scratch(l.logits) + r*l.n_cells;
            float * mass = scratch(l.logits) + b*a.n_gqa*l.n_cells;
            if (h == 0) {
                ggml_vec_scale_f32(n, mass, w);
            } else {
                ggml_vec_mad_f32(n, mass, x, w);
            }
        });

        for (int b = 0; b < block.n; ++b) {
            if (!a.is_scored(block.t[b])) {
                continue;
            }
            const float * mass = scratch(l.logits) + b*a.n_gqa*l.n_cells;
            float       * row  = a.row(block.t[b]);
            if (!a.assign) {
                ggml_vec_acc_f32(n, row + c0, mass);
                continue;
            }
            ggml_vec_cpy_f32(n, row + c0, mass);

            // no query sees these
            std::fill(row + c_prev, row + c0, 0.0f);
            if (ith == nth - 1) {
                std::fill(row + c1, row + a.n_kv, 0.0f);
            }
        }
    }

    void run(const query_block & block, int turn) {
        const int64_t s = a.stream(block.t[0]);

        set_part(block);
        fetch_first(k_rows(c0, 0, s));
        set_q(block);
        set_logits(block);

        if (a.out && !a.v_trans) {
            fetch_first(v_rows(c0, 0, s));
        }
        for (int64_t r = 0; r < block.n*a.n_head; ++r) {
            stats(ith, turn)[r] = exp_logits(scratch(l.logits) + r*l.n_cells, GGML_PAD(c1 - c0, N_TILE));
        }
        if (a.out) {
            set_values(block, turn);
        }

        ggml_barrier(threadpool);

        if (a.out) {
            write_out(block, turn);
        }
        add_mass(block, turn);
    }
};

} // namespace

void kv_attn_few(const ggml_compute_params * params, const kv_attn & a) {
    few_worker worker(params, a);

    int64_t t    = 0;
    int     turn = 0;

    for (;;) {
        query_block block;
        for (; t < a.n_tokens && block.n < worker.l.n_block; ++t) {
            if (!a.is_used(t)) {
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
        worker.run(block, turn);
        turn = 1 - turn;
    }
}

size_t kv_attn_few_work_size(const kv_attn & a, int n_tasks) {
    // a graph may be computed by fewer threads than planned
    size_t res = 0;
    for (int nth = 1; nth <= n_tasks; ++nth) {
        res = std::max(res, few_layout(a, nth).size*nth);
    }
    return res + kv_scratch::PAD;
}
