"""The job in Accelerate, as its guide to gradient accumulation writes it."""

from __future__ import annotations

import accelerate
import torch
from job import ACCUMULATION_STEPS, TEST_SET, TRAIN_SET, Watch, Weight, optimizer_of, tell
from torch.utils.data import DataLoader

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION_STEPS)
model = Weight()
watch = Watch(model)
model, optimizer, train, test = accelerator.prepare(
    model, optimizer_of(model), DataLoader(TRAIN_SET, 1), DataLoader(TEST_SET, 1)
)
for (x,) in train:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    watch.look()
evaluated = sum(len(accelerator.gather_for_metrics(x)) for (x,) in test)
if accelerator.is_main_process:
    tell("Accelerate", accelerate.__version__, watch, evaluated)
torch.distributed.destroy_process_group()
