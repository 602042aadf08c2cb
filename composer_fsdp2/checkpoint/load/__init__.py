"""A checkpoint into a model: what fits, what is read, and whether it may be changed."""
