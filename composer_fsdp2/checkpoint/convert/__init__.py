"""Converting a checkpoint into another layout: the plan, and the copying."""
