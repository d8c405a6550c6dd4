"""DSpine and its baselines as pure JAX functions over pytrees.

Importing this package touches no accelerator and parses no flag.
"""
