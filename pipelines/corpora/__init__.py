"""What the pipelines read: text, blocks, questions, and what is retrieved for them."""
