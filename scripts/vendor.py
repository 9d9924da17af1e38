"""The upstream source and the patch queue on top of it.

    python scripts/vendor.py fetch          download, verify, unpack; tag `upstream`, vendor/stock
    python scripts/vendor.py apply          make vendor/llama.cpp = pin + patches + overlay
    python scripts/vendor.py fold 0210      take uncommitted edits of vendor/llama.cpp into a patch
    python scripts/vendor.py refresh        export the commits of vendor/llama.cpp to patches/
    python scripts/vendor.py check [--fast] do all rules hold, and are patches and commits equal?
    python scripts/vendor.py bump 0.3.37    move the pin, replay the patches with 3-way merges

Rules:
- vendor/llama.cpp is a git repository: tag `upstream`, branch `pyinertia`, one commit per patch.
- A patch only edits existing upstream files: at most 25 lines inserted and 5 deleted. Whole new
  files live in patches/overlay, at their upstream path, and never shadow an upstream file. They are
  symlinks in the tree (copies on Windows), so editing them needs no command.
- A patch says why it exists, and ends with the trailers Kind (hook, build, test or fix), Forwarded,
  Drop-when and Patch-Name. `series` alone decides the order; its comments are generated.
- Exporting is deterministic: check replays the files and wants the same bytes back.
- No command throws away edits or commits that are not in patches/ yet, and none touches a file
  whose content stays the same, so builds stay incremental.

Exit codes: 0 done, 1 check found problems, 2 refused or failed (the message says what to do).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import patch_queue as pq
from upstream import VendorError, download, git, import_upstream, resolve, scratch

TREE = pq.ROOT / "vendor" / "llama.cpp"
STOCK = pq.ROOT / "vendor" / "stock"
APPLIED = "refs/pyinertia/applied"  # the commit that equals the patch files
STAMP = ".pyinertia-stamp"

# No commit ids, no version, no statistics, no user-dependent formats; one line of context.
EXPORT = ["--zero-commit", "--no-signature", "--no-stat", "--full-index", "--no-renames", "-N"]
EXPORT += ["-U1", "--diff-algorithm=myers", "--stdout"]


def fetch() -> None:
    import_upstream(pq.read_pin(), TREE)
    if STOCK.exists() and not resolve(STOCK, "upstream"):
        shutil.rmtree(STOCK)  # left over from another vendor/llama.cpp
    git(TREE, "worktree", "prune")
    if not STOCK.exists():
        git(TREE, "worktree", "add", "-q", "--detach", STOCK, "upstream")
    git(STOCK, "checkout", "-q", "--detach", "upstream")


# -- the patched tree -------------------------------------------------------------------------


def replay(tree: Path, queue: list[pq.Patch]) -> str:
    """Apply the patches, without fuzz, on the tag `upstream`; return the new head."""
    with scratch(tree, "upstream") as work:
        for patch in queue:
            try:
                git(work, "am", "-q", stdin=patch.data)
            except VendorError as error:
                raise VendorError(f"{patch.name} does not apply:\n{error}") from None
        return resolve(work, "HEAD")


def export(tree: Path) -> list[pq.Patch]:
    """The commits on top of `upstream` as patches, named by their trailer."""
    out = []
    for commit in git(tree, "rev-list", "--reverse", "upstream..HEAD").decode().split():
        data = git(tree, "format-patch", "-1", *EXPORT, commit)
        out.append(pq.Patch(pq.Patch("", data).trailers.get("Patch-Name", commit[:9]), data))
    return out


def unfinished() -> str:
    """Why the tree must not be replaced now, or an empty string."""
    if not (TREE / ".git").is_dir() or not resolve(TREE, "HEAD"):
        return ""
    if any((TREE / ".git" / name).exists() for name in ("rebase-apply", "rebase-merge")):
        return "a merge is going on in vendor/llama.cpp: finish it with git am --continue"
    if git(TREE, "status", "--porcelain"):
        return "vendor/llama.cpp has uncommitted edits: run vendor.py fold NUMBER, or drop them"
    known = [resolve(TREE, APPLIED), resolve(TREE, "upstream")]
    if resolve(TREE, "HEAD") not in known and export(TREE) != pq.read_queue():
        return "vendor/llama.cpp has commits that are not in patches/: run vendor.py refresh"
    return ""


def mark_applied() -> None:
    git(TREE, "update-ref", APPLIED, "HEAD")
    stamp = pq.stamp(pq.read_pin(), pq.read_queue())
    (TREE / STAMP).write_text(stamp + "\n", encoding="utf-8")


def sync_overlay() -> None:
    """Put every overlay file into the tree, and take out the ones that are gone."""
    wanted, is_repo = pq.overlay_files(), (TREE / ".git").exists()
    if is_repo:
        upstream = git(TREE, "ls-tree", "-r", "--name-only", "upstream").decode().split("\n")
        if shadows := sorted(set(wanted) & set(upstream)):
            raise VendorError(f"overlay files shadow upstream files: {', '.join(shadows)}")
        exclude = TREE / ".git" / "info" / "exclude"
        exclude.parent.mkdir(exist_ok=True)
        before = exclude.read_text(encoding="utf-8") if exclude.is_file() else ""
        for name in re.findall(r"^/(.+)$", before, re.M):
            if name not in wanted and name != STAMP:
                (TREE / name).unlink(missing_ok=True)
        after = "".join(f"/{name}\n" for name in [*wanted, STAMP])
        exclude.write_text(after, encoding="utf-8")
    for name in wanted:
        source, target = pq.PATCHES / "overlay" / name, TREE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_repo and os.name == "posix":
            link = os.path.relpath(source, target.parent)
            if not target.is_symlink() or target.readlink() != Path(link):
                target.unlink(missing_ok=True)
                target.symlink_to(link)
        elif not target.is_file() or target.read_bytes() != source.read_bytes():
            target.write_bytes(source.read_bytes())


def apply() -> None:
    queue = pq.read_queue()
    stamp = TREE / STAMP
    if stamp.is_file() and stamp.read_text().strip() == pq.stamp(pq.read_pin(), queue):
        return sync_overlay()
    if stamp.is_file() and not (TREE / ".git").exists():
        raise VendorError("this source archive was changed; patches need a git checkout")
    if reason := unfinished():
        raise VendorError(reason)
    if found := pq.problems():
        raise VendorError("\n".join(found))
    fetch()
    git(TREE, "checkout", "-q", "-B", "pyinertia", replay(TREE, queue))
    sync_overlay()
    return mark_applied()


def refresh() -> None:
    if git(TREE, "status", "--porcelain"):
        raise VendorError("vendor/llama.cpp has uncommitted edits: commit them, or use fold")
    queue = export(TREE)
    if found := [text for patch in queue for text in patch.problems()]:
        raise VendorError("\n".join(found))
    names = [patch.name for patch in queue]
    if len(set(names)) < len(names):
        raise VendorError(f"two commits have one Patch-Name: {names}")
    for path in pq.PATCHES.glob("*.patch"):
        if path.name not in names:
            path.unlink()
    for patch in queue:
        (pq.PATCHES / patch.name).write_bytes(patch.data)
    (pq.PATCHES / "series").write_bytes(pq.series_text(names).encode())
    mark_applied()


def fold(prefix: str) -> None:
    commits = git(TREE, "rev-list", "--reverse", "upstream..HEAD").decode().split()
    targets = [c for c, p in zip(commits, export(TREE), strict=True) if p.name.startswith(prefix)]
    if len(targets) != 1:
        raise VendorError(f"{len(targets)} patches start with {prefix}, wanted one")
    if b"?? " in git(TREE, "status", "--porcelain"):
        raise VendorError("vendor/llama.cpp has new files: they belong in patches/overlay")
    if not (diff := git(TREE, "diff", "HEAD", "--binary")):
        raise VendorError("vendor/llama.cpp has no uncommitted edits")
    with scratch(TREE, "HEAD") as work:
        git(work, "apply", "--index", stdin=diff)
        git(work, "commit", "-q", "--fixup", targets[0])
        git(work, "rebase", "-q", "-i", "--autosquash", "upstream")
        head = resolve(work, "HEAD")
    git(TREE, "reset", "-q", head)  # same content: moves branch and index, writes no file
    refresh()


def bump(version: str, commit: str) -> None:
    if reason := unfinished():
        raise VendorError(reason)
    old = pq.read_pin()
    new = pq.Pin(old.package, version, "", commit, old.subdir, old.keep, old.drop)
    sha256 = hashlib.sha256(download(new).read_bytes()).hexdigest()
    changes = {old.version: version, old.sha256: sha256, old.commit: commit}
    changes[old.requirement] = new.requirement
    for path in (pq.PIN_FILE, pq.PYPROJECT, pq.ROOT / "pyinertia" / "_native.py"):
        text = path.read_text(encoding="utf-8")
        for before, after in changes.items():
            text = text.replace(f'"{before}"', f'"{after}"')
        path.write_bytes(text.encode())
    queue = pq.read_queue()
    fetch()
    git(TREE, "checkout", "-q", "-B", "pyinertia", "upstream")
    try:
        git(TREE, "am", "-q", "-3", stdin=b"".join(patch.data for patch in queue))
    except VendorError as error:
        raise VendorError(
            f"{error}\nResolve in vendor/llama.cpp, then:\n  git add -u\n  git am --continue\n"
            "  python scripts/vendor.py refresh   (once all are through)"
        ) from None
    refresh()
    sync_overlay()


# -- check ------------------------------------------------------------------------------------


def differences(what: str, queue: list[pq.Patch]) -> list[str]:
    """Patch files that are not what `queue` would export."""
    files = {patch.name: patch.data for patch in pq.read_queue()}
    wanted = {patch.name: patch.data for patch in queue}
    names = sorted(files.keys() | wanted.keys())
    found = [f"{n}: is not what {what}" for n in names if files.get(n) != wanted.get(n)]
    return found or ([] if list(files) == list(wanted) else [f"series: order is not what {what}"])


def check(fast: bool = False) -> list[str]:
    found = pq.problems()
    if fast or found:
        return found
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        import_upstream(pq.read_pin(), tree)
        try:
            git(tree, "reset", "-q", "--hard", replay(tree, pq.read_queue()))
        except VendorError as error:
            return [str(error)]
        found += differences("replaying the series exports", export(tree))
        upstream = git(tree, "ls-tree", "-r", "--name-only", "upstream").decode().split("\n")
        shadows = sorted(set(pq.overlay_files()) & set(upstream))
        found += [f"overlay/{name}: shadows an upstream file" for name in shadows]
    if (TREE / ".git").exists() and resolve(TREE, "upstream"):
        found += differences("the commits in vendor/llama.cpp export", export(TREE))
        if git(TREE, "status", "--porcelain"):
            found.append("vendor/llama.cpp: uncommitted edits; run vendor.py fold NUMBER")
    return found


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    for name in ("fetch", "apply", "refresh"):
        verbs.add_parser(name)
    verbs.add_parser("fold").add_argument("prefix")
    verbs.add_parser("check").add_argument("--fast", action="store_true", help="no upstream source")
    bumping = verbs.add_parser("bump")
    bumping.add_argument("version")
    bumping.add_argument("--commit", default="unknown", help="of llama.cpp in that version")
    options = vars(parser.parse_args())
    verb = options.pop("verb")
    try:
        found = globals()[verb](**options) or []
    except VendorError as error:
        print(f"vendor.py {verb}: {error}", file=sys.stderr)
        return 2
    print("\n".join(found) if found else f"vendor.py {verb}: done")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
