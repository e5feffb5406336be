"""A slice of the model at work: its weight versions, micro-batches in flight and memory."""
