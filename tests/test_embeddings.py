"""Cells that were evaluated from embeddings, as those of an image are: ranked, kept, or refused."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp as lc
import numpy as np
import pytest
import tiny_families
import tiny_models
from gguf import GGUFReader
from helpers import logits
from llama_cpp.llama_chat_format import (
    Llava15ChatHandler,
    MTMDChatHandler,
    NanoLlavaChatHandler,
)
from low_level import Context

from pyinertia import POLICIES, KVPolicy, Llama, NativeLibraryError, PolicyError

BUDGET = 48
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=8, n_pool=3)
TOKENS = np.random.default_rng(5).integers(0, 256, 400).tolist()
GRID = 3, 5  # rows and columns of an image
PICTURE = TOKENS[300:315]  # what it shows: the embeddings of these tokens


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(scope="module")
def m_rope(tmp_path_factory):
    family = tiny_families.FAMILIES["qwen2vl"]
    return tiny_families.write(tmp_path_factory.mktemp("tiny") / "vl.gguf", "qwen2vl", family)


def embeddings(path, tokens: list[int]) -> np.ndarray:
    """The embeddings of tokens, [n, n_embd]."""
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    return tensors["token_embd.weight"][tokens]


@contextmanager
def contexts(path, *settings: dict) -> Iterator[list[Context]]:
    """Contexts of one model: keywords of Context."""
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    found = [Context(model, **kwargs) for kwargs in settings]
    yield found
    for context in found:
        lc.llama_free(context.ctx)
    lc.llama_model_free(model)


def show(ctx: int, rows: np.ndarray, positions: np.ndarray) -> None:
    """Decode embeddings [n, n_embd] at positions [n], or [4, n] under M-RoPE."""
    n = len(rows)
    rows, positions = np.ascontiguousarray(rows), np.ascontiguousarray(positions, np.int32)
    seq_id = lc.llama_seq_id(0)
    ids = (ctypes.POINTER(lc.llama_seq_id) * n)(*[ctypes.pointer(seq_id)] * n)
    batch = lc.llama_batch(
        n_tokens=n,
        embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        pos=positions.ctypes.data_as(ctypes.POINTER(lc.llama_pos)),
        n_seq_id=(ctypes.c_int32 * n)(*[1] * n),
        seq_id=ids,
        logits=(ctypes.c_int8 * n)(),
    )
    assert lc.llama_decode(ctx, batch) == 0


def picture_positions(p0: int, shared: bool) -> tuple[np.ndarray, int]:
    """The positions of an image at p0, and the one after it; shared: those of M-RoPE."""
    n_row, n_column = GRID
    if not shared:
        return np.arange(p0, p0 + n_row * n_column), p0 + n_row * n_column
    row, column = np.divmod(np.arange(n_row * n_column), n_column)
    pos = np.array([np.full(row.size, p0), p0 + row, p0 + column, np.zeros(row.size)])
    return pos, p0 + max(GRID)


def last_logits(context: Context) -> np.ndarray:
    n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(lc.llama_get_model(context.ctx)))
    row = lc.llama_get_logits_ith(context.ctx, -1)
    return np.ctypeslib.as_array(row, shape=(n_vocab,)).copy()


# beside the engine, with llama.cpp's own calls


def test_embeddings_rank_and_leave_as_their_tokens_do(plain):
    """Where each has a position of its own they are cells like others."""
    with contexts(plain, {"policy": POLICY}, {"policy": POLICY}) as (tokens, shown):
        for context in (tokens, shown):
            context.decode({0: TOKENS[:40]})
        tokens.decode({0: TOKENS[40:100]})
        show(shown.ctx, embeddings(plain, TOKENS[40:100]), np.arange(40, 100))
        shown.n_past[0] = 100
        for token in TOKENS[100:180]:
            for context in (tokens, shown):
                context.decode({0: [token]})
            assert np.array_equal(last_logits(tokens), last_logits(shown))
            assert np.array_equal(tokens.cells(0), shown.cells(0))
        assert len(tokens.positions()) == BUDGET
        assert sum(40 <= pos < 100 for pos in tokens.positions()) > 5


@pytest.mark.parametrize("compact", [False, True])
def test_an_image_stays_whole_where_its_cells_share_a_position(m_rope, compact):
    """Under M-RoPE; the text around it leaves, as from a cache without an engine."""
    rows = embeddings(m_rope, PICTURE)
    settings = {"policy": POLICY, "compact": compact}, {"policy": POLICIES["full"]}
    with contexts(m_rope, *settings) as (ours, same):
        p0 = 60
        at, p1 = picture_positions(p0, shared=True)
        for context in (ours, same):
            context.decode({0: TOKENS[:p0]})
            show(context.ctx, rows, at)
            context.n_past[0] = p1
            context.decode({0: TOKENS[p0:290]})
            assert context.positions().count(p0) == len(rows)
            assert context.n_past[0] == p1 + 230
        held = set(same.positions())
        memory = lc.llama_get_memory(same.ctx)
        for token in TOKENS[290:340]:
            ours.decode({0: [token]})
            kept = set(ours.positions())
            for pos in held - kept:
                assert lc.llama_memory_seq_rm(memory, 0, pos, pos + 1)
            held = kept
            same.decode({0: [token]})
            given, expected = last_logits(ours), last_logits(same)
            assert np.allclose(given, expected, rtol=0, atol=0.02 if compact else 0)
        assert (ours.stats()["n_moved"] > 0) == compact
        assert len(ours.positions()) == BUDGET
        assert ours.positions().count(p0) == len(rows)


# the way of a chat handler


class Pictures(MTMDChatHandler):
    """Puts text and images into the cache as the handlers of llama-cpp-python do.

    Its images are the embeddings of tokens. The others ask libmtmd for them.
    """

    def __init__(self, rows: np.ndarray, *, shared: bool) -> None:
        self.rows, self.shared, self.answers = rows, shared, []

    def __call__(self, *, llama, messages, max_tokens, temperature, grammar, **kwargs):
        llama.reset()
        llama._ctx.kv_cache_clear()
        for part in messages[0]["content"]:
            if part["type"] == "text":
                llama.eval(llama.tokenize(part["text"].encode(), add_bos=False))
            else:
                at, after = picture_positions(llama.n_tokens, self.shared)
                show(llama.ctx, self.rows, at)
                llama.n_tokens = after
        return llama.create_completion(
            prompt=llama.input_ids[: llama.n_tokens].tolist(),
            max_tokens=max_tokens,
            temperature=temperature,
            grammar=grammar,
        )


def messages(before: str, after: str) -> list[dict]:
    texts = [{"type": "text", "text": text} for text in (before, after)]
    image = {"type": "image_url", "image_url": {"url": "file:///picture.png"}}
    return [{"role": "user", "content": [texts[0], image, texts[1]]}]


def ask(llm) -> list[str]:
    """Two questions about pictures; what was behind their tokens before must not matter."""
    grammar = lc.LlamaGrammar.from_string("root ::= [a-z]{12}", verbose=False)
    texts = []
    for i, after in enumerate(("what is it?", "how large is it?")):
        llm.input_ids[:] = -7 - i
        answer = llm.create_chat_completion(
            messages("look at this: ", after), max_tokens=12, temperature=0.0, grammar=grammar
        )
        texts.append(answer["choices"][0]["text"])
    return texts


def load(path, cls=Llama, **kwargs):
    return cls(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, **kwargs)


def test_without_a_policy_images_work(plain):
    rows = embeddings(plain, PICTURE)
    llm, text = load(plain, chat_handler=Pictures(rows, shared=False)), load(plain)
    given = ask(llm)
    grammar = lc.LlamaGrammar.from_string("root ::= [a-z]{12}", verbose=False)
    for answer, after in zip(given, (b"what is it?", b"how large is it?"), strict=True):
        prompt = [*text.tokenize(b"look at this: ", False), *PICTURE, *text.tokenize(after, False)]
        text.reset()
        settings = {"max_tokens": 12, "temperature": 0.0, "grammar": grammar}
        assert answer == text.create_completion(prompt, **settings)["choices"][0]["text"]
    assert given[0] != given[1]


def test_without_a_policy_images_that_share_a_position_work(m_rope):
    handler = Pictures(embeddings(m_rope, PICTURE), shared=True)
    ours, parent = (load(m_rope, cls=cls, chat_handler=handler) for cls in (Llama, lc.Llama))
    assert ask(ours) == ask(parent)
    assert np.array_equal(logits(ours), logits(parent))


def test_a_handler_of_images_that_comes_later_is_refused_at_the_call(plain):
    llm = load(plain, kv_policy=POLICY)
    llm.eval(TOKENS[:60])
    before = llm.kv_cells()
    llm.chat_handler = Pictures(embeddings(plain, PICTURE), shared=False)
    with pytest.raises(PolicyError, match=r"does not serve images.*kv_policy=None"):
        ask(llm)
    assert np.array_equal(llm.kv_cells(), before)


@pytest.mark.parametrize("handler", [Llava15ChatHandler, MTMDChatHandler, NanoLlavaChatHandler])
def test_the_missing_library_is_named(handler):
    with pytest.raises(
        NativeLibraryError, match=rf"{handler.__name__} needs libmtmd.*use llama_cpp"
    ):
        handler(clip_model_path="mmproj.gguf")
