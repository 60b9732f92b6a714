"""Devices and dtypes of models: one choice of device, one table of dtypes, and LMs larger than one GPU."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mac_rag.config import Dtype
from mac_rag.errors import ConfigError, ModelLoadError

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Dtypes of stored weights; see `mac_rag.lm.loading.to_int8`.
STORED_DTYPES: dict[str, torch.dtype] = {str(name): dtype for name, dtype in DTYPES.items()} | {"int8": torch.int8}


def default_device(device: str | torch.device | None) -> torch.device:
    """The device of a name; for None a GPU if there is one, else the CPU.

    Raises:
        ConfigError: for a device that torch does not know or this machine does not have.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"there is no device {str(device)!r} here: {str(error).splitlines()[0]}; give another, such as cpu"
        ) from None
    return place


def warn_of_slow_numbers(name: str, dtype: Dtype, device: torch.device) -> None:
    """Warns if this processor has no instructions for a dtype and so computes in it many times slower than in fp32."""
    if device.type == "cpu" and dtype != "fp32" and not _has_instructions(dtype):
        warnings.warn(
            f"{name} is loaded in {dtype}, for which this processor has no instructions: it computes several times "
            "slower than in fp32, and trains tens of times slower; where memory allows, set dtype: fp32",
            UserWarning,
            stacklevel=3,
        )


def _has_instructions(dtype: Dtype) -> bool:
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported", None)
    return supported is None or bool(supported())


def fastest_dtype(device: torch.device) -> Dtype:
    """The dtype in which an LM answers fastest: bf16 on a GPU, and on a CPU that has instructions for it, else fp32."""
    return "bf16" if device.type != "cpu" or _has_instructions("bf16") else "fp32"


# An LM larger than one GPU: its layers lie on several devices, or stay in main memory or on disk until they run.
#
# accelerate's hooks move a module's inputs and weights to the device where it runs. What this package adds to an LM,
# such as a prefix, must be moved to these devices, too.


@dataclass(frozen=True)
class DeviceMap:
    """Where the parts of an LM go. It describes the machine, so it is not part of a checkpoint.

    Attributes:
        places: `auto`, `balanced`, `balanced_low_0` or `sequential`, or module name -> GPU number, `cpu` or `disk`, as
            transformers takes it.
        max_memory: GPU number or `cpu` -> bytes or a text like `20GiB`; None for all free memory.
    """

    places: str | Mapping[str, int | str]
    max_memory: Mapping[int | str, int | str] | None = None

    @classmethod
    def of(
        cls,
        places: str | Mapping[str, int | str] | None,
        max_memory: Mapping[int | str, int | str] | None,
        device: Any,
    ) -> DeviceMap | None:
        """The map from a caller's arguments; None without one.

        Raises:
            ConfigError: for a device together with a map, or a memory limit without one.
        """
        if places is None:
            if max_memory is not None:
                raise ConfigError(f"max_memory is {max_memory}, but there is no device_map; set device_map to auto")
            return None
        if device is not None:
            raise ConfigError(f"device is {str(device)!r}, but device_map decides where the LM goes; leave out one")
        return cls(places, max_memory)

    def load(self, loader: Any, place: str, **options: Any) -> Any:
        """Calls `loader(place, **options)` so that each part of the LM is loaded directly to its place.

        Raises:
            ModelLoadError: if accelerate is missing, a device does not exist or has no room, or the embeddings are
                offloaded.
        """
        try:
            import accelerate  # noqa: F401
        except ImportError:
            raise ModelLoadError("device_map needs accelerate: install mac-rag[train]") from None
        places = self.places if isinstance(self.places, str) else dict(self.places)
        memory = None if self.max_memory is None else dict(self.max_memory)
        # For offloaded weights that differ from those in the model's files; all others are read from these files.
        folder = TemporaryDirectory(prefix="mac-rag-offloaded-")
        try:
            model = loader(place, **options, device_map=places, max_memory=memory, offload_folder=folder.name)
        except (RuntimeError, AssertionError) as error:  # no such device, or no room there
            detail = str(error).strip().splitlines()[0]
            raise ModelLoadError(
                f"the LM cannot be placed as device_map {places} says: {detail}; change device_map or max_memory"
            ) from error
        if any(Path(folder.name).iterdir()):
            model.offload_folder = folder  # removed together with the model
        else:
            folder.cleanup()
        if model.get_input_embeddings().weight.is_meta:
            raise ModelLoadError(
                "device_map offloads the LM's embeddings, but they and MAC's networks must stay on a device; map them "
                "to a GPU, or to cpu if there is none"
            )
        return model


def device_of(module: Any) -> torch.device:
    """The device where a module runs."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        return next(module.parameters()).device  # type: ignore[no-any-return]
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def offloaded_weights(model: Any) -> list[str]:
    """Names of the weights that are moved to a device only while they are needed."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def require_weights(model: Any, purpose: str) -> None:
    """Checks that all weights of an LM are loaded, for a purpose that needs them at once.

    Raises:
        ConfigError: if some are offloaded; the message names the first.
    """
    offloaded = offloaded_weights(model)
    if offloaded:
        raise ConfigError(
            f"{purpose} needs all weights of the LM, but device_map has offloaded {len(offloaded)} of them to cpu or "
            f"disk, such as {offloaded[0]}; load the model on devices with enough memory"
        )
