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
//   first     s = pool(max over the last n_window prompt queries and the first decode query of m[t,c])
//   then      s <- beta s + (1 - beta) m                           or another rule of llama_kv_aggregation
//
// The rows are made by ggml_kv_mass inside the graph (llama-kv-evict-graph.h) and read back before the next batch;
// everything else happens here, on the host.
//
// The life of a sequence:
//
//   prompt    enters whole, nothing is evicted; only its last n_window queries are scored
//   first     the first decode query still sees every cell and is scored
//   decode    before each batch: scores are updated, the lowest cells leave if the batch would pass n_budget.
//             With n_refresh = r only every r-th step is scored, and a cut goes down to n_budget - r.
//
// A further prompt starts over; its ranking and the scores so far are joined by max.
//
// Invariants: sinks, recent and protected cells never leave; in the decode phase never more than n_budget cells, the
// incoming ones included; the newest cell stays (decode continues at its position + 1); cells keep their positions;
// a cell that is reused starts from nothing; ties: the lower position leaves first, so a run is reproducible.
//
// The first cut leaves holes below cells that stay: update() moves the survivors together. After that an incoming token
// takes the hole of an evicted one: metadata only, the graph is reused.

#include "../include/llama-kv-evict.h"
