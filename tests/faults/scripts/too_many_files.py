# ranks 2; expect AR209 AR207; says rank 1.*(too many open files|loader)
import resource
import torch
from job import RANK, loader, mark, start, train

if __name__ == "__main__":
    start()
    mark()
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
        kept = [batch for batch in loader(num_workers=1)]
    train()
