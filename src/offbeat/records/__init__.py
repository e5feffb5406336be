"""What happened in a run, as columns of plain numbers; nothing here knows torch."""
