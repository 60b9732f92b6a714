"""Time that attention saves by skipping rows that the prior rules out: `python -m benchmarks.skipping --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from mac_rag.nn.attention import Chunk


def main(
    model: Annotated[str, typer.Option(help="A MAC model with a document prior: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=2, help="Documents of the test stream, from its beginning.")] = 1665,
    questions: Annotated[int, typer.Option(min=1, help="Questions of one batch, drawn from all.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each, in turns; the median counts.")] = 3,
    seed: SeedOption = 0,
) -> None:
    """Time the aggregation of a bank on a CPU, with all rows and without the rows that cannot matter.

    First for answers, then for sources, which need each row's share of the attention. Keys and values are projected
    before. Questions and documents come from a data set, because the skipped rows depend on the confidence of the
    document prior.
    """
    import torch

    from benchmarks.large_banks import UnboundedBank
    from benchmarks.measure import medians
    from eval.harness.protocol import adapt
    from eval.harness.streams import open_stream
    from mac_rag.bank import MemoryBank
    from mac_rag.bank.projection import ProjectedBank
    from mac_rag.engine import MACEngine
    from mac_rag.errors import ConfigError
    from mac_rag.model import AmortizedModel
    from mac_rag.nn.attention import streaming_attention

    loaded = AmortizedModel.from_pretrained(model, device="cpu")
    network = loaded.aggregation
    if network.prior is None:
        raise ConfigError(f"{model} has no document prior, so that no row is skipped; give --model one that has")
    stream, _ = open_stream(data, "test", documents, questions, seed=seed, scale="tiny")
    bank = MemoryBank(loaded.fingerprint)
    engine = MACEngine(loaded, bank)
    adapt(engine, stream.documents)
    view = ProjectedBank(network, bank, device="cpu")
    question = loaded.input_encoder([loaded.input_encoder.ids(each.question) for each in stream.questions])

    # Without the view's bounds, no row is left out; without the floor, none is skipped.
    unbounded = UnboundedBank(view)

    def attend(query: Tensor, chunks: Iterable[Chunk], *, floor: Any = None, mass: bool = False) -> Any:
        del floor
        return streaming_attention(query, chunks, mass=mass)

    say(f"{len(question)} questions of {len(stream.documents):,} documents of {stream.name}, {model}:")
    for mass in (False, True):

        def all_rows(mass: bool = mass) -> Any:
            return network(question, unbounded, attention=attend, mass=mass)

        def needed_rows(mass: bool = mass) -> Any:
            return network(question, view, mass=mass)

        with torch.no_grad():
            (phi, shares), (phi_of_all, shares_of_all) = needed_rows(), all_rows()
            fast, slow = medians(needed_rows, all_rows, rounds)
        say("phi* and what each row has of the attention:" if mass else "phi*:")
        say(f"  all rows      {slow:.2f} s")
        say(f"  skipping      {fast:.2f} s, {slow / fast:.1f} times as fast")
        say(f"  difference    {float((phi - phi_of_all).norm() / phi_of_all.norm()):.1e} of phi*, by their norms")
        if mass:
            say(f"                {float((shares - shares_of_all).abs().max()):.1e} at most of a row's attention")


if __name__ == "__main__":
    run_command(main)
