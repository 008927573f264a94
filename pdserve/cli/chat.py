"""`pdserve chat`: a conversation with a server, in a terminal or through pipes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rich.console import Console

from pdserve.client.server import Server, add_server_options, session_of
from pdserve.client.terminal import console_of
from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.common.core.printable import printable

HELP = """/reset  start a new conversation
/system TEXT  start a new conversation with this system prompt (no TEXT: without one)
/quit  leave, like Ctrl-D; Ctrl-C stops the current answer"""


@dataclass
class StreamedAnswer:
    """One streamed answer: its text so far and the `perf_counter` times of its chunks."""

    text: str = ""
    sent: float = field(default_factory=perf_counter)
    first: float | None = None
    last: float | None = None
    tokens: int = 0  # from the usage in the last event
    interrupted: bool = False
    thinking: bool = False  # the text shown last is the model's thought

    def figures(self) -> str:
        if self.first is None or self.last is None:
            return "no tokens"
        figures = [f"TTFT {1000 * (self.first - self.sent):.0f} ms"]
        if self.tokens > 1:
            figures.append(f"TPOT {1000 * (self.last - self.first) / (self.tokens - 1):.1f} ms")
        if self.tokens:
            figures.append(f"{self.tokens} tokens")
        return " · ".join(figures)


class Chat:
    """A conversation: its turns, its model and its system prompt."""

    def __init__(self, options: argparse.Namespace, model: str) -> None:
        self._options = options
        self.model = model
        self.system: str | None = options.system
        self.turns: list[dict[str, str]] = []

    def ask(self, text: str) -> StreamedAnswer:
        """Asks `text` and prints the answer while it streams. Ctrl-C keeps the part received.

        Raises:
            PdserveError: the server failed; the question is removed from the conversation.
        """
        self.turns.append({"role": "user", "content": text})
        answer = StreamedAnswer()
        try:
            asyncio.run(self._stream(answer))
        except KeyboardInterrupt:
            answer.interrupted = True
        except BaseException:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": answer.text})
        return answer

    async def _stream(self, answer: StreamedAnswer) -> None:
        async with session_of(self._options) as session:
            server = Server(session, self._options.url)
            async for event in server.stream("/v1/chat/completions", self._body()):
                _read(event, answer)

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        given = {name: getattr(self._options, name) for name in SAMPLING}
        return {
            **{name: value for name, value in given.items() if value is not None},
            "model": self.model,
            "messages": [*system, *self.turns],
            "stream": True,
            "stream_options": {"include_usage": True},
        }


SAMPLING = ("max_tokens", "temperature", "top_p", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: with a pipe or --quick 1 when the server fails and 130 when
    interrupted, else 0."""
    options = make_parser().parse_args(argv)
    chat = Chat(options, asyncio.run(_model(options)))
    if options.quick is not None:
        return _once(chat, options.quick)
    if not sys.stdin.isatty():
        return _once(chat, sys.stdin.read())
    return _repl(chat)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pdserve chat",
        description="Chat with a server. When standard input is a pipe, all of it is one question. "
        "When standard output is no terminal, it is only the answer, without the model's thought.",
    )
    add_server_options(parser, 600.0)
    parser.add_argument("--model", "--model-name", help="default: the first model listed")
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="system prompt")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask only this, then exit")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    default = "default: the server's"
    parser.add_argument("--temperature", type=float, metavar="X", help=default)
    parser.add_argument("--top-p", type=float, metavar="X", help=default)
    parser.add_argument("--seed", type=int, metavar="N", help=default)
    return parser


async def _model(options: argparse.Namespace) -> str:
    if options.model is not None:
        return str(options.model)
    async with session_of(options) as session:
        return await Server(session, options.url).model()


def _once(chat: Chat, text: str) -> int:
    answer = chat.ask(text)
    sys.stdout.write("\n")
    if sys.stderr.isatty():
        print(answer.figures(), file=sys.stderr)
    return 130 if answer.interrupted else 0


def _repl(chat: Chat) -> int:
    import readline  # noqa: F401  # gives input() history and line editing

    console = console_of()
    console.print(f"{chat.model}; /help, Ctrl-D to leave", style="dim")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if text.startswith("/"):
            if not _command(chat, text, console):
                return 0
        elif text:
            try:
                answer = chat.ask(text)
                console.print(f"{' …' * answer.interrupted}\n{answer.figures()}", style="dim")
            except PdserveError as error:
                console.print(f"error: {error.message}", style="red")


def _command(chat: Chat, text: str, console: Console) -> bool:
    """Runs one slash command; returns False when the chat should end."""
    name, _, rest = text.partition(" ")
    if name in ("/quit", "/exit"):
        return False
    if name in ("/reset", "/system"):
        chat.turns.clear()
        if name == "/system":
            chat.system = rest.strip() or None
        console.print("new conversation", style="dim")
    else:
        console.print(HELP, style="dim")
    return True


def _read(event: dict[str, Any], answer: StreamedAnswer) -> None:
    """Prints the event's text, with control characters escaped, and adds it to `answer`.

    Raises:
        NodeError: the event is not a chat completion chunk.
    """
    try:
        if usage := event.get("usage"):
            answer.tokens = usage["completion_tokens"]
        for choice in event["choices"]:
            delta = choice["delta"]
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            if thought or text:
                answer.last = perf_counter()
                answer.first = answer.first or answer.last
                answer.text += text
                _show(answer, thought, text)
    except (LookupError, TypeError, AttributeError) as error:
        raise NodeError(f"the server sent an event that is no chat chunk: {error!r}") from error


def _show(answer: StreamedAnswer, thought: str, text: str) -> None:
    """Writes the text; in a terminal the thought before it, too, and an empty line between them."""
    shown = text
    if sys.stdout.isatty():
        between = "\n\n" if text and (thought or answer.thinking) else ""
        shown, answer.thinking = thought + between + text, bool(thought and not text)
    sys.stdout.write("".join(c if c in "\n\t" else printable(c) for c in shown))
    sys.stdout.flush()
