"""Scores of all adjacent pairs of candidates, and the draft they select."""
