"""Memory of each process of a training: one process, replicas, and parts (FSDP2).

python -m benchmarks.sharded_training --help
"""

from __future__ import annotations

from typing import Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.errors import ConfigError

_STEPS = 4  # a training measures its first three, and validates behind its last
_WAYS = {
    "one process": (1, {}),
    "two, ddp": (2, {}),
    "two, fsdp": (2, {"parallel": "fsdp"}),
    "two, fsdp, gradient checkpointing": (2, {"parallel": "fsdp", "gradient_checkpointing": "true"}),
    "two, fsdp, offload": (2, {"parallel": "fsdp", "offload": "true"}),
}


def main(
    base_lm: Annotated[str, typer.Option(help="Name or folder of the LM.")] = "smollm2-135m",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a forward pass.")] = 2,
    cpu: Annotated[bool, typer.Option(help="Train on the CPU even if there are GPUs.")] = True,
) -> None:
    """Tune all weights of an LM for a few steps in each way, and show what its largest process takes.

    All ways have the same sequences in a step. `pipelines.tune_qa` measures itself.
    """
    import json
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    from rich.table import Table

    from mac_rag.cli.terminal import cell, show_table
    from pipelines.cost import size

    table = Table("", "weights", "gradients", "optimiser", "peak, resident", "s a step", title=f"{base_lm}, in full")
    for way, (processes, values) in _WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = {
                "steps": _STEPS,
                "batch_size": batch_size,
                "accumulate": 2 // processes,
                "learning_rate": 1e-5,
                "validate_every": _STEPS,
                "save_every": _STEPS,
                "cpu": str(cpu).lower(),
                **values,
            }
            recipe = Path(folder, "recipe.yaml")
            recipe.write_text(
                f"base_lm: {{name: {base_lm}}}\ndata: {{name: newswire, documents: 64, validation_documents: 1}}\n"
                "context: {retriever: bm25, k: [1]}\ntrainer:\n"
                + "".join(f"  {name}: {value}\n" for name, value in trainer.items())
            )
            launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
            command = [sys.executable, "-m", *(launch if processes > 1 else []), "pipelines.tune_qa"]
            run = subprocess.run([*command, "--config", str(recipe), "--output", f"{folder}/run"], check=False)
            if run.returncode:  # it has said why
                raise ConfigError(f"the training of the row {way!r} ended with exit code {run.returncode}")
            lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
            cost = next(line for line in lines if line["kind"] == "cost")
            parts = (size(cost[f"lm/{kind}_bytes"]) for kind in ("weights", "gradients", "optimizer"))
            row = way, *parts, size(cost["resident_peak_bytes"]), f"{cost['seconds_per_step']:.2f}"
            table.add_row(*map(cell, row))
    show_table(table)


if __name__ == "__main__":
    run_command(main)
