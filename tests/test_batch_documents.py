"""Text into prompts, documents into parts, parts into summaries."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pages
import pytest
import tiny_models
from forced import Answer
from hypothesis import given, settings
from hypothesis import strategies as st

from pyinertia import KVPolicy, Llama
from pyinertia.batch import Summary, summarise
from pyinertia.batch.documents import Desk
from pyinertia.batch.schedule import Schedule, Settings
from pyinertia.batch.slots import Slots
from pyinertia.batch.text import common_prefix, encode, split

POLICY = KVPolicy(n_budget=96, n_sink=2, n_recent=8, n_window=8, n_pool=3)
TINY = {"n_threads": 1, "n_threads_batch": 1, "n_batch": 64}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
PARAGRAPH = "The board met on {} May. It decided that item {} be built. Nobody was against it."
REPORT = "\n\n".join(PARAGRAPH.format(i, 7 * i) for i in range(1, 31))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("batch") / "llama.gguf")


def run(documents, llama, **kwargs):
    keywords = {"kv_policy": POLICY, "max_tokens": 12, "instruction": "Sum up.", "n_parallel": 3}
    return summarise(documents, model=llama, **{**keywords, **TINY, **kwargs})


# prompts


class Caught(Llama):
    """Keeps what a chat completion sends to create_completion."""

    def create_completion(self, prompt, stop=None, **kwargs):
        self.caught = prompt, stop
        return super().create_completion(prompt, **{**kwargs, "max_tokens": 1})


@pytest.mark.parametrize("chat_format", ["chatml", "llama-2", "gemma", None])
def test_a_chat_is_what_create_chat_completion_makes_of_it(llama, chat_format):
    kwargs = {"chat_format": chat_format, "verbose": False, "n_ctx": 1024, **TINY}
    with closing(Caught(str(llama), **kwargs)) as llm:
        llm.create_chat_completion(CHAT)
        tokens = encode(llm, CHAT)
        assert (tokens.ids, list(tokens.stop)) == (llm.caught[0], llm.caught[1] or [])
        assert encode(llm, CHAT[1:], CHAT[:1]) == tokens


def test_a_text_is_what_create_completion_makes_of_it(llama):
    with closing(Llama(str(llama), verbose=False, n_ctx=1024, **TINY)) as llm:
        llm.create_completion("Once", max_tokens=1, temperature=0)
        ids = encode(llm, "Once").ids
        assert ids == [tiny_models.BOS, *b"Once"]
        assert llm._input_ids.tolist() == ids
        assert encode(llm, "ce", "On").ids == ids
        with pytest.raises(TypeError, match="the prefix is text"):
            encode(llm, CHAT, "On")
        with pytest.raises(TypeError, match="the prefix is a list"):
            encode(llm, "On", CHAT)


def test_common_prefix():
    assert common_prefix([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == [1, 2]
    assert common_prefix([[1], [2]]) == []
    assert common_prefix([]) == []


# parts


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text("ab .\n", min_size=1, max_size=90), min_size=1, max_size=20).map("\n\n".join),
    st.integers(8, 200),
)
def test_parts_are_the_text_and_fit(text, n_most):
    parts = split(text, n_most, lambda part: len(part.encode()))
    assert "".join(parts) == text
    assert all(0 < len(part.encode()) <= n_most for part in parts)


def test_parts_end_where_paragraphs_do_and_are_alike():
    parts = split(REPORT, 500, len)
    assert all(part.strip().startswith("The board met") for part in parts)
    assert all(part.strip().endswith("against it.") for part in parts)
    assert min(map(len, parts)) > 250


def test_a_sentence_is_cut_only_if_it_must():
    text = "One two three. Four five six. " * 4
    assert all(part.strip().endswith(".") for part in split(text, 40, len))
    assert len(split("x" * 100, 30, len)) >= 4


@pytest.mark.parametrize("text", ["x" * 2**17, "word " * 2**15, "A sentence. " * 2**13])
def test_the_work_of_splitting_grows_with_the_text(text):
    counted = 0

    def count(part: str) -> int:
        nonlocal counted
        counted += len(part)
        return len(part)

    parts = split(text, 200, count)
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 200
    assert counted < 150 * len(text)


# summaries


def test_documents_that_fit_are_read_in_one_go(llama):
    documents = [REPORT[:300].strip(), REPORT[:600].strip(), "short"]
    results = {one.index: one for one in run(documents, llama)}
    assert sorted(results) == [0, 1, 2]
    for i, one in results.items():
        assert (one.n_parts, one.n_levels, one.error) == (1, 0, "")
        assert one.n_tokens == len(documents[i])
        # what the chat format and the instruction add is the same for all
        assert one.n_prompt - one.n_tokens == results[2].n_prompt - results[2].n_tokens
        assert one.n_generated == 12
    assert results[2].n_evicted == 0
    assert results[1].n_evicted == results[1].n_prompt + 11 - POLICY.n_budget


def test_long_documents_are_read_by_parts_and_levels(llama):
    (one,) = run([REPORT], llama, n_part=200)
    n_calls = one.n_generated // 12
    assert one.n_parts >= len(REPORT) // 200
    assert one.n_tokens == len(REPORT)
    assert one.n_levels >= 1
    assert n_calls > one.n_parts
    assert one.finish_reason == "length"
    assert one.n_prompt > len(REPORT)


class Scripted(Slots):
    """The k-th prompt that enters is answered by "(k)": what is put together is known."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[str] = []

    def enter(self, slot, tokens):
        self.asked.append(bytes(t for t in tokens if t < 256).decode())
        return super().enter(slot, tokens)

    def sampler(self, seed, **settings):
        return Answer([*f" ({len(self.asked)}) ".encode(), tiny_models.EOS])

    def draw(self, sampler, row):
        return sampler.tokens.pop(0)


@pytest.fixture
def scripted(llama):
    with closing(Scripted(llama, n_parallel=3, kv_policy=POLICY, n_ctx=1024, **TINY)) as slots:
        yield slots


def summaries(slots, documents, n_part):
    desk = Desk(slots, documents, "Sum up.", n_part, 12, (), 0)
    run = Schedule(slots, Settings(max_tokens=12)).run(desk.next_job)
    return [summary for outcome in run if (summary := desk.take(outcome))]


def test_summaries_of_parts_are_put_together_in_order(scripted):
    (one,) = summaries(scripted, [REPORT[:800]], 300)
    n_parts = one.n_parts
    assert 3 <= n_parts <= 4
    assert "\n\n".join(f"({k})" for k in range(1, n_parts + 1)) in scripted.asked[-1]
    assert one.text == f"({n_parts + 1})"
    assert (one.n_levels, one.finish_reason) == (1, "stop")
    assert all("Sum up." in asked for asked in scripted.asked)
    texts = [asked.split("Sum up.")[1].strip() for asked in scripted.asked[:n_parts]]
    assert " ".join(" ".join(texts).split()) == " ".join(REPORT[:800].split())


def test_bad_documents_end_with_errors_and_disturb_no_other(llama):
    documents = [REPORT[:200], "", " \n", None, "b\ud83d", "fine"]
    results = {one.index: one for one in run(documents, llama)}
    assert all(isinstance(one, Summary) for one in results.values())
    assert [results[i].finish_reason for i in range(6)] == ["length", *["error"] * 4, "length"]
    assert results[1].error == "the document is empty; it must be a text"
    assert results[3].error == "the document is a NoneType; it must be a text"
    assert "surrogates not allowed" in results[4].error


def test_the_instruction_is_never_evicted(llama):
    with closing(Scripted(llama, n_parallel=1, kv_policy=POLICY, n_ctx=1024, **TINY)) as slots:
        desk = Desk(slots, [REPORT[:800]], "Say who won, and when.", None, 12, (), 0)
        job = desk.next_job()
        n_prefix = slots.enter(0, job.tokens)
        assert bytes(t for t in job.tokens[:n_prefix] if t < 256).endswith(
            b"Say who won, and when.\n\n"
        )
        for start in range(n_prefix, len(job.tokens), 32):
            assert slots.evaluate({0: job.tokens[start : start + 32]}, {0: start}) == 0
        assert slots.kv_stats().n_evicted > 500
        assert slots.kv_cells(0)["pos"][:n_prefix].tolist() == list(range(n_prefix))


def test_what_no_part_has_a_word_on_is_an_error(scripted):
    scripted.sampler = lambda seed, **settings: Answer([tiny_models.EOS])
    long, short = summaries(scripted, [REPORT[:800], "short"], 300)[::-1]
    assert (short.text, short.finish_reason) == ("", "stop")
    assert "nothing to say" in long.error
    assert (long.index, long.finish_reason) == (0, "error")


def test_summaries_that_get_no_shorter_are_an_error(scripted):
    """Two of them and the gap between are more than a part: they would be parts for ever."""
    scripted.sampler = lambda seed, **settings: Answer([*b"x" * 12, tiny_models.EOS])
    long, short = sorted(
        summaries(scripted, [REPORT[:800], "short"], 25), key=lambda one: one.index
    )
    assert (short.text, short.error) == ("x" * 12, "")
    assert "do not fit fewer parts; pass a smaller max_tokens" in long.error
    assert len(scripted.asked) < 100


def test_the_error_of_a_part_is_that_of_the_document(scripted):
    """Positions that are not there: one part does not fit, its document ends, the other goes on."""
    desk = Desk(scripted, [REPORT[:800], REPORT[:200]], "Sum up.", 300, 12, (), 0)
    first = desk.next_job()
    scripted._n_ctx = len(first.tokens) - 1
    jobs = iter([first])
    run = Schedule(scripted, Settings(max_tokens=12)).run(
        lambda: next(jobs, None) or desk.next_job()
    )
    done = [summary for outcome in run if (summary := desk.take(outcome))]
    assert [one.index for one in done] == [0, 1]
    assert "leaves no room for an answer" in done[0].error
    assert done[1].error == ""
    assert len(scripted.asked) == 1  # no other part of the first


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"instruction": " "}, "instruction=' ' must be a text"),
        ({"n_part": 0.5}, "n_part=0.5 must be a whole number"),
        ({"n_part": 20}, "a part must have room for two summaries"),
        ({"max_tokens": 400}, "n_ctx=1024 has no room for an instruction"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_settings_without_room_are_refused(llama, kwargs, message):
    with pytest.raises(ValueError, match=message):
        list(run(["text"], llama, **kwargs))


def test_the_example_of_the_docs_runs(llama, tmp_path, monkeypatch, capsys):
    example = pages.python("docs/how-to/many-documents.md")[0]
    monkeypatch.chdir(tmp_path)
    Path("reports").mkdir()
    Path("reports/a.txt").write_text(REPORT[:400])
    Path("reports/b.txt").write_text("")
    Path("model.gguf").symlink_to(llama)
    exec(example.replace("flash_attn=True", "n_threads=1, n_threads_batch=1, max_tokens=20"), {})
    lines = capsys.readouterr().out
    assert "a.txt" in lines
    assert "b.txt the document is empty" in lines
