"""A checkpoint into another layout: what is written where, and the copying of it."""
