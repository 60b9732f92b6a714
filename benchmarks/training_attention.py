"""Times training steps on a CPU with attention by products and by PyTorch's fused kernel.

python -m benchmarks.training_attention --help
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mac_rag.cli.run import run_command


def main(
    rows: Annotated[int, typer.Option(min=1, help="Number of prompts in a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 250,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which both are timed; the median counts.")] = 5,
) -> None:
    """Time the forward and backward pass of an LM of MiniLM's sizes with random weights.

    The command first checks that both give the same loss.
    """
    from functools import partial

    import torch
    from rich.console import Console
    from rich.table import Table
    from torch.nn import functional

    from benchmarks.measure import medians
    from mac_rag.lm.prefix_lm import PrefixLM, PrefixLMConfig
    from pipelines.tasks.cpu_attention import use_products

    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": length,
    }
    config = PrefixLMConfig(vocab_size=2000, is_decoder=True, hidden_dropout_prob=0.0, **sizes)
    torch.manual_seed(0)
    fused = PrefixLM(config)
    products = PrefixLM(PrefixLMConfig(**config.to_dict()))
    products.load_state_dict(fused.state_dict())
    use_products(products)
    ids = torch.randint(config.vocab_size, (rows, length))
    segment_ids = torch.ones_like(ids)

    def loss(lm: PrefixLM, bf16: bool) -> torch.Tensor:
        with torch.autocast("cpu", enabled=bf16):
            states = lm.base_model(input_ids=ids, segment_ids=segment_ids).last_hidden_state
        return functional.mse_loss(states.float(), torch.zeros_like(states, dtype=torch.float32))

    def step(lm: PrefixLM, bf16: bool) -> None:
        lm.zero_grad()
        loss(lm, bf16).backward()

    table = Table("", "products, s", "fused kernel, s", "ratio", title=f"{rows} prompts of {length} tokens")
    for name, bf16 in (("bf16", True), ("fp32", False)):
        torch.testing.assert_close(loss(products, bf16), loss(fused, bf16), atol=1e-2, rtol=1e-2)
        ours, theirs = medians(partial(step, products, bf16), partial(step, fused, bf16), rounds)
        table.add_row(name, f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.2f}")
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
