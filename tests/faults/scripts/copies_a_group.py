# ranks 2; expect AR200; says ProcessGroup; tells Model.body.1.group; guilty
"""C55: a module keeps a process group, and is copied."""
import copy
import torch.distributed as dist
from torch import nn
from job import mark, network, start

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(network(), nn.Linear(4, 4))
        self.body[1].group = dist.new_group()

start()
model = Model()
mark()
best = copy.deepcopy(model)  #@guilty
