"""Evaluations: one command for each benchmark and experiment of the paper, and the results that they write."""
