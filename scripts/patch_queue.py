"""The pin, the patch files and the overlay as data, and the rules they must follow. No git here."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN_FILE = ROOT / "vendor" / "llama.cpp.toml"
PYPROJECT = ROOT / "pyproject.toml"
PATCHES = ROOT / "patches"

MAX_INSERTED = 25  # per patch; more than that is logic, and logic belongs in the overlay
MAX_DELETED = 5
KINDS = ("hook", "build", "test", "fix")
TRAILERS = ("Kind", "Forwarded", "Drop-when", "Patch-Name")
LAYERS = {"01": "ggml", "02": "llama", "05": "fixes", "09": "tests"}  # first digits of a patch name
NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")
FORBIDDEN = ("new file mode", "deleted file mode", "rename from", "old mode", "GIT binary patch")


@dataclass(frozen=True)
class Pin:
    """What vendor/llama.cpp.toml says."""

    package: str
    version: str
    sha256: str
    commit: str
    subdir: str
    keep: list[str]
    drop: list[str]

    @property
    def requirement(self) -> str:
        return f"{self.package.replace('_', '-')}=={self.version}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def read_pin(path: Path = PIN_FILE) -> Pin:
    """Read the pin file. Its subset of TOML is valid Python too, and Python 3.10 has no tomllib."""
    values = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = ast.literal_eval(node.value)
    return Pin(**values)


@dataclass(frozen=True)
class Patch:
    """One exported patch."""

    name: str
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode()

    @property
    def trailers(self) -> dict[str, str]:
        header = self.text.partition("\ndiff --git ")[0]
        return dict(re.findall(r"^([A-Z][A-Za-z-]+): (\S.*)$", header.rpartition("\n\n")[2], re.M))

    @property
    def files(self) -> list[str]:
        return re.findall(r"^diff --git a/(\S+) b/\S+$", self.text, re.M)

    def changed(self, sign: str) -> int:
        """Number of lines that start with `sign` ("+" or "-") inside hunks."""
        count, in_hunk = 0, False
        for line in self.text.splitlines():
            if line.startswith(("diff --git ", "@@ ")):
                in_hunk = line.startswith("@@ ")
            elif in_hunk and line.startswith(sign):
                count += 1
        return count

    def problems(self) -> list[str]:
        found = [f"trailer {key}: is missing" for key in TRAILERS if key not in self.trailers]
        if self.trailers.get("Kind", KINDS[0]) not in KINDS:
            found.append(f"Kind: {self.trailers['Kind']} is not one of {', '.join(KINDS)}")
        if not NAME.fullmatch(self.name):
            found.append("a name looks like 0110-ggml-op.patch")
        if self.trailers.get("Patch-Name", self.name) != self.name:
            found.append(f"Patch-Name: says {self.trailers['Patch-Name']}")
        if not self.files:
            found.append("changes nothing")
        found += [
            f"only edits of existing upstream text files are allowed, this has: {mark}"
            for mark in FORBIDDEN
            if re.search(rf"^{mark}", self.text, re.M)
        ]
        for sign, what, limit in (("+", "inserts", MAX_INSERTED), ("-", "deletes", MAX_DELETED)):
            if self.changed(sign) > limit:
                found.append(f"{what} {self.changed(sign)} lines, the budget is {limit}")
        return [f"{self.name}: {text}" for text in found]


def series_names(patches: Path = PATCHES) -> list[str]:
    lines = (patches / "series").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def series_text(names: list[str]) -> str:
    """The series file for these names: a comment line opens each layer."""
    lines, layer = [], ""
    for name in names:
        if name[:2] != layer:
            layer = name[:2]
            lines.append(f"# {LAYERS.get(layer, layer)}")
        lines.append(name)
    return "\n".join(lines) + "\n"


def read_queue(patches: Path = PATCHES) -> list[Patch]:
    """The patches in series order; a name without a file is left to `problems`."""
    names = series_names(patches)
    return [Patch(n, (patches / n).read_bytes()) for n in names if (patches / n).is_file()]


def overlay_files(patches: Path = PATCHES) -> list[str]:
    """Overlay files as paths relative to the upstream tree."""
    root = patches / "overlay"
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def stamp(pin: Pin, queue: list[Patch]) -> str:
    """What a prepared tree was made from, as one hash."""
    digest = hashlib.sha256(pin.digest.encode())
    for patch in queue:
        digest.update(patch.name.encode() + b"\0" + patch.data + b"\0")
    return digest.hexdigest()


def problems(patches: Path = PATCHES) -> list[str]:
    """Every broken rule that can be seen without the upstream source."""
    names, found = series_names(patches), []
    files = {path.name for path in patches.glob("*.patch")}
    found += [f"series: {name} is listed twice" for name in set(names) if names.count(name) > 1]
    found += [f"series: {name} has no file" for name in names if name not in files]
    found += [f"{name}: not in the series" for name in sorted(files - set(names))]
    if (patches / "series").read_text(encoding="utf-8") != series_text(names):
        found.append("series: not as `vendor.py refresh` writes it")
    overlay = overlay_files(patches)
    for patch in read_queue(patches):
        found += patch.problems()
        found += [f"{patch.name}: edits overlay file {f}" for f in patch.files if f in overlay]
    for name in overlay:
        if not (patches / "overlay" / name).read_bytes().isascii():
            found.append(f"overlay/{name}: only ASCII, as upstream")
    requirement = read_pin().requirement
    if f'"{requirement}"' not in PYPROJECT.read_text(encoding="utf-8"):
        found.append(f"pyproject.toml: dependencies must name {requirement}, as the pin does")
    return found
