"""The old name of `pipelines.add_lexical`, for one release: `python -m pipelines.add_lexical --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from pipelines.add_lexical import main

if __name__ == "__main__":
    say("warning: pipelines.index_words is now called pipelines.add_lexical", err=True, fg="yellow")
    run_command(main)
