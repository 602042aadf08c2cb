"""Loading a checkpoint into a model: the plan, reading and checking, and the change of the model."""
