"""The frozen base LM: loading, prompts, generation under a modulation, and the prefix LM of mac-small."""
