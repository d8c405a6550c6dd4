"""Text, prompts, answers and features, as arrays."""
