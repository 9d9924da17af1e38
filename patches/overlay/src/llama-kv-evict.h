#pragma once

// The eviction engine of a KV cache: scores, choice, cut.
//
// It hangs on llama_kv_cache as an optional member, so every cache built of one has it: the plain cache, the base cache
// of iSWA, the attention part of hybrids. State is per stream (cells) and per sequence (phase).
//
//   positions of a sequence, once cut to n_budget cells:
//
//   0    n_sink                                               max - n_recent   max   next
//   |#####|..#...##.....#......###...#....protect#####.....#...|################|######|
//    sinks  ranked by score, the lowest leave first              recent           incoming
//
// A score is one float per cell, shared by all layers:
//
//   row       m[t,c] = sum_l w_l mean_h softmax(q[t,h] . k[c])     w_l ~ lambda^(L-1-l), sum 1; L = scored layers
//   first     s = pool(max over the last n_window prompt queries and the first decode query of m[t,c]); sum: their sum
//   then      s <- b s + (1 - b) m, b = beta^n, n steps after      or another rule of llama_kv_aggregation
//
// Other scorers have other rows, see ggml_kv_mass. The learned one keeps EMA and maximum of the mass of each cell and has
// for a row what it predicts from them (llama-kv-evict-learned.h); EMA and maximum begin with the first ranking.
// Those of keys ask what a cell holds, not a query: the first decode query alone makes the first ranking (bounded: and the
// last one of each batch). Under both, a cell that enters later takes its first row whole under every time rule, where
// attention lets it grow from 0.
//
// The rows are made inside the graph (llama-kv-evict-graph.h), by ggml_kv_mass beside llama.cpp's attention and by
// ggml_kv_attn, which knows only the row above, in place of it once a sequence was cut, and read back before the next batch;
// everything else happens on the host: scores in llama-kv-evict-score.cpp, saved states and closed gaps in
// llama-kv-evict-state.cpp, the rest in llama-kv-evict.cpp.
//
// The life of a sequence:
//
//   prompt    enters whole, nothing is evicted; only its last n_window queries are scored
//             bounded: each batch makes the room it needs, ranked by the last n_window queries of the batches so far (their
//             max, averaged over n_pool positions), or by those of probes
//   first     the first decode query still sees every cell and is scored
//   decode    before each batch: scores are updated, the lowest cells leave if the batch would pass n_budget.
//             With n_refresh = r every r-th step is scored (and the one before a cut), a cut goes down to n_budget - r.
//
// A further prompt starts over; its ranking and the scores so far are joined by max.
//
// A batch that is removed before the next call, by the caller or because it failed as one micro-batch, has not been: the next
// one finds scores, phase and n_refresh's count as this one found them (n_tokens of the statistics counts both). What it evicted to make room stays evicted; for the same batch that is the same choice.
//
// Invariants: sinks, recent and protected cells never leave; in the decode phase never more than n_budget cells, the
// incoming ones included; the newest cell stays (decode continues at its position + 1); cells keep their positions, unless
// the caller closes the gaps;
// a cell that is reused starts from nothing; ties: the lower position leaves first, so a run is reproducible.
//
// The first cut leaves holes below cells that stay: update() moves the survivors together. After that an incoming token
// takes the hole of an evicted one: metadata only, the graph is reused.

// the public header has the same name
#include "../include/llama-kv-evict.h"

#include "llama-kv-evict-learned.h"

#include "ggml-cpp.h"
#include "ggml-kv-evict.h"

#include <deque>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

class llama_kv_cache;
class llama_kv_cells;
struct llama_memory_i;

struct llama_kv_evict {
    llama_kv_evict(llama_kv_cache & kv, const llama_kv_evict_params & params);

    //
    // called by llama_kv_cache
    //

    // before a batch is placed: take in the rows of the last batch, cut, decide which of the new queries are scored
    void begin_batch(llama_context & lctx);

    // true if update() has cells to move
    bool has_moves() const;

    // move cells; returns true if a graph was computed
    bool update(llama_context & lctx);

    //
    // called while a graph is built and run (llama-kv-evict-graph.cpp)
    //

    struct device_rows {
        ggml_backend_buffer_type_t buft;

        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;

        ggml_tensor * rows; // F32 [kv_size, n_rows*n_stream], one query's mass per cell in each

        // learned scorer only, F32 [kv_size, n_stream]: the norms of cells that had none
        ggml_tensor * key   = nullptr;
        ggml_tensor * value = nullptr;
    };

    bool evicts() const; // by itself

    // what a cell is ranked by comes out of the graph: these tell the op what to take of it
    bool          scores_layers() const { return scores_layers(params); }
    ggml_kv_kind  kind()          const { return kind         (params); }
    ggml_kv_heads heads()         const { return heads        (params); }

    static bool          scores_layers(const llama_kv_evict_params & params);
    static ggml_kv_kind  kind         (const llama_kv_evict_params & params);
    static ggml_kv_heads heads        (const llama_kv_evict_params & params);

    // a sequence with evicted cells: attention and its mass are one op, whose sums have another order than llama.cpp's
    bool fuses_attention() const;

    // the row of query (seq_id, pos) in the batch that is being computed, -1 if it is not scored
    int32_t row(llama_seq_id seq_id, llama_pos pos) const;

    bool is_learned() const { return params.scorer == LLAMA_KV_SCORER_LEARNED; }

    // mask[n_kv] = 0 for the cells whose norms are not known, -inf for the others; returns whether there are any
    bool mask_normless(llama_seq_id seq_id, float * mask, uint32_t n_kv) const;

    std::vector<device_rows> devices; // one per buffer type that holds K

    std::vector<bool>  hooked; // [n_layer] layers whose attention passes through the hook
    std::vector<float> coef;   // [n_layer] layer weights w_l, 0 for layers that are not scored

    int64_t t_op_us  = 0;    // in ggml_kv_mass
    bool    op_timed = true; // only the CPU op keeps its time

    //
    // called by the C interface (llama-kv-evict-api.cpp)
    //

    static llama_kv_evict * get(llama_context & ctx);

    // attach an engine to the context; returns a message, empty on success
    static std::string attach(llama_context & ctx, llama_kv_evict_params params);

    int32_t n_layer() const; // scored ones

    bool set_layer_weights(const float * w, int32_t n);

    // returns a message, empty on success
    std::string set_weights(int32_t n_hidden, const float * w, int32_t n);

    // [n_cells][N_X], by position
    std::vector<float> features(llama_context & lctx, llama_seq_id seq_id);

    bool protect(llama_pos p0, llama_pos p1);
    void unprotect();

    bool prompt(llama_context & lctx, llama_seq_id seq_id, int32_t n_tokens);

    bool probe(llama_context & lctx, llama_seq_id seq_id, int32_t n_tokens);

    std::vector<llama_kv_evict_cell> cells(llama_context & lctx, llama_seq_id seq_id);

    int32_t keep(llama_context & lctx, llama_seq_id seq_id, std::vector<llama_pos> pos);

    // throws where positions cannot be changed
    bool can_close_gaps(llama_context & lctx) const;
    std::vector<llama_pos> close_gaps(llama_context & lctx, llama_seq_id seq_id, uint32_t n_new);

    std::vector<uint8_t> get_state(llama_context & lctx, llama_seq_id seq_id);

    // returns a message, empty on success; n = 0 forgets
    std::string set_state(llama_context & lctx, llama_seq_id seq_id, const uint8_t * src, size_t n);

    llama_kv_evict_stats get_stats(llama_context & lctx);

private:
    // a share of a prompt that has not ended yet
    static constexpr uint32_t n_budget_open = INT32_MAX;

    static std::string refuse   (llama_context & ctx, llama_kv_cache * kv);
    static std::string check_ops(const llama_kv_cache & kv, llama_kv_evict_params & params);

    void alloc_rows();
    void set_coef();
    void take_op_times(llama_context & lctx);

    // memory (llama-kv-evict-memory.cpp): give the pages of cells back that are not used, all or those of some layers
    // returns false if it has to wait
    void release();
    bool release(uint32_t s, size_t il0, size_t il1);

    void get_bytes(llama_memory_i & memory, llama_kv_evict_stats & stats) const;

    enum phase { PHASE_PROMPT, PHASE_FIRST, PHASE_DECODE };

    // a cell as last seen: when its identity (pos, tok) has changed, everything else starts from nothing
    struct cell_state {
        llama_pos   pos = -1;
        llama_token tok = LLAMA_TOKEN_NULL;

        float    score     = 0.0f;
        float    interim   = 0.0f;  // bounded prefill: what the batches of the prompt so far put on it
        uint32_t n_scored  = 0;     // rows in the score; the first ranking counts as one
        bool     generated = false; // entered by a decode step since the last prompt
    };

    // the mass that one prompt query puts on the cells
    struct window_row {
        uint32_t           cell; // of the query itself
        std::vector<float> mass;
    };

    // a query of the batch in flight and the row it writes
    struct scored_query {
        llama_pos pos;
        uint32_t  row;
        uint32_t  n_steps; // decode steps from the scored one before to this one
    };

    // how far a sequence has come; a batch that fails, or is taken back before the next, does not count
    struct progress {
        phase    phase_cur  = PHASE_PROMPT;
        uint32_t n_spare    = 0; // cells that a prompt's batches leave free for probes
        bool     is_probed  = false;
        uint32_t n_budget   = 0;
        uint32_t n_unscored = 0; // decode steps since the last scored one
    };

    // one sequence and its stream
    struct seq_state : progress {
        std::vector<cell_state>       cells;   // [kv_size]
        std::vector<llama_kv_history> history; // [kv_size], empty unless the scorer is learned
        uint32_t                n_cells = 0; // those above were never seen or are empty

        // what the mass of a prompt is gathered in: the learned scorer predicts from it
        float & ranking(uint32_t i) { return history.empty() ? cells[i].score   : history[i].ema;     }
        float & interim(uint32_t i) { return history.empty() ? cells[i].interim : history[i].interim; }

        void forget_interim();

        std::deque<window_row>  window;

        int32_t n_prompt = -1; // announced prompt tokens that are still to come, -1 = none were announced
        int32_t n_probe  = 0;  // announced tokens of a probe

        // the batch in flight, and what the progress was before it
        llama_pos p0 = 0;
        llama_pos p1 = 0; // exclusive
        progress  before;
        std::vector<scored_query> queries;

        // the next layer whose memory goes back: a few per step, so that the cut stays short
        size_t i_release = SIZE_MAX;

        // holes to be filled, and the moves that fill them
        bool has_holes = false;
        std::vector<uint32_t> from;
        std::vector<uint32_t> to;
    };

    void settle(llama_context & lctx);

    const std::vector<bool> & scan(uint32_t s);

    void take_rows(uint32_t s, const std::vector<bool> & seen);
    void rank     (uint32_t s, const std::vector<float> & mass, const std::vector<bool> & saw);
    void add_mass (uint32_t s, const std::vector<float> & mass, const std::vector<bool> & saw, uint32_t n_steps);

    void join(std::vector<float> & dst, const std::vector<float> & mass) const;
    void pool(uint32_t s, const std::vector<float> & mass, float & (seq_state::* dst)(uint32_t));

    // learned scorer
    void take_norms  (uint32_t s, const std::vector<bool> & seen);
    void get_features(uint32_t s, const std::vector<uint32_t> & idxs, bool is_prompt, std::vector<float> & x) const;
    const std::vector<float> & predict(uint32_t s, const std::vector<float> & mass, const std::vector<bool> & saw, bool is_prompt);
    const std::vector<float> & follow (uint32_t s, const std::vector<float> & mass, const std::vector<bool> & saw, uint32_t n_steps);

    void begin_seq(uint32_t s, const std::vector<llama_pos> & pos);
    bool is_prompt(uint32_t s, uint32_t n_new) const;
    void make_room(uint32_t s, uint32_t n_new, bool is_decode);
    void score    (uint32_t s, const std::vector<llama_pos> & pos, size_t i0, size_t i1);
    void cut      (uint32_t s, uint32_t n_most, uint32_t n_target);
    void plan     (uint32_t s, uint32_t n_new);
    void remove   (uint32_t s, const std::vector<uint32_t> & idxs);
    void moved    (uint32_t s, const llama_kv_cells & meta);

    bool scores_keys() const;
    bool starts_whole() const { return scores_keys() || is_learned(); }

    bool  is_protected(llama_pos pos) const;
    float score_init  (llama_pos pos) const;

    uint32_t n_protected(llama_pos p0, llama_pos p1, llama_pos n_pos) const;

    llama_kv_cache & kv;

    const llama_kv_evict_params params;

    const uint32_t n_recent; // at least 1: decode continues at the newest position
    const uint32_t n_window; // none if keys are scored: one query tells all
    const uint32_t n_rows;   // rows per stream

    llama_kv_learned learned;

    std::vector<seq_state> seqs; // [n_stream], a sequence has its own stream

    size_t n_copied = 0; // pending stream copies that have been taken over

    std::vector<std::pair<llama_pos, llama_pos>> ranges; // protected

    llama_kv_evict_stats stats = {};

    // of one step each: kept, so that a step allocates nothing of its own
    struct {
        std::vector<bool>  seen; // what scan() returns
        std::vector<bool>  saw;
        std::vector<float> mass;
        std::vector<float> part;
        std::vector<float> first;
        std::vector<float> predicted;
        std::vector<float> x;

        std::vector<std::vector<llama_pos>>                       pos; // [n_stream]
        std::vector<std::tuple<bool, float, llama_pos, uint32_t>> ranks;
        std::vector<uint32_t>                                     idxs;
    } scratch;
};
