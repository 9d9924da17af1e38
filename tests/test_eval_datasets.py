"""Data sets out of small files in their formats, and damaged ones."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import tiny_models

from pyinertia.errors import EvalError
from pyinertia.eval import datasets, longbench
from pyinertia.eval.vocabulary import Vocabulary

ROWS = [
    {"context": f"Text {i}. " * 40, "input": f"What is {i}?", "answers": [str(i), "none"],
     "all_classes": None}
    for i in range(3)
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "qasper.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return Vocabulary(tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf"))


def test_longbench_from_a_folder_and_from_its_archive(folder):
    assert datasets.longbench_rows(folder, "qasper") == ROWS
    archive = folder / "elsewhere.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.write(folder / "qasper.jsonl", "data/qasper.jsonl")
    assert datasets.longbench_rows(archive, "qasper") == ROWS


def test_longbench_says_what_is_wrong(folder):
    path = folder / "qasper.jsonl"
    with pytest.raises(EvalError, match=r"has no trec\.jsonl"):
        datasets.longbench_rows(folder, "trec")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(EvalError, match=r"qasper\.jsonl, line 3 is not JSON; is it truncated"):
        datasets.longbench_rows(folder, "qasper")
    path.write_bytes(b'{"context": "a"}\n')
    with pytest.raises(EvalError, match="line 1 has no input, answers, all_classes"):
        datasets.longbench_rows(folder, "qasper")
    path.write_bytes(b"")
    with pytest.raises(EvalError, match=r"qasper\.jsonl is empty"):
        datasets.longbench_rows(folder, "qasper")
    archive = folder / "cut.zip"
    archive.write_bytes(b"PK\x03\x04 and no end")
    with pytest.raises(EvalError, match=r"cut\.zip cannot be read"):
        datasets.longbench_rows(archive, "qasper")
    with pytest.raises(EvalError, match=r"nothing\.zip cannot be read"):
        datasets.longbench_rows(folder / "nothing.zip", "qasper")


def test_longbench_v2_reads_choices(tmp_path):
    row = {"context": "c", "question": "q", "answer": "B", "length": "short"}
    row |= {f"choice_{letter}": letter for letter in "ABCD"}
    path = tmp_path / "data.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    assert datasets.longbench_v2_rows(path) == datasets.longbench_v2_rows(tmp_path) == [row]
    path.write_text(json.dumps([row, {"context": "c"}]), encoding="utf-8")
    with pytest.raises(EvalError, match="entry 2 has no question, answer, length"):
        datasets.longbench_v2_rows(path)
    path.write_text(json.dumps([row])[:-5], encoding="utf-8")
    with pytest.raises(EvalError, match="is not JSON"):
        datasets.longbench_v2_rows(path)


def test_squad_keeps_what_has_an_answer(tmp_path):
    paragraphs = [
        {"context": "Ten.", "qas": [{"question": "How many?", "answers": [{"text": "Ten"}] * 2}]},
        {"context": "Two.", "qas": [{"question": "And here?", "answers": [{"text": "Two"}]},
                                    {"question": "Why?", "answers": []}]},
    ]  # fmt: skip
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"title": "T", "paragraphs": paragraphs}]}))
    task, found = datasets.read_questions(path)
    assert task == "qa_1"
    assert found.documents == ("Ten.", "Two.")
    assert [(q.text, q.answers, q.gold, q.related) for q in found.questions] == [
        ("How many?", ("Ten",), (0,), (1,)),
        ("And here?", ("Two",), (1,), (0,)),
    ]


def test_hotpotqa_tells_gold_from_related(tmp_path):
    row = {
        "question": "Who?",
        "answer": "Ann",
        "supporting_facts": [["B", 0], ["B", 1]],
        "context": [["A", ["One. ", "Two."]], ["B", ["Ann."]]],
    }
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([row]))
    task, found = datasets.read_questions(path)
    assert task == "qa_2"
    assert found.documents == ("A\nOne. Two.", "B\nAnn.")
    (question,) = found.questions
    assert (question.gold, question.related, question.answers) == ((1,), (0,), ("Ann",))


def test_questions_of_another_format_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[]")
    with pytest.raises(EvalError, match="neither in the format of SQuAD"):
        datasets.read_questions(path)
    path.write_text('{"data": [{"paragraphs": [{"context": "c"}]}]}')
    with pytest.raises(EvalError, match=r"breaks the format of SQuAD.*KeyError\('qas'\)"):
        datasets.read_questions(path)


def test_without_the_hub_a_local_copy_is_asked_for(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(EvalError, match=r"cannot be fetched \(no route to host\); .*--qa"):
        datasets.questions_from_hub("qa_1")


def test_the_middle_is_left_out(vocabulary):
    # one byte is one token, and one stands before them
    text = "".join(chr(97 + i % 26) for i in range(500))
    whole = longbench.truncated(vocabulary, str, text, 501)
    assert vocabulary.decode(whole) == text
    cut = vocabulary.decode(longbench.truncated(vocabulary, str, text, 101))
    assert cut == text[:50] + text[-50:]


def test_a_wrapping_is_never_cut(vocabulary):
    def wrap(text: str) -> str:
        return f"<<{text}>>"

    cut = vocabulary.decode(longbench.truncated(vocabulary, wrap, "x" * 300, 64))
    assert cut.startswith("<<x")
    assert cut.endswith("x>>")
    with pytest.raises(EvalError, match="no room for the task"):
        longbench.truncated(vocabulary, wrap, "x" * 300, 4)


def test_every_task_of_longbench_makes_a_prompt_and_a_score(vocabulary):
    assert len(longbench.TASKS) == 21
    row = {"context": "Some text.", "input": "Some question.", "answers": ["Paragraph 3", "5"]}
    rows = {name: [row | {"all_classes": ["5", "6"]}] for name in longbench.TASKS}
    found = longbench.evaluation(
        "longbench", rows, longbench.TASKS, vocabulary, n_samples=2, length=2048, seed=0
    )
    assert found.items == [(name, 0) for name in longbench.TASKS]
    for item in found.items:
        sample = found.sample(item)
        text = vocabulary.decode(sample.prompt)
        assert "Some text." in text
        assert found.score("5\n6", sample)["score"] > 0
        assert len(sample.prompt) + sample.n_predict <= 2048
