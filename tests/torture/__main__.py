"""Tortures the library: `python -m tests.torture [PART ...] [--runs N]`.

Each part goes on where its last run has stopped, and works for an hour at most. A failure is kept with its seed, and
the run goes on; at the end, the exit code is 1. `--seed` makes one trial alone, in this process, which its error ends.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tests.bank.helpers import fast_folder
from tests.torture.part import PARTS, make
from tests.torture.runner import run


def main() -> None:
    torch.set_num_threads(1)  # before processes are forked
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=f"from {', '.join(PARTS)}")
    parser.add_argument("--runs", type=int, help="trials of each part, at most its goal; by default its goal")
    parser.add_argument("--fresh", action="store_true", help="start with the first trial")
    parser.add_argument("--seed", type=int, help="make this one trial of each part, and nothing else")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if options.seed is not None:
        for name in options.parts:
            with fast_folder() as place:
                make(name, place).trial(options.seed)
        return
    states = [run(name, options.runs, fresh=options.fresh) for name in options.parts]
    for state in states:
        if state.next < state.goal:
            print(f"{state.part}: {state.goal - state.next:,} trials are left; the same command goes on")
    sys.exit(any(state.failures or state.next < state.goal for state in states))


if __name__ == "__main__":
    main()
