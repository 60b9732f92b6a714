"""`python -m eval.report`: one HTML page of all results in some folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say


def main(
    results: Annotated[list[Path], typer.Argument(help="Folders of result files, such as eval.paper makes.")],
    output: Annotated[
        Path | None, typer.Option(help="The HTML page.", show_default="report.html in the first folder")
    ] = None,
) -> None:
    """Make one self-contained HTML page of all results: tables, plots, and the paper's findings.

    Of several results of one experiment, model, scale and data set, the report shows the newest.
    """
    from mac_rag.errors import ConfigError

    path = output or results[0] / "report.html"
    if path.suffix != ".html":
        raise ConfigError(f"--output must end in .html, got {path}")
    write_report(results, path)


def write_report(folders: list[Path], path: Path) -> None:
    """Writes the HTML page of all results in some folders, and shows its path.

    Raises:
        DataError: if the folders hold no result.
        ConfigError: if the folder of the page cannot be written.
    """
    from eval.harness.results import writable_folder
    from eval.report.collect import collect
    from eval.report.page import page
    from mac_rag.atomic_files import write_text

    text = page(collect(folders))
    writable_folder(path.parent, "--output")
    write_text(path, text)
    say(f"Report: {path}")


if __name__ == "__main__":
    run_command(main)
