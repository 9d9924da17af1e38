"""What the tests of the server share: the real process, and OpenAI's own client."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from command_line import start

KEY = "sesame"
BUDGET, N_CTX = 256, 1024
THREAD = ["--threads", "1", "--threads-batch", "1"]
# random weights say any bytes; those that are no text come late, and all at once
LETTERS = "root ::= [a-z ]*"
SYSTEM = {"role": "system", "content": "Answer in one word."}


@contextmanager
def served(*args: str | Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server, by its address; it must end cleanly."""
    process = start("serve", *args, "--port", "0", stdin=subprocess.DEVNULL)
    told, reader = b"", None
    try:
        for line in process.stderr:
            told += line
            if found := re.search(rb"listening on (http://\S+),", line):
                break
        else:
            pytest.fail(told.decode())
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        yield found[1].decode(), process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(15)
        finally:
            process.kill()
            if reader is not None:
                reader.join()
            process.stdout.close()
            process.stderr.close()
    assert code == 0


def client_of(address: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=address + "/v1", api_key=key, max_retries=0, timeout=60)


def ask(client: openai.OpenAI, text: str, **more):
    settings = {"model": "tiny", "max_tokens": 24, "temperature": 0, **more}
    settings.setdefault("extra_body", {"grammar": LETTERS})
    return client.chat.completions.create(
        messages=[SYSTEM, {"role": "user", "content": text}], **settings
    )


def metrics(address: str) -> dict[str, float]:
    text = httpx.get(address + "/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def refused(status: int, code: str | None, call, *args, **kwargs) -> str:
    with pytest.raises(openai.APIStatusError) as info:
        call(*args, **kwargs)
    assert info.value.status_code == status, info.value
    assert info.value.code == code
    return info.value.message
