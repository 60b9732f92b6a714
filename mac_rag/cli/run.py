"""How every command of the project starts: parsed by typer, stopped by a clear message instead of a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from mac_rag.errors import MACError


def run_command(command: Callable[..., Any]) -> None:
    """Runs one function as a command; an error meant for the user ends it with exit code 1 and one message."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command()(command)
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Runs a typer application the same way."""
    try:
        app()
    except MACError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise SystemExit(1) from None
