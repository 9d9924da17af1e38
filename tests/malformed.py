"""Loads malformed copies of a model, in a process that may die of one. A script, and what it does.

    python malformed.py MODEL FOLDER FIRST END

prints a line before each number and one after it: what came of the copy with that number.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFReader

SPECIAL = {
    "f": [0.0, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan],
    "i": [-1, 0, 1, 3, 2**31 - 1, -(2**31)],
    "u": [0, 1, 2, 3, 5, 8, 12, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1],
}
POLICY = {"kv_policy": "inertiakv", "kv_budget": 40}


class Model:
    """A sound model, and where in its header the numbers stand: counts, types, sizes, values."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        reader = GGUFReader(path)
        self.fields = reader.fields
        start = self.start = reader.data.__array_interface__["data"][0]
        self.n_header = int(reader.data_offset)
        self.numbers: list[tuple[int, np.dtype]] = []
        fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
        for part in (part for field in fields for part in field.parts):
            at = part.__array_interface__["data"][0] - start
            if part.dtype != np.uint8 and 0 <= at < self.n_header:
                self.numbers += [(at + i * part.itemsize, part.dtype) for i in range(part.size)]
        # of the vocabulary there are hundreds
        first, last = (self.content.find(b"tokenizer.ggml." + x) for x in (b"tokens", b"merges"))
        self.few = [(at, kind) for at, kind in self.numbers if not first + 64 < at < last]

    def changed(self, key: str, value: float) -> bytes:
        """With another value of a key that has one number."""
        return self.replaced(self.fields[key].parts[-1], value)

    def twice(self) -> bytes:
        """With a token that is there twice."""
        tokens = self.fields["tokenizer.ggml.tokens"]
        one, other = (tokens.parts[tokens.data[ord(letter)]] for letter in "ab")
        return self.replaced(one, other)

    def replaced(self, part: np.ndarray, value) -> bytes:
        at = part.__array_interface__["data"][0] - self.start
        raw = bytearray(self.content)
        raw[at : at + part.nbytes] = np.array(value, part.dtype).tobytes()
        return bytes(raw)

    def malformed(self, number: int) -> bytes:
        """Cut short, or with other bits, bytes or numbers in its header."""
        rng = random.Random(number)
        kind = rng.choice(["cut", "bits", "bytes", "number", "number", "number", "swap", "drop"])
        if kind == "cut":
            return self.content[: rng.randrange(rng.choice([self.n_header, len(self.content)]))]
        raw = bytearray(self.content)
        at = rng.randrange(self.n_header - 8)
        if kind == "bits":
            for _ in range(rng.choice([1, 1, 1, 4, 32])):
                raw[rng.randrange(self.n_header)] ^= 1 << rng.randrange(8)
        elif kind == "bytes":
            raw[at : at + 8] = rng.randbytes(8)
        elif kind == "number":
            for _ in range(rng.choice([1, 1, 2])):
                at, dtype = rng.choice(rng.choice([self.few, self.few, self.numbers]))
                value = rng.choice(SPECIAL.get(dtype.kind, SPECIAL["u"]))
                if dtype.kind != "f":
                    value %= 2 ** (8 * dtype.itemsize)
                    dtype = np.dtype(f"u{dtype.itemsize}")
                raw[at : at + dtype.itemsize] = np.array(value, dtype).tobytes()
        elif kind == "swap":
            to, n = rng.randrange(self.n_header - 64), rng.randrange(1, 64)
            raw[at : at + n], raw[to : to + n] = raw[to : to + n], raw[at : at + n]
        else:
            del raw[at : at + rng.randrange(1, 64)]
        return bytes(raw)


def outcomes(model: Path, folder: Path, n: int) -> Iterator[tuple[int, str]]:
    """What came of each copy: an exception's name and text, "loaded", or "died: ..."."""
    first, env = 0, os.environ | {"GGML_NO_BACKTRACE": "1"}
    while first < n:
        command = [sys.executable, __file__, str(model), str(folder), str(first), str(n)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=600, env=env
        )
        for line in done.stdout.splitlines():
            what, _, rest = line.partition(" ")
            number, _, outcome = rest.partition(" ")
            if what == "after":
                first = int(number) + 1
                yield int(number), outcome
        if done.returncode:
            log = done.stderr.splitlines()[-3:]
            yield first, f"died: {done.returncode} {' | '.join(log)}"
            first += 1


def main(model: Path, folder: Path, first: int, end: int) -> None:
    from pyinertia import Llama
    from pyinertia.errors import PyInertiaError
    from pyinertia.loading import n_ctx_train

    sound, path = Model(model), folder / "malformed.gguf"
    for number in range(first, end):
        path.write_bytes(sound.malformed(number))
        say("before", number)
        try:
            n_ctx_train(str(path))
            llm = Llama(path, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=True, **POLICY)
            llm.eval(llm.tokenize(b"ab"))
            llm.detokenize([97, 98, 257], special=True)
            llm.close()
            outcome = "loaded"
        except PyInertiaError as error:
            outcome = f"{type(error).__name__}: {error}"
        except Exception as error:
            outcome = f"other {type(error).__name__}: {error}"
        say("after", number, outcome.replace("\n", " "))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
