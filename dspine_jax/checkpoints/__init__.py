"""Weights on disk: Hugging Face folders and Orbax training state."""
