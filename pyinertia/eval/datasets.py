"""Published data sets: from a local file or folder, or through huggingface-hub.

Every reader checks what it reads: a truncated download must not look like a weak model.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyinertia.errors import EvalError

# repository and file on the hub
LONGBENCH = ("THUDM/LongBench", "data.zip")
LONGBENCH_V2 = ("THUDM/LongBench-v2", "data.json")
SQUAD = ("rajpurkar/squad_v2", "squad_v2/validation-00000-of-00001.parquet")
HOTPOTQA = ("hotpotqa/hotpot_qa", "distractor/validation-00000-of-00001.parquet")

AGAIN = "is it truncated? Download it again"


def from_hub(source: tuple[str, str], option: str) -> Path:
    """Fetch a file of a data set, or find it in the hub's cache.

    Raises:
        EvalError: It is not in the cache and cannot be fetched.
    """
    from huggingface_hub import hf_hub_download

    repository, name = source
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # retries end in one line, below
    try:
        return Path(hf_hub_download(repository, name, repo_type="dataset"))
    except Exception as error:  # network, proxy, hub: many kinds, one meaning
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        msg = (
            f"{name} of the data set {repository} cannot be fetched ({reason}); pass a local copy "
            f"with {option}"
        )
        raise EvalError(msg) from error


# -- files ------------------------------------------------------------------------------------


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
        raise EvalError(msg) from error
    except ValueError as error:
        msg = f"{path} is not JSON ({error}); {AGAIN}"
        raise EvalError(msg) from error


def read_lines(text: bytes, what: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Read JSON lines, all of which have the fields."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                msg = f"{what}, line {number} is not JSON; {AGAIN}"
                raise EvalError(msg) from error
            check_row(rows[-1], f"{what}, line {number}", fields)
    if not rows:
        msg = f"{what} is empty; {AGAIN}"
        raise EvalError(msg)
    return rows


def check_row(row: Any, what: str, fields: Sequence[str]) -> None:
    """Refuse a row that lacks a field."""
    lacking = [name for name in fields if not isinstance(row, dict) or name not in row]
    if lacking:
        msg = f"{what} has no {', '.join(lacking)}; this is not the data set that it should be"
        raise EvalError(msg)


def longbench_rows(data: Path | None, task: str) -> list[dict[str, Any]]:
    """Rows of a LongBench task, out of data.zip or a folder of TASK.jsonl files."""
    fields = ("context", "input", "answers", "all_classes")
    path = from_hub(LONGBENCH, "--data") if data is None else data
    if path.is_dir() and (path / "data.zip").is_file():
        path /= "data.zip"
    name = f"{task}.jsonl"
    if path.is_dir():
        found = next((p for p in (path / name, path / "data" / name) if p.is_file()), None)
        if found is None:
            msg = f"{path} has no {name}; pass the folder of LongBench's data, or its data.zip"
            raise EvalError(msg)
        return read_lines(found.read_bytes(), str(found), fields)
    try:
        with zipfile.ZipFile(path) as archive:
            member = next((n for n in archive.namelist() if Path(n).name == name), None)
            if member is None:
                msg = f"{path} has no {name}; pass LongBench's data.zip"
                raise EvalError(msg)
            return read_lines(archive.read(member), f"{path}: {member}", fields)
    except (OSError, zipfile.BadZipFile) as error:
        msg = f"{path} cannot be read ({error}); {AGAIN}"
        raise EvalError(msg) from error


def longbench_v2_rows(data: Path | None) -> list[dict[str, Any]]:
    """Rows of LongBench v2."""
    path = from_hub(LONGBENCH_V2, "--data") if data is None else data
    rows = read_json(path / "data.json" if path.is_dir() else path)
    fields = ("context", "question", "answer", "length", *(f"choice_{c}" for c in "ABCD"))
    if not isinstance(rows, list) or not rows:
        msg = f"{path} is not a list of questions; {AGAIN}"
        raise EvalError(msg)
    for number, row in enumerate(rows, 1):
        check_row(row, f"{path}, entry {number}", fields)
    return rows


# -- questions on documents -------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question, its answers, the documents that hold them, and others on the same subject."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...]


@dataclass(frozen=True)
class Questions:
    """Questions and the documents they are about."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def read_questions(path: Path) -> tuple[str, Questions]:
    """Read a file in the format of SQuAD 2.0 or of HotpotQA: the RULER task it is for, and it."""
    content = read_json(path)
    try:
        if isinstance(content, dict) and "data" in content:
            return "qa_1", squad(
                [
                    {
                        "title": article["title"] if "title" in article else str(number),
                        "context": paragraph["context"],
                        "question": qa["question"],
                        "answers": [answer["text"] for answer in qa["answers"]],
                    }
                    for number, article in enumerate(content["data"])
                    for paragraph in article["paragraphs"]
                    for qa in paragraph["qas"]
                ]
            )
        if isinstance(content, list) and content and "supporting_facts" in content[0]:
            return "qa_2", hotpotqa(
                [
                    {
                        "question": row["question"],
                        "answer": row["answer"],
                        "gold": [title for title, _ in row["supporting_facts"]],
                        "context": [(title, "".join(text)) for title, text in row["context"]],
                    }
                    for row in content
                ]
            )
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path} breaks the format of SQuAD or HotpotQA ({error!r}); {AGAIN}"
        raise EvalError(msg) from error
    msg = f"{path} is neither in the format of SQuAD 2.0 nor of HotpotQA's distractor setting"
    raise EvalError(msg)


def questions_from_hub(task: str) -> Questions:
    """The questions of a RULER task, out of the hub's copies."""
    rows = _parquet(from_hub(SQUAD if task == "qa_1" else HOTPOTQA, "--qa"))
    if task == "qa_1":
        return squad([{**row, "answers": row["answers"]["text"]} for row in rows])
    return hotpotqa(
        [
            {
                "question": row["question"],
                "answer": row["answer"],
                "gold": row["supporting_facts"]["title"],
                "context": [
                    (title, "".join(text))
                    for title, text in zip(
                        row["context"]["title"], row["context"]["sentences"], strict=True
                    )
                ],
            }
            for row in rows
        ]
    )


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        msg = f"{path.name} needs pyarrow; pip install 'pyinertia[eval]', or pass --qa FILE"
        raise EvalError(msg) from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); {AGAIN}"
        raise EvalError(msg) from error


def squad(rows: Iterable[dict[str, Any]]) -> Questions:
    """Questions with an answer; the other paragraphs of the article are related."""
    rows = [row for row in rows if row["answers"]]
    documents = list(dict.fromkeys(row["context"] for row in rows))
    number = {text: i for i, text in enumerate(documents)}
    articles: dict[str, dict[int, None]] = {}
    for row in rows:
        articles.setdefault(row["title"], {})[number[row["context"]]] = None
    return Questions(
        tuple(documents),
        tuple(
            Question(
                row["question"],
                tuple(dict.fromkeys(row["answers"])),
                (number[row["context"]],),
                tuple(i for i in articles[row["title"]] if i != number[row["context"]]),
            )
            for row in rows
        ),
    )


def hotpotqa(rows: Iterable[dict[str, Any]]) -> Questions:
    """Questions over two documents; the other documents given with them are related."""
    rows = list(rows)
    texts = {title: f"{title}\n{text}" for row in rows for title, text in row["context"]}
    number = {title: i for i, title in enumerate(texts)}
    questions = []
    for row in rows:
        gold = dict.fromkeys(number[title] for title in row["gold"])
        related = (number[title] for title, _ in row["context"])
        questions.append(
            Question(
                row["question"],
                (row["answer"],),
                tuple(gold),
                tuple(i for i in dict.fromkeys(related) if i not in gold),
            )
        )
    return Questions(tuple(texts.values()), tuple(questions))
