"""The paper's protocol on RealTimeQA's weekly news, as of each question's day: `python -m eval.realtimeqa --help`."""

from __future__ import annotations

from eval.harness.benchmark import benchmark_command
from mac_rag.cli.run import run_command

main = benchmark_command(
    "realtimeqa",
    "RealTimeQA",
    home="in past/ and backnumber/ of https://github.com/realtimeqa/realtimeqa_public",
    stream=None,
)

if __name__ == "__main__":
    run_command(main)
