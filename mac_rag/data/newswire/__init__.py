"""Newswire: generated news stories with questions."""
