# ranks 2; expect AR744; says rank 1 .*no data; guilty; limit 40
"""One shard for two ranks: rank 1 evaluates nothing."""
from torch.utils.data import DataLoader, IterableDataset
from job import RANK, mark, start, time, torch, train

class Shards(IterableDataset):
    def __init__(self, shards):
        self.shards = shards[RANK::2]
    def __iter__(self):
        for shard in self.shards:
            yield from (torch.full((16,), float(i)) for i in range(shard))

def evaluate(step, model):
    if step == 20:
        mark()
        with torch.no_grad():
            for x in DataLoader(Shards([40]), batch_size=8):  #@guilty
                model.module(x)

start()
train(evaluate, pause_s=0.02)
