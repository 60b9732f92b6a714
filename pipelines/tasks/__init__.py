"""The tasks of the training commands: each makes batches, computes a loss, and validates."""
