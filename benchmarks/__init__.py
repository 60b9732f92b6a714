"""Benchmarks of time and memory, each against a plain implementation in the same run."""
