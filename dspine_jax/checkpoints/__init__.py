"""Reading and writing weights: Hugging Face folders and Orbax training state."""
