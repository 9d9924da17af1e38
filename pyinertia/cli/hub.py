"""GGUF files of the Hugging Face hub: REPO, REPO:FILE, REPO:PATTERN or REPO:QUANTISATION."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

from pyinertia.errors import CommandError

QUANTISATION = "Q4_K_M"  # what a repository's name alone stands for, as in llama.cpp
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def fetch(name: str) -> Path:
    """Return the path of a model file of the hub, downloaded if it is not in the hub's cache.

    Args:
        name: REPO[:FILE]. A FILE that is no file's name is a pattern or part of a name.

    Raises:
        CommandError: The repository or the file does not exist, or the hub cannot be reached and
            the file is not in the cache.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repo, _, wanted = name.partition(":")
    try:
        files = _listed(repo)
        file = choose(files, wanted, repo)
        paths = [Path(hf_hub_download(repo, part)) for part in shards(file)]
    except CommandError:
        raise
    except HFValidationError as error:
        msg = f"-hf {name}: {repo!r} is no repository's name; OWNER/NAME is, as in owner/model:Q8_0"
        raise CommandError(msg) from error
    except HfHubHTTPError as error:
        msg = (
            f"-hf {name}: the hub refuses ({_first_line(error)}); check the name, or log in with "
            "`hf auth login` if the repository is gated"
        )
        raise CommandError(msg) from error
    except OSError as error:
        msg = (
            f"-hf {name}: the Hugging Face hub cannot be reached ({_first_line(error)}) and the "
            "file is not in its cache; pass a local file with -m"
        )
        raise CommandError(msg) from error
    return paths[0]


def choose(files: Iterable[str], wanted: str, repo: str) -> str:
    """Return the one file that is wanted; of a model in several files the first.

    Raises:
        CommandError: There is none, or more than one.
    """
    known = [
        file
        for file in sorted(files)
        if file.endswith(".gguf") and "mmproj" not in file and _is_first(file)
    ]
    found = [file for file in known if file == wanted]
    if not found and wanted:
        found = fnmatch.filter(known, wanted) or [
            file for file in known if wanted.lower() in file.lower()
        ]
    if not wanted:
        usual = [file for file in known if QUANTISATION.lower() in file.lower()]
        found = known if len(known) == 1 else usual
    if len(found) == 1:
        return found[0]
    listed = ", ".join(found or known) or "no GGUF file"
    what = f"{wanted!r} names {len(found)} files" if wanted else "it has several files"
    msg = f"-hf {repo}: {what}; name one of them as {repo}:FILE. There is: {listed}"
    raise CommandError(msg)


def shards(file: str) -> list[str]:
    """Return all files of a model that is in several, given the first; else the file."""
    found = _SHARD.search(file)
    if not found:
        return [file]
    n = int(found[2])
    return [f"{file[: found.start()]}-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]


def _is_first(file: str) -> bool:
    found = _SHARD.search(file)
    return not found or int(found[1]) == 1


def _listed(repo: str) -> list[str]:
    """Files of the repository; those in the cache if the hub cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return list(HfApi().list_repo_files(repo))
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:  # the network's errors are of several libraries
        try:
            folder = Path(snapshot_download(repo, local_files_only=True))
        except LocalEntryNotFoundError:
            raise OSError(str(error)) from error
        return [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
