"""Guards: what becomes of an update that is not finite, or too old."""

from offbeat.guards.guard import Guard, Guards, Policy
from offbeat.records.updates import Outcome, Update, Updates

__all__ = ["Guard", "Guards", "Outcome", "Policy", "Update", "Updates"]
