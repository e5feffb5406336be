"""Data for training: found in a folder, in the cache or on the net, and held on its device."""

from offbeat.zoo.data.digits import batches, digits
from offbeat.zoo.data.loader import Loader
from offbeat.zoo.data.sets import DATA, Data, data_named, gpt2_tokens

__all__ = ["DATA", "Data", "Loader", "batches", "data_named", "digits", "gpt2_tokens"]
