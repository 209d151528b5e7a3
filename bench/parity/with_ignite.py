"""The job in Ignite: its supervised trainer with gradient_accumulation_steps, its automatic loaders, its evaluator."""

from __future__ import annotations

import ignite
import ignite.distributed as idist
from ignite.engine import Engine, Events, create_supervised_trainer
from job import ACCUMULATION_STEPS, TEST_SET, TRAIN_SET, Watch, Weight, optimizer_of, tell


def main(local_rank: int) -> None:
    """One rank."""
    plain = Weight()
    watch = Watch(plain)
    model = idist.auto_model(plain)
    trainer = create_supervised_trainer(
        model,
        idist.auto_optim(optimizer_of(model)),
        lambda output, target: output.mean(),
        prepare_batch=lambda batch, device, non_blocking: (batch[0], batch[0]),
        gradient_accumulation_steps=ACCUMULATION_STEPS,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, watch.look)
    trainer.run(idist.auto_dataloader(TRAIN_SET, batch_size=2, shuffle=False), max_epochs=1)
    counts = []
    evaluator = Engine(lambda engine, batch: counts.append(len(batch[0])))
    evaluator.run(idist.auto_dataloader(TEST_SET, batch_size=2, shuffle=False))
    evaluated = idist.all_reduce(sum(counts))
    if idist.get_rank() == 0:
        tell("Ignite", ignite.__version__, watch, int(evaluated))


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(main)
