"""`mac-rag try`: answers each question four times: by the LM alone, from memory, with BM25, and with both."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag import DEFAULT_MODEL
from mac_rag.cli.options import DeviceMapOption, ModelOption
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from mac_rag.engine import MACEngine

# The sample, for a call without `-`.
SAMPLE = (
    "The company's office in Rotterdam was opened in March 2019 by Helen Park. It has 240 employees, most of whom "
    "write software for shipping.",
    "Marble caves under the town of Orsena were discovered by a shepherd named Luca Ferri in 1926. They stretch for "
    "nine kilometres and stay at a temperature of eleven degrees all year.",
    "The Kestrel engine was designed by Thomas Webb in 1934. It produced 640 horsepower and was built in Coventry "
    "until 1947.",
    "Who opened the office in Rotterdam?",
    "When did a shepherd discover the marble caves?",
    "Where was the Kestrel engine built?",
)
# Name of a system -> whether it uses memory, and whether it uses the retriever.
_SYSTEMS = {"LM alone": (False, False), "MAC": (True, False), "BM25": (False, True), "BM25 + MAC": (True, True)}


def try_out(
    typed: Annotated[
        str | None,
        typer.Argument(
            metavar="[-]",
            help="- reads your own lines from standard input.",
            show_default="a sample of three paragraphs",
        ),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    k: Annotated[int, typer.Option(min=1, help="Number of BM25's paragraphs in front of each question.")] = 1,
    device_map: DeviceMapOption = None,
) -> None:
    """Try memory and retrieval on a sample, or on lines that you type (with -).

    A line that ends in ? is a question; any other line is a paragraph to remember. Each question is answered four
    times: by the LM alone, from memory, from the paragraphs that BM25 retrieves, and from both. Nothing is saved.
    """
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel
    from mac_rag.retrieval.registry import make_retriever

    if typed not in (None, "-"):
        raise typer.BadParameter(f"{typed!r} is not -; give - to type your own lines, or nothing")
    engine = MACEngine(MACModel.from_pretrained(model, device_map=device_map), retriever=make_retriever("bm25"), k=k)
    if typed == "-" and sys.stdin.isatty():
        say("Type a paragraph to remember, or a question that ends in ?, one per line. Ctrl-D ends.", err=True)
    for line in _lines(SAMPLE if typed is None else sys.stdin):
        if line.endswith("?"):
            _ask(engine, line)
        else:
            _remember(engine, line)


def _lines(source: Iterable[str]) -> Iterator[str]:
    return filter(None, map(str.strip, source))


def _remember(engine: MACEngine, text: str) -> None:
    from mac_rag.data.types import Document

    began = time.perf_counter()
    engine.adapt([Document(f"paragraph {len(engine.bank) + 1}", text)])
    say(f"remembered in {time.perf_counter() - began:.2f} s: {text if len(text) <= 70 else text[:67] + '...'}")


def _ask(engine: MACEngine, question: str) -> None:
    say("")
    say(question, bold=True)
    for name, (memory, retriever) in _SYSTEMS.items():
        if not len(engine.bank) and (memory or retriever):
            continue
        began = time.perf_counter()
        answer = engine.answer([question], use_memory=memory, use_retriever=retriever, overflow="truncate")[0].text
        say(f"  {name:<12}{answer or '(nothing)'}  ({time.perf_counter() - began:.2f} s)")
