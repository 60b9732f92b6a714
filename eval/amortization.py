"""Designs of the amortization network (table 7): `python -m eval.amortization --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eval.harness.command import BatchOption, OutputOption, ScaleOption, SeedOption
from eval.harness.scales import SCALES
from eval.harness.streams import (
    DataOption,
    DocumentsOption,
    QuestionsOption,
    StepsOption,
    TrainedModel,
    TrainingRateOption,
)
from mac_rag.cli.run import run_command

# No backbone is quantised: that would freeze a whole encoder or decoder, but only the encoder of a T5.
PAPER: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"design": "encoder-decoder", "name": "google-t5/t5-large"},
    "encoder-only": {"design": "encoder-only", "name": "google-t5/t5-large"},
    "decoder-only": {"design": "decoder-only", "name": "openai-community/gpt2-large"},
}
T5Option = Annotated[
    str | None,
    typer.Option(
        "--t5",
        help="Name or folder of a T5 that encoder-decoder and encoder-only start from.",
        show_default="random layers; at the paper's scale, t5-large",
    ),
]
DecoderOption = Annotated[
    str | None,
    typer.Option(
        "--decoder",
        help="Name or folder of a causal LM that decoder-only starts from.",
        show_default="random layers; at the paper's scale, gpt2-large",
    ),
]


def main(
    context: typer.Context,
    model: TrainedModel = None,
    t5: T5Option = None,
    decoder: DecoderOption = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    steps: StepsOption = None,
    learning_rate: TrainingRateOption = None,
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    output: OutputOption = None,
) -> None:
    """Train MAC with each design of the amortization network on the same budget, and compare answers from memory alone.

    Trained models stay beside the result, in variants/, and are not trained twice.
    """
    from eval.harness.results import result_path

    path = result_path(output, "amortization")
    setup = SCALES[scale]["amortization"].override(model=model, documents=documents, questions=questions)
    from eval.harness.variants import Training, Variant, run_variants

    training = Training(setup.model, data, path.parent / "variants", seed, steps, scale, learning_rate)
    designs = PAPER if scale == "paper" else tiny_designs(setup.model, training.runs, seed)
    pretrained = {"encoder-decoder": t5, "encoder-only": t5, "decoder-only": decoder}
    designs = {name: {**design, "name": pretrained.get(name) or design["name"]} for name, design in designs.items()}
    variants = [Variant(name, training.recipe("amortization", changed(design))) for name, design in designs.items()]
    run_variants(
        "amortization",
        variants,
        training,
        setup,
        path,
        batch_size=batch_size,
        options=setup.options(context.params),
        notes=[describe_starts(setup.model, pretrained)] if scale == "tiny" else [],
    )


def changed(design: dict[str, Any]) -> dict[str, Any]:
    """The changes of a recipe for a design of the amortization network, all other settings of which are plain."""
    plain = {"quantization": "none", "dtype": "fp32", "revision": None, "embeddings": "own", "layers": None}
    return {"model": {"amortization": {**plain, **design}}}


def describe_starts(model: str, pretrained: dict[str, str | None]) -> str:
    """A note on the initial weights of each design at the tiny scale.

    Args:
        model: the MAC model that all other networks come from.
        pretrained: the pretrained backbone of each design; None for random layers.
    """
    clauses = [f"{name} starts from {place}" for name, place in pretrained.items() if place is not None]
    randoms = [name for name, place in pretrained.items() if place is None]
    if randoms:
        clauses.append(f"random layers and the base LM's embeddings are the start of {', '.join(randoms)}")
    return f"{'; '.join(clauses)}; the last row starts from the base LM's layers, and all else from {model}."


def tiny_designs(model: str, runs: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Backbones of each design, as large as the base LM of a MAC model, saved under `runs`.

    Args:
        model: name or folder of the MAC model.
        runs: folder of the variants; backbones that it holds are not made again.
        seed: random seed of the new layers.

    Returns:
        For each design the values of its encoder's configuration; the last one has the base LM's own layers.
    """
    import torch
    from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

    from mac_rag.atomic_files import write_folder
    from mac_rag.config import FROM_BASE_LM, EncoderConfig
    from mac_rag.lm.loading import load_causal_lm, quiet
    from mac_rag.model.checkpoint import find, read_config

    folder = find(model, None)
    config = read_config(folder)
    lm: Any
    lm, tokenizer = load_causal_lm(config.base_lm, torch.device("cpu"), folder)
    sizes = lm.config
    t5 = T5Config(
        vocab_size=sizes.vocab_size,
        d_model=sizes.hidden_size,
        d_kv=sizes.hidden_size // sizes.num_attention_heads,
        d_ff=2 * sizes.hidden_size,
        num_layers=sizes.num_hidden_layers,
        num_heads=sizes.num_attention_heads,
        pad_token_id=sizes.pad_token_id or 0,
        eos_token_id=sizes.eos_token_id,
    )
    own = config.amortization
    if own.design not in FROM_BASE_LM:
        own = EncoderConfig(design="decoder-only", name=None)
    places = {}
    for kind, make in (("t5", T5ForConditionalGeneration), ("decoder", AutoModelForCausalLM.from_config)):
        places[kind] = (
            runs / "starts" / f"{kind}-{seed}-{sizes.hidden_size}x{sizes.num_hidden_layers}-{sizes.vocab_size}"
        )
        if places[kind].exists():
            continue
        torch.manual_seed(seed)
        network = make(t5 if kind == "t5" else sizes)
        with torch.no_grad():
            network.get_input_embeddings().weight.copy_(lm.get_input_embeddings().weight)
        with write_folder(places[kind]) as new:
            with quiet():
                network.save_pretrained(new)
            tokenizer.save_pretrained(new)
    return {
        "encoder-decoder": {"design": "encoder-decoder", "name": str(places["t5"])},
        "encoder-only": {"design": "encoder-only", "name": str(places["t5"])},
        "decoder-only": {"design": "decoder-only", "name": str(places["decoder"])},
        f"{own.design}, pretrained": {**own.model_dump(include={"design", "embeddings", "layers"}), "name": None},
    }


if __name__ == "__main__":
    run_command(main)
