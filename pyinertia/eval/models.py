"""The model under each arm, with the prompt evaluated once for all of them.

Prefill takes most of the time, and it is the same under every policy that lets the prompt in whole.
So those arms share one model: the prompt but for its end is evaluated once, its state saved, and
every arm starts from it with a new engine. The end is long enough for all queries that the first
ranking looks at. What an arm gets does not depend on which others run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pyinertia import _native
from pyinertia.errors import EvalError, PolicyError, PyInertiaError
from pyinertia.eval.arms import FULL_ARM, QUERY, Arm
from pyinertia.eval.sample import Sample
from pyinertia.eval.settings import Settings
from pyinertia.kv_types import KV_TYPES
from pyinertia.policy import KVPolicy

if TYPE_CHECKING:
    from llama_cpp import LlamaState

    from pyinertia.llama import Llama

N_END = 64  # tokens of the prompt that every arm evaluates by itself


class Models:
    """Models that are opened when they are needed, and closed together."""

    def __init__(self, settings: Settings) -> None:
        """Remember how models are opened."""
        self._settings = settings
        self._stack = ExitStack()
        self._opened: dict[Arm, Llama] = {}
        self._start: tuple[str, LlamaState] | None = None

    def __enter__(self) -> Models:
        """Open nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all models."""
        self._stack.close()

    def ready(self, arm: Arm, sample: Sample) -> Llama:
        """The model under an arm, whose cache is empty or has the start of the prompt.

        Raises:
            PolicyError: The policy cannot run on this model, or a question is too long for it.
        """
        if arm.query is not None or arm.policy.prefill != "full":
            llm = self._open(arm)
            llm.reset()
            if arm.query is not None:
                _name(llm, _question(llm, sample) if arm.query is True else arm.query)
            return llm
        llm = self._open(FULL_ARM)
        if self._start is None or self._start[0] != sample.sha256:
            _attach(llm, FULL_ARM.policy)
            llm.reset()
            llm.eval(list(sample.prompt[:-N_END]))
            self._start = (sample.sha256, llm.save_state())
        _attach(llm, arm.policy)
        llm.reset()
        if arm.policy.n_window <= N_END:
            llm.load_state(self._start[1])
        return llm

    def _open(self, arm: Arm) -> Llama:
        if arm not in self._opened:
            from pyinertia.llama import Llama

            settings = self._settings
            with warnings.catch_warnings(), _explained(settings):
                warnings.filterwarnings("ignore", "a KV budget")  # the report has its own notes
                llm = Llama(
                    settings.model,
                    n_ctx=settings.length,
                    n_batch=settings.n_batch,
                    n_ubatch=min(settings.n_batch, 512),
                    n_threads=settings.n_threads,
                    n_threads_batch=settings.n_threads,
                    n_gpu_layers=settings.n_gpu_layers,
                    flash_attn=settings.flash_attn,
                    type_k=KV_TYPES[settings.type_k],
                    type_v=KV_TYPES[settings.type_v],
                    swa_full=False,  # as with a policy, so that all arms see the same
                    verbose=False,
                    kv_policy=arm.policy,
                )
            self._stack.callback(llm.close)
            self._opened[arm] = llm
        return self._opened[arm]


@contextmanager
def _explained(settings: Settings) -> Iterator[None]:
    try:
        yield
    except PyInertiaError:
        raise
    except ValueError as error:
        msg = (
            f"{settings.model} cannot be opened with --length {settings.length} ({error}); is "
            "there memory for it?"
        )
        raise EvalError(msg) from error


def _question(llm: Llama, sample: Sample) -> str:
    first, last = sample.question_span
    if first == last:
        msg = f"{sample.task} asks no question that could be named; leave {QUERY} out"
        raise PolicyError(msg)
    return llm.detokenize(list(sample.prompt[first:last])).decode(errors="replace")


def _name(llm: Llama, question: str) -> None:
    try:
        llm.kv_query(question)
    except ValueError as error:  # its length
        raise PolicyError(str(error)) from error


def _attach(llm: Llama, policy: KVPolicy) -> None:
    refusal = _native.attach(llm.ctx, policy, True)
    if refusal and policy.evicts:
        msg = f"this model cannot run the policy: {refusal}"
        raise PolicyError(msg)
    llm.kv_policy = policy
