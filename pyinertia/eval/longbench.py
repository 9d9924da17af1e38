"""LongBench (arXiv 2308.14508) and LongBench v2 (arXiv 2412.15204), in words of our own.

The benchmarks' data, number of tokens an answer may have, metrics, middle truncation, and the tasks
without a chat template; the instructions say the same in other words. In Chinese the units are
characters, where the benchmark has words of a segmenter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pyinertia.errors import EvalError
from pyinertia.eval import metrics
from pyinertia.eval.sample import Sample
from pyinertia.eval.scored import Scored
from pyinertia.eval.settings import Item
from pyinertia.eval.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task.

    Attributes:
        before: What stands before the context.
        after: What stands after it; {input} is the question.
        n_predict: Most tokens of an answer.
        metric: Score against one reference; the best one counts.
        chat: Whether the prompt is put in the chat template.
        one_line: Whether only the first line of the answer counts.
    """

    before: str
    after: str
    n_predict: int
    metric: metrics.Metric
    chat: bool = True
    one_line: bool = False


def _passages() -> Task:
    rule = "Answer the question from the passages below. Write the answer and nothing else."
    return Task(
        before=f"{rule}\n\nPassages:\n",
        after=f"\n\n{rule}\n\nQuestion: {{input}}\nAnswer:",
        n_predict=32,
        metric=metrics.f1,
    )


def _code(after: str) -> Task:
    return Task(
        before="Write the line that comes next in this code.\n",
        after=after + "Next line:\n",
        n_predict=64,
        metric=metrics.edit_similarity,
        chat=False,
    )


def _summary(what: str, n_predict: int = 512) -> Task:
    return Task(
        before=f"Below {what}. Summarise it on one page.\n\n",
        after="\n\nNow write the summary, one page long.\n\nSummary:",
        n_predict=n_predict,
        metric=metrics.rouge_l,
    )


_BRIEF = "Answer in as few words as you can, and do not explain."
_PAPER = (
    'Answer with one phrase or sentence, with "yes" or "no" where that is asked, and with '
    '"unanswerable" if the article does not tell. Do not explain.'
)

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "narrativeqa": Task(
            before=f"Below is a story and then a question about it. {_BRIEF}\n\nStory: ",
            after=f"\n\nNow answer the question about the story. {_BRIEF}\n\n"
            "Question: {input}\n\nAnswer:",
            n_predict=128,
            metric=metrics.f1,
        ),
        "qasper": Task(
            before=f"Below is a scientific article and then a question about it. {_PAPER}\n\n"
            "Article: ",
            after=f"\n\nNow answer the question about the article. {_PAPER}\n\n"
            "Question: {input}\n\nAnswer:",
            n_predict=128,
            metric=metrics.f1,
        ),
        "multifieldqa_en": Task(
            before="Read the text below, then answer in short.\n\n",
            after="\n\nAnswer the question from the text above. Write the answer and nothing else."
            "\n\nQuestion: {input}\nAnswer:",
            n_predict=64,
            metric=metrics.f1,
        ),
        "multifieldqa_zh": Task(
            before="请先阅读下面的文字，然后用中文简要作答。\n\n",
            after="\n\n请根据上文回答问题，只写答案本身。\n\n问题：{input}\n答案：",
            n_predict=64,
            metric=metrics.f1_zh,
        ),
        "hotpotqa": _passages(),
        "2wikimqa": _passages(),
        "musique": _passages(),
        "dureader": Task(
            before="请根据下面的资料回答后面的问题。\n\n资料：",
            after="\n\n请根据以上资料作答。\n\n问题：{input}\n答案：",
            n_predict=128,
            metric=metrics.rouge_l_zh,
        ),
        "gov_report": _summary("is a report of a government agency"),
        "qmsum": Task(
            before="Below is the transcript of a meeting and then a request about it. Answer the "
            "request in one or a few sentences.\n\nTranscript:\n",
            after="\n\nNow answer the request about the meeting in one or a few sentences.\n\n"
            "Request: {input}\nAnswer:",
            n_predict=512,
            metric=metrics.rouge_l,
        ),
        "multi_news": _summary("are several news articles on one event"),
        "vcsum": Task(
            before="下面是一次会议的记录，请写出会议内容的摘要。\n\n会议记录：\n",
            after="\n\n摘要：",
            n_predict=512,
            metric=metrics.rouge_l_zh,
        ),
        "trec": Task(
            before="Name the type of the last question, as the examples show.\n\n",
            after="\n{input}",
            n_predict=64,
            metric=metrics.classification,
            chat=False,
            one_line=True,
        ),
        "triviaqa": Task(
            before="Answer the question from the passage. Write the answer and nothing else, as "
            "the examples show.\n\n",
            after="\n\n{input}",
            n_predict=32,
            metric=metrics.f1,
            chat=False,
            one_line=True,
        ),
        "samsum": Task(
            before="Summarise the last dialogue in a few short sentences, as the examples show."
            "\n\n",
            after="\n\n{input}",
            n_predict=128,
            metric=metrics.rouge_l,
            chat=False,
            one_line=True,
        ),
        "lsht": Task(
            before="请仿照下面的例子，判断最后一篇新闻的类别。\n\n",
            after="\n{input}",
            n_predict=64,
            metric=metrics.classification,
            chat=False,
            one_line=True,
        ),
        "passage_count": Task(
            before="Below are paragraphs of an encyclopedia; some of them stand there more than "
            "once. Find out how many different ones there are.\n\n",
            after="\n\nHow many different paragraphs are there, duplicates left out? Write the "
            "number and nothing else.\n\nThe number is: ",
            n_predict=32,
            metric=metrics.numbers,
        ),
        "passage_retrieval_en": Task(
            before="Below are 30 numbered paragraphs of an encyclopedia, and then an abstract. "
            "Find the paragraph that the abstract sums up.\n\n",
            after='\n\nAbstract:\n\n{input}\n\nWrite the paragraph as in "Paragraph 1".\n\n'
            "The paragraph is: ",
            n_predict=32,
            metric=metrics.numbers,
        ),
        "passage_retrieval_zh": Task(
            before="下面是一些编了号的段落，之后是其中一段的摘要。请找出摘要对应的段落。\n\n",
            after='\n\n摘要：\n\n{input}\n\n请按"段落1"的格式写出段落编号。\n\n对应的段落是：',
            n_predict=32,
            metric=metrics.numbers,
        ),
        "lcc": _code(""),
        "repobench-p": _code("{input}"),
    }
)

LENGTHS = ("short", "medium", "long")  # the benchmark's classes of LongBench v2

V2_AFTER = (
    "\n\nQuestion: {question}\n\n(A) {choice_A}\n(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\n"
    'Which choice is right? Reply in the form "The correct answer is (X)".'
)
V2 = Task(
    before="Read the text and answer the question after it.\n\n",
    after=V2_AFTER,
    n_predict=128,
    metric=metrics.choice,
)


def truncated(
    vocabulary: Vocabulary, wrap: Callable[[str], str], text: str, limit: int
) -> list[int]:
    """Tokens of a wrapped text, of whose middle is left out what the limit has no room for."""
    tokens = vocabulary.encode(wrap(text))
    if len(tokens) <= limit:
        return tokens
    ids = vocabulary.encode(text)[len(vocabulary.encode("")) :]
    half = len(ids) // 2
    while len(tokens) > limit:
        # cutting may change the tokens at the seam, so look again
        half -= (len(tokens) - limit + 1) // 2
        if half <= 0:
            msg = f"a prompt of {limit} tokens has no room for the task; use a greater --length"
            raise EvalError(msg)
        head, tail = ids[:half], ids[len(ids) - half :]
        tokens = vocabulary.encode(wrap(vocabulary.decode(head) + vocabulary.decode(tail)))
    return tokens


def evaluation(
    name: str,
    rows: Mapping[str, Sequence[dict[str, Any]]],
    tasks: Mapping[str, Task],
    vocabulary: Vocabulary,
    *,
    n_samples: int,
    length: int,
    seed: int,
) -> Scored:
    """Answers to rows of the tasks, chosen by the seed, and their scores."""
    chosen: dict[str, list[int]] = {}
    for task, of_task in rows.items():
        order = random.Random(f"{seed}/{task}").sample(range(len(of_task)), len(of_task))
        chosen[task] = order[:n_samples]
    items = [
        (task, order[i])
        for i in range(n_samples)
        for task, order in chosen.items()
        if i < len(order)
    ]

    def make(item: Item) -> Sample:
        task, row = tasks[item[0]], rows[item[0]][item[1]]
        text = task.before + row["context"] + task.after.format(**row)

        def wrap(text: str) -> str:
            return vocabulary.chat(text) if task.chat else text

        prompt = truncated(vocabulary, wrap, text, length - task.n_predict)
        answers = row["answers"] if "answers" in row else [row["answer"]]
        return Sample(
            task=item[0],
            index=item[1],
            prompt=tuple(prompt),
            n_predict=task.n_predict,
            answers=tuple(answers),
            classes=tuple(row.get("all_classes") or ()),
            one_line=task.one_line,
        )

    def score(text: str, sample: Sample) -> dict[str, object]:
        task = tasks[sample.task]
        if task.one_line:
            text = text.lstrip("\n").split("\n")[0]
        best = max(task.metric(text, answer, sample.classes) for answer in sample.answers)
        return {"score": best}

    return Scored(name, items, make, score)
