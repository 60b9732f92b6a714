"""The first layers of a base LM: encoders start from them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.utils import logging

from mac_rag.config import BaseLMConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm.fetched import local_place
from mac_rag.lm.hub_revisions import pinned
from mac_rag.lm.loading import list_of_layers, loaded, require_all_weights
from mac_rag.lm.model_sizes import check_size


def keep_first_layers(backbone: nn.Module, count: int) -> None:
    """Drops all layers of a backbone but the first `count`.

    Raises:
        ModelLoadError: for a backbone of fewer layers.
    """
    config: Any = backbone.config
    if count > config.num_hidden_layers:
        raise ModelLoadError(f"layers is {count}, but {config.model_type} has {config.num_hidden_layers}")
    name, layers = list_of_layers(backbone)
    parent, _, last = name.rpartition(".")
    setattr(backbone.get_submodule(parent), last, layers[:count])
    describe_first_layers(config, count)


def describe_first_layers(config: Any, count: int) -> None:
    """Makes a transformers configuration that of the first `count` layers alone."""
    for field, value in vars(config).items():
        # What a configuration says of each layer, such as `layer_types`; it is checked against their number.
        if "layer" in field and isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, field, value[:count])
    config.num_hidden_layers = count


def load_first_layers(config: BaseLMConfig, count: int | None, device: torch.device) -> nn.Module:
    """The first layers of a base LM without its head, in fp32, whatever dtype and quantisation the LM is used in.

    Args:
        config: the base LM, in safetensors in a folder or on the Hub.
        count: number of layers; None for all.
        device: where they go.

    Raises:
        ModelLoadError: when there is no such model, it has fewer layers, or its files hold quantised weights alone.
    """
    place = local_place(config.name, config.revision)
    revision = pinned(place, config.revision)
    architecture = loaded("a causal LM", place, AutoConfig.from_pretrained, revision=revision)
    if getattr(architecture, "quantization_config", None) is not None:
        raise ModelLoadError(
            f"{place} holds quantised weights, from which an encoder cannot start; give the encoder a name, or base_lm "
            "a folder with the weights as they were"
        )
    if count is not None:
        if count > architecture.num_hidden_layers:
            raise ModelLoadError(
                f"layers is {count}, but {architecture.model_type} has {architecture.num_hidden_layers}"
            )
        describe_first_layers(architecture, count)
    described = {"architecture": architecture, "auto_class": AutoModel}
    loaded("a model", place, check_size, revision=revision, **described)
    loader = partial(AutoModel.from_pretrained, config=architecture, dtype=torch.float32, use_safetensors=True)
    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would list all layers that are left out
    try:
        model, report = loaded("a model", place, loader, revision=revision, output_loading_info=True)
    finally:
        logging.set_verbosity(shown)
    require_all_weights(place, report)
    layers: nn.Module = model.to(device)
    return layers
