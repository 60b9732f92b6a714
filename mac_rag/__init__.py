"""A frozen language model with a memory of amortized contexts, alone and joined with retrieval."""

DEFAULT_MODEL = "mac-small"  # the shipped model that is used where none is named
