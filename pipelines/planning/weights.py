"""The weights of a model by part: how many there are, which of them are trained, and the memory that they take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mac_rag.config import Quantization
from mac_rag.model import MACModel
from mac_rag.nn.cpu_linear import CPULinear

BASE_LM, SENTENCE, AMORTIZATION, INPUT = "base LM", "sentence encoder", "amortization network", "input encoder"
AGGREGATION, MODULATION = "aggregation network", "modulation"
# bitsandbytes keeps one fp32 scale for each block of 64 weights in NF4 and for each row in int8, and the 16 values of
# NF4's code for each matrix.
_NF4_BLOCK, _NF4_CODE = 64, 16 * 4


@dataclass(frozen=True)
class Weights:
    """The weights of one part of a model, and its buffers.

    Attributes:
        name: name of the part.
        parameters: its parameters; those that an earlier part has too are counted there.
        buffers: its buffers.
        quantized: id of a parameter -> its bytes, for those that are quantised.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[Tensor, ...]
    quantized: Mapping[int, int]

    @property
    def count(self) -> int:
        """Number of weights."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def trained(self) -> tuple[nn.Parameter, ...]:
        """Parameters that an optimiser changes."""
        return tuple(parameter for parameter in self.parameters if parameter.requires_grad)

    @property
    def bytes(self) -> int:
        """Memory of weights and buffers."""
        weights = sum(self.quantized.get(id(weight), _bytes(weight)) for weight in self.parameters)
        return weights + sum(map(_bytes, self.buffers))


def weights_by_part(model: MACModel) -> list[Weights]:
    """The weights of a model, each once: embeddings that an encoder shares with the base LM are the LM's.

    Args:
        model: a model without numbers, from `pipelines.planning.empty_model`; its quantisation is that of its
            configuration.
    """
    config, amortization, inputs = model.config, model.amortization.network, model.input_encoder.network
    quantized = quantized_bytes(model.base_lm.model, config.base_lm.quantization)
    for part, network in ((config.amortization, amortization), (config.input_encoder, inputs)):
        skipped = ("decoder",) if part.design == "encoder-decoder" else None
        quantized |= quantized_bytes(network.backbone, part.quantization, skipped)
    modules: dict[str, nn.Module | None] = {
        BASE_LM: model.base_lm,
        SENTENCE: amortization.sentence_encoder,
        AMORTIZATION: model.amortization,
        INPUT: model.input_encoder,
        AGGREGATION: model.aggregation,
        MODULATION: model.modulation,
    }
    seen: set[int] = set()
    parts = []
    for name, module in modules.items():
        if module is not None:
            parameters = tuple(_unseen(module.parameters(), seen))
            parts.append(Weights(name, parameters, tuple(_unseen(module.buffers(), seen)), quantized))
    return parts


def _unseen(tensors: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def quantized_bytes(model: Any, quantization: Quantization, skipped: tuple[str, ...] | None = None) -> dict[int, int]:
    """Bytes of the weights that transformers quantises when it loads a model, by their ids: those of linear layers.

    Args:
        model: a transformers model.
        quantization: how; nothing is quantised for `none`.
        skipped: parts that stay as they are; None for those that share weights, the head and the last module, which
            transformers leaves out by itself.
    """
    if quantization == "none":
        return {}
    if skipped is None:
        tied = getattr(model, "all_tied_weights_keys", {})
        head = model.get_output_embeddings()
        heads = [name for name, module in model.named_modules() if head is not None and module is head]
        last = [name for name, _ in model.named_parameters()][-1]
        left = {name.removesuffix(".weight") for name in (*tied, *tied.values(), last)} | set(heads)
    else:
        left = set(skipped)
    left |= set(model._keep_in_fp32_modules or ())
    found = {}
    for name, module in model.named_modules():
        if (isinstance(module, Conv1D) or type(module) in (nn.Linear, CPULinear)) and not _left_out(name, left):
            count, rows = module.weight.numel(), module.weight.shape[1 if isinstance(module, Conv1D) else 0]
            nf4 = -(-count // 2) + 4 * -(-count // _NF4_BLOCK) + _NF4_CODE
            found[id(module.weight)] = nf4 if quantization == "nf4" else count + 4 * rows
    return found


def _left_out(name: str, left: Iterable[str]) -> bool:
    """True for the module of a name, what lies inside of it, and names that end with it."""
    return any(re.match(rf"{re.escape(key)}(?:\.|$)", name) or name.endswith(key) for key in left)
