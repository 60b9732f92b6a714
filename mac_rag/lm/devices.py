"""The device and the dtype of models: one choice of device, one table of dtypes."""

from __future__ import annotations

import warnings

import torch

from mac_rag.config import Dtype
from mac_rag.errors import ConfigError

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What weights are stored in; see `mac_rag.lm.int8_storage` for int8.
STORED_DTYPES: dict[str, torch.dtype] = {str(name): dtype for name, dtype in DTYPES.items()} | {"int8": torch.int8}


def default_device(device: str | torch.device | None) -> torch.device:
    """The device by its name; for None a GPU if there is one, else the CPU.

    Raises:
        ConfigError: for a device that torch does not know or this machine does not have.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"there is no device {str(device)!r} here: {str(error).splitlines()[0]}") from None
    return place


def warn_of_slow_numbers(name: str, dtype: Dtype, device: torch.device) -> None:
    """Tells that this processor has no instructions for a dtype, and computes in it many times slower than in fp32."""
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
