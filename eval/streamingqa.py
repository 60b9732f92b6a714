"""The paper's protocol on StreamingQA: `python -m eval.streamingqa --help`."""

from __future__ import annotations

from eval.harness.benchmark import benchmark_command
from mac_rag.cli.run import run_command

main = benchmark_command("streamingqa", "StreamingQA")

if __name__ == "__main__":
    run_command(main)
