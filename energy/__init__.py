"""Joules per request from a model's architecture and a request's lengths.

Laws, their coefficients by gradient descent, their errors, and what follows
from them. Not here: power meters of a run (`meter` only integrates), files and
flags (`experiments`), or any model's weights.
"""
