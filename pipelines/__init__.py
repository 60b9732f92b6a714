"""Training and preparing data: every module with a `main` is a command, `python -m pipelines.<name> --help`."""
