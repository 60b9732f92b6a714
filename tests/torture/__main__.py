"""Damages files at random, many times: `python -m tests.torture banks --runs 10000 --first 0`.

Stops at the first failure, and prints the seed and what was damaged. The default run of the tests has a sample of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import random
import tempfile
import time
from pathlib import Path

from tests.torture.helpers import copy

KINDS = ("banks", "retrievers", "checkpoints", "data_files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=KINDS, help=f"from {', '.join(KINDS)}")
    parser.add_argument("--runs", type=int, default=10_000, help="damaged copies of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    for kind in options.kinds:
        module, slowest = importlib.import_module(f"tests.torture.{kind}"), (0.0, "")
        with tempfile.TemporaryDirectory() as place:
            examples = module.make(Path(place))
            for seed in range(options.first, options.first + options.runs):
                folder = copy(examples[seed % len(examples)], Path(place) / "copy")
                how = module.mutate(folder, random.Random(seed))
                start = time.perf_counter()
                faulthandler.dump_traceback_later(60, exit=True)  # it hangs
                try:
                    module.check(folder)
                except BaseException:
                    print(f"{kind}, seed {seed}: {how}")
                    raise
                faulthandler.cancel_dump_traceback_later()
                slowest = max(slowest, (time.perf_counter() - start, f"seed {seed}: {how[:200]}"))
        print(f"{kind}: {options.runs:,} damaged copies; the slowest took {slowest[0]:.2f} s ({slowest[1]})")


if __name__ == "__main__":
    main()
