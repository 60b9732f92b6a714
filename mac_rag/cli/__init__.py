"""The command `mac-rag`, and how every command of the project starts."""
