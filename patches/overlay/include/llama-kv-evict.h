#pragma once

// Evict KV cells while decoding: the C interface of the eviction engine.
//
// This is the only header that other languages mirror. Every function is safe to call with any argument: a caller's
// mistake is reported through the return value and a message, never by aborting or throwing.
//
// The method, the cell layout and the invariants are explained in src/llama-kv-evict.h.
//
// llama.cpp's own calls on the same context are less patient. These abort the process:
//   llama_memory_seq_*   a sequence that does not exist (n_seq_max or more; 256 with one stream), or below 0 (seq_rm: -1 is all)
//   llama_memory_seq_cp  between streams (kv_unified = false): a part of a sequence
//   llama_memory_seq_add, _div  under M-RoPE, or where llama_memory_can_shift is false (with the next batch); division by 0
//   llama_decode         more tokens than n_batch
// and these spoil K and V without a word:
//   llama_state_seq_get_data, _set_data  before llama_decode has applied a seq_cp between streams or a seq_add
//   an abort callback that stops llama_decode while it applies a seq_add: keys of some layers are rotated again
// pyinertia.Llama calls none of them so. What llama_decode itself refuses, or does not finish (an abort callback, no memory),
// is an error code, and the cells are those of before but for what was evicted to make room, and for the micro-batches before
// the one that failed: these stay until the caller removes them.

#include "llama.h"

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

// bump on any change of a struct or of the meaning of a call below
#define LLAMA_KV_EVICT_ABI_VERSION 5

#ifdef __cplusplus
extern "C" {
#endif

    // what a cell is ranked by
    enum llama_kv_scorer {
        LLAMA_KV_SCORER_NONE       = 0, // nothing is scored, nothing is evicted (the full cache)
        LLAMA_KV_SCORER_ATTENTION  = 1, // attention mass
        LLAMA_KV_SCORER_RECENCY    = 2, // position: the oldest leaves first (StreamingLLM)
        LLAMA_KV_SCORER_RANDOM     = 3, // a seeded hash of the position (control arm)
        LLAMA_KV_SCORER_VALUE_NORM = 4, // attention mass times the norm of the value
        LLAMA_KV_SCORER_ENTROPY    = 5, // attention mass, peaked heads count more
        LLAMA_KV_SCORER_KEYDIFF    = 6, // 1 - cosine of the key and the mean direction of the keys
        LLAMA_KV_SCORER_KEY_NORM   = 7, // 1/(1 + norm of the key)
        LLAMA_KV_SCORER_LEARNED    = 8, // attention mass to come, as llama_kv_evict_set_weights predicts it
    };

    // how the values of heads become one (query heads, or KV heads for the scorers of keys); layers are summed with weights
    enum llama_kv_heads {
        LLAMA_KV_HEADS_MEAN = 0,
        LLAMA_KV_HEADS_MAX  = 1,
    };

    // how the rows m of successive queries become a score s
    enum llama_kv_aggregation {
        LLAMA_KV_AGGREGATION_EMA     = 0, // s <- beta s + (1 - beta) m
        LLAMA_KV_AGGREGATION_COUPLED = 1, // one EMA update per layer: EMA with beta^L and lambda = beta
        LLAMA_KV_AGGREGATION_SUM     = 2, // s <- s + m
        LLAMA_KV_AGGREGATION_LAST    = 3, // s <- m
        LLAMA_KV_AGGREGATION_MAX     = 4, // s <- max(s, m)
        LLAMA_KV_AGGREGATION_MEAN    = 5, // s <- s + (m - s)/n, n = rows so far, the first ranking counts as one
    };

    struct llama_kv_evict_params {
        enum llama_kv_scorer      scorer;
        enum llama_kv_aggregation aggregation;
        enum llama_kv_heads       heads;

        float    beta;         // memory of the EMA per decode step, in [0, 1)
        float    lambda;       // layer weights w_l ~ lambda^(L-1-l), in (0, 1]; 0 = 0.042^(1/L)

        uint32_t n_budget;     // most cells a sequence holds while it decodes, once cut, new ones included
        float    budget_share; // if > 0: n_budget is this share of the prompt's positions, in (0, 1), but never too small

        uint32_t n_sink;       // first positions, never evicted
        uint32_t n_recent;     // newest positions, never evicted
        uint32_t n_window;     // last prompt queries that take part in the first ranking
        uint32_t n_pool;       // the first ranking is averaged over this many neighbouring positions (odd)
        uint32_t n_refresh;    // decode steps between refreshes, 1 = every step
        uint32_t seed;         // for LLAMA_KV_SCORER_RANDOM
        uint32_t n_ctx;        // positions that the context stands for, 0 = as many as it has cells

        bool     frozen;       // keep the first ranking; generated tokens outrank the prompt, oldest of them first
        bool     bounded;      // a prompt that outgrows the context's cells is cut while it enters: give the context at least
                               // n_budget + n_batch cells per sequence
        bool     compact;      // false (for tests) leaves the holes of a cut in place, and attention to llama.cpp: a cut
                               // then equals removing the same positions from a cache without an engine, bit for bit
    };

    struct llama_kv_evict_cell {
        llama_pos pos;
        float     score;
    };

    // counters start again when the cache is empty; times are in milliseconds
    struct llama_kv_evict_stats {
        uint64_t n_cells;     // cells allocated, all streams
        uint64_t n_used;      // cells in use
        uint64_t n_tokens;    // tokens that were sent to the cache
        uint64_t n_evicted;   // cells that were evicted
        uint64_t n_evictions; // cuts that evicted at least one cell
        uint64_t n_refreshes; // decode queries that were scored
        uint64_t n_moved;     // cells that were moved by compaction
        uint64_t n_reused;    // graphs that were reused, since the context was created
        uint64_t kv_bytes;          // bytes allocated for K and V, a sliding window's included
        uint64_t kv_bytes_used;     // bytes of the cells in use
        uint64_t kv_bytes_resident; // bytes in physical memory; kv_bytes where that cannot be told
        double   t_score_ms;  // scoring: the op on the CPU plus the time rules; NaN where the op cannot be timed
                              // where the op is part of attention (mean mass, once cut) the rules alone
        double   t_evict_ms;  // choosing and removing cells
        double   t_move_ms;   // compaction
    };

    LLAMA_API uint32_t llama_kv_evict_abi_version(void);
    LLAMA_API size_t   llama_kv_evict_params_size(void);
    LLAMA_API size_t   llama_kv_evict_cell_size  (void);
    LLAMA_API size_t   llama_kv_evict_stats_size (void);

    LLAMA_API struct llama_kv_evict_params llama_kv_evict_default_params(void);

    // Give the context's KV cache an eviction engine, in place of the one it has.
    // Returns false and writes a message to err when the parameters are out of range or the context cannot be served.
    LLAMA_API bool llama_kv_evict_attach(
            struct llama_context * ctx,
            struct llama_kv_evict_params params,
            char * err,
            size_t n_err);

    // The number of layers whose cells are scored, -1 without an engine.
    LLAMA_API int32_t llama_kv_evict_n_layer(struct llama_context * ctx);

    // Weigh the scored layers by w[0 .. n-1], first layer first, in place of lambda. Their sum becomes 1.
    // Returns false unless there is one weight per scored layer, all finite, none negative and some above 0.
    LLAMA_API bool llama_kv_evict_set_layer_weights(struct llama_context * ctx, const float * w, int32_t n);

    // The numbers of the learned scorer, which predicts the mass to come from what is known of a cell: the table of features
    // is in src/llama-kv-evict-learned.h. n_hidden = 0: a linear function, else that many ReLUs.
    // w[0 .. n-1]: beta of the EMA, 7 means, 7 scales, then 7 weights and a bias, or
    //              [n_hidden][7] weights, n_hidden biases, n_hidden weights and a bias.
    // Until then cells are ranked by the EMA of their mass. Scores that there are stay.
    // Returns false and writes a message to err when there is no such engine, n does not fit n_hidden, a number is not
    // finite, a scale is not above 0 or beta is not in [0, 1): then nothing changes.
    LLAMA_API bool llama_kv_evict_set_weights(
            struct llama_context * ctx,
            int32_t n_hidden,
            const float * w,
            int32_t n,
            char * err,
            size_t n_err);

    // The 7 features of each resident cell of the sequence, by position, as the last scored query left them.
    // Writes them to x if n_max floats are enough; returns how many floats there are, -1 without an engine of the learned
    // scorer or for a sequence that does not exist.
    LLAMA_API int32_t llama_kv_evict_features(struct llama_context * ctx, llama_seq_id seq_id, float * x, int32_t n_max);

    // Never evict positions [p0, p1) of any sequence.
    // Returns false when there is no engine, the range is empty or the budget has no room for it.
    LLAMA_API bool llama_kv_evict_protect(struct llama_context * ctx, llama_pos p0, llama_pos p1);

    // Protect nothing but the sinks from here on. Returns false when there is no engine.
    LLAMA_API bool llama_kv_evict_unprotect(struct llama_context * ctx);

    // The next n_tokens tokens of the sequence are prompt, those after them are decode steps, whatever their batch sizes.
    // n_tokens < 0 returns to the default: several tokens of a sequence in one batch are prompt, a single one is not.
    LLAMA_API bool llama_kv_evict_prompt(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_tokens);

    // The next n_tokens tokens of the sequence ask about its cells: their attention ranks the cuts of a bounded prefill
    // from now on, the prompt's own queries do not. n_tokens = 0 takes in what they saw; after that they can be removed.
    // The ranking by probes ends when the sequence's prompt does. Returns false outside of a bounded prompt.
    LLAMA_API bool llama_kv_evict_probe(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_tokens);

    // The resident cells of the sequence, by position. Writes at most n_max of them, returns how many there are,
    // -1 without an engine or for a sequence that does not exist.
    LLAMA_API int32_t llama_kv_evict_cells(
            struct llama_context * ctx,
            llama_seq_id seq_id,
            struct llama_kv_evict_cell * cells,
            int32_t n_max);

    // Keep exactly the given positions of the sequence and its newest one. The rest is evicted, sinks included.
    // Returns the number of evicted cells, -1 when there is no engine, -2 when a position is not resident (nothing happens).
    LLAMA_API int32_t llama_kv_evict_keep(
            struct llama_context * ctx,
            llama_seq_id seq_id,
            const llama_pos * pos,
            int32_t n_pos);

    // Make the room that the next n_new tokens of the sequence need, as the batch itself would, and close the gaps in its
    // positions: they become 0 .. n-1 in order, scores and protected ranges follow. The newest positions that a sliding
    // window sees keep their distances.
    // Writes to old[q] the position that is q now, at most n_max of them. Returns n, -1 when there is no engine or sequence,
    // -2 when positions cannot be changed here (no K-shift, a recurrent part, quantised K with heads that are no multiple of
    // 64, protected ranges of several sequences).
    LLAMA_API int32_t llama_kv_evict_close_gaps(
            struct llama_context * ctx,
            llama_seq_id seq_id,
            int32_t n_new,
            llama_pos * old,
            int32_t n_max);

    // What the engine knows about the sequence beyond the cells themselves: scores, marks, phase, counters. llama.cpp's own
    // state holds the cells: load that first, then set this.
    // Writes it to dst if n_max is enough; returns its size in bytes, 0 without an engine or sequence.
    LLAMA_API size_t llama_kv_evict_state_get(struct llama_context * ctx, llama_seq_id seq_id, void * dst, size_t n_max);

    // Returns false and writes a message to err when src is not such a state, is of another version or another ranking, or
    // does not name the resident positions of the sequence: then nothing changes. Budget, sinks and the like may differ.
    // n = 0 forgets what is known: the cells are ranked afresh, like those of a prompt.
    LLAMA_API bool llama_kv_evict_state_set(
            struct llama_context * ctx,
            llama_seq_id seq_id,
            const void * src,
            size_t n,
            char * err,
            size_t n_err);

    LLAMA_API bool llama_kv_evict_get_stats(struct llama_context * ctx, struct llama_kv_evict_stats * stats);

#ifdef __cplusplus
}
#endif
