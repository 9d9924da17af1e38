"""Build everything that changed, then run the tests; other arguments go to pytest.

    python scripts/test.py                       all but the slow ones
    python scripts/test.py --slow                these too: the wheel and the sdist are built
    python scripts/test.py tests/test_policy.py -x
    python scripts/test.py --sanitize address    the engine's tests under sanitizers; or: thread

A run without arguments also fails if not all native op cases ran.
"""

from __future__ import annotations

import subprocess
import sys
import time

import bootstrap
import sanitize


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    bootstrap.enter()
    if sys.argv[1:2] == ["--sanitize"]:
        return sanitize.main(sys.argv[2:])
    start = time.monotonic()
    bootstrap.build_libs("test-backend-ops", "kv-cuda-host")
    bootstrap.build_stock_libs()
    bootstrap.smollm2()
    bootstrap.gemma3()
    bootstrap.cuda_includes()
    built = time.monotonic()
    args = sys.argv[1:]
    complete = not args or args == ["--slow"]
    command = [sys.executable, "-m", "pytest"]
    if "--slow" in args:
        args.remove("--slow")
    else:
        command += ["-m", "not slow"]
    command += ["--require-op-cases", "--durations=10"] if complete else args
    code = subprocess.call(command, cwd=bootstrap.ROOT)
    what = "passed" if code == 0 else f"FAILED (pytest exit code {code})"
    tests = time.monotonic() - built
    bootstrap.say(f"tests {what}; build {built - start:.0f} s, tests {tests:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
