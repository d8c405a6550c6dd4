"""Accelerated ops for block drafters, each beside a plain-JAX reference.

An op is a folder: `api.py` is the public function with its gradient,
`reference.py` its specification in plain JAX and the XLA implementation,
`triton.py` and `pallas_mosaic.py` the kernels for Hopper, `cost.py` what they
must compute and move. Importing this package touches no GPU and loads neither
Triton nor Mosaic.
"""
