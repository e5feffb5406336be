"""The order of work at every stage, as values; nothing here knows torch."""
