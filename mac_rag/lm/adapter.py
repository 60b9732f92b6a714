"""Adapters: low-rank updates of an LM's layers (LoRA; Hu et al., 2022), in the files that PEFT writes, without PEFT."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from mac_rag.errors import ModelLoadError
from mac_rag.lm.model_folders import ADAPTER as CONFIG
from mac_rag.untrusted_files import read_json

WEIGHTS = "adapter_model.safetensors"
_LARGEST_CONFIG = 1 << 20
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Adapter:
    """Updates of linear layers: `scale * up @ down` is added to the weight of each.

    Attributes:
        rank: r, the rank of each update.
        alpha: `scale * r`.
        updates: name of a layer -> `down` `[r, inputs]` and `up` `[outputs, r]`.
    """

    rank: int
    alpha: float
    updates: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def add(cls, folder: Path, lm: Any) -> Adapter:
        """Adds the adapter in a folder to an LM: to its weights, or beside them if they are quantised.

        Args:
            folder: the folder, as PEFT writes it.
            lm: the LM; its dtype is the one that the adapter is rounded to, as a sum with its weights would be anyway.

        Raises:
            ModelLoadError: if there is no adapter, it is not plain LoRA, or it belongs to another LM; the LM then stays
                as it was.
        """
        try:
            adapter = cls._read(folder, lm.dtype)
            adapter._apply(lm)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelLoadError(
                f"{folder} holds no adapter of this LM: {error}; train one for it (python -m pipelines.train --config "
                "my-lm-reading)"
            ) from None
        return adapter

    @classmethod
    def _read(cls, folder: Path, dtype: torch.dtype) -> Adapter:
        told = read_json(folder / CONFIG, _LARGEST_CONFIG)
        plain = told["peft_type"] == "LORA" and not any(map(told.get, ("use_dora", "use_rslora", "alpha_pattern")))
        tensors = {name.removeprefix(_PREFIX): each.to(dtype) for name, each in load_file(folder / WEIGHTS).items()}
        names = sorted(name.removesuffix(_DOWN) for name in tensors if name.endswith(_DOWN))
        if not plain or tensors.keys() != {name + part for name in names for part in (_DOWN, _UP)}:
            raise ValueError("it is of another kind than those of the task tune_reading")
        updates = {name: (tensors[name + _DOWN], tensors[name + _UP]) for name in names}
        ranks = {len(down) for down, _ in updates.values()}
        if ranks != {told["r"]}:
            raise ValueError(f"its rank is said to be {told['r']!r:.20}, and its updates have {sorted(ranks)}")
        return cls(told["r"], float(told["lora_alpha"]), updates)

    def write(self, folder: Path) -> None:
        """Writes the adapter, with no more of its description than PEFT needs, into a folder that is created."""
        folder.mkdir()
        targets = sorted({name.rpartition(".")[2] for name in self.updates})
        told = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": targets}
        (folder / CONFIG).write_text(json.dumps(told, indent=2) + "\n")
        save_file(self._tensors, folder / WEIGHTS, metadata={"format": "pt"})

    @property
    def digest(self) -> str:
        """sha256 of all that is added to the LM."""
        digest = hashlib.sha256(f"{self.alpha / self.rank}".encode())
        for name, tensor in sorted(self._tensors.items()):
            digest.update(f"{name} {tensor.dtype}".encode())
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def _tensors(self) -> dict[str, Tensor]:
        parts = ((name + part, each) for name, pair in self.updates.items() for part, each in zip((_DOWN, _UP), pair))
        return {_PREFIX + name: each for name, each in parts}

    @torch.no_grad()
    def _apply(self, lm: Any) -> None:
        layers = dict(lm.named_modules())
        for name, (down, up) in self.updates.items():
            layer = layers.get(name)
            if not isinstance(layer, nn.Linear | Conv1D):
                raise ValueError(f"the LM has no layer {name}")
            wide, high = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
            if (down.shape, up.shape) != ((self.rank, wide), (high, self.rank)):
                raise ValueError(f"{name} maps {wide} numbers to {high}, its update {[*down.shape]} to {[*up.shape]}")
        for name, (down, up) in self.updates.items():
            self._update(layers[name], down.float(), up.float())

    def _update(self, layer: Any, down: Tensor, up: Tensor) -> None:
        scale, weight = self.alpha / self.rank, layer.weight
        down, up = down.to(weight.device), up.to(weight.device)
        if weight.is_floating_point():
            update = up @ down * scale
            weight += update.T if isinstance(layer, Conv1D) else update
            return

        def with_update(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            update = functional.linear(functional.linear(inputs[0].to(down.dtype), down), up)
            return output + (scale * update).to(output.dtype)

        layer.register_forward_hook(with_update)
