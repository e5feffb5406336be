"""Other people's training loops around an offbeat trainer."""
