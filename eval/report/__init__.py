"""One page of all results, with plots and the paper's numbers: `python -m eval.report --help`."""
