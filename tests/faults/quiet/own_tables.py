# ranks 2
"""Each rank has a table of its own size, which DDP is told to leave alone."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, network, start, train

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(4 + RANK))
        self.register_buffer("seen", torch.zeros(2 + RANK))

class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = Table(), network()

    def forward(self, x):
        return self.head(x) + self.table.rows.sum()

start()
model = Tables()
DDP._set_params_and_buffers_to_ignore_for_model(model, ["table.rows", "table.seen"])
train(model=model, epochs=1)
dist.destroy_process_group()
