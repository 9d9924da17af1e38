"""Train the learned scorer: record what a model attends to, fit, write an .npz.

    .venv/bin/python scripts/train_scorer.py model.gguf -o my.npz

and then replace(POLICIES["learned"], scorer_file="my.npz").

Windows of text are played token by token. The engine itself computes the features of each cell:
once the whole prompt was ranked, and at later steps in a cache that was cut to the budget. What is
to be predicted is the mean mass that the next queries put on the cell in a cache that keeps all.
Each window is then ranked by what the others taught, and windows of held-out texts by all of it.
Beside other rankings that tells the rank correlation with what came, after the prompt and at later
steps, how much of what can be kept of it the first cut keeps, and, held out, the KL to the full
cache with its ratio to attention's (a geometric mean).

The texts are ones that every Python has: to train on, docstrings and sources of its standard
library; held out, its help topics, which `pyinertia eval` plays, too. --train and --held-out name
others. Everything is seeded; with --traces the recordings are kept, and a stopped run goes on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import pyinertia  # first: it finds the library
from pyinertia import POLICIES, Llama, _native
from pyinertia.eval.statistics import log_softmax, spearman
from pyinertia.eval.text import article
from pyinertia.learned import ARRAYS, FEATURES, LearnedScorer
from pyinertia.state import LlamaState

EPS = 1e-4  # of the features and of the target: log(EPS + value/mean)
BETA = 0.95
STEPS = (1, 9, 33, 65, 97)  # decode steps whose cells are samples; only the first sees all of them
RIDGE = 1e-3

Array = npt.NDArray[np.float64]


class Group(NamedTuple):
    """The cells that may leave after a decode step: features [n, 7] and target [n]."""

    step: int
    x: Array
    y: Array


# -- texts ------------------------------------------------------------------------------------


def sources() -> Iterator[str]:
    """The modules of the standard library, by name."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def docstrings() -> Iterator[str]:
    """Their docstrings of some length."""
    for source in sources():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in some of them
            tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) > 200:
                    yield text


def windows(llm: Llama, texts: Sequence[str], n: int, n_tokens: int, seed: int) -> list[list[int]]:
    """n windows of n_tokens tokens, from the texts in turn."""
    rng, out = np.random.default_rng(seed), []
    for i in range(n):
        data = texts[i % len(texts)].encode()
        n_bytes = min(12 * n_tokens, len(data))
        start = int(rng.integers(0, len(data) - n_bytes + 1))
        tokens = llm.tokenize(data[start : start + n_bytes].decode(errors="ignore").encode())
        if len(tokens) < n_tokens:
            raise SystemExit(f"a text is shorter than {n_tokens} tokens: use longer ones")
        out.append(tokens[:n_tokens])
    return out


# -- recording --------------------------------------------------------------------------------


def by_feature(name: str, sign: float = 1.0) -> LearnedScorer:
    """Ranks by one feature: what is compared with."""
    weight = np.array([sign * (name == feature) for feature in FEATURES], np.float32)
    zeros, ones, no = np.zeros(7, np.float32), np.ones(7, np.float32), np.zeros(0, np.float32)
    beta, bias = np.array(BETA, np.float32), np.array(0, np.float32)
    return LearnedScorer(beta, zeros, ones, np.zeros((0, 7), np.float32), no, weight, bias)


NEUTRAL = by_feature("ema")  # ranks as attention does
BASE = "EMA (attention)"
OTHERS = {
    BASE: NEUTRAL,
    "mass": by_feature("mass"),
    "newest (recency)": by_feature("age", -1),
}


class Recorder:
    """Plays windows in a cache that keeps all, and in one that is cut."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        """Load the model twice."""
        self.options = options
        scorer_file = folder / "neutral.npz"
        NEUTRAL.write(scorer_file)
        make = partial(replace, POLICIES["learned"], scorer_file=str(scorer_file))
        self.policy = make(n_budget=options.budget)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the size of the budget
            self.whole, self.cut = (
                Llama(
                    options.model,
                    n_ctx=options.length + options.tokens,
                    n_threads=options.threads,
                    n_threads_batch=options.threads,
                    flash_attn=True,
                    verbose=False,
                    kv_policy=policy,
                )
                for policy in (make(n_budget=2**30), self.policy)
            )

    def prompt(self, tokens: Sequence[int]) -> LlamaState:
        """Evaluate a window's prompt, and return the state after it."""
        self.whole.reset()
        self.whole.eval(tokens[: self.options.length])
        return self.whole.save_state()

    def play_whole(self, tokens: Sequence[int]) -> tuple[Array, Array]:
        """After each step: mass of the cells over its mean [steps, n], logs of the next tokens."""
        steps = tokens[self.options.length :]
        masses, logs = np.zeros((len(steps), len(tokens))), []
        for t, token in enumerate(steps):
            self.whole.eval([token])
            mass = np.exp(_native.features(self.whole.ctx, 0)[:, 0].astype(np.float64)) - EPS
            masses[t, : mass.size] = mass
            logs.append(next_logs(self.whole))
        return masses, np.array(logs)

    def play_cut(
        self, state: LlamaState, tokens: Sequence[int], scorer: LearnedScorer
    ) -> Iterator[tuple[Array, npt.NDArray[np.int32]]]:
        """Yield after each step: features [n, 7] and positions [n] of the cells."""
        _native.set_weights(self.cut.ctx, NEUTRAL.n_hidden, NEUTRAL.flat())  # those of the state
        self.cut.load_state(state)
        _native.set_weights(self.cut.ctx, scorer.n_hidden, scorer.flat())
        for token in tokens[self.options.length :]:
            self.cut.eval([token])
            yield _native.features(self.cut.ctx, 0).astype(np.float64), self.cut.kv_cells()["pos"]

    def groups(self, cells: Sequence[tuple[Array, Any]], masses: Array) -> list[Group]:
        """The samples of a window that was played both ways."""
        out = []
        for step in STEPS:
            later = masses[step : step + self.options.horizon]
            if len(later) < self.options.horizon:
                break
            x, pos = cells[step - 1]
            future = later.mean(axis=0)[pos]
            newest = self.options.length + step - 1
            may_leave = (pos >= self.policy.n_sink) & (pos <= newest - self.policy.n_recent)
            y = np.log(EPS + future / future.mean())
            out.append(Group(step, x[may_leave], y[may_leave]))
        return out

    def record(self, tokens: Sequence[int]) -> list[Group]:
        """The samples of one window, cut as attention cuts."""
        state = self.prompt(tokens)
        masses, _ = self.play_whole(tokens)
        return self.groups(list(self.play_cut(state, tokens, NEUTRAL)), masses)

    def compare(
        self, tokens: Sequence[int], scorers: Mapping[str, LearnedScorer]
    ) -> tuple[list[Group], dict[str, float]]:
        """The samples of one window, and each scorer's mean KL to the full cache after the cut."""
        state = self.prompt(tokens)
        masses, logs = self.play_whole(tokens)
        groups, kl = [], {}
        for name, scorer in scorers.items():
            cells, distances = [], []
            for p, seen in zip(logs, self.play_cut(state, tokens, scorer), strict=True):
                cells.append(seen)
                distances.append(float(np.exp(p) @ (p - next_logs(self.cut))))
            kl[name] = float(np.mean(distances[1:]))  # the first step sees all cells
            if scorer is NEUTRAL:
                groups = self.groups(cells, masses)
        return groups, kl


def next_logs(llm: Llama) -> npt.NDArray[np.float32]:
    """The logs of the probabilities of the next token, [n_vocab]."""
    logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
    return np.asarray(log_softmax(logits), np.float32)


def record_all(recorder: Recorder, texts: Sequence[str], folder: Path) -> list[list[Group]]:
    """Record the windows to train on, or read those that the folder has."""
    options, out = recorder.options, []
    n_tokens = options.length + options.tokens
    played = windows(recorder.whole, texts, options.windows, n_tokens, options.seed)
    for i, tokens in enumerate(played):
        identity = (Path(options.model).name, options.budget, options.horizon, STEPS, tokens)
        digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
        path = folder / f"train-{digest}.npz"
        if not path.is_file():
            found = recorder.record(tokens)
            arrays = {f"{k}{j}": a for j, g in enumerate(found) for k, a in g._asdict().items()}
            part = path.with_suffix(".part")
            with part.open("wb") as file:
                np.savez(file, **arrays)
            part.replace(path)
        with np.load(path) as file:
            n_groups = len(file.files) // len(Group._fields)
            steps = [int(file[f"step{j}"]) for j in range(n_groups)]
            out.append([Group(step, file[f"x{j}"], file[f"y{j}"]) for j, step in enumerate(steps)])
        print(f"recorded {i + 1}/{options.windows}", flush=True)
    return out


# -- fitting ----------------------------------------------------------------------------------


def fit(groups: Sequence[Group], n_hidden: int, seed: int, about: str) -> LearnedScorer:
    """Least squares of the logs, each group with the same weight."""
    x = np.concatenate([g.x for g in groups])
    y = np.concatenate([g.y for g in groups])
    weight = np.concatenate([np.full(g.y.size, 1 / g.y.size) for g in groups]) / len(groups)
    mean = weight @ x
    scale = np.maximum(np.sqrt(weight @ (x - mean) ** 2), 1e-3)
    u = (x - mean) / scale
    if n_hidden:
        net = _fit_hidden(u, y, weight, n_hidden, seed)
    else:
        net = (np.zeros((0, x.shape[1])), np.zeros(0), *_fit_linear(u, y, weight))
    parts = zip(ARRAYS, (BETA, mean, scale, *net), strict=True)
    arrays = {name: np.asarray(part, np.float32) for name, part in parts}
    return LearnedScorer(**arrays, about=about)


def _fit_linear(u: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    bias = weight @ y
    gram = u.T @ (weight[:, None] * u) + RIDGE * np.eye(u.shape[1])
    return np.linalg.solve(gram, u.T @ (weight * (y - bias))), bias


def _fit_hidden(u: Array, y: Array, weight: Array, n_hidden: int, seed: int) -> tuple[Array, ...]:
    """Adam on all samples at once."""
    rng = np.random.default_rng(seed)
    net = [
        rng.normal(0, (2 / u.shape[1]) ** 0.5, (n_hidden, u.shape[1])),
        np.zeros(n_hidden),
        rng.normal(0, n_hidden**-0.5, n_hidden),
        np.array(weight @ y),
    ]
    first, second = [np.zeros_like(p) for p in net], [np.zeros_like(p) for p in net]
    n_steps = 1500
    for step in range(1, n_steps + 1):
        w1, b1, w2, b2 = net
        h = np.maximum(0, u @ w1.T + b1)
        d = 2 * weight * (h @ w2 + b2 - y)
        back = np.outer(d, w2) * (h > 0)
        gradients = [back.T @ u + RIDGE * w1, back.sum(axis=0), h.T @ d + RIDGE * w2, d.sum()]
        rate = 0.02 * (1 - step / (n_steps + 1))
        for i, g in enumerate(gradients):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            m, v = first[i] / (1 - 0.9**step), second[i] / (1 - 0.999**step)
            net[i] = net[i] - rate * m / (np.sqrt(v) + 1e-9)
    return tuple(net)


# -- what it is worth -------------------------------------------------------------------------


def captured(score: Array, group: Group, n: int) -> float:
    """The share of the mass to come that the n best cells have, of what n cells can have."""
    future = np.exp(group.y)
    best = np.sort(future)[-n:].sum()
    return float(future[np.argsort(score)[-n:]].sum() / best)


def measures(scorer: LearnedScorer, groups: Sequence[Group], n_keep: int) -> tuple[float, ...]:
    """Of one window: rank correlations after the prompt and at later steps, mass kept."""
    first, *later = groups
    rho = [spearman(scorer.predict(g.x).tolist(), g.y.tolist()) for g in groups]
    share = captured(scorer.predict(first.x), first, min(n_keep, first.y.size))
    return rho[0], float(np.mean(rho[1:])) if later else float("nan"), share


def show(title: str, rows: Mapping[str, Sequence[tuple[float, ...]]]) -> None:
    """The means over windows of measures, and of KL if there are any."""
    print(f"\n{title:<36}{'Spearman':>10}{'later':>8}{'kept mass':>11}{'KL':>9}{'ratio':>8}")
    base = [window[3:] for window in rows[BASE]]
    for name, values in rows.items():
        rho, later, share, *kl = np.mean(values, axis=0)
        line = f"{name:<36}{rho:>10.3f}{later:>8.3f}{share:>11.3f}"
        if kl:
            logs = [
                np.log(window[3] / theirs[0]) for window, theirs in zip(values, base, strict=True)
            ]
            line += f"{kl[0]:>9.4f}{np.exp(np.mean(logs)):>8.3f}"
        print(line)


def cross_validate(played: Sequence[Sequence[Group]], n_keep: int) -> None:
    """Rank each window by numbers that were fitted to the others."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    for i, groups in enumerate(played):
        others = [g for j, window in enumerate(played) if j != i for g in window]
        for name, scorer in {**OTHERS, "learned, linear": fit(others, 0, 0, "")}.items():
            rows.setdefault(name, []).append(measures(scorer, groups, n_keep))
    show(f"{len(played)} windows, by the others", rows)


def report(
    recorder: Recorder, texts: Sequence[str], fitted: Mapping[str, LearnedScorer], n_keep: int
) -> None:
    """Play what was held out, and compare rankings."""
    options, scorers = recorder.options, {**OTHERS, **fitted}
    n_tokens, n = options.length + options.tokens, options.held_out_windows
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in scorers}
    for i, tokens in enumerate(windows(recorder.whole, texts, n, n_tokens, options.seed + 1)):
        groups, kl = recorder.compare(tokens, scorers)
        for name, scorer in scorers.items():
            rows[name].append((*measures(scorer, groups, n_keep), kl[name]))
        listed = ", ".join(f"{name} {value:.4f}" for name, value in kl.items())
        print(f"held out {i + 1}/{n}, KL to the full cache: {listed}", flush=True)
    show(f"{n} windows that were held out", rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="GGUF")
    parser.add_argument("-o", "--out", default="learned.npz", help="file to write")
    parser.add_argument("--hidden", type=int, default=0, help="ReLUs; 0: linear")
    parser.add_argument("--train", nargs="+", help="text files to train on")
    parser.add_argument("--held-out", nargs="+", help="text files that are held out")
    parser.add_argument("--windows", type=int, default=12, help="windows to train on")
    parser.add_argument("--held-out-windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window's prompt")
    parser.add_argument("--tokens", type=int, default=160, help="tokens decoded after it")
    parser.add_argument("--horizon", type=int, default=63, help="queries whose mass is predicted")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path, help="folder that keeps the recordings")
    options = parser.parse_args(arguments)
    if options.tokens <= options.horizon:
        parser.error(f"--tokens {options.tokens} has to be more than --horizon {options.horizon}")
    if not 0 <= options.hidden <= 256:
        parser.error("--hidden has to be in [0, 256]")
    if min(options.windows, options.held_out_windows) < 1:
        parser.error("--windows and --held-out-windows have to be at least 1")
    return options


def read_texts(paths: Iterable[str] | None, default: Callable[[], list[str]]) -> list[str]:
    """The files' texts, or those that every Python has."""
    return [Path(path).read_text(encoding="utf-8") for path in paths] if paths else default()


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, fit, report, write."""
    options = parse(arguments)
    train = read_texts(options.train, lambda: ["\n\n".join(docstrings()), "\n".join(sources())])
    held_out = read_texts(options.held_out, lambda: [article()])
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(options, folder)
        played = record_all(recorder, train, folder)
    about = (
        f"pyinertia {pyinertia.__version__}, {Path(options.model).name}, {options.windows} windows "
        f"of {options.length} + {options.tokens} tokens, budget {options.budget}, "
        f"horizon {options.horizon}, seed {options.seed}"
    )
    sizes = dict.fromkeys((0, options.hidden or 16))
    samples = [group for window in played for group in window]
    fitted = {n: fit(samples, n, options.seed, about) for n in sizes}
    chosen = fitted[options.hidden]
    chosen.write(options.out)
    print(f"written: {options.out}, {Path(options.out).stat().st_size} bytes")
    if not options.hidden:
        terms = zip(FEATURES, chosen.weight, strict=True)
        print("weights:", ", ".join(f"{name} {weight:+.3f}" for name, weight in terms))
    n_keep = options.budget - recorder.policy.n_sink - recorder.policy.n_recent
    if len(played) > 1:
        cross_validate(played, n_keep)
    named = {f"learned, {n} ReLUs" if n else "learned, linear": fitted[n] for n in fitted}
    report(recorder, held_out, named, n_keep)


if __name__ == "__main__":
    main()
