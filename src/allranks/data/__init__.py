"""The data of a run: which samples does each rank see, in which order, and how do they get to its device?

make_loader     a data set or DataLoader -> RankLoader, this rank's batches
MicroBatch      what the loop knows of the batch it was just given
"""

from allranks.data.batch import MicroBatch
from allranks.data.loader import RankLoader
from allranks.data.make import make_loader

__all__ = ["MicroBatch", "RankLoader", "make_loader"]
