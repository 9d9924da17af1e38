#include "llama-kv-evict.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cmath>

// attention cost is padded to this many cells (llama_kv_cache::get_n_kv)
static constexpr uint32_t n_kv_pad = 256;

// decode steps over which the memory above a cut goes back to the system
static constexpr size_t n_release = 16;

llama_kv_evict::llama_kv_evict(llama_kv_cache & kv, const llama_kv_evict_params & params) :
        kv(kv), params(params), n_recent(std::max(1u, params.n_recent)),
        n_window(scores_keys() ? 0 : params.n_window), n_rows(std::max(1u, n_window)) {
    hooked.resize(kv.hparams.n_layer_all, false);
    coef  .resize(kv.hparams.n_layer_all, 0.0f);

    seqs.resize(kv.n_stream);
    for (auto & seq : seqs) {
        seq.cells.resize(kv.get_size());
        seq.history.resize(is_learned() ? kv.get_size() : 0);
        seq.n_budget = params.budget_share > 0.0f ? n_budget_open : std::min(params.n_budget, kv.get_size());
    }

    if (scores_layers()) {
        alloc_rows();
    }
}

bool llama_kv_evict::evicts() const {
    return params.scorer != LLAMA_KV_SCORER_NONE;
}

bool llama_kv_evict::fuses_attention() const {
    if (!evicts() || !params.compact) {
        return false;
    }
    if (scores_layers() && (kind() != GGML_KV_KIND_MASS || heads() != GGML_KV_HEADS_MEAN)) {
        return false; // the op does not know how
    }

    for (uint32_t s = 0; s < seqs.size(); ++s) {
        const auto & cells = kv.v_cells[s];
        if (cells.seq_pos_max(s) >= (llama_pos) cells.seq_pos_get(s).size()) {
            return true; // positions are missing
        }
    }

    return false;
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
    }

    auto & pos = scratch.pos;
    pos.resize(seqs.size());
    for (auto & p : pos) {
        p.clear();
    }
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
    n_copied = 0;
    LLAMA_LOG_ERROR("%s: nothing is evicted: %s\n", __func__, err.what());
}

void llama_kv_evict::seq_state::forget_interim() {
    for (auto & cell : cells) {
        cell.interim = 0.0f;
    }
    for (auto & h : history) {
        h.interim = 0.0f;
    }
}

bool llama_kv_evict::is_prompt(uint32_t s, uint32_t n_new) const {
    const auto & seq = seqs[s];

    const bool is_empty = kv.v_cells[s].seq_pos_get(s).empty();

    return is_empty || seq.n_probe > 0 || (seq.n_prompt >= 0 ? seq.n_prompt > 0 : n_new > 1);
}

void llama_kv_evict::make_room(uint32_t s, uint32_t n_new, bool is_decode) {
    auto & seq = seqs[s];

    if (is_decode) {
        seq.phase_cur = PHASE_DECODE;

        // down to n_budget after n_refresh more tokens
        const auto below = [&seq](uint32_t n) { return seq.n_budget - std::min(seq.n_budget, n); };
        cut(s, below(n_new), below(std::max(params.n_refresh, n_new)));
    } else if (params.bounded || seq.phase_cur == PHASE_FIRST) {
        // a probe must not push out what it is to rank
        const bool     is_spare = seq.n_probe == 0 && seq.phase_cur != PHASE_DECODE;
        const uint32_t n_need   = n_new + (is_spare ? seq.n_spare : 0);
        const uint32_t n_room   = kv.get_size() - std::min(kv.get_size(), n_need);
        cut(s, n_room, n_room);
    }
}

void llama_kv_evict::begin_seq(uint32_t s, const std::vector<llama_pos> & pos) {
    auto & seq = seqs[s];

    const uint32_t n_new  = pos.size();
    const uint32_t n_used = kv.v_cells[s].seq_pos_get(s).size();

    seq.p0 = pos.front();
    seq.p1 = pos.back() + 1;

    seq.before = seq;

    if (is_prompt(s, n_new)) {
        if (n_used == 0 && seq.n_probe == 0) {
            seq.is_probed = false;
            seq.n_spare   = 0;
        }

        if (seq.phase_cur != PHASE_PROMPT) {
            seq.phase_cur = PHASE_PROMPT;
            seq.is_probed = false;
            seq.n_spare   = 0;
            seq.window.clear();
            seq.forget_interim();
        }

        make_room(s, n_new, false);

        // the prompt's last n_window tokens are scored; they may stand in several batches
        // bounded: those of every batch, the next one may need room
        const size_t n_left = seq.n_prompt > 0 && !params.bounded ? seq.n_prompt : n_new;
        const size_t n_last = params.bounded ? n_rows : n_window;
        score(s, pos, n_left - std::min(n_left, n_last), std::min<size_t>(n_left, n_new));
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
            seq.n_budget = std::min<uint64_t>(kv.get_size(), std::max<uint64_t>(n_min, params.budget_share*n_pos));
        }

        make_room(s, n_new, false);

        score(s, pos, 0, 1);
    } else {
        make_room(s, n_new, true);

        const size_t n_layer = kv.layers.size();
        if (seq.i_release < n_layer) {
            const size_t il = std::min(n_layer, seq.i_release + (n_layer + n_release - 1)/n_release);
            if (release(s, seq.i_release, il)) {
                seq.i_release = il;
            }
        }

        // a cut should see a fresh row: score when the next step has to cut
        const bool is_full = kv.v_cells[s].seq_pos_get(s).size() + 2*n_new > seq.n_budget;
        if (!params.frozen && (++seq.n_unscored >= params.n_refresh || is_full)) {
            score(s, pos, 0, 1);
            seq.n_unscored = 0;
        }
    }

    plan(s, n_new);
}

// tokens [i0, i1) of the sequence's batch get a row each
void llama_kv_evict::score(uint32_t s, const std::vector<llama_pos> & pos, size_t i0, size_t i1) {
    if (!scores_layers()) {
        return;
    }

    for (size_t i = i0; i < i1; ++i) {
        if (i > i0 && pos[i] == pos[i - 1]) {
            continue; // the first of them has the row
        }
        seqs[s].queries.push_back({ pos[i], s*n_rows + (uint32_t) (i - i0), seqs[s].n_unscored });
    }
}

//
// the cut
//

// if there are more than n_most cells: down to n_target
void llama_kv_evict::cut(uint32_t s, uint32_t n_most, uint32_t n_target) {
    auto & seq = seqs[s];

    const auto & cells = kv.v_cells[s];

    const uint32_t n_used = cells.seq_pos_get(s).size();

    if (!evicts() || n_used <= n_most) {
        return;
    }

    const int64_t t_start_us = ggml_time_us();

    const llama_pos pos_recent = cells.seq_pos_max(s) + 1 - (llama_pos) n_recent;

    // generated tokens outrank the prompt if the ranking is frozen, the oldest of them leaves first; then score, then position
    auto & ranks = scratch.ranks;
    ranks.clear();
    for (const auto & [pos, i] : cells.seq_pos_get(s)) {
        // the cells of an image under M-RoPE stay together
        const bool is_image = kv.hparams.n_pos_per_embd() > 1 && cells.ext_get(i).tok == LLAMA_TOKEN_NULL;

        if (pos < pos_recent && !is_protected(pos) && !is_image) {
            const bool outranks = params.frozen && seq.cells[i].generated;
            const float score = seq.phase_cur == PHASE_DECODE ? seq.cells[i].score : std::max(seq.cells[i].score, seq.cells[i].interim);
            ranks.emplace_back(outranks, outranks ? 0.0f : score, pos, i);
        }
    }

    if (seq.phase_cur != PHASE_DECODE && n_used - ranks.size() > n_most) {
        return; // the batch does not fit, whatever leaves
    }

    const uint32_t n_cut = std::min<uint32_t>(ranks.size(), n_used - std::min(n_used, n_target));

    std::nth_element(ranks.begin(), ranks.begin() + n_cut, ranks.end());

    auto & idxs = scratch.idxs;
    idxs.clear();
    for (uint32_t k = 0; k < n_cut; ++k) {
        idxs.push_back(std::get<3>(ranks[k]));
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
void llama_kv_evict::plan(uint32_t s, uint32_t n_new) {
    auto & seq = seqs[s];

    const auto & cells = kv.v_cells[s];

    if (!seq.has_holes || !params.compact) {
        return;
    }
    seq.has_holes = false;

    const uint32_t n_end  = cells.used_max_p1();
    const bool     is_open = !evicts() || seq.n_budget == n_budget_open;
    const uint32_t n_keep  = std::max(is_open ? 0 : seq.n_budget, cells.get_used() + n_new);

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
        if (is_learned()) {
            seq.history[to]   = seq.history[from];
            seq.history[from] = {};
        }

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

    const bool is_limited = evicts() && params.budget_share <= 0.0f;
    if (is_limited && (uint64_t) n_protected(p0, p1, n_budget_open) + n_recent + params.n_refresh > params.n_budget) {
        return false;
    }

    ranges.emplace_back(p0, p1);

    return true;
}

void llama_kv_evict::unprotect() {
    ranges.clear();
}

bool llama_kv_evict::prompt(llama_context & lctx, llama_seq_id seq_id, int32_t n_tokens) {
    settle(lctx); // the tokens of the last batch belong to the last announcement

    seqs[seq_id].n_prompt = std::max(-1, n_tokens);
    seqs[seq_id].n_probe  = 0; // one that failed is over

    return true;
}

bool llama_kv_evict::probe(llama_context & lctx, llama_seq_id seq_id, int32_t n_tokens) {
    settle(lctx);

    auto & seq = seqs[seq_id];

    if (!params.bounded || seq.phase_cur != PHASE_PROMPT || n_tokens > (int64_t) kv.get_size()) {
        return false;
    }

    // the first probe: what the prompt's own queries valued no longer counts
    if (n_tokens > 0 && !seq.is_probed) {
        seq.is_probed = true;
        seq.forget_interim();
    }

    seq.n_probe = std::max(0, n_tokens);
    seq.n_spare = std::max<uint32_t>(seq.n_spare, seq.n_probe);

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
    get_bytes(*lctx.get_memory(), res);

    res.n_reused   = lctx.n_reused;
    res.t_score_ms = op_timed ? stats.t_score_ms + 1e-3*t_op_us : NAN;

    return res;
}
