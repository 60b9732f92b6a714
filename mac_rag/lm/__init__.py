"""The frozen base LM: loading, prompts, generation under a modulation, and an LM architecture of our own."""
