"""A snapshot of a bank in shards."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mac_rag.distributed.reader import ShardedReader
from mac_rag.distributed.sharded_contents import ShardedContents
from mac_rag.memory.known_documents import Timeline

if TYPE_CHECKING:
    from mac_rag.config import AttentionConfig
    from mac_rag.model import MACModel


class ShardedSnapshot(ShardedContents):
    """The contents of a bank in shards at one moment; later changes of the bank do not affect it.

    The shards keep the states that it refers to as long as it is in use.
    """

    @cached_property
    def timeline(self) -> Timeline:
        """As `ShardedContents.timeline`, made once."""
        return super().timeline

    def reader(self, model: MACModel, config: AttentionConfig) -> ShardedReader:
        """See `mac_rag.memory.views.base_reader.BringsReader`."""
        return ShardedReader(model, self, config)
