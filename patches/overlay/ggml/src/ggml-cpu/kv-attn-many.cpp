#include "kv-attn.h"
#include "kv-gemm.h"

static constexpr int     N_TILE = 64; // cells
static constexpr int64_t N_ROWS = 96; // query heads that share K and V

namespace {

// A block is some queries of a stream, all heads of a KV head: rows r = j*n_block + b for head j of the group, query b.
// Matrices of a block have the rows in dim 0, as lanes of vectors, so that softmax runs over all rows at once.
struct many_layout : kv_scratch {
    many_layout(const kv_attn & a, int nth) {
        n_block = std::max<int64_t>(1, N_ROWS/a.n_gqa);

        // enough blocks for all threads, but no smaller than pays
        const int64_t n_block_fair = (a.n_stream_tokens*a.n_stream*a.n_head_kv + 2*nth - 1)/(2*nth);
        n_block = std::min({ n_block, std::max<int64_t>(8, n_block_fair), a.n_stream_tokens });

        n_rows_pad = GGML_PAD(n_block*a.n_gqa, VEC);

        q      = take(sizeof(float)*a.n_embd_k*n_rows_pad);
        logits = take(sizeof(float)*N_TILE    *n_rows_pad);
        values = take(sizeof(float)*a.n_embd_v*n_rows_pad);
        max    = take(sizeof(float)*n_rows_pad);
        sum    = take(sizeof(float)*n_rows_pad);
        keep   = take(sizeof(float)*n_rows_pad);
        k      = take(sizeof(float)*N_TILE*a.n_embd_k);
        v      = take(sizeof(float)*N_TILE*a.n_embd_v);
        mask   = take(sizeof(float)*N_TILE*n_block);
        slope  = take(sizeof(float)*a.n_head);
    }

    int64_t n_block;
    int64_t n_rows_pad;

    size_t q, logits, values, max, sum, keep, k, v, mask, slope;
};

struct many_worker {
    many_worker(const ggml_compute_params * params, const kv_attn & a) :
        a(a), l(a, params->nth),
        kernels_k(get_kernels(a.k->type)), kernels_v(get_kernels(a.v->type)) {
        char * data = kv_scratch::start(params) + params->ith*l.size;
        GGML_ASSERT(kv_scratch::start(params) + params->nth*l.size <= (char *) params->wdata + params->wsize);

        q      = (float *) (data + l.q);
        logits = (float *) (data + l.logits);
        values = (float *) (data + l.values);
        max    = (float *) (data + l.max);
        sum    = (float *) (data + l.sum);
        keep   = (float *) (data + l.keep);
        k      = (float *) (data + l.k);
        v      = (float *) (data + l.v);
        mask   = (float *) (data + l.mask);
        slope  = (float *) (data + l.slope);

        for (int64_t h = 0; h < a.n_head; ++h) {
            slope[h] = a.slope(h);
        }
    }

    const kv_attn & a;

    const many_layout l;

    const row_kernels kernels_k;
    const row_kernels kernels_v;

    float * q;      // [n_embd_k][rows]
    float * logits; // [N_TILE][rows]
    float * values; // [n_embd_v][rows], sums of exp(logit - max) V
    float * max;    // [rows]
    float * sum;    // [rows]
    float * keep;   // [rows], what is left of values and sum when max grows
    float * k;      // [N_TILE][n_embd_k]
    float * v;      // [N_TILE][n_embd_v], transposed [n_embd_v][N_TILE]
    float * mask;   // [N_TILE][n_block]
    float * slope;  // [n_head]

    // the block: queries [t0, t0 + n_q) of stream s, heads of h_kv
    int64_t t0;
    int64_t n_q;
    int64_t s;
    int64_t h_kv;

    int64_t n_rows_pad;

    bool seen[N_TILE]; // cells of the tile that some query sees

    enum mask_kind { MASK_ALL, MASK_SOME, MASK_NONE };

    void set_q() {
        std::fill(q, q + a.n_embd_k*n_rows_pad, 0.0f);
        for (int64_t j = 0; j < a.n_gqa; ++j) {
            for (int64_t b = 0; b < n_q; ++b) {
                const float * src = a.q_row(t0 + b, h_kv*a.n_gqa + j);
                for (int64_t d = 0; d < a.n_embd_k; ++d) {
                    q[d*n_rows_pad + j*n_q + b] = src[d]*a.scale;
                }
            }
        }
    }

    // all n values of the mask at c are the same bytes as the first
    bool is_uniform(int64_t c, int n, int64_t t) const {
        const char * row  = a.mask_row(c, t);
        const size_t size = ggml_type_size(a.mask->type);
        return memcmp(row, row + size, (n - 1)*size) == 0;
    }

    // what the queries see of n cells at c: nothing, everything at mask 0, or as `mask` and `seen` say
    mask_kind set_mask(int64_t c, int n) {
        bool none = true;
        bool all  = true;
        for (int64_t b = 0; b < n_q && (none || all); ++b) {
            float first;
            a.get_mask(&first, c, 1, t0 + b);
            const bool uniform = is_uniform(c, n, t0 + b);
            none = none && uniform && first == -INFINITY;
            all  = all  && uniform && first == 0.0f;
        }

        std::fill(seen, seen + n, !none);
        if (none || all) {
            return none ? MASK_NONE : MASK_ALL;
        }

        std::fill(seen, seen + n, false);
        for (int64_t b = 0; b < n_q; ++b) {
            float row[N_TILE];
            a.get_mask(row, c, n, t0 + b);
            for (int i = 0; i < n; ++i) {
                mask[i*n_q + b] = row[i];
                seen[i] |= row[i] != -INFINITY;
            }
        }
        return MASK_SOME;
    }

    // what cells hold that no query sees must not be touched
    void set_kv(int64_t c, int n) {
        for (int i = 0; i < n; ++i) {
            float * dst = k + i*a.n_embd_k;
            if (seen[i]) {
                kernels_k.to_f32(a.k_row(c + i, h_kv, s), dst, a.n_embd_k);
            } else {
                std::fill(dst, dst + a.n_embd_k, 0.0f);
            }
        }

        if (a.v_trans) {
            const bool all = std::all_of(seen, seen + n, [](bool x) { return x; });
            for (int64_t d = 0; d < a.n_embd_v; ++d) {
                float * dst = v + d*N_TILE;
                kernels_v.to_f32(a.v_channel(d, c, h_kv, s), dst, n);
                for (int i = 0; !all && i < n; ++i) {
                    dst[i] = seen[i] ? dst[i] : 0.0f;
                }
            }
            return;
        }
        for (int i = 0; i < n; ++i) {
            float * dst = v + i*a.n_embd_v;
            if (seen[i]) {
                kernels_v.to_f32(a.v_row(c + i, h_kv, s), dst, a.n_embd_v);
            } else {
                std::fill(dst, dst + a.n_embd_v, 0.0f);
            }
        }
    }

    void set_logits(int n, mask_kind kind) {
        gemm<false>(n, n_rows_pad, a.n_embd_k, logits, n_rows_pad, k, a.n_embd_k, q, n_rows_pad, nullptr);

        if (a.softcap != 0.0f) {
            for (int64_t i = 0; i < n*n_rows_pad; ++i) {
                logits[i] = a.softcap*tanhf(logits[i]/a.softcap);
            }
        }
        for (int i = 0; kind == MASK_SOME && i < n; ++i) {
            for (int64_t j = 0; j < a.n_gqa; ++j) {
                const float   m   = slope[h_kv*a.n_gqa + j];
                const float * src = mask   + i*n_q;
                float       * dst = logits + i*n_rows_pad + j*n_q;
                for (int64_t b = 0; b < n_q; ++b) {
                    dst[b] += m*src[b];
                }
            }
        }
    }

    // logits become exp(logit - max)
    void soft_max(int n) {
        for (int64_t r = 0; r < n_rows_pad; r += VEC) {
            const vec old = vec_load(max, r);

            vec top = old;
            for (int i = 0; i < n; ++i) {
                top = vec_max(top, vec_load(logits + i*n_rows_pad, r));
            }
            vec_store(max + r, top);

            // a row that has seen nothing yet: -inf - -inf
            top = vec_max(top, vec_set(-FLT_MAX));

            const vec kept = vec_exp(vec_sub(old, top));
            vec_store(keep + r, kept);

            vec total = vec_mul(vec_load(sum, r), kept);
            for (int i = 0; i < n; ++i) {
                float * x = logits + i*n_rows_pad + r;
                const vec e = vec_exp(vec_sub(vec_load(x, 0), top));
                vec_store(x, e);
                total = vec_add(total, e);
            }
            vec_store(sum + r, total);
        }
    }

    void add_values(int n) {
        if (a.v_trans) {
            gemm<false>(a.n_embd_v, n_rows_pad, n, values, n_rows_pad, v, N_TILE,     logits, n_rows_pad, keep);
        } else {
            gemm<true> (a.n_embd_v, n_rows_pad, n, values, n_rows_pad, v, a.n_embd_v, logits, n_rows_pad, keep);
        }
    }

    void write_out() const {
        for (int64_t j = 0; j < a.n_gqa; ++j) {
            const int64_t h = h_kv*a.n_gqa + j;
            for (int64_t b = 0; b < n_q; ++b) {
                const int64_t r = j*n_q + b;

                float weight = 1.0f;
                float total  = sum[r];
                if (a.sinks) {
                    const float top = std::max(max[r], a.sinks[h]);
                    weight = expf(max[r] - top);
                    total  = total*weight + expf(a.sinks[h] - top);
                }
                weight = sum[r] == 0.0f ? 0.0f : weight/total;

                float * dst = a.out_row(t0 + b, h);
                for (int64_t d = 0; d < a.n_embd_v; ++d) {
                    dst[d] = values[d*n_rows_pad + r]*weight;
                }
            }
        }
    }

    void run(int64_t i_block, int64_t n_blocks) {
        h_kv = i_block%a.n_head_kv;
        s    = i_block/a.n_head_kv/n_blocks;

        const int64_t b0 = i_block/a.n_head_kv%n_blocks*l.n_block;

        t0  = s*a.n_stream_tokens + b0;
        n_q = std::min(l.n_block, a.n_stream_tokens - b0);

        n_rows_pad = GGML_PAD(n_q*a.n_gqa, VEC);

        std::fill(values, values + a.n_embd_v*n_rows_pad, 0.0f);
        std::fill(max,    max + n_rows_pad, -INFINITY);
        std::fill(sum,    sum + n_rows_pad, 0.0f);
        set_q();

        for (int64_t c = 0; c < a.n_kv; c += N_TILE) {
            int n = std::min<int64_t>(N_TILE, a.n_kv - c);

            const mask_kind kind = set_mask(c, n);
            while (n > 0 && !seen[n - 1]) {
                --n;
            }
            if (n == 0) {
                continue;
            }
            set_kv(c, n);
            set_logits(n, kind);
            soft_max(n);
            add_values(n);
        }

        write_out();
    }
};

} // namespace

void kv_attn_many(const ggml_compute_params * params, const kv_attn & a) {
    many_worker worker(params, a);

    const int64_t n_blocks = (a.n_stream_tokens + worker.l.n_block - 1)/worker.l.n_block;
    const int64_t n_items  = a.n_head_kv*n_blocks*a.n_stream;

    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    for (int64_t i = params->ith; i < n_items; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        worker.run(i, n_blocks);
    }
}

size_t kv_attn_many_work_size(const kv_attn & a, int n_tasks) {
    size_t res = 0;
    for (int nth = 1; nth <= n_tasks; ++nth) {
        res = std::max(res, many_layout(a, nth).size*nth);
    }
    return res + kv_scratch::PAD;
}
