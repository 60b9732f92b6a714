"""The systems that the paper compares MAC with, each trained and evaluated by the paper's protocol."""
