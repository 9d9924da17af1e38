// the learned scorer: norms, features, predictions

#include "llama-kv-evict.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cmath>

std::string llama_kv_evict::set_weights(int32_t n_hidden, const float * w, int32_t n) {
    if (!is_learned()) {
        return "the scorer of this engine is not the learned one";
    }

    auto msg = llama_kv_learned::check(n_hidden, w, n);
    if (msg.empty()) {
        learned.data.assign(w, w + n);
        learned.n_hidden = n_hidden;
    }

    return msg;
}

bool llama_kv_evict::mask_normless(llama_seq_id seq_id, float * mask, uint32_t n_kv) const {
    const auto & cells = kv.v_cells[seq_id];
    const auto & seq   = seqs[seq_id];

    bool any = false;
    for (uint32_t i = 0; i < n_kv; ++i) {
        const auto & cell = seq.cells[i];

        // what is known may be of a cell that was here before
        const bool is_used  = !cells.is_empty(i);
        const bool is_known = is_used && cell.pos == cells.pos_get(i) && cell.tok == cells.ext_get(i).tok && seq.history[i].key > 0.0f;

        mask[i] = is_used && !is_known ? 0.0f : -INFINITY;
        any |= is_used && !is_known;
    }

    return any;
}

// the graph of the last scored query wrote the norms of all cells that had none
void llama_kv_evict::take_norms(uint32_t s, const std::vector<bool> & seen) {
    auto & seq = seqs[s];

    const auto & by_pos = kv.v_cells[s].seq_pos_get(s);
    const auto & query  = seq.queries.back();

    const auto is_query = [&](const auto & p) { return seen[p.second] && seq.cells[p.second].pos == query.pos; };
    if (std::none_of(by_pos.begin(), by_pos.end(), is_query)) {
        return; // it may not have finished; the next one tries again
    }

    const uint32_t n = seq.n_cells;

    const auto read = [&](ggml_tensor * device_rows::* rows, float llama_kv_history::* dst) {
        auto & sum  = scratch.mass;
        auto & part = scratch.part;
        sum.assign(n, 0.0f);
        part.resize(n);
        for (const auto & device : devices) {
            // of a copied sequence: the row of its source
            ggml_backend_tensor_get(device.*rows, part.data(), query.row/n_rows*(device.*rows)->nb[1], n*sizeof(float));
            for (uint32_t i = 0; i < n; ++i) {
                sum[i] += part[i];
            }
        }
        for (uint32_t i = 0; i < n; ++i) {
            const bool is_new = seen[i] && seq.cells[i].pos <= query.pos && !(seq.history[i].key > 0.0f);
            if (is_new && sum[i] > 0.0f && std::isfinite(sum[i])) {
                seq.history[i].*dst = sum[i];
            }
        }
    };

    read(&device_rows::value, &llama_kv_history::value);
    read(&device_rows::key,   &llama_kv_history::key); // last: it tells that both are known
}

// x [idxs.size()][N_X], after the table in llama-kv-evict-learned.h
void llama_kv_evict::get_features(uint32_t s, const std::vector<uint32_t> & idxs, bool is_prompt, std::vector<float> & x) const {
    using net = llama_kv_learned;

    const auto & seq = seqs[s];

    const auto value = [&](uint32_t i, int j) -> double {
        const auto & h = seq.history[i];
        switch (j) {
            case 0:  return h.mass;
            case 1:  return is_prompt ? std::max(h.ema, h.interim) : h.ema;
            case 2:  return is_prompt ? std::max(h.max, h.interim) : h.max;
            case 4:  return h.key;
            default: return h.value;
        }
    };
    const auto is_known = [&](uint32_t i, int j) { return j < 4 || seq.history[i].key > 0.0f; };

    x.resize(idxs.size()*net::N_X);

    for (const int j : { 0, 1, 2, 4, 5 }) {
        double sum = 0.0;
        size_t n   = 0;
        for (const uint32_t i : idxs) {
            sum += is_known(i, j) ? value(i, j) : 0.0;
            n   += is_known(i, j);
        }
        for (size_t k = 0; k < idxs.size(); ++k) {
            const uint32_t i = idxs[k];
            const double ratio = sum > 0.0 ? value(i, j)*n/sum : 0.0;
            x[k*net::N_X + j] = is_known(i, j) ? std::log(net::EPS + ratio) : learned.mean(j);
        }
    }

    llama_pos newest = 0;
    for (const uint32_t i : idxs) {
        newest = std::max(newest, seq.cells[i].pos);
    }
    for (size_t k = 0; k < idxs.size(); ++k) {
        const double pos = seq.cells[idxs[k]].pos;
        x[k*net::N_X + 3] = std::log(1.0 + newest - pos);
        x[k*net::N_X + 6] = pos/(newest + 1.0);
    }
}

// what later queries are expected to put on the cells that this one saw, whose mass is remembered
const std::vector<float> & llama_kv_evict::predict(uint32_t s, const std::vector<float> & mass, const std::vector<bool> & saw, bool is_prompt) {
    auto & seq = seqs[s];

    auto & idxs = scratch.idxs;
    idxs.clear();
    for (uint32_t i = 0; i < saw.size(); ++i) {
        seq.history[i].mass = mass[i];
        if (saw[i]) {
            idxs.push_back(i);
        }
    }

    auto & x = scratch.x;
    get_features(s, idxs, is_prompt, x);

    auto & res = scratch.predicted;
    res.assign(saw.size(), 0.0f);
    for (size_t k = 0; k < idxs.size(); ++k) {
        res[idxs[k]] = std::exp(learned.predict(&x[k*llama_kv_learned::N_X]))/idxs.size();
    }

    return res;
}

// a decode query
const std::vector<float> & llama_kv_evict::follow(uint32_t s, const std::vector<float> & mass, const std::vector<bool> & saw, uint32_t n_steps) {
    const float beta = std::pow((double) learned.beta(), n_steps);

    for (size_t i = 0; i < mass.size(); ++i) {
        auto & h = seqs[s].history[i];
        if (saw[i]) {
            h.ema = beta*h.ema + (1.0f - beta)*mass[i];
            h.max = std::max(h.max, mass[i]);
        }
    }

    return predict(s, mass, saw, false);
}

std::vector<float> llama_kv_evict::features(llama_context & lctx, llama_seq_id seq_id) {
    settle(lctx);

    std::vector<uint32_t> idxs;
    for (const auto & [pos, i] : kv.v_cells[seq_id].seq_pos_get(seq_id)) {
        idxs.push_back(i);
    }

    std::vector<float> x;
    get_features(seq_id, idxs, seqs[seq_id].phase_cur == PHASE_PROMPT, x);

    return x;
}
