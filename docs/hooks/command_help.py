"""MkDocs hook: a line `@help mac-rag` or `@help eval` becomes the help texts of those commands, as they are now.

`@help mac-rag` stands for the command `mac-rag` with its subcommands; `@help FOLDER` for every `python -m FOLDER.name`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
_WIDTH = 88  # columns of a help text
_DIRECTIVE = re.compile(r"^@help (\S+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces the directives of one page."""
    return _DIRECTIVE.sub(lambda found: "\n".join(_sections(found[1])), markdown)


def _sections(name: str) -> Iterator[str]:
    for title, app, arguments in _mac_rag() if name == "mac-rag" else _modules(name):
        yield f"## {title} {{ #{title.removeprefix('python -m ').replace('.', '-').replace(' ', '-')} }}\n"
        yield f"```text\n{_help(app, arguments, title)}\n```\n"


def _mac_rag() -> Iterator[tuple[str, typer.Typer, list[str]]]:
    from mac_rag.cli.main import app

    app.rich_markup_mode = None  # plain text, without boxes
    command: Any = get_command(app)
    for name, subcommand in command.commands.items():
        yield f"mac-rag {name}", app, [name]
        for nested in getattr(subcommand, "commands", ()):
            yield f"mac-rag {name} {nested}", app, [name, nested]


def _modules(folder: str) -> Iterator[tuple[str, typer.Typer, list[str]]]:
    for path in sorted((ROOT / folder).glob("*.py")):
        if "run_command(main)" in path.read_text():
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command()(importlib.import_module(f"{folder}.{path.stem}").main)
            yield f"python -m {folder}.{path.stem}", app, []


def _help(app: typer.Typer, arguments: list[str], title: str) -> str:
    program = "mac-rag" if arguments else title
    shown = CliRunner().invoke(app, [*arguments, "--help"], prog_name=program, terminal_width=_WIDTH)
    if shown.exit_code:
        raise RuntimeError(f"{title} --help failed with exit code {shown.exit_code}: {shown.output}")
    return shown.output.strip()
