"""What ranks compute together beside sharding: layers, sequences and batches that they share."""
