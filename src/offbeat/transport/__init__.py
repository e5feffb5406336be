"""How messages travel between stages and between replicas."""
