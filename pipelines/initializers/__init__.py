"""First weights of networks, before any training."""
