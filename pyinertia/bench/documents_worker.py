"""What the process of a documents' side runs: summarise the next few, and say how long it took.

It speaks lines of JSON, as worker.py does: first a job, then requests {"do": "documents", "n": n},
whose answer comes once n more documents are done, and {"do": "stats"}.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from pyinertia.batch.documents import INSTRUCTION, Desk, Summary
from pyinertia.batch.schedule import Schedule, Settings
from pyinertia.batch.slots import Slots
from pyinertia.bench.worker import main, model_keywords, process_memory
from pyinertia.policy_text import parse_policy


class EndlessSlots(Slots):
    """Answers take all their tokens, so that all sides have the same work."""

    def is_end(self, token: int) -> bool:
        """No token ends an answer."""
        return False


def work(requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Load the model and evaluate the instruction, then answer requests."""
    warnings.simplefilter("ignore")  # a small budget is the user's choice here
    job = json.loads(next(requests))
    slots = EndlessSlots(
        job["model"],
        n_parallel=job["n_parallel"],
        kv_policy=parse_policy(job["policy"], job["budget"]) if job["policy"] else None,
        **model_keywords(job),
    )
    with closing(slots):
        n_tokens = job["n_tokens"]
        desk = Desk(slots, job["documents"], INSTRUCTION, None, n_tokens, (), seed=0)
        schedule = Schedule(slots, Settings(max_tokens=n_tokens, sampling={"temp": 0.0}))
        summaries = (desk.take(outcome) for outcome in schedule.run(desk.next_job))
        yield {"ready": True}
        for line in requests:
            request = json.loads(line)
            if request["do"] == "stats":
                stats = {"kv_bytes": slots.kv_stats().kv_bytes, **asdict(schedule.clock)}
                yield {**stats, **process_memory()}
                continue
            start = time.perf_counter()
            done: list[Summary] = []
            while len(done) < request["n"]:
                summary = next(summaries)
                if summary is not None:
                    done.append(summary)
            if errors := [summary.error for summary in done if summary.error]:
                raise RuntimeError(errors[0])
            yield {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main(work)
