"""`summarise` on a Ray cluster: the same results, each once, whoever dies."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_models
from command_line import start
from summarise_runs import ARGUMENTS, expected, identities, make_pile, records, run
from typer.testing import CliRunner

from pyinertia import ModelError
from pyinertia.batch import Summary, summarise
from pyinertia.batch.documents import Numbered
from pyinertia.batch.ray_worker import Worker, _told
from pyinertia.cli import app

# Ray's own warnings are not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore")
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("pyarrow") is None, reason="pip install 'pyinertia[ray]'"
)

ON_RAY = ["--engine", "ray", "--cpus-per-worker", "1"]
N_MORE = 30  # documents beside those of make_pile
TEXTS = [f"This is document {i}. " * (i % 4 + 1) for i in range(12)]
KEYWORDS = {
    "instruction": "Sum up",
    "n_ctx": 768,
    "max_tokens": 8,
    "temperature": 0.8,  # so that seeds matter
    "seed": 3,
    "n_threads": 1,
    "n_threads_batch": 1,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "chat.gguf")


@pytest.fixture(scope="module")
def alone(tiny) -> list[Summary]:
    """What one process says about TEXTS, by number."""
    found = summarise(TEXTS, model=tiny, n_parallel=3, **KEYWORDS)
    return sorted(found, key=lambda summary: summary.index)


def facts(summary: Summary) -> tuple:
    """All but the time it took."""
    return summary.index, summary.text, summary.n_prompt, summary.n_generated, summary.error


# what needs no Ray


class Hesitant(Numbered):
    """The last of TEXTS first, and nothing at every second call while others are worked on."""

    def __init__(self) -> None:
        self.left, self.n_open, self.calls = list(enumerate(TEXTS)), 0, 0

    def __next__(self) -> tuple[int, str]:
        self.calls += 1
        if not self.left or (self.n_open and self.calls % 2):
            raise StopIteration
        self.n_open += 1
        return self.left.pop()


def test_documents_that_come_late_keep_their_numbers_and_seeds(tiny, alone):
    documents, found = Hesitant(), []
    for summary in summarise(documents, model=tiny, n_parallel=3, **KEYWORDS):
        documents.n_open -= 1
        found.append(summary)
    found.sort(key=lambda summary: summary.index)
    assert [*map(facts, found)] == [*map(facts, alone)]


def ask(worker: Worker, number: int, text: object) -> Summary | Exception:
    batch = {"number": [number], "document": [pickle.dumps(text)]}
    (result,) = worker(batch)["result"]
    return pickle.loads(result)


def test_a_worker_answers_each_thread_with_its_own_document(tiny, alone):
    worker = Worker({"model": tiny, "n_parallel": 3, **KEYWORDS})
    with ThreadPoolExecutor(5) as threads:
        numbers = [*range(12), 4]  # a document that is sent twice is answered twice
        found = [*threads.map(lambda i: ask(worker, i, TEXTS[i]), numbers)]
    assert [*map(facts, found)] == [*map(facts, alone), facts(alone[4])]
    bad = ask(worker, 12, 7)
    assert bad.error == "the document is a int; it must be a text"
    assert ask(worker, 13, "Go on.").error == ""


def test_a_worker_without_a_model_says_so_to_all(tmp_path):
    worker = Worker({"model": tmp_path / "missing.gguf", "n_parallel": 3, **KEYWORDS})
    with ThreadPoolExecutor(3) as threads:
        errors = [*threads.map(lambda i: ask(worker, i, TEXTS[i]), range(6))]
    assert {type(error) for error in errors} == {ModelError}
    (said,) = {str(error) for error in errors}
    assert said.startswith(f"{tmp_path / 'missing.gguf'} does not exist; check model_path (on ")


def test_an_error_that_takes_more_than_a_text_is_told_too():
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    told = _told(error)
    assert type(told) is ValueError
    assert str(error) in str(told)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--engine", "spark"], "--engine spark: must be one of local, ray"),
        (["--workers", "2", "--ray-address", "a:1"], "--workers, --ray-address: only for --engine"),
        ([*ON_RAY, "--gpus-per-worker", "1"], "pass -ngl -1 for all layers"),
    ],
)
def test_what_has_no_meaning_is_refused(args, says, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pyinertia.cli.engine.find_spec", lambda name: name)
    make_pile(tmp_path)
    assert says in run(tiny, "docs", "-o", "out.jsonl", *args, code=2).stderr
    assert not Path("out.jsonl").exists()


def test_without_ray_the_command_says_what_to_install(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pyinertia.cli.engine.find_spec", lambda name: None)
    make_pile(tmp_path)
    done = run(tiny, "docs", *ON_RAY, code=2)
    assert done.stderr == "error: --engine ray needs ray; pip install 'pyinertia[ray]'\n"


# a cluster


@pytest.fixture
def pile(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    docs = make_pile(tmp_path)
    for i in range(N_MORE):
        (docs / f"more{i}.txt").write_text(f"Of this there is more, {i}. " * 10)
    return docs


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A connection to a cluster of two machines, as far as Ray knows, of one CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home folder
        import ray
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
        head = {**size, "include_dashboard": False}
        machines = Cluster(initialize_head=True, head_node_args=head)
        machines.add_node(**size)
        ray.init(machines.address, log_to_driver=False)
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # of what tests bring about
        yield machines.address
        ray.shutdown()
        machines.shutdown()


def n_lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def workers() -> list[int]:
    """Processes of the workers."""
    import ray

    return [
        actor["Pid"]
        for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and "MapWorker" in actor["ActorClassName"]
    ]


@needs_ray
def test_a_worker_is_killed_and_each_document_is_done_once(pile, tiny, cluster):
    out, killed = Path("ray.jsonl"), []

    def kill_one() -> None:
        end = time.monotonic() + 300  # workers take long to start where others work, too
        while n_lines(out) < 5 and time.monotonic() < end:
            time.sleep(0.01)
        killed.extend(workers()[:1])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    done = run(tiny, "docs", "-o", out, *ON_RAY)
    killer.join(10)
    found = records(out)
    assert killed
    assert f"{13 + N_MORE} done; ray.jsonl" in done.stderr
    assert identities(found) == expected(pile)
    assert not any(record["error"] for record in found)
    # the other engine agrees that all is done, and on what there is to say
    assert f"0 done, {len(found)} done before" in run(tiny, "docs", "-o", out).stderr
    run(tiny, "docs", "-o", "here.jsonl")
    assert spoken(found) == spoken(records("here.jsonl"))


def spoken(found: list[dict]) -> dict:
    return {(one["path"], one["line"]): one["summary"] for one in found}


@pytest.mark.slow
@needs_ray
def test_a_run_that_is_killed_goes_on_where_it_was(pile, tiny, cluster):
    out = Path("ray.jsonl")
    arguments = ["docs", "-o", out, *ON_RAY, "--ray-address", cluster, "-m", tiny, *ARGUMENTS]
    with start("summarise", *arguments) as process:
        while process.poll() is None and n_lines(out) < 5:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    n_before = n_lines(out)
    assert 5 <= n_before < 13 + N_MORE
    assert f"{n_before} done before" in run(tiny, "docs", "-o", out, *ON_RAY).stderr
    assert identities(records(out)) == expected(pile)


@needs_ray
def test_a_document_that_kills_its_workers_is_an_error(tiny, cluster, monkeypatch):
    from pyinertia.batch import ray_engine

    class Mortal(Worker):
        def __call__(self, batch):
            if pickle.loads(batch["document"][0]) == "poison":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch)

    monkeypatch.setattr(ray_engine, "Worker", Mortal)
    monkeypatch.setattr(ray_engine, "N_RETRIES", 0)
    texts = [TEXTS[0], "poison", *TEXTS[2:5]]
    found = {one.index: one for one in on_ray(texts, tiny, n_workers=1, n_parallel=1)}
    errors = [one.error for _, one in sorted(found.items())]
    assert errors.pop(1).startswith("its worker died, and again in 0 more tries; is there memory")
    assert errors == [""] * 4


@needs_ray
def test_documents_that_fail_to_come_end_the_run_when_the_others_are_done(tiny, cluster, alone):
    def texts() -> Iterator[str]:
        yield from TEXTS  # one more window than the first, which has 8
        raise OSError("the disk is gone")

    summaries = on_ray(texts(), tiny, n_workers=1, n_parallel=1)
    found = [next(summaries) for _ in TEXTS]
    assert sorted(map(facts, found)) == [*map(facts, alone)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(summaries)


def on_ray(texts, tiny: Path, **kwargs) -> Iterator[Summary]:
    from pyinertia.batch import ray_engine

    keywords = {"cpus_per_worker": 1, "n_parallel": 3, **KEYWORDS, **kwargs}
    return ray_engine.summarise(texts, model=tiny, **keywords)


@needs_ray
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--cpus-per-worker", "3"], "no machine of the Ray cluster has 3 CPUs, which a worker"),
        (["--workers", "1", "-n", "400"], "has no room for an instruction"),
    ],
)
def test_what_the_cluster_or_its_workers_refuse_is_one_line(args, says, pile, tiny, cluster):
    given = ["summarise", "docs", "-m", tiny, *ARGUMENTS, "-o", "out.jsonl", *ON_RAY, *args]
    done = CliRunner().invoke(app, [*map(str, given)])
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert done.stderr.count("error:") == 1
    assert not Path("out.jsonl").exists()
