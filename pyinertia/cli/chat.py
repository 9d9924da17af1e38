"""`pyinertia chat`."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pyinertia.cli.group import say
from pyinertia.cli.options import ContextOptions, KVOptions, ModelOptions, SamplingOptions
from pyinertia.cli.run import System
from pyinertia.errors import CommandError, PyInertiaError

if TYPE_CHECKING:
    from pyinertia.cli.conversation import Conversation
    from pyinertia.llama import Llama

COMMANDS = {
    "/stats": "counters of the cache",
    "/kept": "what was said, with what the model no longer sees cut out",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "go on with a saved one",
    "/reset": "forget everything but the system prompt",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does",
}
HELP = (
    "Talk with a model, for as long as you like."
    "\n\n"
    "The cache drops cells by rank and keeps the system prompt; the line after each answer says "
    "how much was dropped, /kept shows what. When all positions of the model are used, it starts "
    "anew with the system prompt and the newest messages, and says so."
    "\n\n"
    "Ctrl-C stops an answer. A line that ends with \\ goes on in the next one. Commands: "
    f"{', '.join(name.split()[0] for name in COMMANDS)}."
)


def main(
    system: System = None,
    *,
    model: ModelOptions,
    context: ContextOptions,
    sampling: SamplingOptions,
    kv: KVOptions,
) -> None:
    """Load the model, then take turns until the input ends."""
    from pyinertia.cli.conversation import Conversation
    from pyinertia.cli.models import open_model

    llm = open_model(model, context, kv, sampling)
    with closing(llm):
        talk = Conversation(llm, sampling, system, lambda text: say(f"note: {text}"))
        if not talk.template.is_own:
            say("note: the model has no chat template, so ChatML is used; is it made for chats?")
        if isinstance(sys.stdin, io.TextIOWrapper):  # one bad byte must not end the chat
            sys.stdin.reconfigure(errors="surrogateescape")
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - input() then has a history
            say("/help lists the commands")
        for text in _lines():
            try:
                if text.startswith("/"):
                    if not _command(talk, llm, text):
                        return
                else:
                    _answer(talk, llm, text)
            except PyInertiaError as error:
                say(f"error: {error}")


def _lines() -> Iterator[str]:
    """What the user types, until the input ends."""
    parts: list[str] = []
    while True:
        try:
            line = _typed("> " if not parts else ". ")
        except EOFError:
            break
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield from _message([*parts, line])
        parts = []
    yield from _message(parts)


def _message(lines: list[str]) -> Iterator[str]:
    """What the lines say together, if it is text."""
    text = "\n".join(lines).strip()
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are no text came in as halves of surrogate pairs
        say("error: this message is not UTF-8 text and is left out; convert it")
        return
    if text:
        yield text


def _typed(prompt: str) -> str:
    if not sys.stdin.isatty():
        return input()
    if not sys.stdout.isatty():  # stdout is for answers
        sys.stderr.write(prompt)
        sys.stderr.flush()
        prompt = ""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        say("")
        raise


def _answer(talk: Conversation, llm: Llama, text: str) -> None:
    from pyinertia.cli import memory

    with _interruptible() as interrupted:
        stopped = False
        try:
            with closing(talk.ask(text)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
                    if interrupted():
                        stopped = True
                        break
        except KeyboardInterrupt:
            stopped = True
    sys.stdout.write("\n")
    sys.stdout.flush()
    answer = talk.answer
    if answer is None or not (answer.tokens or answer.end):
        say("[stopped before the message was read; it does not count]")
        return
    how = "stopped, " if stopped else ""
    if answer.end == "length":
        how = f"stopped at -n {len(answer.tokens)}, "
    if answer.end == "context":
        how = "stopped, no position is left; the next message starts anew, "
    used = memory.used(llm, talk.n_forgotten)
    shows = "" if "nothing dropped" in used else "; /kept shows what is left"
    say(f"[{how}{answer.tokens_per_second:.1f} tokens/s, {used}{shows}]")


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C be asked for; a second one interrupts at once."""
    seen = False

    def handle(*_: object) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


def _command(talk: Conversation, llm: Llama, text: str) -> bool:
    """Do what a line with a slash says; return False at the end.

    Raises:
        CommandError: It is unknown, or its file is missing, or is of no use.
    """
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    if name == "/quit":
        return False
    if name in ("/save", "/load"):
        if not argument:
            msg = f"{name} needs a file: {name} chat.json"
            raise CommandError(msg)
        try:
            path = Path(argument).expanduser()
        except RuntimeError as error:
            msg = f"{name} {argument}: {error}; pass another path"
            raise CommandError(msg) from error
        if name == "/save":
            talk.save(path)
            say(f"[{len(talk.messages)} messages are in {path}]")
        else:
            talk.load(path)
            say(f"[{len(talk.messages)} messages; the model reads them with your next one]")
    elif name == "/reset":
        talk.reset()
        say("[everything but the system prompt is forgotten]")
    elif name == "/help":
        for usage, what in COMMANDS.items():
            say(f"{usage:<12}{what}")
    elif name == "/stats":
        if not llm._kv_refusal:
            for key, value in asdict(llm.kv_stats()).items():
                say(f"{key:<18}{value:,.1f}" if isinstance(value, float) else f"{key:<18}{value:,}")
        say(f"{'positions':<18}{llm.n_tokens:,} of {llm._n_ctx:,}")
    elif name == "/kept":
        _show_kept(talk, llm)
    else:
        msg = f"{name} is no command; /help lists them"
        raise CommandError(msg)
    return True


def _show_kept(talk: Conversation, llm: Llama) -> None:
    from pyinertia.cli import memory

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if talk.n_forgotten:
        console.print(f"[the first {talk.n_forgotten} messages dropped]", style="dim")
    for kept, tokens in talk.kept():
        if kept:
            text = llm.detokenize(tokens, special=True).decode(errors="replace")
            console.print(text, end="")
        else:
            console.print(f"[{len(tokens)} tokens dropped]", style="dim", end="")
    console.print()
    say(f"[{memory.used(llm, talk.n_forgotten)}]")
