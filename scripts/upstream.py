"""The upstream source: git without anybody's own settings, download, unpack, import."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import patch_queue as pq

CACHE = pq.ROOT / "vendor" / "cache"

# Nobody's own git configuration may change a byte; these are also written into the tree's config.
CONFIG = {
    "apply.whitespace": "nowarn",
    "commit.gpgsign": "false",
    "core.autocrlf": "false",
    "core.hooksPath": os.devnull,
    "user.name": "pyinertia",
    "user.email": "pyinertia@localhost",
}


class VendorError(Exception):
    """A command refuses or fails; the text says what to do."""


def git(tree: Path, *args: object, stdin: bytes = b"", env: dict[str, str] | None = None) -> bytes:
    config = [word for key, value in CONFIG.items() for word in ("-c", f"{key}={value}")]
    command = ["git", *config, *map(str, args)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    clean |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    clean |= {"GIT_CEILING_DIRECTORIES": str(tree.parent), "GIT_EDITOR": ":"}
    clean |= {"GIT_SEQUENCE_EDITOR": ":", **(env or {})}
    done = subprocess.run(command, cwd=tree, input=stdin, env=clean, capture_output=True)
    if done.returncode:
        output = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise VendorError(f"git {' '.join(map(str, args[:2]))} failed in {tree}:\n{output}")
    return done.stdout


def resolve(tree: Path, revision: str) -> str:
    try:
        return git(tree, "rev-parse", "-q", "--verify", revision + "^{commit}").decode().strip()
    except VendorError:
        return ""


@contextmanager
def scratch(tree: Path, revision: str) -> Iterator[Path]:
    """A throw-away worktree: history is edited there, so that `tree` keeps its file times."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "tree"
        git(tree, "worktree", "add", "-q", "--detach", path, revision)
        try:
            yield path
        finally:
            git(tree, "worktree", "remove", "--force", path)


def download(pin: pq.Pin) -> Path:
    """The sdist, through pip, which verifies the hash; a file already in the cache is used."""
    path = CACHE / f"{pin.package}-{pin.version}.tar.gz"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == pin.sha256:
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        line = f"{pin.package}=={pin.version}"
        line += f" --hash=sha256:{pin.sha256}" if pin.sha256 else ""
        (Path(folder) / "pin.txt").write_text(line, encoding="utf-8")
        # -I: inside an isolated build, PYTHONPATH hides the pip of this interpreter
        command = [sys.executable, "-I", "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
        command += [pin.package, "-d", str(CACHE), "-r", str(Path(folder) / "pin.txt")]
        if subprocess.run(command).returncode or not path.is_file():
            raise VendorError(f"pip could not download {line}; or put that file into {CACHE}")
    return path


def unpack(pin: pq.Pin, sdist: Path, target: Path) -> None:
    def under(name: str, folders: list[str]) -> bool:
        return any(name == folder or name.startswith(folder + "/") for folder in folders)

    root = f"{pin.package}-{pin.version}/{pin.subdir}/"
    with tarfile.open(sdist) as tar:
        for member in tar:
            name = member.name[len(root) :]
            if not member.isfile() or not member.name.startswith(root):
                continue
            if under(name, pin.keep) and not under(name, pin.drop):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                data = tar.extractfile(member)
                (target / name).write_bytes(data.read() if data else b"")


def import_upstream(pin: pq.Pin, tree: Path) -> None:
    """Commit the kept files and tag them `upstream`, without touching the files of `tree`."""
    if not (tree / ".git").exists():
        tree.mkdir(parents=True, exist_ok=True)
        git(tree, "init", "-q", "-b", "pyinertia")
        for key, value in CONFIG.items():
            git(tree, "config", key, value)
    title = f"upstream {pin.commit[:9]} ({pin.package} {pin.version})\n\nPin: {pin.digest}"
    old = git(tree, "tag", "-l", "--format=%(contents)", "upstream").decode().strip()
    if old == title:
        return
    with tempfile.TemporaryDirectory() as folder:
        files, index = Path(folder) / "files", Path(folder) / "index"
        unpack(pin, download(pin), files)
        env = {"GIT_DIR": str(tree / ".git"), "GIT_INDEX_FILE": str(index)}
        git(files, "add", "-A", "-f", ".", env=env | {"GIT_WORK_TREE": str(files)})
        root = git(tree, "write-tree", env=env).decode().strip()
        commit = git(tree, "commit-tree", root, "-m", title).decode().strip()
        git(tree, "tag", "-f", "upstream", commit)
