"""The job as a user of allranks writes it."""

from job import *

import allranks

lf, done = nn.CrossEntropyLoss(), False
with allranks.start(global_batch_size=BATCH * int(os.environ.get("WORLD_SIZE", 1))) as run:
    m = run.model(model(), shared_memory="auto" if os.environ.get("SHARED_MEMORY", "1") == "1" else False)
    opt = run.optimizer(torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9))
    dl, c = run.loader(dataset(), shuffle=True, drop_last=True), Clock("allranks")
    while not done:
        for x, y in dl:
            run.step(lf(m(x), y))
            if c.tick():
                done = True
                break
