"""How a model becomes stages."""
