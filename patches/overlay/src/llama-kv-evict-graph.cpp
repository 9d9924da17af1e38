#include "llama-kv-evict-graph.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-evict.h"

#include "ggml-kv-evict.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

//
// llm_graph_input_kv_evict
//

class llm_graph_input_kv_evict : public llm_graph_input_i {
public:
    llm_graph_input_kv_evict(std::shared_ptr<llama_kv_evict> evict) : evict(std::move(evict)), fused(this->evict->fuses_attention()) {}

    void set_input(const llama_ubatch * ubatch) override {
        take_times();

        if (!coef || !coef->buffer || !row_idx->buffer) {
            return; // no layer of this graph is scored
        }

        std::vector<int32_t> idx(ubatch->n_tokens);
        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            idx[i] = evict->row(ubatch->seq_id[i][0], ubatch->pos[i]);
        }

        ggml_backend_tensor_set(coef,    evict->coef.data(), 0, ggml_nbytes(coef));
        ggml_backend_tensor_set(row_idx, idx.data(),         0, ggml_nbytes(row_idx));

        if (norm_mask && norm_mask->buffer && norm_idx->buffer) {
            set_norm_input(ubatch, idx);
        }
    }

    // cells without norms get them with a scored query of their sequence
    void set_norm_input(const llama_ubatch * ubatch, const std::vector<int32_t> & idx) {
        const int64_t n_kv     = norm_mask->ne[0];
        const int64_t n_stream = norm_mask->ne[3];
        const int64_t n_tokens = idx.size()/n_stream;

        std::vector<float>   mask(n_kv*n_stream, -INFINITY);
        std::vector<int32_t> rows(n_stream, -1);

        for (int64_t i = 0; i < n_stream; ++i) {
            const auto begin  = idx.begin() + i*n_tokens;
            const auto seq_id = ubatch->seq_id[i*n_tokens][0];

            const bool is_scored = std::any_of(begin, begin + n_tokens, [](int32_t row) { return row >= 0; });
            if (is_scored && evict->mask_normless(seq_id, mask.data() + i*n_kv, n_kv)) {
                rows[i] = seq_id;
            }
        }

        ggml_backend_tensor_set(norm_mask, mask.data(), 0, ggml_nbytes(norm_mask));
        ggml_backend_tensor_set(norm_idx,  rows.data(), 0, ggml_nbytes(norm_idx));
    }

    bool can_reuse(const llm_graph_params & params) override {
        return fused == evict->fuses_attention() && (!row_idx || row_idx->ne[0] == params.ubatch.n_tokens);
    }

    // NULL if layers are not scored
    ggml_tensor * coef    = nullptr; // F32 [n_layer]
    ggml_tensor * row_idx = nullptr; // I32 [n_tokens]

    // rows of each device as its last node leaves them, the next one continues; NULL: it is the first
    std::vector<ggml_tensor *> last;

    // learned scorer only, of one query per stream that sees the cells whose norms are missing
    ggml_tensor * norm_mask = nullptr; // F32 [n_kv, 1, 1, n_stream]
    ggml_tensor * norm_idx  = nullptr; // I32 [n_stream]

    std::vector<ggml_tensor *> last_key;
    std::vector<ggml_tensor *> last_value;

    std::vector<ggml_tensor *> nodes;

    const std::shared_ptr<llama_kv_evict> evict;

    const bool fused;

    // not in the destructor: the nodes are gone before their inputs
    void take_times() {
        for (auto * node : nodes) {
            evict->t_op_us += std::max<int64_t>(0, ggml_kv_mass_take_time_us(node));
        }
    }
};

static llm_graph_input_kv_evict * get_input(const llm_graph_context & graph, const std::shared_ptr<llama_kv_evict> & evict) {
    for (const auto & input : graph.res->inputs) {
        if (auto * res = dynamic_cast<llm_graph_input_kv_evict *>(input.get())) {
            return res;
        }
    }

    auto inp = std::make_unique<llm_graph_input_kv_evict>(evict);

    if (evict->scores_layers()) {
        inp->coef    = ggml_new_tensor_1d(graph.ctx0, GGML_TYPE_F32, evict->coef.size());
        inp->row_idx = ggml_new_tensor_1d(graph.ctx0, GGML_TYPE_I32, graph.n_tokens);
        ggml_set_input(inp->coef);
        ggml_set_input(inp->row_idx);
        ggml_set_name (inp->coef,    "kv_mass_coef");
        ggml_set_name (inp->row_idx, "kv_mass_row_idx");
    }

    inp->last      .resize(evict->devices.size(), nullptr);
    inp->last_key  .resize(evict->devices.size(), nullptr);
    inp->last_value.resize(evict->devices.size(), nullptr);

    return static_cast<llm_graph_input_kv_evict *>(graph.res->add_input(std::move(inp)));
}

// rows live on the device that holds this layer's K
static size_t get_device(const llama_kv_evict & evict, const ggml_tensor * k) {
    const auto buft = ggml_backend_buffer_get_type(k->view_src->buffer);

    const auto dev = std::find_if(evict.devices.begin(), evict.devices.end(),
            [buft](const llama_kv_evict::device_rows & d) { return d.buft == buft; });
    GGML_ASSERT(dev != evict.devices.end());

    return dev - evict.devices.begin();
}

// logits are softcap*tanh(scale*qk/softcap); Grok has both numbers in hparams of its own
static float get_softcap(const llm_graph_context & graph) {
    const bool has_softcap = graph.hparams.attn_soft_cap || graph.arch == LLM_ARCH_GROK;

    return has_softcap ? graph.hparams.f_attn_logit_softcapping : 0.0f;
}

static float get_scale(const llm_graph_context & graph, float kq_scale) {
    return graph.arch == LLM_ARCH_GROK ? graph.hparams.f_attn_out_scale : kq_scale;
}

// learned scorer: of the layer's cells whose norms are missing, these
static void build_kv_norms(
        const llm_graph_context  & graph,
        llm_graph_input_kv_evict * inp,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        int           il) {
    const auto & evict = *inp->evict;

    if (!evict.is_learned()) {
        return;
    }

    auto * ctx = graph.ctx0;

    const int64_t n_stream = k->ne[3];

    if (!inp->norm_mask) {
        inp->norm_mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, k->ne[2], 1, 1, n_stream);
        inp->norm_idx  = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_stream);
        ggml_set_input(inp->norm_mask);
        ggml_set_input(inp->norm_idx);
        ggml_set_name (inp->norm_mask, "kv_norm_mask");
        ggml_set_name (inp->norm_idx,  "kv_norm_idx");
    }

    // only its shape counts: a query per stream, a head per KV head
    q = ggml_view_3d(ctx, q, q->ne[0], k->ne[1], n_stream, q->nb[1], q->nb[2], 0);

    const size_t i = get_device(evict, k);

    const auto add = [&](ggml_kv_kind kind, ggml_tensor * rows, ggml_tensor *& last) {
        auto * cur = ggml_kv_mass(ctx, last ? last : rows, q, k, kind == GGML_KV_KIND_VALUE_LEN ? v : nullptr, inp->norm_mask, nullptr,
                inp->coef, inp->norm_idx, kind, evict.heads(), il, 1.0f, 0.0f, 0.0f, last == nullptr);
        graph.cb(cur, "kv_norm", il);
        ggml_build_forward_expand(graph.gf, cur);

        last = cur;
        inp->nodes.push_back(cur);
    };

    add(GGML_KV_KIND_KEY_NORM,  evict.devices[i].key,   inp->last_key[i]);
    add(GGML_KV_KIND_VALUE_LEN, evict.devices[i].value, inp->last_value[i]);
}

ggml_tensor * build_kv_attn(
        const llm_graph_context      & graph,
        const llama_kv_cache_context * mctx,
        const llama_kv_cache_context * mctx_base,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_b,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        ggml_tensor * v_mla,
        float         kq_scale,
        int           il) {
    const auto & evict = mctx_base->get_evict();

    if (!evict || !evict->evicts() || graph.cparams.training) {
        return nullptr;
    }

    auto * inp = get_input(graph, evict); // it tells when a graph without the op is out of date, too

    if (!inp->fused || kq_b || v_mla) {
        return nullptr;
    }

    // buffers of the CPU may name no device
    auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(k->view_src->buffer));
    if (!dev) {
        dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }

    ggml_tensor *  rows = nullptr;
    ggml_tensor ** last = nullptr;
    if (evict->scores_layers() && mctx == mctx_base) {
        const size_t i = get_device(*evict, k);

        rows = evict->devices[i].rows;
        last = &inp->last[i];

        evict->hooked[il] = true;
    }

    ggml_tensor * cur = ggml_kv_attn(graph.ctx0, q, k, v, kq_mask, sinks, rows, rows ? inp->coef : nullptr, rows ? inp->row_idx : nullptr, il,
            get_scale(graph, kq_scale), graph.hparams.f_max_alibi_bias, get_softcap(graph), last && !*last);
    if (!ggml_backend_dev_supports_op(dev, cur)) {
        return nullptr; // attention of its own and ggml_kv_mass, on that device
    }
    if (last) {
        *last = rows;
    }
    graph.cb(cur, "kv_attn", il);

    cur = ggml_reshape_2d(graph.ctx0, cur, cur->ne[0]*cur->ne[1], cur->ne[2]);
    ggml_build_forward_expand(graph.gf, cur);

    if (rows) {
        build_kv_norms(graph, inp, q, k, v, il);
    }

    return cur;
}

void build_kv_mass(
        const llm_graph_context      & graph,
        const llama_kv_cache_context * mctx,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float         kq_scale,
        int           il) {
    const auto & evict = mctx->get_evict();

    if (!evict || !evict->scores_layers() || graph.cparams.training) {
        return;
    }

    evict->hooked[il] = true;

    auto * inp = get_input(graph, evict);

    const size_t i = get_device(*evict, k);

    ggml_tensor *& last = inp->last[i];

    const bool takes_v = evict->kind() == GGML_KV_KIND_VALUE_NORM;

    ggml_tensor * cur = ggml_kv_mass(graph.ctx0, last ? last : evict->devices[i].rows, q, k, takes_v ? v : nullptr, kq_mask, sinks, inp->coef, inp->row_idx,
            evict->kind(), evict->heads(), il, get_scale(graph, kq_scale), graph.hparams.f_max_alibi_bias, get_softcap(graph), last == nullptr);
    graph.cb(cur, "kv_mass", il);

    ggml_build_forward_expand(graph.gf, cur);

    last = cur;
    inp->nodes.push_back(cur);

    build_kv_norms(graph, inp, q, k, v, il);
}

//
// llama_kv_evict: the parts that need graphs
//

void llama_kv_evict::take_op_times(llama_context & lctx) {
    for (const auto & res : lctx.gf_res_prev) {
        for (size_t i = 0; res && i < res->inputs.size(); ++i) {
            if (auto * inp = dynamic_cast<llm_graph_input_kv_evict *>(res->inputs[i].get())) {
                inp->take_times();
            }
        }
    }
}

void llama_kv_evict::alloc_rows() {
    for (const auto & layer : kv.layers) {
        const auto buft = ggml_backend_buffer_get_type(layer.k->buffer);

        const bool found = std::any_of(devices.begin(), devices.end(), [buft](const device_rows & d) { return d.buft == buft; });
        if (found) {
            continue;
        }

        auto * dev = ggml_backend_buft_get_device(buft);
        op_timed = op_timed && (!dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU);

        ggml_context_ptr ctx { ggml_init({ /*.mem_size =*/ 3*ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true }) };

        ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, kv.get_size(), n_rows*kv.n_stream);
        ggml_set_name(rows, "kv_mass_rows");

        ggml_tensor * key   = nullptr;
        ggml_tensor * value = nullptr;
        if (is_learned()) {
            key   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, kv.get_size(), kv.n_stream);
            value = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, kv.get_size(), kv.n_stream);
            ggml_set_name(key,   "kv_norm_key");
            ggml_set_name(value, "kv_norm_value");
        }

        ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft) };
        if (!buf) {
            throw std::runtime_error(format("there is no memory for the scores of %u cells: %zu MiB; fewer cells, or a smaller n_window, take less",
                        kv.get_size(), ggml_nbytes(rows) >> 20));
        }
        ggml_backend_buffer_clear(buf.get(), 0);

        devices.push_back({ buft, std::move(ctx), std::move(buf), rows, key, value });
    }
}

// llama_decode does not catch
bool llama_kv_evict::update(llama_context & lctx) try {
    bool updated = false;

    for (uint32_t s = 0; s < seqs.size(); ++s) {
        auto & seq = seqs[s];

        // a K-shift has just been applied: these are the positions now
        const auto & cells = kv.v_cells[s];
        for (uint32_t i = 0; i < seq.cells.size(); ++i) {
            if (!cells.is_empty(i)) {
                seq.cells[i].pos = cells.pos_get(i);
                if (params.scorer == LLAMA_KV_SCORER_RECENCY) {
                    seq.cells[i].score = score_init(seq.cells[i].pos);
                }
            }
        }

        if (seq.from.empty()) {
            continue;
        }

        const int64_t t_start_us = ggml_time_us();

        const auto meta = cells.cp(seq.from);

        auto * sched = lctx.get_sched();
        ggml_backend_sched_reset(sched);

        auto * res = lctx.get_gf_res_reserve();
        res->reset();

        auto * ctx = res->get_ctx();
        auto * gf  = res->get_gf();

        ggml_tensor * idx = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, seq.from.size(), 2);
        ggml_set_input(idx);

        for (const auto & layer : kv.layers) {
            ggml_tensor * v = layer.v_stream[s];
            if (kv.v_trans) {
                // one row per channel, padded when layers differ in size [TAG_V_CACHE_VARIABLE]
                v = ggml_view_2d(ctx, layer.v, kv.get_size(), layer.v->ne[0], kv.get_size()*layer.v->nb[0], s*layer.v->nb[2]);
            }

            ggml_build_forward_expand(gf, ggml_kv_move(ctx, layer.k_stream[s], idx, 1));
            ggml_build_forward_expand(gf, ggml_kv_move(ctx, v,                 idx, kv.v_trans ? 0 : 1));
        }

        bool ok = ggml_backend_sched_alloc_graph(sched, gf);
        if (ok) {
            const size_t size = ggml_nbytes(idx)/2;
            ggml_backend_tensor_set(idx, seq.from.data(), 0,    size);
            ggml_backend_tensor_set(idx, seq.to.data(),   size, size);

            ok = lctx.graph_compute(gf, false) == GGML_STATUS_SUCCESS;
        }

        updated = true;

        if (ok) {
            moved(s, meta);
            seq.i_release = 0;
        } else {
            seq.has_holes = true;
            LLAMA_LOG_ERROR("%s: failed to move %zu cells of stream %u, they stay where they are\n", __func__, seq.from.size(), s);
        }

        seq.from.clear();
        seq.to.clear();

        ggml_backend_sched_synchronize(sched);
        stats.t_move_ms += 1e-3*(ggml_time_us() - t_start_us);
    }

    return updated;
} catch (const std::exception & err) {
    LLAMA_LOG_ERROR("%s: nothing is moved: %s\n", __func__, err.what());
    return true;
}
