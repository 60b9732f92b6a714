"""Speed of a training, and the share of the chip's peak that it uses."""

from __future__ import annotations

from typing import Any

import torch

# Dense bf16 peaks in FLOP/s (vendor's data sheets) by a part of the chip's name; the first that fits counts.
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}


def training_speed(lm: Any, sequences: float, length: int) -> dict[str, float]:
    """Tokens per second and, on a chip whose peak is known, the share of this peak.

    A token costs 6 FLOP for each weight, and 6 x layers x width x length for causal attention, forward and backward
    (Chowdhery et al., 2022, "PaLM", appendix B; halved, because causal attention skips later tokens).

    Args:
        lm: a causal LM.
        sequences: full sequences per second over all processes.
        length: tokens of a sequence.
    """
    tokens = sequences * length
    speed = {"tokens_per_second": tokens}
    peak = _peak(lm.device)
    if peak is not None:
        weights = sum(parameter.numel() for parameter in lm.parameters())
        per_token = 6 * weights + 6 * lm.config.num_hidden_layers * lm.config.hidden_size * length
        processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        speed["share_of_peak"] = tokens * per_token / (peak * processes)
    return speed


def _peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for chip, peak in PEAKS.items() if chip in name), None)
