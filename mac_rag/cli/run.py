"""Starts every command of the project: typer parses it, and an error is one message instead of a traceback."""

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
        # Behind a line break, which may be in a file name, nothing looks like a message of its own.
        say(f"error: {error}".replace("\n", "\n  "), lines=True, err=True, fg="red")
        raise SystemExit(1) from None


_OBJECTS = 1_000_000  # about as many as PyTorch, transformers and a model make until the first question
_usual: tuple[int, int, int] | None = None  # the thresholds outside of `rare_garbage_collection`


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Lets Python look for garbage rarely, until `settle`.

    Nearly all objects that imports and models make stay. Python looks through them again and again as they become more,
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
    """Ends the start: the objects that are there stay and are not looked through again, and new ones are as always."""
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
