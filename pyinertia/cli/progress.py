"""How far a run is: a bar on a terminal, a line per document elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from pyinertia.cli.group import say


class Meter:
    """Counts documents, and bytes of them, which is what the time left follows.

    Attributes:
        n_done: Documents done by this run.
        n_failed: Documents that failed in this run.
    """

    def __init__(self, n_bytes: int, quiet: bool) -> None:
        """Start the clock; n_bytes is the size of all documents."""
        self._total, self._seen, self._quiet = n_bytes, 0, quiet
        self._start = time.monotonic()
        self.n_done = self.n_failed = 0
        console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal and not quiet:
            columns = (BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("reading", total=max(n_bytes, 1))

    def __enter__(self) -> Meter:
        """Show the bar."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        if self._bar:
            self._bar.stop()

    def skip(self, n_bytes: int) -> None:
        """A document was done before."""
        self._total -= n_bytes
        self._show()

    def done(self, name: str, n_bytes: int, what: str) -> None:
        """A document is done."""
        self.n_done += 1
        self._seen += n_bytes
        self._say(f"{name}: {what}")

    def failed(self, name: str, n_bytes: int, error: str) -> None:
        """A document failed; this is told even if quiet is asked for."""
        self.n_failed += 1
        self._seen += n_bytes
        if self._bar:
            self._bar.console.print(f"failed: {name}: {error}", markup=False, soft_wrap=True)
            self._show()
        else:
            say(f"failed: {name}: {error}")

    def text(self) -> str:
        """Counts and the time left."""
        failed = f", {self.n_failed} failed" if self.n_failed else ""
        return f"{self.n_done} done{failed}, {self.time_left()}"

    def time_left(self) -> str:
        """About how long it takes from now on."""
        if not self._seen or self._total <= self._seen:
            return "time left unknown" if not self._seen else "almost there"
        elapsed = time.monotonic() - self._start
        seconds = elapsed * (self._total - self._seen) / self._seen
        for n, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
            if seconds >= 2 * n:
                return f"about {seconds / n:.0f} {unit} left"
        return f"about {seconds:.0f} seconds left"

    def _say(self, line: str) -> None:
        if self._bar:
            self._show()
        elif not self._quiet:
            say(f"[{self.text()}] {line}")

    def _show(self) -> None:
        if self._bar:
            self._bar.update(
                self._task,
                total=max(self._total, 1),
                completed=self._seen,
                description=self.text(),
            )
