"""Tortures the library: `python -m tests.torture [PART ...] [--runs N]`.

Each part goes on where its last run has stopped, and works for an hour at most. A failure is kept with its seed, and
the run goes on; at the end, the exit code is 1. `--seed` makes some trials alone, in this process, which an error ends.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tests.bank.helpers import fast_folder
from tests.torture.part import PARTS, make
from tests.torture.runner import run
from tests.torture.system import start_again


def main() -> None:
    start_again()
    torch.set_num_threads(1)  # before processes are forked
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=f"from {', '.join(PARTS)}")
    parser.add_argument("--runs", type=int, help="trials of each part, at most its goal; by default its goal")
    parser.add_argument("--fresh", action="store_true", help="start with the first trial")
    parser.add_argument("--seed", type=int, nargs="+", help="make these trials of each part, and nothing else")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if options.seed is not None:
        for name in options.parts:
            with fast_folder() as place:
                part = make(name, place)
                for seed in options.seed:
                    part.trial(seed % part.goal)
        return
    states = [run(name, options.runs, fresh=options.fresh) for name in options.parts]
    for state in states:
        if state.next < state.goal:
            print(f"{state.part}: {state.goal - state.next:,} trials are left; the same command goes on")
    sys.exit(any(state.failures or state.next < state.goal for state in states))


if __name__ == "__main__":
    main()
