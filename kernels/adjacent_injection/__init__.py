"""A slot of a draft block writes into its successor's residual stream."""
