// what the engine knows about a sequence: written, read back, renumbered

#include "llama-kv-evict.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-iswa.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <type_traits>

//
// bytes
//

static constexpr uint32_t state_magic   = 0x5645564b; // "KVEV"
static constexpr uint32_t state_version = 1;          // bump on any change of what is written below

struct state_writer {
    std::vector<uint8_t> data;

    template <typename T>
    void put(const T & value) {
        static_assert(std::is_arithmetic_v<T>);
        const auto * bytes = (const uint8_t *) &value;
        data.insert(data.end(), bytes, bytes + sizeof(T));
    }
};

// whatever the bytes are: reading beyond them throws
struct state_reader {
    const uint8_t * data;
    size_t          n_left;

    template <typename T>
    T get() {
        static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>);
        T res;
        if (n_left < sizeof(T)) {
            throw std::runtime_error("the state is truncated");
        }
        memcpy(&res, data, sizeof(T));
        data   += sizeof(T);
        n_left -= sizeof(T);
        return res;
    }

    // scores and masses are finite and not negative (recency: a position)
    float get_score() {
        const auto res = get<float>();
        if (!(std::isfinite(res) && res >= 0.0f)) {
            throw std::runtime_error("the state is corrupted: a score is not a number");
        }
        return res;
    }

    // a count of items of n_bytes each
    uint32_t get_count(size_t n_bytes) {
        const auto res = get<uint32_t>();
        if (res > n_left/std::max<size_t>(1, n_bytes)) {
            throw std::runtime_error("the state is truncated");
        }
        return res;
    }
};

static constexpr float llama_kv_history::* history_values[] = {
    &llama_kv_history::mass, &llama_kv_history::ema, &llama_kv_history::max, &llama_kv_history::interim,
    &llama_kv_history::key, &llama_kv_history::value,
};

std::vector<uint8_t> llama_kv_evict::get_state(llama_context & lctx, llama_seq_id seq_id) {
    settle(lctx);

    const auto & seq    = seqs[seq_id];
    const auto & by_pos = kv.v_cells[seq_id].seq_pos_get(seq_id);

    state_writer out;

    out.put(state_magic);
    out.put(state_version);

    // what makes scores comparable
    out.put((uint32_t) params.scorer);
    out.put((uint32_t) params.aggregation);
    out.put((uint32_t) params.heads);
    out.put(params.scorer == LLAMA_KV_SCORER_RANDOM ? params.seed : 0);
    out.put(params.beta);
    out.put((uint32_t) coef.size());
    for (const float w : coef) {
        out.put(w);
    }
    if (is_learned()) {
        out.put(learned.n_hidden);
        for (const float w : learned.data) {
            out.put(w);
        }
    }

    out.put((uint32_t) seq.phase_cur);
    out.put(seq.n_prompt);
    out.put((uint32_t) seq.is_probed);
    out.put(seq.n_spare);
    out.put(seq.n_budget);
    out.put(seq.n_unscored);

    for (const uint64_t n : { stats.n_tokens, stats.n_evicted, stats.n_evictions, stats.n_refreshes, stats.n_moved }) {
        out.put(n);
    }
    out.put(stats.t_score_ms + 1e-3*t_op_us);
    out.put(stats.t_evict_ms);
    out.put(stats.t_move_ms);

    out.put((uint32_t) by_pos.size());
    for (const auto & [pos, i] : by_pos) {
        const auto & cell = seq.cells[i];

        out.put(pos);
        out.put(cell.score);
        out.put(cell.interim);
        out.put(cell.n_scored);
        out.put((uint32_t) cell.generated);
    }

    out.put((uint32_t) seq.window.size());
    for (const auto & row : seq.window) {
        out.put(seq.cells[row.cell].pos);
        for (const auto & [pos, i] : by_pos) {
            out.put(i < row.mass.size() ? row.mass[i] : 0.0f);
        }
    }

    for (const auto & [pos, i] : by_pos) {
        for (const auto value : history_values) {
            if (is_learned()) {
                out.put(seq.history[i].*value);
            }
        }
    }

    return std::move(out.data);
}

std::string llama_kv_evict::set_state(llama_context & lctx, llama_seq_id seq_id, const uint8_t * src, size_t n) {
    settle(lctx);

    const auto & cells  = kv.v_cells[seq_id];
    const auto & by_pos = cells.seq_pos_get(seq_id);

    // all of it is read and checked before anything changes
    seq_state seq;
    seq.cells.resize(kv.get_size());
    seq.history.resize(is_learned() ? kv.get_size() : 0);
    seq.n_cells   = cells.used_max_p1();
    seq.n_budget  = params.budget_share > 0.0f ? n_budget_open : std::min(params.n_budget, kv.get_size());
    seq.i_release = 0;

    for (const auto & [pos, i] : by_pos) {
        seq.cells[i].pos   = pos - cells.get_shift(i);
        seq.cells[i].tok   = cells.ext_get(i).tok;
        seq.cells[i].score = score_init(pos);
    }

    if (n == 0) {
        seqs[seq_id] = std::move(seq);
        return "";
    }

    state_reader in { src, n };

    if (in.get<uint32_t>() != state_magic) {
        return "these bytes are not a state of the engine";
    }
    if (const auto version = in.get<uint32_t>(); version != state_version) {
        return format("the state has version %u, this engine reads version %u", version, state_version);
    }

    const auto is_same = [&](auto ours) { return in.get<decltype(ours)>() == ours; };

    bool same = is_same((uint32_t) params.scorer);
    same = is_same((uint32_t) params.aggregation) && same;
    same = is_same((uint32_t) params.heads)       && same;
    same = is_same(params.scorer == LLAMA_KV_SCORER_RANDOM ? params.seed : 0) && same;
    same = is_same(params.beta) && same;
    same = is_same((uint32_t) coef.size()) && same;
    for (size_t il = 0; same && il < coef.size(); ++il) {
        same = is_same(coef[il]);
    }
    if (same && is_learned()) {
        same = is_same(learned.n_hidden);
        for (size_t k = 0; same && k < learned.data.size(); ++k) {
            same = is_same(learned.data[k]);
        }
    }
    if (!same) {
        return "the state was ranked by another scorer, aggregation, beta or other weights";
    }

    const auto phase_cur = in.get<uint32_t>();
    seq.n_prompt         = in.get<int32_t>();
    const auto is_probed = in.get<uint32_t>();
    seq.n_spare          = in.get<uint32_t>();
    const auto n_budget  = in.get<uint32_t>();
    seq.n_unscored       = in.get<uint32_t>();
    if (phase_cur > PHASE_DECODE || seq.n_prompt < -1 || is_probed > 1 || seq.n_spare > kv.get_size() || n_budget > n_budget_open) {
        return "the state is corrupted: a value is out of range";
    }
    seq.phase_cur = (phase) phase_cur;
    seq.is_probed = is_probed;
    if (params.budget_share > 0.0f) {
        const llama_pos n_pos = by_pos.empty() ? 0 : by_pos.rbegin()->first + 1;
        seq.n_budget = std::max(n_budget, n_protected(0, 0, n_pos) + n_recent + params.n_refresh);
    }

    llama_kv_evict_stats counts = {};
    counts.n_tokens    = in.get<uint64_t>();
    counts.n_evicted   = in.get<uint64_t>();
    counts.n_evictions = in.get<uint64_t>();
    counts.n_refreshes = in.get<uint64_t>();
    counts.n_moved     = in.get<uint64_t>();
    counts.t_score_ms  = in.get<double>();
    counts.t_evict_ms  = in.get<double>();
    counts.t_move_ms   = in.get<double>();

    if (in.get_count(5*sizeof(float)) != by_pos.size()) {
        return "the state has other cells than the sequence: load llama.cpp's part of it first";
    }
    for (const auto & [pos, i] : by_pos) {
        auto & cell = seq.cells[i];

        if (in.get<llama_pos>() != pos) {
            return "the state has other positions than the sequence: load llama.cpp's part of it first";
        }
        cell.score     = in.get_score();
        cell.interim   = in.get_score();
        cell.n_scored  = in.get<uint32_t>();
        cell.generated = in.get<uint32_t>() != 0;
    }

    const auto n_window_cur = in.get_count(sizeof(float)*(1 + by_pos.size()));
    for (uint32_t k = 0; k < n_window_cur; ++k) {
        const auto query = in.get<llama_pos>();

        const auto it = by_pos.lower_bound({ query, 0 });
        if (it == by_pos.end() || it->first != query) {
            return "the state is corrupted: a query is not resident";
        }

        window_row row = { it->second, std::vector<float>(seq.n_cells) };
        for (const auto & [pos, i] : by_pos) {
            row.mass[i] = in.get_score();
        }
        seq.window.push_back(std::move(row));
        if (seq.window.size() > n_window) {
            seq.window.pop_front(); // a smaller window than that of the state
        }
    }

    for (const auto & [pos, i] : by_pos) {
        for (const auto value : history_values) {
            if (is_learned()) {
                seq.history[i].*value = in.get_score();
            }
        }
    }

    if (in.n_left > 0) {
        return "the state is corrupted: it is longer than what it says";
    }

    seqs[seq_id] = std::move(seq);
    if (seqs.size() == 1) {
        stats   = counts;
        t_op_us = 0;
    }

    return "";
}

//
// positions
//

bool llama_kv_evict::can_close_gaps(llama_context & lctx) const {
    auto * memory = lctx.get_memory();

    // a hybrid's recurrent part counts positions of its own
    if (memory != &kv && !dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return false;
    }

    // build_rope_shift counts on a Hadamard rotation of quantised K, which heads of some sizes do not have
    const auto is_served = [this](const auto & layer) { return !ggml_is_quantized(layer.k->type) || kv.attn_rot_k; };

    return memory->get_can_shift() && std::all_of(kv.layers.begin(), kv.layers.end(), is_served);
}

std::vector<llama_pos> llama_kv_evict::close_gaps(llama_context & lctx, llama_seq_id seq_id, uint32_t n_new) {
    if (!can_close_gaps(lctx)) {
        throw std::runtime_error("positions cannot be changed here");
    }

    settle(lctx);

    auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(lctx.get_memory());

    make_room(seq_id, n_new, seqs[seq_id].phase_cur != PHASE_PROMPT && !is_prompt(seq_id, n_new));

    auto & cells = kv.v_cells[seq_id];

    std::vector<std::pair<llama_pos, uint32_t>> by_pos(cells.seq_pos_get(seq_id).begin(), cells.seq_pos_get(seq_id).end());
    if (by_pos.empty()) {
        return {};
    }

    // from p_window on positions move together
    const llama_pos n_pos    = by_pos.back().first + 1;
    const llama_pos p_window = iswa ? std::max(0, n_pos - (llama_pos) kv.hparams.n_swa) : n_pos;

    std::vector<llama_pos> old;
    for (const auto & [pos, i] : by_pos) {
        if (pos < p_window) {
            old.push_back(pos);
        }
    }
    const llama_pos n_below = old.size();
    for (llama_pos pos = p_window; pos < n_pos; ++pos) {
        old.push_back(pos);
    }

    // the number of kept positions below pos, which is where pos goes
    const auto renumbered = [&](llama_pos pos) -> llama_pos {
        return pos < p_window ? std::lower_bound(old.begin(), old.begin() + n_below, pos) - old.begin() : n_below + pos - p_window;
    };

    auto moved_ranges = ranges;
    for (auto & [p0, p1] : moved_ranges) {
        p0 = renumbered(p0);
        p1 = renumbered(p1);
    }
    if (seqs.size() > 1 && moved_ranges != ranges) {
        throw std::runtime_error("the protected ranges of several sequences cannot move");
    }
    moved_ranges.erase(std::remove_if(moved_ranges.begin(), moved_ranges.end(),
                [](const auto & range) { return range.first >= range.second; }), moved_ranges.end());
    ranges = moved_ranges;

    if (p_window - n_below == 0) {
        return old;
    }

    // by index: one seq_add per run of cells would scan all of them each time
    for (const auto & [pos, i] : by_pos) {
        if (const llama_pos shift = renumbered(pos) - pos) {
            cells.pos_add(i, shift);
        }
    }
    kv.v_heads[seq_id] = 0;

    if (iswa) {
        // what no window sees any more would come to stand among what it sees
        iswa->get_swa()->seq_rm (seq_id, 0, p_window);
        iswa->get_swa()->seq_add(seq_id, p_window, -1, n_below - p_window);
    }

    // now, not with the next batch: K fits its positions if a state is saved before
    // all of it: keys of which some are rotated would be lost
    auto * abort_callback = lctx.abort_callback;
    lctx.set_abort_callback(nullptr, lctx.abort_callback_data);
    try {
        lctx.sched_reserve();
        lctx.memory_update(true);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: the next batch rotates the keys: %s\n", __func__, err.what());
    }
    n_copied = kv.sc_info.ssrc.size(); // all were taken over, those that are still pending too
    lctx.set_abort_callback(abort_callback, lctx.abort_callback_data);

    return old;
}
