"""Where stages run: in one process, in many, or side by side on one GPU."""
