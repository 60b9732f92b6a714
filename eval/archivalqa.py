"""The paper's protocol on ArchivalQA-Seq: `python -m eval.archivalqa --help`."""

from __future__ import annotations

from eval.harness.benchmark import benchmark_command
from mac_rag.cli.run import run_command

main = benchmark_command("archivalqa", "ArchivalQA-Seq")

if __name__ == "__main__":
    run_command(main)
