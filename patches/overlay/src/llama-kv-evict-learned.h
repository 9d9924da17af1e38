#pragma once

// The learned scorer: from what is known of a cell to the mass that later queries will put on it.
//
//   x    feature          of the cells that a query sees
//
//   0    mass             log(eps + v/mean(v)), v: of this query
//   1    EMA              the same, v: the first ranking, then v <- beta v + (1 - beta) m
//   2    maximum          the same, v: the first ranking, then v <- max(v, m)
//   3    age              log(1 + positions from the cell to the newest one)
//   4    key norm         as 0, v: the row of the scorer key-norm, 1/(1 + |k|)
//   5    value norm       as 0, v: |v|
//   6    position share   position/(newest position + 1)
//
//   y = net((x - mean)/scale), a linear function or one hidden layer of ReLUs
//
//   predicted mass = exp(y)/n, n cells seen
//
// All but 3 and 6 are relative to the other cells, so they mean the same in any model and at any budget.
// scripts/train_scorer.py makes the numbers. Before there are any, y is x[1]: the order of the EMA.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

// what the engine keeps of a cell for it; kept by cell, so it moves when the cell does
struct llama_kv_history {
    float mass    = 0.0f; // of the last scored query
    float ema     = 0.0f;
    float max     = 0.0f;
    float interim = 0.0f; // bounded prefill: as llama_kv_evict::cell_state has it, of the mass
    float key     = 0.0f; // rows over all layers, 0: not known yet
    float value   = 0.0f;
};

struct llama_kv_learned {
    static constexpr int32_t N_X          = 7;
    static constexpr int32_t N_HIDDEN_MAX = 256;

    static constexpr double EPS   = 1e-4;
    static constexpr double Y_MAX = 30.0; // of either sign: scores stay finite and positive

    static constexpr int32_t I_MEAN  = 1;
    static constexpr int32_t I_SCALE = I_MEAN  + N_X;
    static constexpr int32_t I_NET   = I_SCALE + N_X;

    int32_t n_hidden = 0;

    // beta, mean [N_X], scale [N_X], then
    //   n_hidden = 0: w [N_X], b
    //   else:         W [n_hidden][N_X], b [n_hidden], w [n_hidden], b
    std::vector<float> data = {
        0.95f,
        0, 0, 0, 0, 0, 0, 0,
        1, 1, 1, 1, 1, 1, 1,
        0, 1, 0, 0, 0, 0, 0, 0,
    };

    static int64_t size(int32_t n_hidden) {
        return I_NET + (n_hidden == 0 ? N_X : n_hidden*(int64_t) (N_X + 2)) + 1;
    }

    // why these numbers cannot be used, empty if they can
    static std::string check(int32_t n_hidden, const float * data, int64_t n) {
        if (n_hidden < 0 || n_hidden > N_HIDDEN_MAX) {
            return "n_hidden = " + std::to_string(n_hidden) + ", it has to be in [0, " + std::to_string(N_HIDDEN_MAX) + "]";
        }
        if (!data || n != size(n_hidden)) {
            return std::to_string(data ? n : 0) + " numbers, a scorer with n_hidden = " + std::to_string(n_hidden) +
                " has " + std::to_string(size(n_hidden));
        }
        if (!std::all_of(data, data + n, [](float x) { return std::isfinite(x); })) {
            return "a number is not finite";
        }
        if (!(data[0] >= 0.0f && data[0] < 1.0f)) {
            return "beta = " + std::to_string(data[0]) + ", it has to be in [0, 1)";
        }
        if (!std::all_of(data + I_SCALE, data + I_NET, [](float x) { return x > 0.0f; })) {
            return "a scale is not above 0";
        }
        return "";
    }

    float beta()           const { return data[0]; }
    float mean (int32_t i) const { return data[I_MEAN  + i]; }
    float scale(int32_t i) const { return data[I_SCALE + i]; }

    // y of the features x[N_X]
    double predict(const float * x) const {
        double u[N_X]; // no finite numbers overflow in double
        for (int32_t i = 0; i < N_X; ++i) {
            u[i] = ((double) x[i] - mean(i))/scale(i);
        }

        const auto dot = [&u](const float * w) {
            double res = 0.0;
            for (int32_t i = 0; i < N_X; ++i) {
                res += w[i]*u[i];
            }
            return res;
        };

        const float * W = data.data() + I_NET;

        double y = data.back();
        if (n_hidden == 0) {
            y += dot(W);
        } else {
            const float * b = W + n_hidden*N_X;
            const float * w = b + n_hidden;
            for (int32_t j = 0; j < n_hidden; ++j) {
                y += w[j]*std::max(0.0, dot(W + j*N_X) + b[j]);
            }
        }

        return std::min(std::max(y, -Y_MAX), Y_MAX);
    }
};
