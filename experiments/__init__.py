"""Scripts that run the library: one file, one experiment."""
