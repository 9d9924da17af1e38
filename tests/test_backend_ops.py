"""Upstream's op tester with our cases: every fast path against the scalar reference.

The binary says OK when it ran nothing, so the number of cases is part of the test.
"""

from __future__ import annotations

import re
import subprocess

import bootstrap
import pytest
from conftest import OP_CASES

EXPECTED = {
    "KV_ATTN": 317,
    "KV_MASS": 189,
    "KV_MOVE": 42,
}  # cases in patches/overlay/tests/test-kv-evict.h


@pytest.mark.parametrize("op", EXPECTED)
def test_op_equals_its_reference(op: str, request: pytest.FixtureRequest) -> None:
    binary = bootstrap.op_tests(request.config.getoption("--build"))
    if not binary.is_file():
        pytest.fail("not built: run python scripts/test.py")
    command = [str(binary), "test", "-b", "CPU", "-o", op]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    report = done.stdout + done.stderr
    found = re.search(r"(\d+)/(\d+) tests passed", report)
    assert found, report[-2000:]
    passed, ran = int(found[1]), int(found[2])
    assert passed == ran, "\n".join(line for line in report.splitlines() if "FAIL" in line)
    assert ran >= EXPECTED[op], f"{ran} cases of {op} ran"
    assert done.returncode == 0, report[-2000:]
    request.config.stash[OP_CASES][op] = ran
