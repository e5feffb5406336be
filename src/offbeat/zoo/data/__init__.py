"""Data for training: found in a folder, in the cache or on the net, and held on its device."""
