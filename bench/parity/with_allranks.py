"""The job in allranks."""

from __future__ import annotations

import tempfile

from job import ACCUMULATION_STEPS, TEST_SET, TRAIN_SET, Watch, Weight, optimizer_of, tell

import allranks

with (
    tempfile.TemporaryDirectory() as folder,
    allranks.start(folder, global_batch_size=8, accumulation_steps=ACCUMULATION_STEPS) as run,
):
    plain = Weight()
    watch = Watch(plain)
    model = run.model(plain)
    run.optimizer(optimizer_of(model))
    for (x,) in run.loader(TRAIN_SET, train=True):
        run.step(model(x).mean())
        watch.look()
    evaluated = run.sum(len(x) for (x,) in run.loader(TEST_SET, global_batch_size=2))
    if run.is_rank_zero:
        tell("allranks", allranks.__version__, watch, evaluated)
