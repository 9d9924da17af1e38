"""Reads the state of one sequence, as llama_state_seq_get_data writes it."""

from __future__ import annotations

import struct

import numpy as np


def parse(data: bytes, seq_id: int = 0) -> tuple[dict[int, tuple[bytes, ...]], int]:
    """K of every layer, then V of every layer, by position; and how many bytes they took.

    seq_id: the sequence that was saved. Of a cache with sliding windows these are the layers
    without.
    """
    at = 0

    def read(form: str):
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def take(n: int) -> bytes:
        nonlocal at
        at += n
        return data[at - n : at]

    _, _, n_stream = read("IiI")  # magic, sequence
    n_cells = read("I")
    for _ in range(n_stream - 1):  # the streams of other sequences have no cells here
        if n_cells == 0:
            n_cells = read("I")
    if n_cells == 0:
        return {}, at
    cells = []
    for _ in range(n_cells):
        pos, n_seq, seq = read("iIi")
        cells.append(pos)
        assert (n_seq, seq) == (1, seq_id)
    v_trans, n_layer = read("II")
    out = {pos: [] for pos in cells}
    for _ in range(n_layer):
        _, size = read("iQ")
        for pos in cells:
            out[pos].append(take(size))
    for _ in range(n_layer):
        if v_trans:
            _, size, n_embd = read("iII")
            v = np.frombuffer(take(size * n_embd * n_cells), np.uint8)
            for i, pos in enumerate(cells):
                out[pos].append(v.reshape(n_embd, n_cells, size)[:, i].tobytes())
        else:
            _, size = read("iQ")
            for pos in cells:
                out[pos].append(take(size))
    return {pos: tuple(parts) for pos, parts in out.items()}, at


def keys_and_values(data: bytes, n_head_kv: int) -> np.ndarray:
    """K and V of an F16 cache without holes, [2, n_layer, n_cells, n_head_kv, n_embd_head]."""
    rows, _ = parse(data)
    cells = [[np.frombuffer(part, np.float16) for part in rows[pos]] for pos in range(len(rows))]
    kv = np.array(cells, np.float64).swapaxes(0, 1)
    return kv.reshape(2, -1, len(rows), n_head_kv, kv.shape[-1] // n_head_kv)
