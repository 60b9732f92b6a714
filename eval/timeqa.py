"""The paper's protocol on Time-Sensitive QA, with dates and without: `python -m eval.timeqa --help`."""

from __future__ import annotations

from eval.harness.benchmark import benchmark_command
from mac_rag.cli.run import run_command

main = benchmark_command(
    "timeqa", "Time-Sensitive QA", home="in dataset/ of https://github.com/wenhuchen/Time-Sensitive-QA"
)

if __name__ == "__main__":
    run_command(main)
