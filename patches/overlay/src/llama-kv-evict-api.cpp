// the C interface of the eviction engine, and what it refuses

#include "llama-kv-evict.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-model.h"

#include "ggml-kv-evict.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <typeinfo>

//
// parameters
//

// cells that a sequence needs whatever is cut
static uint64_t get_n_min(const llama_kv_evict_params & p) {
    return (uint64_t) p.n_sink + std::max(1u, p.n_recent) + p.n_refresh;
}

// what a caller in C put there: a value that the enum does not have must not be read as one
template <typename T>
static int get_int(const T & value) {
    int res;
    static_assert(sizeof(res) == sizeof(value), "enums are ints");
    memcpy(&res, &value, sizeof(res));
    return res;
}

static std::string check_params(const llama_kv_evict_params & p) {
    const int scorer      = get_int(p.scorer);
    const int aggregation = get_int(p.aggregation);
    const int heads       = get_int(p.heads);

    if (scorer < LLAMA_KV_SCORER_NONE || scorer > LLAMA_KV_SCORER_LEARNED) {
        return format("scorer = %d is not known", scorer);
    }
    if (aggregation < LLAMA_KV_AGGREGATION_EMA || aggregation > LLAMA_KV_AGGREGATION_MEAN) {
        return format("aggregation = %d is not known", aggregation);
    }
    if (heads < LLAMA_KV_HEADS_MEAN || heads > LLAMA_KV_HEADS_MAX) {
        return format("heads = %d is not known", heads);
    }
    // written so that NaN fails
    if (!(p.beta >= 0.0f && p.beta < 1.0f)) {
        return format("beta = %g, it has to be in [0, 1)", p.beta);
    }
    if (!(p.lambda >= 0.0f && p.lambda <= 1.0f)) {
        return format("lambda = %g, it has to be in (0, 1], or 0 for the default", p.lambda);
    }
    if (!(p.budget_share >= 0.0f && p.budget_share < 1.0f)) {
        return format("budget_share = %g, it has to be in (0, 1), or 0 to use n_budget", p.budget_share);
    }
    if (p.bounded && p.budget_share > 0.0f) {
        return "a bounded prefill needs n_budget: a share of a prompt that has not been read has no size";
    }
    if (p.n_pool % 2 == 0 || p.n_pool > 255) {
        return format("n_pool = %u, it has to be odd and at most 255", p.n_pool);
    }
    if (p.n_refresh == 0) {
        return "n_refresh = 0, it has to be at least 1";
    }
    if (p.n_window > 512) {
        return format("n_window = %u, it has to be at most 512", p.n_window);
    }

    for (const uint32_t n : { p.n_budget, p.n_sink, p.n_recent, p.n_refresh, p.n_ctx }) {
        if (n > INT32_MAX) {
            return format("a count is %u, it has to be at most %d", n, INT32_MAX);
        }
    }

    const uint64_t n_min = get_n_min(p);
    if (p.scorer != LLAMA_KV_SCORER_NONE && p.budget_share == 0.0f && p.n_budget < n_min) {
        return format("n_budget = %u, it has to be at least n_sink + n_recent + n_refresh = %llu", p.n_budget, (unsigned long long) n_min);
    }

    return "";
}

//
// contexts
//

// the cache that an engine of this memory hangs on: a class that is derived from or mirrors one of these is not served
static llama_kv_cache * find_cache(llama_memory_i * memory) {
    if (!memory) {
        return nullptr;
    }
    if (typeid(*memory) == typeid(llama_kv_cache)) {
        return static_cast<llama_kv_cache *>(memory);
    }
    if (typeid(*memory) == typeid(llama_kv_cache_iswa)) {
        return static_cast<llama_kv_cache_iswa *>(memory)->get_base();
    }
    if (typeid(*memory) == typeid(llama_memory_hybrid)) {
        return static_cast<llama_memory_hybrid *>(memory)->get_mem_attn();
    }
    if (typeid(*memory) == typeid(llama_memory_hybrid_iswa)) {
        return static_cast<llama_memory_hybrid_iswa *>(memory)->get_mem_attn()->get_base();
    }

    return nullptr;
}

llama_kv_evict * llama_kv_evict::get(llama_context & ctx) {
    auto * kv = find_cache(ctx.get_memory());

    return kv ? kv->evict.get() : nullptr;
}

// what a scorer takes of attention, in words
static const char * describe(ggml_kv_kind kind, ggml_kv_heads heads) {
    switch (kind) {
        case GGML_KV_KIND_MASS:       return heads == GGML_KV_HEADS_MAX ? "attention (max over heads)" : "attention";
        case GGML_KV_KIND_VALUE_NORM: return "value norm";
        case GGML_KV_KIND_ENTROPY:    return "entropy";
        case GGML_KV_KIND_KEYDIFF:    return "keydiff";
        case GGML_KV_KIND_KEY_NORM:   return "key norm";
        case GGML_KV_KIND_VALUE_LEN:  return "length of values";
    }
    return "this scorer";
}

// an op that its device lacks would abort the process when the graph is split, so ask first
// returns what is missing; an engine that evicts nothing by itself does without compaction
std::string llama_kv_evict::check_ops(const llama_kv_cache & kv, llama_kv_evict_params & params) {
    for (const auto & layer : kv.layers) {
        const auto buft = ggml_backend_buffer_get_type(layer.k->buffer);

        auto * dev = ggml_backend_buft_get_device(buft);
        if (!dev) {
            dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        }

        ggml_context_ptr ptr { ggml_init({ /*.mem_size =*/ 24*ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true }) };
        auto * ctx = ptr.get();

        auto * k    = layer.k;
        auto * v    = layer.v;
        auto * move = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, 2);

        const bool can_move =
            ggml_backend_dev_supports_op(dev, ggml_kv_move(ctx, k, move, 1)) &&
            ggml_backend_dev_supports_op(dev, ggml_kv_move(ctx, v, move, kv.v_trans ? 0 : 1));

        if (!can_move && params.scorer == LLAMA_KV_SCORER_NONE) {
            params.compact = false;
        } else if (!can_move && params.compact) {
            return format("the cache of layer %u is on %s, which cannot move cells; offload_kqv = false keeps it on the CPU",
                    layer.il, ggml_backend_buft_name(buft));
        }

        const uint32_t n_head_kv = kv.hparams.n_head_kv(layer.il);

        if (scores_layers(params) && n_head_kv > 0) {
            const uint32_t n_embd_head = kv.hparams.n_embd_head_k(layer.il);

            auto * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k->ne[1], 1);
            auto * q    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_embd_head, kv.hparams.n_head(layer.il), 1);
            auto * mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, k->ne[1], 1, 1, 1);
            auto * coef = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
            auto * idx  = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 1);

            k = ggml_view_4d(ctx, k, n_embd_head, n_head_kv, k->ne[1], 1, ggml_row_size(k->type, n_embd_head), k->nb[1], k->nb[2], 0);

            llama_kv_cache::slot_info sinfo;
            sinfo.s0 = sinfo.s1 = 0;

            std::vector<ggml_kv_kind> kinds = { kind(params) };
            if (params.scorer == LLAMA_KV_SCORER_LEARNED) {
                kinds.push_back(GGML_KV_KIND_KEY_NORM);
                kinds.push_back(GGML_KV_KIND_VALUE_LEN);
            }
            for (const auto kind : kinds) {
                const bool takes_v = kind == GGML_KV_KIND_VALUE_NORM || kind == GGML_KV_KIND_VALUE_LEN;
                v = takes_v ? kv.get_v(ctx, layer.il, kv.get_size(), sinfo) : nullptr;

                auto * op = ggml_kv_mass(ctx, rows, q, k, v, mask, nullptr, coef, idx, kind, heads(params), 0, 1.0f, 0.0f, 0.0f, true);
                if (!ggml_backend_dev_supports_op(dev, op)) {
                    return format("the cache of layer %u is on %s, which cannot score cells by %s with keys of type %s and size %u; "
                            "offload_kqv = false keeps it on the CPU", layer.il, ggml_backend_buft_name(buft),
                            describe(kind, heads(params)), ggml_type_name(layer.k->type), n_embd_head);
                }
            }
        }
    }

    return "";
}

// why the engine cannot serve this context, empty if it can
std::string llama_kv_evict::refuse(llama_context & ctx, llama_kv_cache * kv) {
    const auto & model   = ctx.get_model();
    const auto & cparams = ctx.get_cparams();
    const auto & hparams = model.hparams;

    const char * arch = llm_arch_name(model.arch);

    if (!ctx.get_memory()) {
        return format("architecture '%s' has no KV cache here: nothing to evict", arch);
    }
    if (!kv) {
        return format("architecture '%s' uses a cache that cannot be evicted from (recurrent, MLA, or several caches that mirror each other)", arch);
    }
    if (kv->layers.empty()) {
        return format("architecture '%s' looks back no further than a sliding window here, in any layer: nothing to evict", arch);
    }
    if (llama_model_has_encoder(&model)) {
        return format("architecture '%s' has an encoder, which is not supported", arch);
    }
    if (!hparams.causal_attn) {
        return format("architecture '%s' attends to later tokens, too, which is not supported", arch);
    }
    if (hparams.is_mla()) {
        return format("architecture '%s' uses multi-head latent attention (MLA), which is not supported", arch);
    }
    if (hparams.ple_n_heads > 0) {
        return format("architecture '%s' looks up its neighbour tokens in the cache, which holes would break", arch);
    }
    if (hparams.router_layer >= 0) {
        return format("architecture '%s' looks up in the cache which adapter is on, which holes would break", arch);
    }
    if (kv->other) {
        return format("the cache of architecture '%s' shares its cells with another context", arch);
    }
    if (cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT) {
        return "only the default context type is supported, this one is for multi-token prediction";
    }
    if (cparams.kv_unified && cparams.n_seq_max > 1) {
        return format("a unified cache for n_seq_max = %u sequences is not supported (embeddings ask for one): use kv_unified = false", cparams.n_seq_max);
    }
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR || model.split_mode() == LLAMA_SPLIT_MODE_ROW) {
        return "split_mode row and tensor are not supported: use layer or none";
    }

    for (const auto & layer : kv->layers) {
        auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(layer.k->buffer));
        auto * reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
        if (reg && std::string(ggml_backend_reg_name(reg)) == "RPC") {
            return format("layer %u is on an RPC device, which is not supported", layer.il);
        }
    }

    return "";
}

std::string llama_kv_evict::attach(llama_context & ctx, llama_kv_evict_params params) {
    auto * kv = find_cache(ctx.get_memory());

    auto msg = check_params(params);
    if (msg.empty()) {
        msg = refuse(ctx, kv);
    }
    if (msg.empty() && params.scorer != LLAMA_KV_SCORER_NONE && kv->get_size() < get_n_min(params)) {
        msg = format("the context has %u cells per sequence, n_sink + n_recent + n_refresh need %llu",
                kv->get_size(), (unsigned long long) get_n_min(params));
    }
    if (msg.empty()) {
        msg = check_ops(*kv, params);
    }
    if (!msg.empty()) {
        return msg;
    }

    const auto evict = std::make_shared<llama_kv_evict>(*kv, params);

    const auto before  = kv->evict;
    const auto cparams = ctx.cparams;

    // build the graphs again, with or without the hook; the old ones go first: there may be no memory for both
    const auto reserve = [&](std::shared_ptr<llama_kv_evict> engine) -> std::string {
        kv->evict = std::move(engine);
        ctx.synchronize();
        ctx.sched.reset();
        ctx.sched_need_reserve = true;
        try {
            ctx.sched_reserve();
        } catch (const std::exception & err) {
            return format("its graphs cannot be reserved: %s", err.what()); // the next batch tries again
        }
        return "";
    };

    // some models choose their RoPE factors by the positions of a context
    const uint32_t n_ctx_seq = GGML_PAD((params.n_ctx + ctx.n_seq_max() - 1)/ctx.n_seq_max(), 256);
    ctx.cparams.n_ctx_seq = std::max(n_ctx_seq, kv->get_size());
    ctx.cparams.n_ctx     = ctx.cparams.n_ctx_seq*ctx.n_seq_max();

    msg = reserve(evict);

    for (const auto & layer : kv->layers) {
        const bool has_attention = layer.il < kv->hparams.n_layer() && kv->hparams.n_head_kv(layer.il) > 0;
        if (msg.empty() && evict->scores_layers() && has_attention && !evict->hooked[layer.il]) {
            msg = format("layer %u of architecture '%s' computes its attention in a way that cannot be scored",
                    layer.il, llm_arch_name(ctx.get_model().arch));
        }
    }

    if (!msg.empty()) {
        ctx.cparams.n_ctx     = cparams.n_ctx;
        ctx.cparams.n_ctx_seq = cparams.n_ctx_seq;
        reserve(before);
        return msg;
    }

    evict->set_coef();
    evict->release();

    return "";
}

//
// C interface
//

uint32_t llama_kv_evict_abi_version(void) { return LLAMA_KV_EVICT_ABI_VERSION; }
size_t   llama_kv_evict_params_size(void) { return sizeof(llama_kv_evict_params); }
size_t   llama_kv_evict_cell_size  (void) { return sizeof(llama_kv_evict_cell); }
size_t   llama_kv_evict_stats_size (void) { return sizeof(llama_kv_evict_stats); }

llama_kv_evict_params llama_kv_evict_default_params(void) {
    return {
        /*.scorer       =*/ LLAMA_KV_SCORER_ATTENTION,
        /*.aggregation  =*/ LLAMA_KV_AGGREGATION_EMA,
        /*.heads        =*/ LLAMA_KV_HEADS_MEAN,
        /*.beta         =*/ 0.99f,
        /*.lambda       =*/ 0.0f,
        /*.n_budget     =*/ 1024,
        /*.budget_share =*/ 0.0f,
        /*.n_sink       =*/ 4,
        /*.n_recent     =*/ 32,
        /*.n_window     =*/ 16,
        /*.n_pool       =*/ 21,
        /*.n_refresh    =*/ 1,
        /*.seed         =*/ 0,
        /*.n_ctx        =*/ 0,
        /*.frozen       =*/ false,
        /*.bounded      =*/ false,
        /*.compact      =*/ true,
    };
}

// the engine of a context and a sequence that exists, or NULL
static llama_kv_evict * get_engine(llama_context * ctx, llama_seq_id seq_id = 0) {
    if (!ctx || seq_id < 0 || (uint32_t) seq_id >= ctx->n_seq_max()) {
        return nullptr;
    }

    return llama_kv_evict::get(*ctx);
}

// runs f; an exception becomes a log line and the value res
template <typename T, typename F>
static T guarded(const char * func, T res, F f) {
    try {
        return f();
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", func, err.what());
    }

    return res;
}

// runs f, which returns a message, and writes that, or that of an exception; returns whether it is empty
template <typename F>
static bool reported(char * err, size_t n_err, F f) {
    std::string msg;
    try {
        msg = f();
    } catch (const std::bad_alloc &) {
        msg = "there is no memory for it";
    } catch (const std::exception & e) {
        msg = e.what();
    }

    if (err && n_err > 0) {
        snprintf(err, n_err, "%s", msg.c_str());
    }

    return msg.empty();
}

bool llama_kv_evict_attach(llama_context * ctx, llama_kv_evict_params params, char * err, size_t n_err) {
    return reported(err, n_err, [&] { return ctx ? llama_kv_evict::attach(*ctx, params) : std::string("there is no context"); });
}

int32_t llama_kv_evict_n_layer(llama_context * ctx) {
    auto * evict = get_engine(ctx);

    return evict ? evict->n_layer() : -1;
}

bool llama_kv_evict_set_layer_weights(llama_context * ctx, const float * w, int32_t n) {
    auto * evict = get_engine(ctx);

    return evict && w && n > 0 && evict->set_layer_weights(w, n);
}

bool llama_kv_evict_set_weights(llama_context * ctx, int32_t n_hidden, const float * w, int32_t n, char * err, size_t n_err) {
    auto * evict = get_engine(ctx);

    return reported(err, n_err, [&] { return evict ? evict->set_weights(n_hidden, w, n) : std::string("there is no engine"); });
}

int32_t llama_kv_evict_features(llama_context * ctx, llama_seq_id seq_id, float * x, int32_t n_max) {
    auto * evict = get_engine(ctx, seq_id);
    if (!evict || !evict->is_learned()) {
        return -1;
    }

    return guarded(__func__, -1, [&] {
        const auto res = evict->features(*ctx, seq_id);
        if (x && (int32_t) res.size() <= n_max) {
            std::copy(res.begin(), res.end(), x);
        }
        return (int32_t) res.size();
    });
}

bool llama_kv_evict_protect(llama_context * ctx, llama_pos p0, llama_pos p1) {
    auto * evict = get_engine(ctx);

    return evict && guarded(__func__, false, [&] { return evict->protect(p0, p1); });
}

bool llama_kv_evict_unprotect(llama_context * ctx) {
    auto * evict = get_engine(ctx);
    if (evict) {
        evict->unprotect();
    }

    return evict;
}

bool llama_kv_evict_prompt(llama_context * ctx, llama_seq_id seq_id, int32_t n_tokens) {
    auto * evict = get_engine(ctx, seq_id);

    return evict && guarded(__func__, false, [&] { return evict->prompt(*ctx, seq_id, n_tokens); });
}

bool llama_kv_evict_probe(llama_context * ctx, llama_seq_id seq_id, int32_t n_tokens) {
    auto * evict = get_engine(ctx, seq_id);

    return evict && guarded(__func__, false, [&] { return evict->probe(*ctx, seq_id, n_tokens); });
}

int32_t llama_kv_evict_cells(llama_context * ctx, llama_seq_id seq_id, llama_kv_evict_cell * cells, int32_t n_max) {
    auto * evict = get_engine(ctx, seq_id);
    if (!evict) {
        return -1;
    }

    return guarded(__func__, -1, [&] {
        const auto res = evict->cells(*ctx, seq_id);
        for (int32_t i = 0; cells && i < std::min<int32_t>(n_max, res.size()); ++i) {
            cells[i] = res[i];
        }
        return (int32_t) res.size();
    });
}

int32_t llama_kv_evict_keep(llama_context * ctx, llama_seq_id seq_id, const llama_pos * pos, int32_t n_pos) {
    auto * evict = get_engine(ctx, seq_id);
    if (!evict) {
        return -1;
    }
    if (n_pos < 0 || (n_pos > 0 && !pos)) {
        return -2;
    }

    return guarded(__func__, -1, [&] {
        return evict->keep(*ctx, seq_id, std::vector<llama_pos>(pos, pos + n_pos));
    });
}

int32_t llama_kv_evict_close_gaps(llama_context * ctx, llama_seq_id seq_id, int32_t n_new, llama_pos * old, int32_t n_max) {
    auto * evict = get_engine(ctx, seq_id);
    if (!evict) {
        return -1;
    }

    return guarded(__func__, -2, [&] {
        const auto res = evict->close_gaps(*ctx, seq_id, std::max(0, n_new));
        std::copy_n(res.begin(), old ? std::min<size_t>(std::max(0, n_max), res.size()) : 0, old);
        return (int32_t) res.size();
    });
}

size_t llama_kv_evict_state_get(llama_context * ctx, llama_seq_id seq_id, void * dst, size_t n_max) {
    auto * evict = get_engine(ctx, seq_id);
    if (!evict) {
        return 0;
    }

    return guarded(__func__, (size_t) 0, [&] {
        const auto res = evict->get_state(*ctx, seq_id);
        if (dst && res.size() <= n_max) {
            std::copy(res.begin(), res.end(), (uint8_t *) dst);
        }
        return res.size();
    });
}

bool llama_kv_evict_state_set(llama_context * ctx, llama_seq_id seq_id, const void * src, size_t n, char * err, size_t n_err) {
    auto * evict = get_engine(ctx, seq_id);

    return reported(err, n_err, [&]() -> std::string {
        return !evict ? "there is no engine, or no such sequence" : !src && n > 0 ? "there is no state" :
            evict->set_state(*ctx, seq_id, (const uint8_t *) src, n);
    });
}

bool llama_kv_evict_get_stats(llama_context * ctx, llama_kv_evict_stats * stats) {
    auto * evict = get_engine(ctx);
    if (!evict || !stats) {
        return false;
    }

    return guarded(__func__, false, [&] {
        *stats = evict->get_stats(*ctx);
        return true;
    });
}
