"""Load a checkpoint into a model: plan, read and check, then modify the model."""
