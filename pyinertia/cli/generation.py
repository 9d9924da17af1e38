"""One answer, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING

from pyinertia.cli.options import SamplingOptions

if TYPE_CHECKING:
    from pyinertia.llama import Llama


class Generation:
    """What a model says to a prompt; iterate over it once, for pieces of text.

    Attributes:
        tokens: The answer's tokens so far, without the one that ends it.
        end: "stop" (the model is done), "length" (n_predict), "context" (no position is left), or
            "" while it runs and if the caller left.
        t_prompt: Seconds until the first token.
        t_decode: Seconds from the first to the last token.
    """

    def __init__(
        self,
        llm: Llama,
        prompt: Sequence[int],
        sampling: SamplingOptions,
        stop: Sequence[str] = (),
    ) -> None:
        """Start nothing yet; `stop` are texts that end the answer and are not part of it."""
        self._llm, self._prompt, self._sampling, self._stop = llm, prompt, sampling, stop
        self.tokens: list[int] = []
        self.end = ""
        self.t_prompt = self.t_decode = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding, 0 if there was none."""
        return (len(self.tokens) - 1) / self.t_decode if self.t_decode else 0.0

    def __iter__(self) -> Iterator[str]:
        """Yield text as soon as it is certain."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        held = ""  # what may be the start of a stop text
        for token in self._decode():
            held += decoder.decode(self._llm.detokenize([token]))
            found = [at for stop in self._stop if (at := held.find(stop)) >= 0]
            if found:
                self.end = "stop"
                yield held[: min(found)]
                return
            certain = len(held) - self._n_open(held)
            if certain:
                yield held[:certain]
                held = held[certain:]
        if rest := held + decoder.decode(b"", final=True):
            yield rest

    def _decode(self) -> Iterator[int]:
        import llama_cpp

        llm, sampling = self._llm, self._sampling
        n_most = sampling.n_predict if sampling.n_predict >= 0 else llm._n_ctx
        if n_most == 0:
            self.end = "length"
            return
        start = perf_counter()
        with closing(
            llm.generate(
                self._prompt,
                temp=sampling.temp,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repeat_penalty=sampling.repeat_penalty,
            )
        ) as stream:
            for token in stream:
                now = perf_counter()
                self.t_prompt = self.t_prompt or now - start
                self.t_decode = now - start - self.t_prompt
                if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
                    self.end = "stop"
                    return
                self.tokens.append(token)
                yield token
                if len(self.tokens) >= n_most:
                    self.end = "length"
                    return
                if len(self._prompt) + len(self.tokens) >= llm._n_ctx:
                    self.end = "context"
                    return

    def _n_open(self, text: str) -> int:
        """The number of characters at the end that may begin a stop text."""
        return max(
            (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
