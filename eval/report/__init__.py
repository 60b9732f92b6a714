"""One page of all results, with plots and the paper's figures: `python -m eval.report --help`."""
