"""The systems that the paper compares MAC with, each trained and evaluated by the paper's protocol.

Online fine-tuning (Uniform, Salient Spans, CaMeLS), prompting (zero-shot, five-shot, a retriever), and compressed
contexts with a trained retriever (CCM).
"""
