"""Data of the pipelines: questions, documents in parts and groups, and documents retrieved for questions."""
