"""Variants of MAC, each trained on the same budget and asked the same questions (tables 4, 7 and 8).

`python -m eval.variants peft --help`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eval.harness.command import BatchOption, OutputOption, ProtocolOption, ScaleOption, SeedOption
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

if TYPE_CHECKING:
    from eval.harness.variants import Training, Variant

# Table 4: how phi* changes the LM.
KINDS = {"P-tuning v2": "prefix", "LoRA": "lora", "FiLM": "film"}
# Table 7. No backbone is quantised: that would freeze a whole encoder or decoder, but only the encoder of a T5.
DESIGNS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"design": "encoder-decoder", "name": "google-t5/t5-large"},
    "encoder-only": {"design": "encoder-only", "name": "google-t5/t5-large"},
    "decoder-only": {"design": "decoder-only", "name": "openai-community/gpt2-large"},
}
# Table 8. Pretrained networks are quantised; networks that are trained from scratch never are.
WHOLE = {"quantization": "none", "dtype": "fp32"}
FROZEN = {"quantization": "none", "dtype": "bf16"}
NF4 = {"quantization": "nf4", "dtype": "bf16"}
PRECISIONS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "32bit": {"trainer": {"precision": "fp32"}},
        "16bit": {"trainer": {"precision": "bf16"}},
        "4bit": {"trainer": {"precision": "bf16"}, "model": {"base_lm": NF4}},
    },
    "paper": {
        "16bit": {"model": {"base_lm": FROZEN, "amortization": WHOLE, "input_encoder": WHOLE}},
        "4bit": {"model": {"base_lm": NF4, "amortization": NF4, "input_encoder": NF4}},
    },
}


def main(
    context: typer.Context,
    experiment: Annotated[
        Literal["peft", "amortization", "quantization"],
        typer.Argument(help="Vary the modulation (table 4), the amortization network (7), or the precision (8)."),
    ],
    model: TrainedModel = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    steps: StepsOption = None,
    learning_rate: TrainingRateOption = None,
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    protocol: ProtocolOption = "strict",
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    output: OutputOption = None,
) -> None:
    """Train variants of MAC on the same budget, and compare their answers from memory alone.

    peft: P-tuning v2, LoRA and FiLM as the modulation.

    amortization: an encoder-decoder, an encoder and a decoder as the amortization network.

    quantization: a base LM in 4, 16 and 32 bit. 16 bit is mixed precision (bfloat16), 4 bit is NF4 by bitsandbytes.
    Training in 4 bit needs bitsandbytes; without it the result lists it as not run.

    Trained models stay beside the result, in variants/, and are not trained twice.
    """
    from eval.harness.results import result_path

    path = result_path(output, experiment)
    setup = SCALES[scale][experiment].override(model=model, documents=documents, questions=questions)
    from eval.harness.variants import Training, run_variants

    training = Training(setup.model, data, path.parent / "variants", seed, steps, scale, learning_rate)
    not_run: dict[str, str] = {}
    notes: list[str] = []
    if experiment == "peft":
        variants = modulations(training)
        notes = [
            f"Each kind's map from phi* starts anew; all else starts from {setup.model}, whose networks were trained "
            "with P-tuning v2."
        ]
    elif experiment == "amortization":
        variants = amortizations(training)
        notes = [
            "The last row starts from the base LM's layers, the others from random layers and its embeddings; all else "
            f"starts from {setup.model}."
        ]
    else:
        variants, not_run = precisions(training)
    run_variants(
        experiment,
        variants,
        training,
        setup,
        path,
        batch_size=batch_size,
        options=setup.options(context.params),
        notes=notes if scale == "tiny" else [],
        not_run=not_run,
        protocol=protocol,
    )


def modulations(training: Training) -> list[Variant]:
    """A variant for each kind of modulation."""
    from eval.harness.variants import Variant

    changes = {name: {"model": {"modulation": {"kind": kind}}} for name, kind in KINDS.items()}
    return [Variant(name, training.recipe("modulation", change)) for name, change in changes.items()]


def amortizations(training: Training) -> list[Variant]:
    """A variant for each design of the amortization network."""
    from eval.harness.variants import Variant

    designs = DESIGNS
    if training.scale == "tiny":
        designs = tiny_designs(training.model, training.runs, training.seed)
    plain = {"quantization": "none", "dtype": "fp32", "revision": None, "embeddings": "own", "layers": None}
    variants = []
    for name, design in designs.items():
        network = {**plain, **design}
        variants.append(Variant(name, training.recipe("amortization", {"model": {"amortization": network}})))
    return variants


def precisions(training: Training) -> tuple[list[Variant], dict[str, str]]:
    """A variant for each precision that this machine can train in, and why it cannot train in the others."""
    from eval.harness.variants import Variant
    from mac_rag.errors import QuantizationError
    from mac_rag.lm.devices import default_device
    from mac_rag.lm.loading import require_gradients

    variants, not_run = [], {}
    for name, change in PRECISIONS[training.scale].items():
        try:
            if name == "4bit":
                require_gradients("nf4", default_device(None))
            variants.append(Variant(name, training.recipe("modulation", change)))
        except QuantizationError as error:
            not_run[name] = str(error)
    return variants, not_run


def tiny_designs(model: str, runs: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Makes a backbone for each design, as large as the base LM of a MAC model, and saves it under `runs` once.

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
