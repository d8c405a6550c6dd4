"""The stages of an experiment as functions, without flags.

Scripts define flags and call these; the quickstart strings them together.
"""
