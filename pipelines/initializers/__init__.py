"""How networks start, before any training."""
