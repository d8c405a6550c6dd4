"""Cross-entropy and L1 distance of a draft to its teacher, from two states."""
