"""Memory by part and kind: what `pipelines.plan` shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mac_rag.errors import ConfigError

GIB = 1 << 30
# CUDA's own memory for a process, and what PyTorch's allocator cannot use again.
RESERVED = GIB
GPUS = {
    "t4": 16, "rtx-3060": 12, "rtx-3090": 24, "rtx-4090": 24, "rtx-5090": 32, "l4": 24, "a10": 24, "l40s": 48,
    "v100-32gb": 32, "a100-40gb": 40, "a100-80gb": 80, "h100": 80, "h200": 141, "b200": 180,
}  # fmt: skip


def gpu_bytes(text: str) -> int:
    """Bytes of a GPU by its size in GiB or its name.

    Raises:
        ConfigError: for any other text.
    """
    name = text.strip().lower().replace(" ", "-")
    for known, size in GPUS.items():
        if name in (known, known.removeprefix("rtx-")):
            return size * GIB
    try:
        given = float(name)
    except ValueError:
        given = 0.0
    if not 0 < given < 1 << 20:
        raise ConfigError(f"--gpu {text!r}: give a size in GiB, or one of {', '.join(GPUS)}")
    return int(given * GIB)


@dataclass(frozen=True)
class Memory:
    """Memory of one use of a model.

    Attributes:
        parts: part -> kind of memory -> bytes.
    """

    parts: Mapping[str, Mapping[str, int]]

    @property
    def kinds(self) -> list[str]:
        """The kinds of memory that any part has, in the order in which parts name them."""
        named = dict.fromkeys(kind for part in self.parts.values() for kind in part)
        return [kind for kind in named if self.of(kind)]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(sum(part.values()) for part in self.parts.values())

    def of(self, kind: str) -> int:
        """Bytes of one kind."""
        return sum(part.get(kind, 0) for part in self.parts.values())

    def fits(self, gpu: int) -> bool:
        """True if a GPU with so many bytes has room for it, beside 1 GiB for CUDA and PyTorch's allocator."""
        return self.total + RESERVED <= gpu


def smallest_gpu(memory: Memory) -> int | None:
    """GiB of the smallest common GPU that has room for a use; None if there is none."""
    return next((size for size in sorted(set(GPUS.values())) if memory.fits(size * GIB)), None)
