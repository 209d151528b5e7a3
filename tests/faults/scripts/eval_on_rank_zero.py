# ranks 2; expect AR264 AR250; says rank 0 ; guilty
import torch
from torch import nn
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 0 and step == 12:
        mark()
        model.eval()
        for _ in range(5):
            model(torch.zeros(8, 16))  #@guilty
        model.train()

start()
train(fault, model=nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
