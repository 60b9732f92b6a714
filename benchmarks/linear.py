"""Times linear layers on a CPU by oneDNN and by the library that PyTorch multiplies by itself.

python -m benchmarks.linear --help
"""

from __future__ import annotations

from typing import Annotated

import typer

from mac_rag.cli.run import run_command

# Rows and widths: a token's step in mac-small's LM and its head, a batch, a question's memory tokens; wider LMs.
_CASES = [
    (1, 384, 1536),
    (1, 384, 30522),
    (16, 384, 1536),
    (16, 384, 30522),
    (96, 384, 4608),
    (320, 384, 1536),
    (1, 2048, 8192),
    (8, 2048, 8192),
]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which both are timed; the median counts.")] = 50,
) -> None:
    """Time `nn.Linear` and `CPULinear` in fp32 without gradients."""
    from functools import partial

    import torch
    from rich.console import Console
    from rich.table import Table
    from torch import nn

    from benchmarks.measure import medians
    from mac_rag.errors import ConfigError
    from mac_rag.nn.cpu_linear import CPULinear, is_supported

    if not is_supported():
        raise ConfigError("this processor has no kernels of oneDNN, so that nn.Linear is used everywhere")
    table = Table(
        "rows", "in", "out", "oneDNN, ms", "nn.Linear, ms", "ratio", title=f"{torch.get_num_threads()} threads"
    )
    for rows, inner, outer in _CASES:
        torch.manual_seed(0)
        plain, ours = nn.Linear(inner, outer), CPULinear(inner, outer)
        ours.load_state_dict(plain.state_dict())
        x = torch.randn(rows, inner)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), plain(x), atol=1e-5, rtol=1e-4)
            fast, slow = medians(partial(ours, x), partial(plain, x), rounds)
        table.add_row(
            f"{rows}", f"{inner:,}", f"{outer:,}", f"{1e3 * fast:.3f}", f"{1e3 * slow:.3f}", f"{slow / fast:.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
