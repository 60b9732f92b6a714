"""A bank as a network reads it: projected, as codes, by prior, and what recent questions found."""
