"""Speculative rounds, verification rules and generation."""
