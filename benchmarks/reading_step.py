"""A step of pipelines.tune_reading against a plain forward and backward pass of as many tokens.

    python -m benchmarks.reading_step --data FOLDER

The bound is the LM's own work: the same LM with the same low-rank updates reads the same number of tokens as one
ordinary text in PyTorch's causal attention, and has its loss on as many tokens. What a step does beside it is packs,
retrieval, block attention, rotation, the codec, clipping, and the optimiser.
"""

from __future__ import annotations

from typing import Annotated

import typer

from mac_rag.cli.run import run_command


def main(
    data: Annotated[str, typer.Option(help="Folder of SQuAD v1.1.")],
    config: Annotated[str, typer.Option(help="A recipe of pipelines.tune_reading.")] = "smollm2-135m-reading/read",
    rounds: Annotated[int, typer.Option(min=1, help="Packs that are timed, in turns.")] = 10,
) -> None:
    """Time steps of training to read, in turns with plain passes over as many tokens."""
    import statistics
    import time

    import torch
    from rich.console import Console
    from rich.table import Table

    from pipelines.recipe import load_recipe
    from pipelines.tasks.tune_reading import TuneReadingConfig, TuneReadingTask

    overrides = [f"data.path={data}", "data.train=val", "adapter=null"]
    recipe = load_recipe(TuneReadingConfig, config, overrides)
    task = TuneReadingTask(recipe)
    optimiser = torch.optim.AdamW(task.parameter_groups(), lr=1e-6, fused=True)
    task.begin_step(0)
    half = recipe.trainer.precision == "bf16"

    def step(number: int) -> tuple[int, int]:
        batch = task.batch(number, 0, 1)
        with torch.autocast(task.lm.device.type, torch.bfloat16, enabled=half):
            loss = task(batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), recipe.trainer.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        [pack] = batch
        questions = [len(question) + len(answer) - 1 for question, answer in pack.questions]
        return (
            len(task.prompt.opening) + sum(map(len, pack.documents)) + sum(questions),
            sum(len(answer) for _, answer in pack.questions),
        )

    def plain(tokens: int, answers: int) -> None:
        ids = torch.randint(100, 1000, (1, tokens), device=task.lm.device)
        with torch.autocast(task.lm.device.type, torch.bfloat16, enabled=half):
            logits = task.lm(input_ids=ids, use_cache=False, logits_to_keep=answers).logits[0]
            torch.nn.functional.cross_entropy(logits.float(), ids[0, -answers:]).backward()
        task.zero_grad(set_to_none=True)

    seconds: tuple[list[float], list[float]] = ([], [])
    counts = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        tokens, answers = step(number)
        between = time.perf_counter()
        plain(tokens, answers)
        if number:  # the first is a warm-up
            seconds[0].append(between - began)
            seconds[1].append(time.perf_counter() - between)
            counts.append(tokens)
    ratios = [bound / ours for ours, bound in zip(*seconds, strict=True)]
    table = Table(
        "",
        "seconds a step",
        "tokens a second",
        title=f"{rounds} packs of {statistics.mean(counts):,.0f} tokens, {torch.get_num_threads()} threads; "
        f"plain pass / step: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}",
    )
    for name, times in zip(("step", "plain pass"), seconds, strict=True):
        table.add_row(name, f"{statistics.median(times):.2f}", f"{sum(counts) / sum(times):,.0f}")
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
