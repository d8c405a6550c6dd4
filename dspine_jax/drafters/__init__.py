"""Block drafters: one backbone, one file a method."""
