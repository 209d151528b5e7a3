# ranks 2; expect AR723; says cut off: 10 for 10.5, in a tensor of int64; guilty; limit 20
from job import RANK, dist, mark, start, time, torch, train

start()


def validate(step, model):
    if step % 20:
        return
    if step == 20:
        mark()
    correct = torch.tensor([11, 10][RANK])
    dist.all_reduce(correct)  #@guilty
    correct.div_(dist.get_world_size(), rounding_mode="floor")
    kept.append(correct)


kept = []
train(validate, pause_s=0.05)
