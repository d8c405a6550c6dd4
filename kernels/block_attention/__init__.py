"""Slots of draft blocks attend to their context and to their own block."""
