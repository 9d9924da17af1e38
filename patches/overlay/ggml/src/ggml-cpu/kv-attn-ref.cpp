#include "kv-attn.h"

#include <vector>

void kv_attn_ref(const ggml_compute_params * params, const kv_attn & a) {
    std::vector<float>  k(a.n_embd_k);
    std::vector<float>  v(a.n_embd_v);
    std::vector<float>  mask(a.n_kv);
    std::vector<double> prob(a.n_kv);
    std::vector<double> mass(a.n_kv);
    std::vector<double> out(a.n_embd_v);

    for (int64_t t = params->ith; t < a.n_tokens; t += params->nth) {
        if (!a.is_used(t)) {
            continue;
        }

        a.get_mask(mask.data(), 0, a.n_kv, t);
        std::fill(mass.begin(), mass.end(), 0.0);

        for (int64_t h = 0; h < a.n_head; ++h) {
            const int64_t h_kv  = h/a.n_gqa;
            const float * q     = a.q_row(t, h);
            const float   slope = a.slope(h);

            double max = a.sinks ? a.sinks[h] : -INFINITY;

            for (int64_t c = 0; c < a.n_kv; ++c) {
                prob[c] = -INFINITY;
                if (mask[c] == -INFINITY) {
                    continue;
                }

                kv_to_f32(a.k, a.k_row(c, h_kv, a.stream(t)), k.data(), a.n_embd_k);

                double x = 0.0;
                for (int64_t i = 0; i < a.n_embd_k; ++i) {
                    x += (double) q[i]*k[i];
                }
                x *= a.scale;
                if (a.softcap != 0.0f) {
                    x = a.softcap*std::tanh(x/a.softcap);
                }

                prob[c] = x + slope*mask[c];
                max     = std::max(max, prob[c]);
            }

            double sum = a.sinks ? std::exp(a.sinks[h] - max) : 0.0;
            for (int64_t c = 0; c < a.n_kv; ++c) {
                prob[c] = mask[c] == -INFINITY ? 0.0 : std::exp(prob[c] - max);
                sum    += prob[c];
            }

            std::fill(out.begin(), out.end(), 0.0);

            for (int64_t c = 0; c < a.n_kv; ++c) {
                if (mask[c] == -INFINITY) {
                    continue;
                }
                prob[c] /= sum;
                mass[c] += prob[c];

                if (a.out && !a.v_trans) {
                    kv_to_f32(a.v, a.v_row(c, h_kv, a.stream(t)), v.data(), a.n_embd_v);
                }
                for (int64_t i = 0; a.out && i < a.n_embd_v; ++i) {
                    if (a.v_trans) {
                        kv_to_f32(a.v, a.v_channel(i, c, h_kv, a.stream(t)), &v[i], 1);
                    }
                    out[i] += prob[c]*v[i];
                }
            }

            if (a.out) {
                std::copy(out.begin(), out.end(), a.out_row(t, h));
            }
        }

        if (a.is_scored(t)) {
            float * row = a.row(t);
            for (int64_t c = 0; c < a.n_kv; ++c) {
                row[c] = (a.assign ? 0.0f : row[c]) + *a.coef*mass[c]/a.n_head;
            }
        }
    }
}
