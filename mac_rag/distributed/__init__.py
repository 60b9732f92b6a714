"""Banks and adaptation on several processes or machines with Ray (extra `ray`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mac_rag.distributed.sharded_bank import ShardedBank

__all__ = ["ShardedBank"]


def __getattr__(name: str) -> Any:  # imported on first use, because it needs PyTorch
    if name != "ShardedBank":
        raise AttributeError(f"module 'mac_rag.distributed' has no attribute {name!r}")
    from mac_rag.distributed.sharded_bank import ShardedBank

    return ShardedBank
