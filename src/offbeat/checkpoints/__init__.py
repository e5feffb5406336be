"""Saving a run with everything it has in flight, and taking it up again with the same bits.

An *exact* checkpoint holds what every stage, every message and every average under way is between
two steps; nothing is drained. A *drained* one holds plain weights and training state by name, and
fits any cut, method or number of replicas.
"""

from offbeat.checkpoints.archive import Archive, Resumed
from offbeat.checkpoints.weights import load_weights, open_weights, save_weights

__all__ = ["Archive", "Resumed", "load_weights", "open_weights", "save_weights"]
