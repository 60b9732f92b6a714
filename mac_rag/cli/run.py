"""Runs every command of the project: typer parses it, and an error is one message instead of a traceback."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from mac_rag.cli.terminal import say
from mac_rag.errors import MACError


def run_command(command: Callable[..., Any]) -> None:
    """Runs one function as a command. A `MACError` ends it with one message and exit code 1."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command()(command)
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Runs a typer application. A `MACError` ends it with one message and exit code 1."""
    try:
        app()
    except MACError as error:
        # Indented, so that text after a line break, which a file name may hold, cannot pass for a separate message.
        say(f"error: {error}".replace("\n", "\n  "), lines=True, err=True, fg="red")
        raise SystemExit(1) from None


_OBJECTS = 1_000_000  # about as many objects as PyTorch, transformers and a model make before the first question
_usual: tuple[int, int, int] | None = None  # the thresholds before `rare_garbage_collection`


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Makes Python collect garbage rarely, until `settle` is called.

    Nearly all objects that imports and models make stay. As their number grows, Python searches them again and again,
    which takes a quarter of the time to the first answer.
    """
    global _usual
    _usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *_usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*_usual)
        _usual = None


def settle() -> None:
    """Ends the start-up: excludes all present objects from garbage collection, and restores its usual thresholds."""
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
