"""RULER with policies of ours and presses of kvpress, on the same samples at equal budgets.

    python -m venv rival && rival/bin/pip install kvpress gguf
    .venv/bin/python scripts/kvpress_compare.py -m model.gguf --python rival/bin/python \\
        --policies inertiakv,tova --presses tova,snapkv --budgets 256 --length 1024

The options are those of `pyinertia eval ruler`, the table, too: `kvpress/none` is kvpress's model
with its whole cache, f32 weights from the same file. A stopped run goes on where it was.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from pyinertia.bench.process import Process
from pyinertia.errors import EvalError
from pyinertia.eval import report, ruler, session
from pyinertia.eval.arms import FULL_ARM, Arm
from pyinertia.eval.options import Options, choose, command
from pyinertia.eval.sample import Sample
from pyinertia.eval.scored import Scored, all_items
from pyinertia.eval.store import Result, Store
from pyinertia.eval.vocabulary import Vocabulary, file_sha256

# isort: split

from llama_cpp import llama_vocab_is_eog, llama_vocab_n_tokens

PRESSES = ("snapkv", "tova", "keydiff", "streaming-llm")
WORKER = Path(__file__).with_name("kvpress_worker.py")

app = typer.Typer(add_completion=False)


@command(app, "compare")
def compare(
    options: Options,
    python: Annotated[Path, typer.Option(help="A Python that has kvpress and gguf.")],
    presses: Annotated[str, typer.Option(help="Presses, separated by commas.")] = ",".join(PRESSES),
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas, or all.")] = "all",
    answer_prefix: bool = True,
) -> None:
    names = choose(tasks, list(ruler.TASKS))
    rivals = choose(presses, PRESSES, "--presses")
    vocabulary = Vocabulary(options.model)
    if not options.chat:
        vocabulary.forget_chat()
    evaluation = ruler.evaluation(
        vocabulary,
        all_items(names, options.samples),
        length=options.length,
        seed=options.seed,
        with_prefix=answer_prefix,
    )
    done = session.measure(options, lambda _: evaluation, extra={"answer_prefix": answer_prefix})
    budgets = dict.fromkeys(arm.budget for arm in done.arms if arm.budget is not None)
    arms = [Arm("kvpress/none", None, FULL_ARM.policy)]
    arms += [Arm(f"kvpress/{one}", b, FULL_ARM.policy) for one in rivals for b in budgets]
    rival = Rival(python, options, vocabulary)
    try:
        for item in track(evaluation.items, "kvpress", transient=True):
            sample = evaluation.sample(item)
            for arm in arms:
                done.measured.results[arm, item] = rival.measure(arm, sample, evaluation)
    except KeyboardInterrupt:
        done.measured.interrupted = True
    finally:
        rival.close()
    found = report.scores(names)(done.measured, [*done.arms, *arms])
    session.show(options, {**done.about, "evaluation": "kvpress"}, done.measured, found)


class Rival:
    """kvpress in its own process; what it answered is kept, as our own answers are."""

    def __init__(self, python: Path, options: Options, vocabulary: Vocabulary) -> None:
        self._store = Store(options.out / "kvpress.jsonl")
        self._process: Process | None = None
        self._command = [str(python), "-I", str(WORKER)]
        self._load = {"model": str(options.model.resolve()), "n_threads": options.threads}
        self._about = {"model": file_sha256(options.model), "worker": file_sha256(WORKER)}
        self._vocabulary = vocabulary
        vocab = vocabulary._model.vocab
        self._stop = [t for t in range(llama_vocab_n_tokens(vocab)) if llama_vocab_is_eog(vocab, t)]

    def measure(self, arm: Arm, sample: Sample, evaluation: Scored) -> Result:
        """Answer and score, as `Scored.measure` does."""
        key = {**self._about, "arm": arm.label, "sample": sample.sha256}
        result = self._store.get(key)
        if result is None:
            answer = self._answer(arm, sample)
            text = self._vocabulary.decode(answer["tokens"])
            scores = evaluation.score(text, sample)
            result = {**answer, **scores, "text": text, "depths": sample.depths}
            result |= {"t_token": None, "kept": None}  # not measured
            self._store.add(key, result)
        return result

    def _answer(self, arm: Arm, sample: Sample) -> dict[str, Any]:
        name = arm.name.removeprefix("kvpress/")
        budget = arm.budget or 0
        return self._ask(
            press=None if name == "none" else name,
            budget=int(budget * len(sample.prompt)) if isinstance(budget, float) else budget,
            tokens=sample.prompt,
            n_predict=sample.n_predict,
            stop=self._stop,
        )

    def _ask(self, **request: Any) -> dict[str, Any]:
        if self._process is None:
            self._process = Process(self._command, dict(os.environ))
            self._ask(**self._load)
        answer = self._process.ask(**request)
        if self._process.failed:
            raise EvalError(f"kvpress: {self._process.failed}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._store.close()
        if self._process:
            self._process.close()


if __name__ == "__main__":
    app()
