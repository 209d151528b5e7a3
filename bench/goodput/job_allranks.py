"""The job with allranks: saved every 25 updates, resumed by itself.  job_allranks.py PROGRESS"""

import sys

import torch
import torch.nn.functional as F
from work import EPOCHS, Progress, data, model

import allranks

with allranks.start(global_batch_size=64, seed=1) as run:
    net = run.model(model())
    adam = run.optimizer(torch.optim.Adam(net.parameters(), lr=1e-3))
    loader = run.loader(data(), shuffle=True, num_workers=0)
    run.save_every(steps=25)
    progress = Progress(sys.argv[1])
    for _ in run.epochs(EPOCHS):
        for x, y in loader:
            run.step(F.cross_entropy(net(x), y))
            if run.is_rank_zero:
                progress.say(run.updates)
