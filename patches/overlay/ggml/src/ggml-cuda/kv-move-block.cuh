#pragma once

// Operands of GGML_OP_KV_MOVE and what its threads do. No cell is both a source and a target: any order is right.

#include "kv-block.cuh"

#include "ggml-impl.h"

static constexpr int KV_MOVE_UNITS = 32; // threads of a block that share a move of whole rows
static constexpr int KV_MOVE_MOVES = 8;  // moves of a block

struct kv_move_args {
    char          * data;
    const int32_t * from;
    const int32_t * to;

    size_t  nb1, nb2, nb3;
    int64_t ne1, ne2;
    int64_t n_rows; // dim 0: of elements
    int64_t n_mat;  // dim 1: of rows
    int     n_move;
    int     n_unit; // dim 1: of a row
};

// the largest that all rows of all cells are made of and aligned to, in bytes
static inline int kv_move_unit(const ggml_tensor * dst) {
    const ggml_tensor * a = dst->src[0];

    const size_t all = ggml_row_size(a->type, a->ne[0]) | a->nb[1] | a->nb[2] | a->nb[3] | (uintptr_t) a->data | 16;

    return (int) (all & ~(all - 1)); // the lowest bit
}

static inline kv_move_args kv_move_get_args(const ggml_tensor * dst, int n_unit_bytes) {
    const ggml_tensor * a   = dst->src[0];
    const ggml_tensor * idx = dst->src[1];

    kv_move_args m = {};

    m.data   = (char *) a->data;
    m.from   = (const int32_t *) idx->data;
    m.to     = (const int32_t *) ((const char *) idx->data + idx->nb[1]);
    m.nb1    = a->nb[1];
    m.nb2    = a->nb[2];
    m.nb3    = a->nb[3];
    m.ne1    = a->ne[1];
    m.ne2    = a->ne[2];
    m.n_rows = ggml_nrows(a);
    m.n_mat  = a->ne[2]*a->ne[3];
    m.n_move = (int) idx->ne[0];
    m.n_unit = (int) (ggml_row_size(a->type, a->ne[0])/n_unit_bytes);

    return m;
}

static inline bool kv_move_is_supported(const ggml_tensor * dst) {
    const ggml_tensor * a = dst->src[0];

    if (ggml_get_op_params_i32(dst, 0) == 1) {
        return a->ne[2]*a->ne[3] <= 65535; // blocks of a grid in y
    }
    return ggml_type_size(a->type) == 2 || ggml_type_size(a->type) == 4;
}

// whole rows, in units of T. Thread (x, y) of a block of KV_MOVE_UNITS x KV_MOVE_MOVES.
template <typename T> KV_DEVICE void kv_move_dim_1(const kv_move_args & m, int i_block, int i_mat, int x, int y) {
    const int i = i_block*KV_MOVE_MOVES + y;
    if (i >= m.n_move) {
        return;
    }

    char * mat = m.data + i_mat%m.ne2*m.nb2 + i_mat/m.ne2*m.nb3;

    const T * from = (const T *) (mat + m.from[i]*m.nb1);
    T       * to   = (T       *) (mat + m.to  [i]*m.nb1);

    for (int u = x; u < m.n_unit; u += KV_MOVE_UNITS) {
        to[u] = from[u];
    }
}

// single elements of a row. Thread i of a block, each has its own move.
template <typename T> KV_DEVICE void kv_move_dim_0(const kv_move_args & m, int64_t i_row, int i) {
    if (i >= m.n_move) {
        return;
    }

    T * row = (T *) (m.data + i_row%m.ne1*m.nb1 + i_row/m.ne1%m.ne2*m.nb2 + i_row/m.ne1/m.ne2*m.nb3);

    row[m.to[i]] = row[m.from[i]];
}
