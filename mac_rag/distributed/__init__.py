"""Work on several processes or machines with Ray (extra `ray`)."""

from mac_rag.distributed.sharded_bank import ShardedBank

__all__ = ["ShardedBank"]
