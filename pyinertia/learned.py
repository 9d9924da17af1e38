"""The learned scorer: a small function of what the engine knows of a cell, in an .npz.

patches/overlay/src/llama-kv-evict-learned.h says what the features are, and computes them.
scripts/train_scorer.py makes such files; one ships with the package.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyinertia.errors import PolicyError

FEATURES = ("mass", "ema", "max", "age", "key_norm", "value_norm", "position_share")
ARRAYS = ("beta", "mean", "scale", "hidden_weight", "hidden_bias", "weight", "bias")
N_HIDDEN_MAX = 256

_UNREADABLE = (
    *(OSError, ValueError, EOFError, TypeError, AttributeError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LearnedScorer:
    """log(n m) of a cell among n, with m the mean mass that later queries will put on it.

    It is linear, or has a hidden layer of n_hidden ReLUs, in (features - mean)/scale.

    Attributes:
        beta: Memory of the EMA that is a feature, in [0, 1).
        mean: float32 [7].
        scale: float32 [7], above 0.
        hidden_weight: float32 [n_hidden, 7], [0, 7] of a linear one.
        hidden_bias: float32 [n_hidden].
        weight: float32 [n_hidden], [7] of a linear one.
        bias: float32 [].
        about: How it was trained.
    """

    beta: Floats
    mean: Floats
    scale: Floats
    hidden_weight: Floats
    hidden_bias: Floats
    weight: Floats
    bias: Floats
    about: str = ""

    @property
    def n_hidden(self) -> int:
        """The hidden ReLUs, 0 of a linear one."""
        return self.hidden_bias.size

    def predict(self, features: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """The log of the mass to come, relative to the mean: features [n, 7] -> [n]."""
        x = (features.astype(np.float64) - self.mean) / self.scale
        if self.n_hidden:
            x = np.maximum(0.0, x @ self.hidden_weight.T + self.hidden_bias)
        y: npt.NDArray[np.float64] = x @ self.weight + self.bias
        return y

    def flat(self) -> Floats:
        """All numbers in the order of llama_kv_evict_set_weights, float32."""
        return np.concatenate([np.ravel(getattr(self, name)) for name in ARRAYS])

    def write(self, path: str | Path) -> None:
        """Write an .npz, the same bytes each time."""
        arrays: dict[str, Any] = {name: np.float32(getattr(self, name)) for name in ARRAYS}
        with Path(path).open("wb") as file:
            np.savez(file, features=np.array(FEATURES), about=np.array(self.about), **arrays)


def shipped() -> Path:
    """The file that the package has."""
    return Path(str(resources.files("pyinertia").joinpath("learned.npz")))


def read(path: str | Path | None = None) -> LearnedScorer:
    """Read a file, or the one that ships.

    Raises:
        PolicyError: It is missing, or not such a file.
    """
    path = shipped() if path is None else Path(path)
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise _refused(path, "it does not exist") from error
    except _UNREADABLE as error:
        raise _refused(path, f"it cannot be read as an .npz ({error})") from error
    if reason := _check(found):
        raise _refused(path, reason)
    arrays = {name: np.asarray(found[name], np.float32) for name in _shapes(found)}
    return LearnedScorer(**arrays, about=str(found.get("about", "")))


def _refused(path: Path, reason: str) -> PolicyError:
    return PolicyError(
        f"scorer_file={str(path)!r}: {reason}; give a file that scripts/train_scorer.py wrote, "
        "or None for the one that ships"
    )


def _shapes(found: dict[str, npt.NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    n, n_hidden = len(FEATURES), np.size(found.get("hidden_bias", ()))
    return {
        "beta": (),
        "mean": (n,),
        "scale": (n,),
        "hidden_weight": (n_hidden, n),
        "hidden_bias": (n_hidden,),
        "weight": (n_hidden or n,),
        "bias": (),
    }


def _check(found: dict[str, npt.NDArray[Any]]) -> str:
    """Why these arrays are no scorer, "" if they are."""
    features = tuple(np.ravel(found.get("features", ())).tolist())
    if features != FEATURES:
        return f"its features are {features}, they have to be {FEATURES}"
    for name, shape in _shapes(found).items():
        array = found.get(name)
        if array is None:
            return f"it has no array {name}"
        if array.dtype.kind != "f" or array.shape != shape:
            return f"{name} is {array.dtype} {array.shape}, it has to be float32 {shape}"
        with np.errstate(over="ignore"):
            if not np.isfinite(array.astype(np.float32)).all():
                return f"{name} has numbers that are not finite"
    if np.size(found["hidden_bias"]) > N_HIDDEN_MAX:
        return f"it has more than {N_HIDDEN_MAX} hidden units"
    if not 0 <= np.float32(found["beta"]) < 1:
        return f"beta is {found['beta']}, it has to be in [0, 1)"
    if not (found["scale"].astype(np.float32) > 0).all():
        return "a scale is not above 0"
    return ""
