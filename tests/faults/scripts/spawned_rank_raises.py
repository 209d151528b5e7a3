# ranks 1; expect AR200; says rank 1 .*KeyError; guilty; limit 10
"""A script that starts its own ranks with mp.spawn; one of them raises."""
import os, socket
import torch.multiprocessing as mp
import torch.distributed as dist
import job

def main(rank, world_size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    def fault(step, model):
        if rank == 1 and step == 12:
            job.mark()
            {}["label"]  #@guilty
    job.train(fault)

if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    mp.spawn(main, (2, port), nprocs=2)
