"""Where stages run: in this process, in many, or side by side on one GPU."""
