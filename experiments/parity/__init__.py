"""Comparisons of this code with golden arrays, one file a method folder."""
