"""A run before it has a machine: from a user's file to a model without weights, its plan, and what was replaced."""
