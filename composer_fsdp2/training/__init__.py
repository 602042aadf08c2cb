"""The steps of a sharded model: microbatches, clipping, full parameters, guards and out-of-memory votes."""
