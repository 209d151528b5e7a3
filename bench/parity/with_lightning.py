"""The job in Lightning: a module, a trainer with accumulate_grad_batches, and validation as the trainer does it."""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
from job import ACCUMULATION_STEPS, TEST_SET, TRAIN_SET, Watch, Weight, optimizer_of, tell
from torch.utils.data import DataLoader


class Job(lightning.LightningModule):
    """The weight, and what is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Weight()
        self.watch = Watch(self.model)
        self.evaluated = 0

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.model(batch[0]).mean()

    def on_train_batch_end(self, *args: object) -> None:
        self.watch.look()

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.evaluated += len(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
job = Job()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=ACCUMULATION_STEPS,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    num_sanity_val_steps=0, limit_val_batches=0,
)  # fmt: skip
trainer.fit(job, DataLoader(TRAIN_SET, 1), DataLoader(TEST_SET, 1))
trainer.limit_val_batches = 1.0
trainer.validate(job, DataLoader(TEST_SET, 1), verbose=False)
evaluated = torch.tensor(job.evaluated)
torch.distributed.all_reduce(evaluated)
if trainer.is_global_zero:
    tell("Lightning", lightning.__version__, job.watch, int(evaluated))
torch.distributed.destroy_process_group()
