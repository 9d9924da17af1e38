"""Bytes of the KV cache: allocated, used, and what the system still holds for it."""

from __future__ import annotations

import sys

import pytest
from helpers import play

from pyinertia import Llama

PER_CELL = 30 * 2 * 192 * 2  # SmolLM2: layers, K and V, 3 heads of 64, f16
N_CTX, BUDGET = 1024, 256


@pytest.mark.parametrize("flash_attn", [False, True])  # without it V is transposed
def test_bytes_are_those_of_the_cells(smollm2, flash_attn):
    llm = Llama(
        smollm2, n_ctx=N_CTX, n_threads=2, verbose=False, flash_attn=flash_attn,
        kv_policy="inertiakv", kv_budget=BUDGET,
    )  # fmt: skip
    linux = sys.platform == "linux"
    stats = llm.kv_stats()
    assert stats.kv_bytes == PER_CELL * N_CTX
    assert stats.kv_bytes_used == 0
    if linux:  # allocated, cleared by llama.cpp, and given back: nothing is in it
        assert stats.kv_bytes_resident < 0.1 * stats.kv_bytes

    play(llm, 500, 1)
    stats = llm.kv_stats()
    assert stats.kv_bytes_used == PER_CELL * 501
    assert PER_CELL * 501 <= stats.kv_bytes_resident <= stats.kv_bytes

    llm.reset()
    play(llm, 500, 2 + 16)  # the second step cuts, the next 16 give the memory back
    stats = llm.kv_stats()
    assert stats.kv_bytes == PER_CELL * N_CTX
    assert stats.kv_bytes_used == PER_CELL * BUDGET
    if linux:
        # whole pages above the budget; a transposed V has rows of 2 KiB here, no page to give
        v_bytes = PER_CELL // 2 * (BUDGET if flash_attn else N_CTX)
        n_pages = 30 * 2 * 2  # those at the ends of K and V in each layer
        assert stats.kv_bytes_resident <= PER_CELL // 2 * BUDGET + v_bytes + n_pages * 4096


def test_a_transposed_v_gives_back_what_its_rows_have(smollm2):
    """At 8,192 cells a channel's row is 16 KiB: 256 cells are half a KiB, 3 of 4 pages leave."""
    llm = Llama(
        smollm2, n_ctx=8192, n_threads=2, verbose=False, kv_policy="inertiakv", kv_budget=BUDGET
    )
    play(llm, 500, 2 + 16)
    stats = llm.kv_stats()
    assert stats.kv_bytes_used == PER_CELL * BUDGET
    assert stats.kv_bytes == PER_CELL * 8192
    if sys.platform == "linux":
        assert stats.kv_bytes_resident < 0.3 * stats.kv_bytes


def test_the_window_cache_counts(gemma3):
    """Gemma 3 270M: 18 layers of one KV head of 256; 3 of them see everything."""
    llm = Llama(gemma3, n_ctx=2048, n_threads=2, verbose=False, kv_policy="inertiakv", n_batch=512)
    per_layer = 2 * 256 * 2
    assert llm.kv_stats().kv_bytes == per_layer * (3 * 2048 + 15 * 1024)  # window 512 + batch 512
