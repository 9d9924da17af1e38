"""`pyinertia run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyinertia.cli.group import say
from pyinertia.cli.options import ContextOptions, KVOptions, ModelOptions, SamplingOptions
from pyinertia.documents import DocumentError, plain, read
from pyinertia.errors import CommandError

if TYPE_CHECKING:
    from pyinertia.cli.template import ChatTemplate
    from pyinertia.llama import Llama

HELP = (
    "Answer one prompt, token by token on stdout."
    "\n\n"
    "The prompt is the argument, a file (-f), or stdin; with a file and an argument, the argument "
    "is the question about the file, and what it asks about is looked after when cells leave: "
    "pyinertia run -m model.gguf -f report.txt 'What did the board decide?'"
)

System = Annotated[
    str | None,
    typer.Option(
        "-sys",
        "--system",
        metavar="TEXT",
        help="System prompt. It never leaves the cache.",
        rich_help_panel="Prompt",
    ),
]

InChat = Annotated[
    bool,
    typer.Option(
        "--chat/--no-chat",
        help="Put the prompt into the model's chat template, or continue it as it is.",
        rich_help_panel="Prompt",
    ),
]


def main(
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="The same.", rich_help_panel="Prompt"),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="Read the prompt from a file: text, HTML or PDF; - for stdin.",
            rich_help_panel="Prompt",
        ),
    ] = None,
    system: System = None,
    chat: InChat = True,
    quiet: Annotated[
        bool,
        typer.Option(
            "-q",
            "--quiet",
            help="No line about speed and what was dropped.",
            rich_help_panel="Help",
        ),
    ] = False,
    *,
    model: ModelOptions,
    context: ContextOptions,
    sampling: SamplingOptions,
    kv: KVOptions,
) -> None:
    """Read the prompt, load the model, answer."""
    if text is not None and prompt is not None:
        msg = "the prompt is there twice, as an argument and as -p; leave one out"
        raise CommandError(msg)
    whole = read_prompt(text if text is not None else prompt, file)
    check_system(system, chat)
    from pyinertia.cli import memory
    from pyinertia.cli.generation import Generation
    from pyinertia.cli.models import open_model

    llm = open_model(model, context, kv, sampling)
    try:
        tokens = prompt_tokens(llm, whole, system, chat)
        answer = Generation(llm, tokens, sampling)
        for piece in answer:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if answer.end == "context":
            say(f"note: the answer ends at {llm._n_ctx:,} positions; a larger -c has more")
        if not quiet and (sys.stderr.isatty() or "nothing" not in memory.used(llm)):
            say(f"[{answer.tokens_per_second:.1f} tokens/s, {memory.used(llm)}]")
    finally:
        llm.close()


def check_system(system: str | None, chat: bool) -> None:
    """Refuse a system prompt that has no place."""
    if system is not None and not chat:
        msg = "--system needs the chat template; leave --no-chat out, or put it into the prompt"
        raise CommandError(msg)


def prompt_tokens(llm: Llama, whole: str, system: str | None, chat: bool) -> list[int]:
    """The prompt as tokens; its system prompt is protected.

    Raises:
        CommandError: It does not fit, or the system prompt has no place.
    """
    from pyinertia.cli import memory
    from pyinertia.cli.template import ChatTemplate, encode

    template = ChatTemplate(llm) if chat and "tokenizer.chat_template" in llm.metadata else None
    if template is None:
        tokens = encode(llm, whole)
        if system is not None:
            msg = "the model has no chat template, so --system has no place; leave it out"
            raise CommandError(msg)
    else:
        tokens = _in_chat(template, whole, system)
        memory.protect(llm, template, system)
    if len(tokens) >= llm._n_ctx:
        msg = (
            f"the prompt has {len(tokens):,} tokens, with the answer it must fit "
            f"{llm._n_ctx:,} positions; pass a larger -c, or let `pyinertia summarise` read it"
        )
        raise CommandError(msg)
    return tokens


def read_prompt(text: str | None, file: Path | None) -> str:
    """The whole prompt, what is asked of a file at its end.

    Raises:
        CommandError: There is none, or it is empty.
    """
    if file is None and text is None and sys.stdin.isatty():
        msg = "no prompt; pass it as an argument, in a file with -f, or on stdin"
        raise CommandError(msg)
    parts = [text] if text is not None else []
    if file is not None or text is None:
        parts.insert(0, _file_text(file))
    whole = parts[0] if len(parts) == 1 else "\n\n".join(part.strip("\n") for part in parts)
    if not whole.strip():
        msg = "the prompt is empty; pass some text"
        raise CommandError(msg)
    return whole


def _file_text(file: Path | None) -> str:
    stdin = file is None or str(file) == "-"
    try:
        if file is not None and file.suffix.lower() in (".html", ".htm", ".pdf"):
            (found,) = read(str(file))
            if isinstance(found, DocumentError):
                raise found
            return found.text
        data = sys.stdin.buffer.read() if stdin or file is None else file.read_bytes()
        return plain.text(data, "utf-8").removesuffix("\n")  # editors end a file with one
    except DocumentError as error:
        why = str(error).replace(", or say what it is with --encoding", "")  # not here
        msg = f"{'stdin' if stdin else file}: {why}"
        raise CommandError(msg) from error


def _in_chat(template: ChatTemplate, text: str, system: str | None) -> list[int]:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return template.tokens(messages)
