"""What a step of a plan allocates and sends, and how long it takes at least, without a GPU and for any world size."""
