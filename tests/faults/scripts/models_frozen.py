# ranks 2; expect AR280; says models differ.*rank 1; limit 30
from job import RANK, mark, network, start, train

start()
model = network()
if RANK == 1:
    model[0].weight.requires_grad_(False)
mark()
train(model=model)
