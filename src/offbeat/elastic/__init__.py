"""Replicas that die, and replicas that come back."""
