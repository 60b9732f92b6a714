"""The embedded newswire: a generated world, its beats, and the stories told about it."""
