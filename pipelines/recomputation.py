"""Gradient checkpointing: a transformer's layers keep their inputs alone; the backward pass computes the rest again.

While a model trains, transformers' own way removes the layers' key-value cache, and with it a memory's prefix. Here
each layer gets a copy of the cache that it can fill twice, and runs the second time under the hooks of the first, such
as those of a modulation by LoRA.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from mac_rag.errors import ConfigError

_Hooks: TypeAlias = list[tuple[nn.Module, "OrderedDict[int, Callable[..., Any]]"]]


def transformer_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of all transformers models in a module, each once, in the order of the modules."""
    found: dict[int, nn.Module] = {}

    def walk(part: nn.Module, inside: bool) -> None:
        inside = inside or isinstance(part, PreTrainedModel)
        for child in part.children():
            if inside and isinstance(child, nn.ModuleList):
                found.update((id(layer), layer) for layer in child)
            else:
                walk(child, inside)

    walk(module, False)
    return [layer for layer in found.values() if any(True for _ in layer.parameters())]


def recompute_activations(module: nn.Module) -> None:
    """Switches gradient checkpointing on for all transformer layers of a module."""
    for layer in transformer_layers(module):
        layer.forward = partial(_recomputed, layer, layer.forward)


def _recomputed(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    parts = [part for part in layer.modules() if part is not layer and part._forward_hooks]
    hooks: _Hooks = [(part, OrderedDict(part._forward_hooks)) for part in parts]

    def run(*args: Any, **kwargs: Any) -> Any:
        with _hooked(hooks):
            return forward(*map(_own, args), **{name: _own(value) for name, value in kwargs.items()})

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _own(value: Any) -> Any:
    """A copy of a key-value cache, which shares its tensors; anything else as it is."""
    if not isinstance(value, Cache):
        return value
    if not isinstance(value, DynamicCache):
        raise ConfigError(
            f"trainer.gradient_checkpointing cannot compute layers again that fill a {type(value).__name__}; set it to "
            "false"
        )
    own = copy.copy(value)
    own.layers = [copy.copy(layer) for layer in value.layers]
    return own


@contextmanager
def _hooked(hooks: _Hooks) -> Iterator[None]:
    """Gives modules the forward hooks that they had when a layer ran for the first time."""
    present = [(part, part._forward_hooks) for part, _ in hooks]
    for part, then in hooks:
        part._forward_hooks = then
    try:
        yield
    finally:
        for part, now in present:
            part._forward_hooks = now
