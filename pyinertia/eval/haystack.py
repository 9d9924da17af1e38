"""The texts that needles are hidden in, by number of units."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

from pyinertia.eval.text import sentences, words

NOISE = (
    "Rain falls on the roof.",
    "The river runs to the sea.",
    "A train leaves the station.",
    "Bread is on the table.",
    "We walk on and come home.",
)

# lines of text without needles, from a generator and a number of units
Haystack = Callable[[random.Random, int], list[str]]


def noise(_: random.Random, n: int) -> list[str]:
    """The same five sentences, again and again; the unit is a sentence."""
    whole, rest = divmod(n, len(NOISE))
    lines = [" ".join(NOISE)] * whole
    return [*lines, " ".join(NOISE[:rest])] if rest else lines


def prose(rng: random.Random, n: int) -> list[str]:
    """Prose from a random place on; the unit is a word. It starts again where it ends."""
    source = sentences()
    place, found = rng.randrange(len(source)), []
    while n > 0:
        part = source[place % len(source)].split(" ")[:n]
        found.append(" ".join(part))
        place, n = place + 1, n - len(part)
    return found


def word_key(rng: random.Random) -> str:
    """A key of two words, out of millions."""
    return f"{rng.choice(words())}-{rng.choice(words())}"


def number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randrange(1_000_000, 10_000_000))


def uuid(rng: random.Random) -> str:
    """32 hexadecimal digits in the groups of a UUID."""
    digits = f"{rng.getrandbits(128):032x}"
    groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "-".join(groups)


def hide(needles: Sequence[str], depths: Sequence[float], lines: Sequence[str]) -> list[str]:
    """Put every needle between two lines, as near to its share of the text as they let it."""
    ends = [0, *accumulate(len(line) for line in lines)]
    hidden = list(lines)
    for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
        place = depth * ends[-1]
        hidden.insert(min(range(len(ends)), key=lambda i: abs(ends[i] - place)), needle)
    return hidden
