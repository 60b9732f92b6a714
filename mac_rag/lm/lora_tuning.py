"""Tuning of a base LM: all of its weights, or low-rank updates (PEFT) that saving merges into the weights."""

from __future__ import annotations

import copy
from typing import Any

from transformers.pytorch_utils import Conv1D

from mac_rag.errors import ConfigError
from mac_rag.lm.loading import keep_gradients
from mac_rag.nn.dtypes import use_master_weights


def make_trainable(lm: Any, lora_rank: int | None, *, merging: bool = True) -> None:
    """Makes all weights trainable, or freezes them and adds trainable low-rank updates in place.

    Trained weights become fp32, even in an LM of half precision (see `mac_rag.nn.dtypes.use_master_weights`).

    Args:
        lm: a transformers causal LM; it keeps its class and the names of its modules.
        lora_rank: rank of the updates; None trains all weights.
        merging: False for updates that are never merged, which a quantised LM can have too (QLoRA).

    Raises:
        ConfigError: for a quantised LM, whose weights cannot be trained, or merged; if PEFT is missing.
    """
    if getattr(lm, "is_quantized", False) and (merging or lora_rank is None):
        raise ConfigError("a quantised base LM stays frozen; set base_lm.quantization: none to train it")
    keep_gradients(lm)
    lm.requires_grad_(lora_rank is None)
    if lora_rank is None:
        use_master_weights(lm)
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("low-rank tuning needs PEFT: install mac-rag[train]") from None
    transposed = any(isinstance(module, Conv1D) for module in lm.modules())  # GPT-2's linear layers
    config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=_targets(lm), fan_in_fan_out=transposed)
    inject_adapter_in_model(config, lm)
    use_master_weights(lm)


def merged(lm: Any) -> Any:
    """The LM without adapters: the LM itself, or a copy with its low-rank updates merged into its weights."""
    if not any("lora_" in name for name, _ in lm.named_parameters()):
        return lm
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = copy.deepcopy(lm)
    for name, module in list(plain.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            plain.set_submodule(name, module.get_base_layer())
    if hasattr(plain, "peft_config"):
        del plain.peft_config
    return plain


def _targets(lm: Any) -> list[str]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    kind = lm.config.model_type
    if kind not in TARGETS:
        raise ConfigError(f"PEFT knows no LoRA targets for {kind}; train the base LM in full, or leave it frozen")
    return list(TARGETS[kind])
