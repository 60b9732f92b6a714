"""Starts every command of the project: typer parses it, and an error is one message instead of a traceback."""

from __future__ import annotations

from collections.abc import Callable
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
