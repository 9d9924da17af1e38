#pragma once

// Cases of GGML_OP_KV_ATTN, GGML_OP_KV_MASS and GGML_OP_KV_MOVE, included by test-backend-ops.cpp after its own

#include "ggml-kv-evict.h"

// GGML_OP_KV_MASS
struct test_kv_mass : public test_case {
    const int64_t   hs;       // head size
    const int64_t   nh;       // num KV heads
    const int64_t   gqa;      // query heads per KV head
    const int64_t   kv;       // kv size
    const int64_t   nb;       // batch size, per stream
    const int64_t   ns;       // num streams
    const int64_t   n_scored; // queries of the batch that are scored
    const ggml_type type_K;
    const ggml_type type_mask;
    const float     max_bias;
    const float     softcap;
    const bool      sinks;
    const bool      assign;

    std::string vars() override {
        return VARS_TO_STR13(hs, nh, gqa, kv, nb, ns, n_scored, type_K, type_mask, max_bias, softcap, sinks, assign);
    }

    test_kv_mass(int64_t hs, int64_t nh, int64_t gqa, int64_t kv, int64_t nb, int64_t ns, int64_t n_scored,
                 ggml_type type_K = GGML_TYPE_F16, ggml_type type_mask = GGML_TYPE_F16,
                 float max_bias = 0.0f, float softcap = 0.0f, bool sinks = false, bool assign = false)
        : hs(hs), nh(nh), gqa(gqa), kv(kv), nb(nb), ns(ns), n_scored(n_scored), type_K(type_K), type_mask(type_mask),
          max_bias(max_bias), softcap(softcap), sinks(sinks), assign(assign) {}

    // A relative error e of q moves a logit by up to 2.7 e (its deviation here, see initialize_tensors), and the
    // mass as much: e is 2^-12 for f16, 2^-9 for bf16, 2^-8 for q8; four deviations.
    double max_nmse_err() override {
        const double e = type_K == GGML_TYPE_F32  ? 1e-6 :
                         type_K == GGML_TYPE_F16  ? 1.0/4096 :
                         type_K == GGML_TYPE_BF16 ? 1.0/512 : 1.0/256;
        return 4*(2.7*e)*(2.7*e);
    }

    uint64_t op_flops(ggml_tensor * t) override {
        GGML_UNUSED(t);
        return 2*hs*nh*gqa*kv*n_scored;
    }

    struct operands {
        ggml_tensor * rows, * q, * k, * m, * s, * coef, * idx;
    };

    operands build_operands(ggml_context * ctx) {
        const int64_t n_head   = nh*gqa;
        const int64_t n_tokens = nb*ns;

        // a row is wider than n_kv, as the cache is
        ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kv + 37, n_scored + 2);
        ggml_set_name(rows, "rows");

        // strided as after a permutation of fused q
        ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, hs, n_head + 2, n_tokens);
        ggml_set_name(q, "q");
        q = ggml_view_3d(ctx, q, hs, n_head, n_tokens, q->nb[1], q->nb[2], q->nb[1]);

        // a view of a larger cache
        ggml_tensor * k = ggml_new_tensor_4d(ctx, type_K, hs, nh, kv + 16, ns);
        ggml_set_name(k, "k");
        k = ggml_view_4d(ctx, k, hs, nh, kv, ns, k->nb[1], k->nb[2], k->nb[3], 0);

        ggml_tensor * m = ggml_new_tensor_4d(ctx, type_mask, kv, nb, 1, ns);
        ggml_set_name(m, "m");

        ggml_tensor * s = nullptr;
        if (sinks) {
            s = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head);
            ggml_set_name(s, "s");
        }

        ggml_tensor * coef = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 3);
        ggml_set_name(coef, "coef");

        ggml_tensor * idx = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
        ggml_set_name(idx, "idx");

        return { rows, q, k, m, s, coef, idx };
    }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        const operands a = build_operands(ctx);

        ggml_tensor * out = ggml_kv_mass(ctx, a.rows, a.q, a.k, nullptr, a.m, a.s, a.coef, a.idx,
                GGML_KV_KIND_MASS, GGML_KV_HEADS_MEAN, 1, 1.0f/sqrtf(hs), max_bias, softcap, assign);
        ggml_set_name(out, "out");

        return out;
    }

    void initialize_tensors(ggml_context * ctx) override {
        std::mt19937 rng(kv + nb);

        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
            if (t->view_src != nullptr) {
                continue;
            }
            if (strcmp(t->name, "rows") == 0) {
                init_tensor_uniform(t, 0.0f, 1.0f/kv); // no larger than the mass, or errors would drown
            } else if (strcmp(t->name, "q") == 0) {
                init_tensor_uniform(t, -8.0f, 8.0f);   // logits deviate by 8/3
            } else if (strcmp(t->name, "coef") == 0) {
                init_tensor_uniform(t, 0.5f, 1.0f);
            } else if (strcmp(t->name, "m") == 0) {
                init_mask(t, rng);
            } else if (strcmp(t->name, "idx") == 0) {
                init_row_idx(t, rng);
            } else {
                init_tensor_uniform(t);
            }
        }
    }

    // the last cells and a quarter of the others are masked; of many queries, one sees nothing
    virtual bool is_masked(int64_t c, int64_t b, std::mt19937 & rng) const {
        const bool masked = c > kv - kv/8 || rng()%4 == 0 || b == 3;
        return masked && !(c == 0 && b == 0);
    }

    virtual float mask_value(std::mt19937 & rng) const {
        return std::uniform_real_distribution<float>(-1.0f, 1.0f)(rng);
    }

    void init_mask(ggml_tensor * t, std::mt19937 & rng) const {
        std::vector<float> data(ggml_nelements(t));
        for (size_t i = 0; i < data.size(); i++) {
            data[i] = is_masked(i % kv, i / kv, rng) ? -INFINITY : mask_value(rng);
        }

        if (t->type == GGML_TYPE_F16) {
            std::vector<ggml_fp16_t> data_f16(data.size());
            ggml_fp32_to_fp16_row(data.data(), data_f16.data(), data.size());
            ggml_backend_tensor_set(t, data_f16.data(), 0, ggml_nbytes(t));
        } else {
            ggml_backend_tensor_set(t, data.data(), 0, ggml_nbytes(t));
        }
    }

    void init_row_idx(ggml_tensor * t, std::mt19937 & rng) const {
        std::vector<int32_t> data(nb*ns, -1);
        for (int64_t i = 0; i < std::min<int64_t>(n_scored, data.size()); i++) {
            data[i] = i + 1;
        }
        std::shuffle(data.begin(), data.end(), rng);
        ggml_backend_tensor_set(t, data.data(), 0, ggml_nbytes(t));
    }
};

// GGML_OP_KV_ATTN: q, k, mask and rows as for GGML_OP_KV_MASS
struct test_kv_attn : public test_kv_mass {
    // the cells that a query sees
    enum mask_kind {
        MOST,   // as for GGML_OP_KV_MASS
        CAUSAL, // of a prompt's last batch
        RING,   // of a sliding window that goes on at the first cell
        ENDS,   // the first few and the last third: threads cannot share these in parts of one size
    };

    const int64_t   hsv;     // V head size
    const ggml_type type_V;
    const bool      v_trans;
    const int       sees;    // mask_kind
    const bool      rows;    // compare the rows, not the attention

    std::string vars() override {
        return test_kv_mass::vars() + "," + VARS_TO_STR5(hsv, type_V, v_trans, sees, rows);
    }

    std::string op_desc(ggml_tensor * t) override {
        GGML_UNUSED(t);
        return "KV_ATTN";
    }

    test_kv_attn(int64_t hs, int64_t nh, int64_t gqa, int64_t kv, int64_t nb, int64_t ns, int64_t n_scored,
                 ggml_type type_K, ggml_type type_V, bool v_trans = false, mask_kind sees = MOST, bool rows = false,
                 ggml_type type_mask = GGML_TYPE_F16, float max_bias = 0.0f, float softcap = 0.0f, bool sinks = false, int64_t hsv = 0)
        : test_kv_mass(hs, nh, gqa, kv, nb, ns, n_scored, type_K, type_mask, max_bias, softcap, sinks, true),
          hsv(hsv ? hsv : hs), type_V(type_V), v_trans(v_trans), sees(sees), rows(rows) {}

    // q, K and V are not rounded: what is left is the rounding of sums, some 1e-6 of a logit
    double max_nmse_err() override {
        return 4*(2.7*1e-6)*(2.7*1e-6);
    }

    // as of GGML_OP_FLASH_ATTN_EXT, masked cells included
    uint64_t op_flops(ggml_tensor * t) override {
        GGML_UNUSED(t);
        return 2*nh*gqa*nb*ns*(hs + hsv)*kv;
    }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        const operands a = build_operands(ctx);

        ggml_tensor * v = ggml_new_tensor_4d(ctx, type_V, v_trans ? kv + 16 : hsv, v_trans ? hsv : nh, v_trans ? nh : kv + 16, ns);
        ggml_set_name(v, "v");
        v = v_trans ?
            ggml_view_4d(ctx, v, kv, nh, hsv, ns, v->nb[2], v->nb[1], v->nb[3], 0) :
            ggml_view_4d(ctx, v, hsv, nh, kv, ns, v->nb[1], v->nb[2], v->nb[3], 0);

        ggml_tensor * out = ggml_kv_attn(ctx, a.q, a.k, v, a.m, a.s, a.rows, a.coef, a.idx, 1, 1.0f/sqrtf(hs), max_bias, softcap, assign);
        ggml_set_name(out, "out");

        // rows + 0, after the op
        return rows ? ggml_add(ctx, a.rows, ggml_scale(ctx, ggml_view_1d(ctx, out, 1, 0), 0.0f)) : out;
    }

    bool is_masked(int64_t c, int64_t b, std::mt19937 & rng) const override {
        switch (sees) {
            case CAUSAL: return c > kv - nb + b%nb;
            case RING:   return c >= kv/8 + b%nb && c < kv - kv/4 + b%nb;
            case ENDS:   return c >= 16 && c < kv - kv/3;
            default:     return test_kv_mass::is_masked(c, b, rng);
        }
    }

    float mask_value(std::mt19937 & rng) const override {
        return sees == CAUSAL ? 0.0f : test_kv_mass::mask_value(rng);
    }
};

// upstream's attention on the mask of a prompt's last batch
struct test_flash_attn_causal : public test_flash_attn_ext {
    test_flash_attn_causal(int64_t hs, int64_t nh, int64_t gqa, int64_t kv, int64_t nb, ggml_type type)
        : test_flash_attn_ext(hs, hs, nh, { gqa, 1 }, kv, nb, true, false, 0.0f, 0.0f, GGML_PREC_F32, type, type, { 0, 2, 1, 3 }) {}

    void initialize_tensors(ggml_context * ctx) override {
        test_flash_attn_ext::initialize_tensors(ctx);

        std::vector<ggml_fp16_t> data(kv*nb);
        for (int64_t i = 0; i < kv*nb; i++) {
            data[i] = ggml_fp32_to_fp16(i%kv > kv - nb + i/kv ? -INFINITY : 0.0f);
        }
        ggml_backend_tensor_set(ggml_get_tensor(ctx, "m"), data.data(), 0, data.size()*sizeof(data[0]));
    }
};

// GGML_OP_KV_MOVE
struct test_kv_move : public test_case {
    const ggml_type              type;
    const std::array<int64_t, 4> ne;
    const int                    dim;
    const int64_t                n_move;

    std::string vars() override {
        return VARS_TO_STR4(type, ne, dim, n_move);
    }

    test_kv_move(ggml_type type, std::array<int64_t, 4> ne, int dim, int64_t n_move)
        : type(type), ne(ne), dim(dim), n_move(n_move) {}

    double max_nmse_err() override {
        return 0.0;
    }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        ggml_tensor * a = ggml_new_tensor(ctx, type, 4, ne.data());
        ggml_set_name(a, "a");

        ggml_tensor * idx = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_move, 2);
        ggml_set_name(idx, "idx");

        ggml_tensor * out = ggml_kv_move(ctx, a, idx, dim);
        ggml_set_name(out, "out");

        return out;
    }

    void initialize_tensors(ggml_context * ctx) override {
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
            if (t->view_src != nullptr) {
                continue;
            }
            if (strcmp(t->name, "idx") == 0) {
                // sources and targets have no cell in common
                std::vector<int32_t> cells(ne[dim]);
                for (size_t i = 0; i < cells.size(); i++) {
                    cells[i] = i;
                }
                std::shuffle(cells.begin(), cells.end(), std::mt19937(n_move));
                ggml_backend_tensor_set(t, cells.data(), 0, ggml_nbytes(t));
            } else {
                init_tensor_uniform(t);
            }
        }
    }
};

static const ggml_type kv_evict_types[] = {
    GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,  GGML_TYPE_Q5_1,
    GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL,
};

static void add_test_cases_kv_evict_eval(std::vector<std::unique_ptr<test_case>> & cases) {
    const ggml_type F16 = GGML_TYPE_F16;
    const ggml_type F32 = GGML_TYPE_F32;

    const auto MOST   = test_kv_attn::MOST;
    const auto CAUSAL = test_kv_attn::CAUSAL;

    for (ggml_type type_K : kv_evict_types) {
        for (int64_t hs : { 64, 128, 256 }) {
            for (int64_t kv : { 1, 33, 512 }) {
                cases.emplace_back(new test_kv_mass(hs, 2, 3, kv, 1, 1, 1, type_K));
                cases.emplace_back(new test_kv_mass(hs, 2, 3, kv, 9, 2, 11, type_K, F32));
            }
        }
    }
    for (int64_t gqa = 1; gqa <= 8; gqa++) {
        cases.emplace_back(new test_kv_mass(80, 3, gqa, 257, 5, 1, 4, F16));
    }
    for (float max_bias : { 0.0f, 8.0f }) {
        for (float softcap : { 0.0f, 30.0f }) {
            for (bool sinks : { false, true }) {
                for (bool assign : { false, true }) {
                    cases.emplace_back(new test_kv_mass(64, 3, 3, 300, 6, 1, 5, F16, F16, max_bias, softcap, sinks, assign));
                }
            }
        }
    }
    cases.emplace_back(new test_kv_mass(64, 3, 3, 4096, 512, 1,  17, F16));
    cases.emplace_back(new test_kv_mass(64, 3, 3, 4095, 512, 1,   0, F16));
    cases.emplace_back(new test_kv_mass(64, 1, 2,  100, 512, 1, 512, F16));

    for (ggml_type type : kv_evict_types) {
        for (int64_t hs : { 64, 128, 256 }) {
            for (int64_t nb : { 1, 8, 33 }) {
                cases.emplace_back(new test_kv_attn(hs, 2, 3, 257, nb, 1, 5, type, type));
                cases.emplace_back(new test_kv_attn(hs, 2, 3, 257, nb, 1, 5, type, type, false, MOST, true));
                if (ggml_blck_size(type) == 1) {
                    cases.emplace_back(new test_kv_attn(hs, 2, 3, 257, nb, 2, 5, type, type, true, MOST, false, F32));
                }
            }
        }
    }
    for (int64_t gqa = 1; gqa <= 8; gqa++) {
        for (int64_t nb : { 1, 5, 20 }) {
            cases.emplace_back(new test_kv_attn(80, 3, gqa, 257, nb, 1, 4, F16, F16));
        }
    }
    for (float max_bias : { 0.0f, 8.0f }) {
        for (float softcap : { 0.0f, 30.0f }) {
            for (bool sinks : { false, true }) {
                for (int64_t nb : { 1, 6, 40 }) {
                    cases.emplace_back(new test_kv_attn(64, 3, 3, 300, nb, 1, 5, F16, F16, false, MOST, false, F16, max_bias, softcap, sinks, 128));
                    cases.emplace_back(new test_kv_attn(64, 3, 3, 300, nb, 1, 5, F16, F16, false, MOST, true,  F16, max_bias, softcap, sinks, 128));
                }
            }
        }
    }
    for (int64_t kv : { 512, 1000 }) {
        cases.emplace_back(new test_kv_attn(64, 3, 3, kv, 512, 1, 17, F16,            F16,            false, CAUSAL));
        cases.emplace_back(new test_kv_attn(64, 3, 3, kv, 512, 1, 17, F16,            F16,            true, CAUSAL));
        cases.emplace_back(new test_kv_attn(64, 3, 3, kv, 512, 1, 17, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, false, CAUSAL));
        cases.emplace_back(new test_kv_attn(64, 3, 3, kv,   1, 1,  1, F16,            F16,            false, CAUSAL));
    }

    for (test_kv_attn::mask_kind sees : { test_kv_attn::RING, test_kv_attn::ENDS }) {
        for (int64_t kv : { 100, 1000 }) {
            for (int64_t nb : { 1, 8, 20 }) {
                for (bool v_trans : { false, true }) {
                    cases.emplace_back(new test_kv_attn(64, 2, 3, kv, nb, 1, 1, F16, F16, v_trans, sees));
                    cases.emplace_back(new test_kv_attn(64, 2, 3, kv, nb, 1, 1, F16, F16, v_trans, sees, true));
                }
            }
        }
    }

    for (ggml_type type : kv_evict_types) {
        for (int64_t n_move : { 1, 100 }) {
            cases.emplace_back(new test_kv_move(type, { 192, 256, 1, 1 }, 1, n_move));
            cases.emplace_back(new test_kv_move(type, { 64, 256, 3, 2 },  1, n_move));
            if (ggml_blck_size(type) == 1) {
                cases.emplace_back(new test_kv_move(type, { 256, 64, 3, 2 }, 0, n_move));
            }
        }
    }
}

static void add_test_cases_kv_evict_perf(std::vector<std::unique_ptr<test_case>> & cases) {
    const auto CAUSAL = test_kv_attn::CAUSAL;

    for (ggml_type type_K : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
        for (int64_t kv : { 512, 1024, 8192 }) {
            cases.emplace_back(new test_kv_mass(64, 3, 3, kv, 1, 1, 1, type_K));
        }
        cases.emplace_back(new test_kv_mass( 64, 3, 3, 8192, 16, 1, 16, type_K));
        cases.emplace_back(new test_kv_mass(128, 8, 4, 4096,  1, 1,  1, type_K));
    }
    cases.emplace_back(new test_kv_mass(64, 3, 3, 8192, 512, 1, 0));

    // attention of SmolLM2, beside upstream's
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
        for (int64_t kv : { 512, 1024, 2048 }) {
            cases.emplace_back(new test_kv_attn(64, 3, 3, kv, 1, 1, 1, type, type, false, CAUSAL));
            cases.emplace_back(new test_flash_attn_causal(64, 3, 3, kv, 1, type));
        }
        cases.emplace_back(new test_kv_attn(64, 3, 3, 1536, 512, 1, 0, type, type, false, CAUSAL));
        cases.emplace_back(new test_flash_attn_causal(64, 3, 3, 1536, 512, type));
    }

    cases.emplace_back(new test_kv_move(GGML_TYPE_F16,  { 192, 8192, 1, 1 }, 1, 400));
    cases.emplace_back(new test_kv_move(GGML_TYPE_Q8_0, { 192, 8192, 1, 1 }, 1, 400));
    cases.emplace_back(new test_kv_move(GGML_TYPE_F16,  { 8192, 192, 1, 1 }, 0, 400));
}
