"""The systems that the paper holds MAC against, each trained and evaluated by its protocol.

Online fine-tuning (Uniform, Salient Spans, CaMeLS), prompts alone (zero-shot, five-shot, a retriever), and compressed
contexts with a trained retriever (CCM).
"""
