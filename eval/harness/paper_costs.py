"""What the steps of `eval.paper` take on one H100 or H200: most bytes at once, and hours (see `pipelines.sizes`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.harness.paper_plan import EPOCHS, LARGEST, QUESTIONS, Step, TrainedModel, argument
from eval.harness.scales import SCALES, Setup
from mac_rag.model.presets import PAPER
from pipelines.sizes import LAYER_SECONDS, RATES, Cost, architecture

_TRAININGS = {"peft": 2, "amortization": 3, "quantization": 2, "dropout_memory": 2, "perplexity": 1}
# Table 8's other training, without quantisation.
_IN_16_BIT = [f"model.{part}.quantization=none" for part in ("base_lm", "amortization", "input_encoder")]
_IN_16_BIT += [f"model.{part}.dtype=fp32" for part in ("amortization", "input_encoder")]
_STREAM = {"streamingqa": 1665, "squad": 8_500, "archivalqa": 2_900}  # questions about 1,665 documents
_ROWS = {"main_table": 8, "retention": 8, "peft": 2, "amortization": 3, "quantization": 2}  # asked all of them
_READ = dict.fromkeys((1, 3, 5), 2 * 3)  # rows of table 2 after k documents: with and without memory, three retrievers
_UPDATED = 3 * (1665 + 4 * 200)  # documents for three methods: the stream, and the search of a learning rate
_WINDOW, _DOCUMENT, _BATCH, _NEW, _BEAMS = 1024, 512, 32, 16, 12  # tokens; questions; tokens of an answer
_FORWARD = LAYER_SECONDS / 3  # of one layer without its backward pass


def camels_cost(dataset: str) -> Cost:
    """Meta-training of CaMeLS with DistilGPT2: six updated copies in a chain, and second derivatives through all."""
    lm = architecture(PAPER["distilgpt2"].base_lm.name)
    weights = _weights(lm)
    # Of each pass forward, backward and through both: a layer's tensors, attention scores and logits, in fp32.
    kept = 3 * 4 * _WINDOW * (lm.n_layer * (20 * lm.n_embd + 2 * lm.n_head * _WINDOW) + 3 * lm.vocab_size)
    batches, updates = EPOCHS * QUESTIONS[dataset] // 6, 6
    seconds = updates * max(9 * 2 * weights * _WINDOW / RATES["fp32"], 4 * lm.n_layer * LAYER_SECONDS)
    return Cost(4 * weights * (4 + 2 * updates) + updates * kept, batches * seconds / 3600)


def step_cost(step: Step) -> Cost:
    """A step's answers, updates of the LM on documents, and trainings, but for that of CaMeLS (`camels_cost`)."""
    setup = SCALES["paper"].get(step.experiment, Setup(LARGEST, 0))
    name = argument(step, "--model") or setup.model
    preset, dataset = name if name in PAPER else TrainedModel.of(name).preset, Path(argument(step, "--data") or "").name
    lm = architecture(PAPER[preset].base_lm.name)
    weights, layers, questions = _weights(lm), lm.num_hidden_layers, _STREAM[dataset]
    rows = _ROWS.get(step.experiment, 1) * questions / _BATCH * _NEW * layers * _FORWARD
    if argument(step, "--retriever") is not None:
        for k, count in _READ.items():
            reading = 2 * weights * _BEAMS * k * _DOCUMENT / RATES["bf16"]
            rows += count * questions * (reading + _NEW * layers * _FORWARD / _BATCH)
    cost = Cost(2 * weights + (8 << 30), rows / 3600)  # with the bank, caches of beams and logits
    if setup.lm is not None or argument(step, "--lm") is not None:
        # In fp32 with gradients and Adam's moments, beside the LM before; low-rank updates leave the LM in half.
        used = 2 * 2 * weights if argument(step, "--lora-rank") else (16 + 4) * weights
        cost += Cost(used + (4 << 30), _UPDATED * layers * LAYER_SECONDS / 3600)
    if step.experiment in _TRAININGS:
        model = TrainedModel(preset, "train", False, dataset)
        cost += model.cost().times(_TRAININGS[step.experiment])
        if step.experiment == "quantization":
            cost += Cost(model.cost(*_IN_16_BIT).bytes, 0.0)
    return cost


def _weights(lm: Any) -> int:
    """Weights of an LM whose feed-forward network is four times as wide as it, or gated and 2.7 times."""
    return int(lm.num_hidden_layers * 12 * lm.hidden_size**2 + lm.vocab_size * lm.hidden_size)
