"""What is wrong with a checkpoint, found and named."""
