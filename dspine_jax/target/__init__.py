"""The target (verifier): a Qwen3- or Llama-style decoder and its taps."""
