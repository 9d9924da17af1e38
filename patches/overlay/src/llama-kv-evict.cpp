#include "llama-kv-evict.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

// attention cost is padded to this many cells (llama_kv_cache::get_n_kv)
static constexpr uint32_t n_kv_pad = 256;

// a share of a prompt that has not ended yet
static constexpr uint32_t n_budget_open = std::numeric_limits<int32_t>::max();

llama_kv_evict::llama_kv_evict(llama_kv_cache & kv, const llama_kv_evict_params & params) :
        kv(kv), params(params), n_recent(std::max(1u, params.n_recent)), n_rows(std::max(1u, params.n_window)) {
    hooked.resize(kv.hparams.n_layer_all, false);
    coef  .resize(kv.hparams.n_layer_all, 0.0f);

    seqs.resize(kv.n_stream);
    for (auto & seq : seqs) {
        seq.cells.resize(kv.get_size());
        seq.n_budget = params.budget_share > 0.0f ? n_budget_open : params.n_budget;
    }

    if (scores_attention()) {
        alloc_rows();
    }
}

bool llama_kv_evict::scores_attention() const {
    return params.scorer == LLAMA_KV_SCORER_ATTENTION;
}

bool llama_kv_evict::evicts() const {
    return params.scorer != LLAMA_KV_SCORER_NONE;
}

bool llama_kv_evict::fuses_attention() const {
    return is_cut && params.compact;
}

// w_l ~ lambda^(L-1-l), sum 1, over the L scored layers
void llama_kv_evict::set_coef() {
    const int n_scored = std::count(hooked.begin(), hooked.end(), true);

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

int32_t llama_kv_evict::row(llama_seq_id seq_id, llama_pos pos) const {
    for (const auto & query : seqs[seq_id].queries) {
        if (query.pos == pos) {
            return query.row;
        }
    }

    return -1;
}

//
// before a batch
//

// llama_decode does not catch
void llama_kv_evict::begin_batch(llama_context & lctx) try {
    const llama_batch & batch = lctx.balloc->get_batch();

    settle(lctx);

    n_copied = 0; // the cache is about to apply its pending copies

    const auto is_empty = [](const llama_kv_cells & cells) { return cells.get_used() == 0; };
    if (std::all_of(kv.v_cells.begin(), kv.v_cells.end(), is_empty)) {
        stats   = {};
        t_op_us = 0;
        is_cut  = false;
    }

    std::vector<std::vector<llama_pos>> pos(seqs.size());
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            pos[batch.seq_id[i][j]].push_back(batch.pos[i]);
        }
    }

    // the tokens of an image under M-RoPE share one position
    const bool is_image = kv.hparams.n_pos_per_embd() > 1 && !batch.token;

    for (uint32_t s = 0; s < seqs.size(); ++s) {
        if (!pos[s].empty()) {
            begin_seq(s, pos[s]);
        }
        if (is_image) {
            seqs[s].queries.clear();
        }
    }
    stats.n_tokens += batch.n_tokens;
} catch (const std::exception & err) {
    LLAMA_LOG_ERROR("%s: nothing is evicted: %s\n", __func__, err.what());
}

void llama_kv_evict::begin_seq(uint32_t s, const std::vector<llama_pos> & pos) {
    auto & seq = seqs[s];

    const uint32_t n_new  = pos.size();
    const uint32_t n_used = kv.v_cells[s].seq_pos_get(s).size();

    seq.p0 = pos.front();
    seq.p1 = pos.back() + 1;

    if (n_used == 0 || (seq.n_prompt >= 0 ? seq.n_prompt > 0 : n_new > 1)) {
        if (seq.phase_cur != PHASE_PROMPT) {
            seq.phase_cur = PHASE_PROMPT;
            seq.window.clear();
        }

        // the prompt's last n_window tokens are scored; they may stand in several batches
        const size_t n_left = seq.n_prompt > 0 ? seq.n_prompt : n_new;
        score(s, pos, n_left - std::min<size_t>(n_left, params.n_window), std::min<size_t>(n_left, n_new));
    } else if (seq.phase_cur == PHASE_PROMPT) {
        seq.phase_cur  = PHASE_FIRST;
        seq.n_unscored = 0;

        for (auto & cell : seq.cells) {
            cell.generated = false;
        }

        if (params.budget_share > 0.0f) {
            // all of its positions, also those that have left
            const llama_pos n_pos = kv.v_cells[s].seq_pos_max(s) + 1;
            const uint64_t  n_min = (uint64_t) n_protected(0, 0, n_pos) + n_recent + params.n_refresh;
            seq.n_budget = std::min<uint64_t>(n_budget_open, std::max<uint64_t>(n_min, params.budget_share*n_pos));
        }

        score(s, pos, 0, 1);
    } else {
        seq.phase_cur = PHASE_DECODE;

        cut(s, n_new);

        // a cut should see a fresh row: score when the next step has to cut
        const bool is_full = kv.v_cells[s].seq_pos_get(s).size() + 2*n_new > seq.n_budget;
        if (!params.frozen && (++seq.n_unscored >= params.n_refresh || is_full)) {
            seq.n_unscored = 0;
            score(s, pos, 0, 1);
        }
    }

    plan(s);
}

// tokens [i0, i1) of the sequence's batch get a row each
void llama_kv_evict::score(uint32_t s, const std::vector<llama_pos> & pos, size_t i0, size_t i1) {
    if (!scores_attention()) {
        return;
    }

    for (size_t i = i0; i < i1; ++i) {
        seqs[s].queries.push_back({ pos[i], s*n_rows + (uint32_t) (i - i0) });
    }
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
        dst = seqs[kv.sc_info.ssrc[n_copied]];
        dst.n_prompt = n_prompt;
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
std::vector<bool> llama_kv_evict::scan(uint32_t s) {
    auto & seq = seqs[s];

    const auto & cells = kv.v_cells[s];

    const uint32_t n = std::max(seq.n_cells, cells.used_max_p1());
    seq.n_cells = cells.used_max_p1();

    std::vector<bool> seen(n);

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

    if (n_old == 0) {
        // other contents were loaded, or these are the first
        seq.phase_cur = PHASE_PROMPT;
        seq.window.clear();
    }

    if (seq.n_prompt > 0 && seq.phase_cur == PHASE_PROMPT) {
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

    std::vector<float> mass(n);
    std::vector<float> part(n);

    for (const auto & query : seq.queries) {
        const auto is_query = [&query](const cell_state & cell) { return cell.pos == query.pos; };
        const auto end = seq.cells.begin() + n;
        const auto it  = std::find_if(seq.cells.begin(), end, is_query);

        // the query itself is gone (the batch failed, or was rolled back): so is its row
        if (it == end || !seen[it - seq.cells.begin()]) {
            if (seq.phase_cur == PHASE_FIRST) {
                seq.phase_cur = PHASE_PROMPT;
            }
            continue;
        }

        std::fill(mass.begin(), mass.end(), 0.0f);
        for (const auto & device : devices) {
            ggml_backend_tensor_get(device.rows, part.data(), query.row*device.rows->nb[1], n*sizeof(float));
            for (uint32_t i = 0; i < n; ++i) {
                mass[i] += part[i];
            }
        }

        // columns that the query did not see hold old values
        for (uint32_t i = 0; i < n; ++i) {
            if (!seen[i] || seq.cells[i].pos > query.pos || !(mass[i] > 0.0f)) {
                mass[i] = 0.0f;
            }
        }

        switch (seq.phase_cur) {
            case PHASE_PROMPT:
                {
                    seq.window.push_back({ (uint32_t) (it - seq.cells.begin()), mass });
                    if (seq.window.size() > params.n_window) {
                        seq.window.pop_front();
                    }
                } break;
            case PHASE_FIRST:
                {
                    rank(s, mass);
                    stats.n_refreshes++;
                } break;
            case PHASE_DECODE:
                {
                    add_mass(s, mass);
                    stats.n_refreshes++;
                } break;
        }
    }
}

// the first ranking: window and first decode query, pooled over neighbouring positions
void llama_kv_evict::rank(uint32_t s, const std::vector<float> & mass) {
    auto & seq = seqs[s];

    const bool is_sum = params.aggregation == LLAMA_KV_AGGREGATION_SUM;

    std::vector<float> first = mass;
    for (const auto & row : seq.window) {
        for (size_t i = 0; i < std::min(first.size(), row.mass.size()); ++i) {
            first[i] = is_sum ? first[i] + row.mass[i] : std::max(first[i], row.mass[i]);
        }
    }
    seq.window.clear();

    const auto & by_pos = kv.v_cells[s].seq_pos_get(s);

    const llama_pos n_side = params.n_pool/2;

    // mean over the resident positions [pos - n_side, pos + n_side], as a sliding sum
    auto   lo  = by_pos.begin();
    auto   hi  = by_pos.begin();
    double sum = 0.0;
    int    n   = 0;

    for (const auto & [pos, i] : by_pos) {
        for (; hi != by_pos.end() && hi->first <= pos + n_side; ++hi, ++n) {
            sum += first[hi->second];
        }
        for (; lo->first < pos - n_side; ++lo, --n) {
            sum -= first[lo->second];
        }

        // scores of an earlier prompt stay if they are higher
        seq.cells[i].score = std::max(seq.cells[i].score, (float) std::max(0.0, sum/n));
    }
}

void llama_kv_evict::add_mass(uint32_t s, const std::vector<float> & mass) {
    auto & seq = seqs[s];

    float beta = params.beta;
    if (params.aggregation == LLAMA_KV_AGGREGATION_COUPLED) {
        beta = std::pow((double) params.beta, std::count(hooked.begin(), hooked.end(), true));
    }

    for (size_t i = 0; i < mass.size(); ++i) {
        float & score = seq.cells[i].score;

        switch (params.aggregation) {
            case LLAMA_KV_AGGREGATION_EMA:
            case LLAMA_KV_AGGREGATION_COUPLED: score = beta*score + (1.0f - beta)*mass[i]; break;
            case LLAMA_KV_AGGREGATION_SUM:     score = score + mass[i];                    break;
            case LLAMA_KV_AGGREGATION_LAST:    score = mass[i];                            break;
            case LLAMA_KV_AGGREGATION_MAX:     score = std::max(score, mass[i]);           break;
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
        case LLAMA_KV_SCORER_NONE:
        case LLAMA_KV_SCORER_ATTENTION:
            break;
    }

    return 0.0f;
}

//
// the cut
//

void llama_kv_evict::cut(uint32_t s, uint32_t n_new) {
    auto & seq = seqs[s];

    const auto & cells = kv.v_cells[s];

    const uint32_t n_used = cells.seq_pos_get(s).size();

    if (params.scorer == LLAMA_KV_SCORER_NONE || n_used + n_new <= seq.n_budget) {
        return;
    }

    const int64_t t_start_us = ggml_time_us();

    const llama_pos pos_recent = cells.seq_pos_max(s) + 1 - (llama_pos) n_recent;

    // generated tokens outrank the prompt if the ranking is frozen, the oldest of them leaves first; then score, then position
    std::vector<std::tuple<bool, float, llama_pos, uint32_t>> ranks;
    for (const auto & [pos, i] : cells.seq_pos_get(s)) {
        // the cells of an image under M-RoPE stay together
        const bool is_image = kv.hparams.n_pos_per_embd() > 1 && cells.ext_get(i).tok == LLAMA_TOKEN_NULL;

        if (pos < pos_recent && !is_protected(pos) && !is_image) {
            const bool outranks = params.frozen && seq.cells[i].generated;
            ranks.emplace_back(outranks, outranks ? 0.0f : seq.cells[i].score, pos, i);
        }
    }

    // down to n_budget after n_refresh more tokens
    const uint32_t n_target = seq.n_budget - std::min(seq.n_budget, std::max(params.n_refresh, n_new));
    const uint32_t n_cut    = std::min<uint32_t>(ranks.size(), n_used - std::min(n_used, n_target));

    std::nth_element(ranks.begin(), ranks.begin() + n_cut, ranks.end());

    std::vector<uint32_t> idxs(n_cut);
    for (uint32_t k = 0; k < n_cut; ++k) {
        idxs[k] = std::get<3>(ranks[k]);
    }

    remove(s, idxs);

    stats.t_evict_ms += 1e-3*(ggml_time_us() - t_start_us);
}

// by index: one seq_rm per position would scan all cells each time
// the next scan sees that they are gone
void llama_kv_evict::remove(uint32_t s, const std::vector<uint32_t> & idxs) {
    if (idxs.empty()) {
        return;
    }

    for (const uint32_t i : idxs) {
        kv.v_cells[s].seq_rm(i, s);
        kv.v_heads[s] = std::min(kv.v_heads[s], i);
    }

    seqs[s].has_holes = true;

    is_cut = is_cut || evicts();

    stats.n_evicted += idxs.size();
    stats.n_evictions++;
}

bool llama_kv_evict::is_protected(llama_pos pos) const {
    const auto has = [pos](const std::pair<llama_pos, llama_pos> & range) { return range.first <= pos && pos < range.second; };

    return pos < (llama_pos) params.n_sink || std::any_of(ranges.begin(), ranges.end(), has);
}

// number of positions below n_pos that never leave, with [p0, p1) added
uint32_t llama_kv_evict::n_protected(llama_pos p0, llama_pos p1, llama_pos n_pos) const {
    auto all = ranges;
    all.emplace_back(0, params.n_sink);
    all.emplace_back(p0, p1);
    std::sort(all.begin(), all.end());

    uint32_t  res = 0;
    llama_pos end = 0;
    for (const auto & range : all) {
        res += std::max(0, std::min(n_pos, range.second) - std::max(end, range.first));
        end  = std::max(end, range.second);
    }

    return res;
}

//
// compaction
//

// survivors above the budget move into the holes below it
void llama_kv_evict::plan(uint32_t s) {
    auto & seq = seqs[s];

    const auto & cells = kv.v_cells[s];

    if (!seq.has_holes || !params.compact) {
        return;
    }
    seq.has_holes = false;

    const uint32_t n_end  = cells.used_max_p1();
    const bool     is_open = params.scorer == LLAMA_KV_SCORER_NONE || seq.n_budget == n_budget_open;
    const uint32_t n_keep  = std::max(is_open ? 0 : seq.n_budget, cells.get_used());

    if (n_keep >= n_end || GGML_PAD(n_end, n_kv_pad) == GGML_PAD(n_keep, n_kv_pad)) {
        return; // nothing to gain
    }

    for (uint32_t i = n_keep, j = 0; i < n_end; ++i) {
        if (!cells.is_empty(i)) {
            while (!cells.is_empty(j)) {
                ++j;
            }
            seq.from.push_back(i);
            seq.to  .push_back(j++);
        }
    }
}

bool llama_kv_evict::has_moves() const {
    return std::any_of(seqs.begin(), seqs.end(), [](const seq_state & seq) { return !seq.from.empty(); });
}

// the data has moved: now what is known about the cells
void llama_kv_evict::moved(uint32_t s, const llama_kv_cells & meta) {
    auto & seq   = seqs[s];
    auto & cells = kv.v_cells[s];

    for (const uint32_t i : seq.from) {
        cells.rm(i);
    }
    cells.set(seq.to, meta);
    kv.v_heads[s] = 0;

    for (size_t k = 0; k < seq.from.size(); ++k) {
        const uint32_t from = seq.from[k];
        const uint32_t to   = seq.to[k];

        seq.cells[to]   = seq.cells[from];
        seq.cells[from] = {};

        for (auto & row : seq.window) {
            if (to < row.mass.size()) {
                row.mass[to] = from < row.mass.size() ? row.mass[from] : 0.0f;
            }
            if (row.cell == from) {
                row.cell = to;
            }
        }
    }

    stats.n_moved += seq.from.size();
}

//
// interface
//

bool llama_kv_evict::protect(llama_pos p0, llama_pos p1) {
    if (p0 < 0 || p1 <= p0) {
        return false;
    }

    const bool is_limited = params.scorer != LLAMA_KV_SCORER_NONE && params.budget_share <= 0.0f;
    if (is_limited && (uint64_t) n_protected(p0, p1, n_budget_open) + n_recent + params.n_refresh > params.n_budget) {
        return false;
    }

    ranges.emplace_back(p0, p1);

    return true;
}

bool llama_kv_evict::prompt(llama_context & lctx, llama_seq_id seq_id, int32_t n_tokens) {
    settle(lctx); // the tokens of the last batch belong to the last announcement

    seqs[seq_id].n_prompt = std::max(-1, n_tokens);

    return true;
}

std::vector<llama_kv_evict_cell> llama_kv_evict::cells(llama_context & lctx, llama_seq_id seq_id) {
    settle(lctx);

    std::vector<llama_kv_evict_cell> res;
    for (const auto & [pos, i] : kv.v_cells[seq_id].seq_pos_get(seq_id)) {
        res.push_back({ pos, seqs[seq_id].cells[i].score });
    }

    return res;
}

int32_t llama_kv_evict::keep(llama_context & lctx, llama_seq_id seq_id, std::vector<llama_pos> pos) {
    settle(lctx);

    std::sort(pos.begin(), pos.end());
    pos.erase(std::unique(pos.begin(), pos.end()), pos.end());

    const auto & by_pos = kv.v_cells[seq_id].seq_pos_get(seq_id);

    for (const llama_pos p : pos) {
        const auto it = by_pos.lower_bound({ p, 0 });
        if (it == by_pos.end() || it->first != p) {
            return -2;
        }
    }

    std::vector<uint32_t> idxs;
    for (const auto & [p, i] : by_pos) {
        if (p != by_pos.rbegin()->first && !std::binary_search(pos.begin(), pos.end(), p)) {
            idxs.push_back(i);
        }
    }

    remove(seq_id, idxs);
    scan(seq_id);

    return idxs.size();
}

llama_kv_evict_stats llama_kv_evict::get_stats(llama_context & lctx) {
    settle(lctx);

    llama_kv_evict_stats res = stats;

    for (const auto & cells : kv.v_cells) {
        res.n_cells += cells.size();
        res.n_used  += cells.get_used();
    }

    res.n_reused   = lctx.n_reused;
    res.t_score_ms = op_timed ? stats.t_score_ms + 1e-3*t_op_us : NAN;

    return res;
}
