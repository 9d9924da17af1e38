// scores: from the rows of the last batch to a ranking

#include "llama-kv-evict.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cmath>
#include <numeric>

bool llama_kv_evict::scores_layers(const llama_kv_evict_params & params) {
    switch (params.scorer) {
        case LLAMA_KV_SCORER_NONE:
        case LLAMA_KV_SCORER_RECENCY:
        case LLAMA_KV_SCORER_RANDOM: return false;
        default:                     return true;
    }
}

bool llama_kv_evict::scores_keys() const {
    return params.scorer == LLAMA_KV_SCORER_KEYDIFF || params.scorer == LLAMA_KV_SCORER_KEY_NORM;
}

ggml_kv_kind llama_kv_evict::kind(const llama_kv_evict_params & params) {
    switch (params.scorer) {
        case LLAMA_KV_SCORER_VALUE_NORM: return GGML_KV_KIND_VALUE_NORM;
        case LLAMA_KV_SCORER_ENTROPY:    return GGML_KV_KIND_ENTROPY;
        case LLAMA_KV_SCORER_KEYDIFF:    return GGML_KV_KIND_KEYDIFF;
        case LLAMA_KV_SCORER_KEY_NORM:   return GGML_KV_KIND_KEY_NORM;
        default:                         return GGML_KV_KIND_MASS;
    }
}

ggml_kv_heads llama_kv_evict::heads(const llama_kv_evict_params & params) {
    return params.heads == LLAMA_KV_HEADS_MAX ? GGML_KV_HEADS_MAX : GGML_KV_HEADS_MEAN;
}

int32_t llama_kv_evict::n_layer() const {
    return std::count(hooked.begin(), hooked.end(), true);
}

// w_l ~ lambda^(L-1-l), sum 1, over the L scored layers
void llama_kv_evict::set_coef() {
    const int n_scored = n_layer();

    double lambda = params.lambda;
    if (params.aggregation == LLAMA_KV_AGGREGATION_COUPLED) {
        lambda = params.beta;
    } else if (lambda == 0.0) {
        lambda = std::pow(0.042, 1.0/std::max(1, n_scored));
    }

    double sum = 0.0;
    for (int l = 0; l < n_scored; ++l) {
        sum += std::pow(lambda, l);
    }

    for (size_t il = 0, l = 0; il < coef.size(); ++il) {
        coef[il] = hooked[il] ? std::pow(lambda, n_scored - 1 - (int) l++)/sum : 0.0;
    }
}

// in place of the above
bool llama_kv_evict::set_layer_weights(const float * w, int32_t n) {
    const auto is_weight = [](float x) { return std::isfinite(x) && x >= 0.0f; };
    if (n != n_layer() || !std::all_of(w, w + n, is_weight)) {
        return false;
    }

    const double sum = std::accumulate(w, w + n, 0.0);
    if (sum <= 0.0) {
        return false;
    }

    for (size_t il = 0, l = 0; il < coef.size(); ++il) {
        coef[il] = hooked[il] ? w[l++]/sum : 0.0;
    }

    return true;
}

//
// taking in the last batch: cells, then rows
//

void llama_kv_evict::settle(llama_context & lctx) {
    const bool has_rows = std::any_of(seqs.begin(), seqs.end(), [](const seq_state & seq) { return !seq.queries.empty(); });
    if (has_rows) {
        // not lctx.synchronize(): this is not the end of an evaluation
        ggml_backend_sched_synchronize(lctx.get_sched());
        take_op_times(lctx);
    }

    const int64_t t_start_us = ggml_time_us();

    // pending stream copies: what was known of the source at that time, its last rows included, goes with the cells
    for (; n_copied < kv.sc_info.ssrc.size(); ++n_copied) {
        auto & dst = seqs[kv.sc_info.sdst[n_copied]];

        const int32_t n_prompt = dst.n_prompt; // announced for the tokens after the copy
        const int32_t n_probe  = dst.n_probe;
        dst = seqs[kv.sc_info.ssrc[n_copied]];
        dst.n_prompt = n_prompt;
        dst.n_probe  = n_probe;
    }

    for (uint32_t s = 0; s < seqs.size(); ++s) {
        auto & seq = seqs[s];

        // update() was not reached: the holes may be taken by now
        seq.has_holes |= !seq.from.empty();
        seq.from.clear();
        seq.to.clear();

        take_rows(s, scan(s));

        seq.queries.clear();
        seq.p0 = seq.p1 = 0;
    }

    stats.t_score_ms += 1e-3*(ggml_time_us() - t_start_us);
}

// compare every cell with what was last seen
// result[i]: cell i was there when the last batch was computed, or came with it
const std::vector<bool> & llama_kv_evict::scan(uint32_t s) {
    auto & seq = seqs[s];

    const auto & cells = kv.v_cells[s];

    const uint32_t n = std::max(seq.n_cells, cells.used_max_p1());
    seq.n_cells = cells.used_max_p1();

    auto & seen = scratch.seen;
    seen.assign(n, false);

    int n_old = 0;
    int n_new = 0;

    for (uint32_t i = 0; i < n; ++i) {
        auto & cell = seq.cells[i];

        const bool is_empty = cells.is_empty(i);
        if (is_empty && cell.pos == -1) {
            continue;
        }

        // as it was before a pending K-shift
        const llama_pos   pos = is_empty ? -1 : cells.pos_get(i) - cells.get_shift(i);
        const llama_token tok = is_empty ? LLAMA_TOKEN_NULL : cells.ext_get(i).tok;

        if (cell.pos == pos && cell.tok == tok) {
            seen[i] = true;
            n_old++;
            continue;
        }

        const bool is_new = pos >= seq.p0 && pos < seq.p1;

        cell = {};
        if (is_learned()) {
            seq.history[i] = {};
        }
        if (!is_empty) {
            cell.pos       = pos;
            cell.tok       = tok;
            cell.score     = score_init(pos);
            cell.generated = is_new && seq.phase_cur != PHASE_PROMPT;
        }

        for (auto & row : seq.window) {
            if (i < row.mass.size()) {
                row.mass[i] = 0.0f;
            }
        }
        const auto is_gone = [i](const window_row & row) { return row.cell == i; };
        seq.window.erase(std::remove_if(seq.window.begin(), seq.window.end(), is_gone), seq.window.end());

        seen[i] = is_new;
        n_new += is_new;
    }

    if (seq.p0 < seq.p1 && n_new == 0) {
        static_cast<progress &>(seq) = seq.before;
    }

    if (n_old == 0) {
        // other contents were loaded, or these are the first
        seq.phase_cur = PHASE_PROMPT;
        seq.i_release = 0; // a load touches all pages
        seq.window.clear();
    }

    if (seq.n_prompt > 0 && seq.n_probe == 0 && seq.phase_cur == PHASE_PROMPT) {
        seq.n_prompt = std::max(0, seq.n_prompt - n_new);
    }

    return seen;
}

void llama_kv_evict::take_rows(uint32_t s, const std::vector<bool> & seen) {
    auto & seq = seqs[s];

    if (seq.queries.empty()) {
        return;
    }

    const uint32_t n = seq.n_cells;

    const auto & by_pos = kv.v_cells[s].seq_pos_get(s);

    if (is_learned()) {
        take_norms(s, seen);
    }

    auto & mass  = scratch.mass;
    auto & part  = scratch.part;
    auto & saw   = scratch.saw;
    auto & first = scratch.first;
    part.resize(n);
    saw.resize(n);
    first.clear();

    for (const auto & query : seq.queries) {
        const auto is_query = [&](const auto & p) { return seq.cells[p.second].pos == query.pos; };
        const auto it = std::find_if(by_pos.begin(), by_pos.end(), is_query);

        // the query itself is gone (the batch failed, or was rolled back): so is its row
        if (it == by_pos.end() || !seen[it->second]) {
            continue;
        }

        mass.assign(n, 0.0f);
        for (const auto & device : devices) {
            ggml_backend_tensor_get(device.rows, part.data(), query.row*device.rows->nb[1], n*sizeof(float));
            for (uint32_t i = 0; i < n; ++i) {
                mass[i] += part[i];
            }
        }

        // columns that the query did not see hold old values
        for (uint32_t i = 0; i < n; ++i) {
            saw[i] = seen[i] && seq.cells[i].pos <= query.pos;
            if (!saw[i] || !(mass[i] > 0.0f)) {
                mass[i] = 0.0f;
            }
        }

        switch (seq.phase_cur) {
            case PHASE_PROMPT:
                {
                    if (seq.n_probe > 0 || (params.bounded && !seq.is_probed)) {
                        join(first, mass);
                    }
                    if (seq.n_probe == 0) {
                        seq.window.push_back({ it->second, mass });
                    }
                    if (seq.window.size() > n_window) {
                        seq.window.pop_front();
                    }
                } break;
            case PHASE_FIRST:
                {
                    rank(s, mass, saw);
                    stats.n_refreshes++;
                } break;
            case PHASE_DECODE:
                {
                    add_mass(s, mass, saw, query.n_steps);
                    stats.n_refreshes++;
                } break;
        }
    }

    if (!first.empty()) {
        pool(s, first, &seq_state::interim);

        if (is_learned()) {
            const auto & predicted = predict(s, mass, saw, true);
            for (uint32_t i = 0; i < n; ++i) {
                seq.cells[i].interim = predicted[i];
            }
        }
    }
}

// several queries that rank together: their max, or sum
void llama_kv_evict::join(std::vector<float> & dst, const std::vector<float> & mass) const {
    dst.resize(std::max(dst.size(), mass.size()), 0.0f);

    const bool is_sum = params.aggregation == LLAMA_KV_AGGREGATION_SUM && !is_learned();

    for (size_t i = 0; i < mass.size(); ++i) {
        dst[i] = is_sum ? dst[i] + mass[i] : std::max(dst[i], mass[i]);
    }
}

// the first ranking: window and first decode query
void llama_kv_evict::rank(uint32_t s, const std::vector<float> & mass, const std::vector<bool> & saw) {
    auto & seq = seqs[s];

    std::vector<float> first = mass;
    for (const auto & row : seq.window) {
        join(first, row.mass);
    }
    seq.window.clear();

    // scores of an earlier prompt stay if they are higher
    pool(s, first, &seq_state::ranking);

    if (seq.is_probed) {
        seq.is_probed = false;
        for (uint32_t i = 0; i < seq.n_cells; ++i) {
            seq.ranking(i) = std::max(seq.ranking(i), seq.interim(i));
        }
    }

    if (is_learned()) {
        for (auto & h : seq.history) {
            h.max = std::max(h.max, h.ema);
        }

        const auto & predicted = predict(s, mass, saw, false);
        for (uint32_t i = 0; i < seq.n_cells; ++i) {
            seq.cells[i].score = predicted[i];
        }
    }

    for (size_t i = 0; i < saw.size(); ++i) {
        seq.cells[i].n_scored = saw[i];
    }
}

// dst = max(dst, mean over the resident ones of n_pool neighbouring positions)
void llama_kv_evict::pool(uint32_t s, const std::vector<float> & mass, float & (seq_state::* dst)(uint32_t)) {
    const llama_pos n_side = params.n_pool/2;

    const auto & by_pos = kv.v_cells[s].seq_pos_get(s);

    // a sliding sum
    auto   lo  = by_pos.begin();
    auto   hi  = by_pos.begin();
    double sum = 0.0;
    int    n   = 0;

    for (const auto & [pos, i] : by_pos) {
        for (; hi != by_pos.end() && hi->first <= pos + n_side; ++hi, ++n) {
            sum += mass[hi->second];
        }
        for (; lo->first < pos - n_side; ++lo, --n) {
            sum -= mass[lo->second];
        }

        float & value = (seqs[s].*dst)(i);
        value = std::max(value, (float) std::max(0.0, sum/n));
    }
}

void llama_kv_evict::add_mass(uint32_t s, const std::vector<float> & mass, const std::vector<bool> & saw, uint32_t n_steps) {
    auto & seq = seqs[s];

    // a memory of so many steps, however many of them are scored
    const double n_updates = params.aggregation == LLAMA_KV_AGGREGATION_COUPLED ? (double) n_steps*n_layer() : n_steps;
    const float  beta      = std::pow((double) params.beta, n_updates);

    const auto & row = is_learned() ? follow(s, mass, saw, n_steps) : mass;

    for (size_t i = 0; i < row.size(); ++i) {
        float    & score = seq.cells[i].score;
        uint32_t & n     = seq.cells[i].n_scored;

        n += saw[i];
        if (n <= 1 && starts_whole()) {
            score = row[i]; // what a key says, or a prediction, is said at once
            continue;
        }

        switch (params.aggregation) {
            case LLAMA_KV_AGGREGATION_EMA:
            case LLAMA_KV_AGGREGATION_COUPLED: score = beta*score + (1.0f - beta)*row[i]; break;
            case LLAMA_KV_AGGREGATION_SUM:     score = score + row[i];                    break;
            case LLAMA_KV_AGGREGATION_LAST:    score = row[i];                            break;
            case LLAMA_KV_AGGREGATION_MAX:     score = std::max(score, row[i]);           break;
            case LLAMA_KV_AGGREGATION_MEAN:    score += saw[i] ? (row[i] - score)/n : 0;  break;
        }
    }
}

// scores that do not come from attention
float llama_kv_evict::score_init(llama_pos pos) const {
    switch (params.scorer) {
        case LLAMA_KV_SCORER_RECENCY:
            return pos;
        case LLAMA_KV_SCORER_RANDOM:
            {
                // splitmix64 finalizer
                uint64_t x = ((uint64_t) params.seed << 32) + (uint32_t) pos + 0x9e3779b97f4a7c15ull;
                x = (x ^ (x >> 30))*0xbf58476d1ce4e5b9ull;
                x = (x ^ (x >> 27))*0x94d049bb133111ebull;
                return ((x ^ (x >> 31)) >> 40)*0x1p-24f;
            }
        default:
            break;
    }

    return 0.0f;
}
