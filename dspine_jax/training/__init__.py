"""Training of drafters (and of the embedded target's optimiser parts)."""
