#include "kv-attn.h"

#include "vec.h"

// ggml_kv_mass of any kind, after the table in ggml-kv-evict.h: arms of comparisons, written to be read.
//
// A scored query after the other, each in two steps with a barrier behind them:
//
//   heads   a thread takes heads in turn: a value for each cell, and a weight for the head
//   cells   a thread takes a part of the cells: reduces their values over the heads, adds to the row

// the entropy of a head stays this far from 0 and 1, so that no head is all or nothing
static constexpr double ENTROPY_EPS = 1e-3;

namespace {

struct score_layout : kv_scratch {
    explicit score_layout(const kv_attn & a) {
        // of all threads
        value  = take(sizeof(float)*a.n_head*a.n_kv);
        norm   = take(sizeof(float)*a.n_head_kv*a.n_kv);
        weight = take(sizeof(double)*a.n_head);
        shared = size;

        // of one thread
        mask   = take(sizeof(float)*a.n_kv);
        row    = take(sizeof(float)*std::max({ a.n_embd_k, a.n_embd_v, a.n_kv }));
        q      = take(sizeof(float)*a.n_embd_k); // q as the type of a dot product is no larger
        sum    = take(sizeof(double)*a.n_embd_k);
        dir    = take(sizeof(float)*a.n_embd_k);
    }

    size_t work_size(int n_tasks) const { return shared + (size - shared)*n_tasks + PAD; }

    size_t shared;
    size_t value, norm, weight, mask, row, q, sum, dir;
};

struct score_worker {
    score_worker(const ggml_compute_params * params, const kv_attn & a) : a(a), l(a), ith(params->ith), nth(params->nth) {
        GGML_ASSERT(l.work_size(nth) <= params->wsize);

        char * data = kv_scratch::start(params);
        char * own  = data + (l.size - l.shared)*ith;

        values  = (float  *) (data + l.value);
        norms   = (float  *) (data + l.norm);
        weights = (double *) (data + l.weight);
        mask    = (float  *) (own  + l.mask);
        row     = (float  *) (own  + l.row);
        q       =             own  + l.q;
        sum     = (double *) (own  + l.sum);
        dir     = (float  *) (own  + l.dir);
    }

    const kv_attn & a;

    const score_layout l;

    const int ith;
    const int nth;

    float  * values;  // [n_head][n_kv]
    float  * norms;   // [n_head_kv][n_kv] of V
    double * weights; // [n_head]

    float  * mask; // of the query
    float  * row;
    char   * q;
    double * sum;
    float  * dir;

    // whether KV heads have values, not query heads
    bool of_cells() const {
        return a.kind == GGML_KV_KIND_KEYDIFF || a.kind == GGML_KV_KIND_KEY_NORM || a.kind == GGML_KV_KIND_VALUE_LEN;
    }

    int64_t n_head() const { return of_cells() ? a.n_head_kv : a.n_head; }

    bool sees(int64_t c) const { return mask[c] != -INFINITY; }

    static float length(const float * x, int64_t n) {
        float res;
        ggml_vec_norm_f32(n, &res, x);
        return res;
    }

    // softmax over the cells that the query sees
    void set_mass(int64_t t, int64_t h) {
        const auto * traits = ggml_get_type_traits_cpu(a.k->type);
        const float  slope  = a.slope(h);

        float  * value  = values + h*a.n_kv;
        double & weight = weights[h];

        const void * q_row = a.q_row(t, h);
        if (traits->vec_dot_type != GGML_TYPE_F32) {
            ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(a.q_row(t, h), q, a.n_embd_k);
            q_row = q;
        }

        float   max    = -INFINITY;
        int64_t n_seen = 0;

        for (int64_t c = 0; c < a.n_kv; ++c) {
            value[c] = -INFINITY;
            if (!sees(c)) {
                continue;
            }

            float x;
            traits->vec_dot(a.n_embd_k, &x, 0, a.k_row(c, h/a.n_gqa, a.stream(t)), 0, q_row, 0, 1);
            x *= a.scale;
            if (a.softcap != 0.0f) {
                x = a.softcap*std::tanh(x/a.softcap);
            }

            value[c] = x + slope*mask[c];
            max      = std::max(max, value[c]);
            n_seen++;
        }

        // of e = exp(x - max), and of (x - max) e
        double sum   = 0.0;
        double sum_x = 0.0;

        for (int64_t c = 0; c < a.n_kv; ++c) {
            const float x = value[c] - max;

            value[c] = sees(c) ? std::exp(x) : 0.0f;
            sum     += value[c];
            sum_x   += value[c] > 0.0f ? (double) x*value[c] : 0.0;
        }

        const double total = sum + (a.sinks ? std::exp((double) a.sinks[h] - max) : 0.0);
        for (int64_t c = 0; c < a.n_kv && n_seen > 0; ++c) {
            value[c] /= total;
        }

        weight = 1.0;
        if (a.kind == GGML_KV_KIND_ENTROPY) {
            // - sum p log p with log p = x - max - log(sum)
            const double entropy = n_seen > 1 ? (std::log(sum) - sum_x/sum)/std::log((double) n_seen) : 0.0;
            const double h_eps   = std::min(std::max(entropy, ENTROPY_EPS), 1.0 - ENTROPY_EPS);

            weight = (1.0 - h_eps)/h_eps;
        }
    }

    // of V in the cells [c0, c1) of a stream, seen or not
    void set_norms(float * dst, int64_t h_kv, int64_t s, int64_t c0, int64_t c1) {
        if (!a.v_trans) {
            for (int64_t c = c0; c < c1; ++c) {
                kv_to_f32(a.v, a.v_row(c, h_kv, s), row, a.n_embd_v);
                dst[c] = length(row, a.n_embd_v);
            }
            return;
        }

        std::fill(dst + c0, dst + c1, 0.0f);
        for (int64_t d = 0; d < a.n_embd_v; ++d) {
            kv_to_f32(a.v, a.v_channel(d, c0, h_kv, s), row, c1 - c0);
            for (int64_t c = c0; c < c1; ++c) {
                dst[c] += row[c - c0]*row[c - c0];
            }
        }
        for (int64_t c = c0; c < c1; ++c) {
            dst[c] = std::sqrt(dst[c]);
        }
    }

    void set_value_len(int64_t h_kv, int64_t s) {
        int64_t c0 = 0;
        int64_t c1 = a.n_kv;
        while (c0 < c1 && !sees(c0)) {
            ++c0;
        }
        while (c0 < c1 && !sees(c1 - 1)) {
            --c1;
        }

        weights[h_kv] = 1.0;
        set_norms(values + h_kv*a.n_kv, h_kv, s, c0, c1);
    }

    // f(c, length) for each cell that the query sees, its key in row
    template <typename F>
    void for_keys(int64_t h_kv, int64_t s, F f) {
        for (int64_t c = 0; c < a.n_kv; ++c) {
            if (sees(c)) {
                kv_to_f32(a.k, a.k_row(c, h_kv, s), row, a.n_embd_k);
                f(c, length(row, a.n_embd_k));
            }
        }
    }

    void set_key_norm(int64_t h_kv, int64_t s) {
        float * value = values + h_kv*a.n_kv;

        weights[h_kv] = 1.0;
        for_keys(h_kv, s, [&](int64_t c, float len) { value[c] = 1.0f/(1.0f + len); });
    }

    void set_keydiff(int64_t h_kv, int64_t s) {
        float * value = values + h_kv*a.n_kv;

        // the direction of the mean is that of the sum
        std::fill(sum, sum + a.n_embd_k, 0.0);
        for_keys(h_kv, s, [&](int64_t, float len) {
            const double scale = len > 0.0f ? 1.0/len : 0.0;
            for (int64_t i = 0; i < a.n_embd_k; ++i) {
                sum[i] += scale*row[i];
            }
        });
        std::copy(sum, sum + a.n_embd_k, dir);
        const float len_dir = length(dir, a.n_embd_k);

        weights[h_kv] = 1.0;
        for_keys(h_kv, s, [&](int64_t c, float len) {
            float cos = 0.0f;
            if (len > 0.0f && len_dir > 0.0f) {
                ggml_vec_dot_f32(a.n_embd_k, &cos, 0, row, 0, dir, 0, 1);
                cos /= len*len_dir;
            }
            value[c] = std::max(0.0f, 1.0f - cos);
        });
    }

    void set_head(int64_t t, int64_t h) {
        switch (a.kind) {
            case GGML_KV_KIND_MASS:
            case GGML_KV_KIND_VALUE_NORM:
            case GGML_KV_KIND_ENTROPY:   set_mass     (t, h);           break;
            case GGML_KV_KIND_KEYDIFF:   set_keydiff  (h, a.stream(t)); break;
            case GGML_KV_KIND_KEY_NORM:  set_key_norm (h, a.stream(t)); break;
            case GGML_KV_KIND_VALUE_LEN: set_value_len(h, a.stream(t)); break;
        }
    }

    // a cell's values, weighted, over the weights
    void add_row(int64_t t) const {
        const bool is_max = a.heads == GGML_KV_HEADS_MAX;

        const auto reduce = [&](auto value) {
            double res = 0.0; // nothing is negative
            for (int64_t h = 0; h < n_head(); ++h) {
                res = is_max ? std::max(res, value(h)) : res + value(h);
            }
            return res;
        };

        const double weight = reduce([&](int64_t h) { return weights[h]; });

        const int64_t n_part = (a.n_kv + nth - 1)/nth;
        const int64_t c0     = std::min(a.n_kv, n_part*ith);
        const int64_t c1     = std::min(a.n_kv, n_part*(ith + 1));

        float * dst = a.row(t);
        for (int64_t c = c0; c < c1; ++c) {
            double value = 0.0;
            if (sees(c)) {
                value = reduce([&](int64_t h) {
                    const double norm = a.kind == GGML_KV_KIND_VALUE_NORM ? norms[h/a.n_gqa*a.n_kv + c] : 1.0;
                    return weights[h]*values[h*a.n_kv + c]*norm;
                });
            }
            dst[c] = (a.assign ? 0.0f : dst[c]) + *a.coef*value/weight;
        }
    }
};

}

void kv_score(const ggml_compute_params * params, const kv_attn & a) {
    score_worker w(params, a);

    int64_t s_norms = -1; // the stream whose norms are known

    for (int64_t t = 0; t < a.n_tokens; ++t) {
        if (!a.is_scored(t)) {
            continue;
        }

        a.get_mask(w.mask, 0, a.n_kv, t);

        for (int64_t h = w.ith; h < w.n_head(); h += w.nth) {
            w.set_head(t, h);
        }
        if (a.kind == GGML_KV_KIND_VALUE_NORM && s_norms != a.stream(t)) {
            s_norms = a.stream(t);
            for (int64_t h = w.ith; h < a.n_head_kv; h += w.nth) {
                w.set_norms(w.norms + h*a.n_kv, h, s_norms, 0, a.n_kv);
            }
        }
        ggml_barrier(params->threadpool);

        w.add_row(t);
        ggml_barrier(params->threadpool);
    }
}

size_t kv_score_work_size(const kv_attn & a, int n_tasks) {
    return score_layout(a).work_size(n_tasks);
}
