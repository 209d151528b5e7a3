# ranks 2; expect AR280; says models differ.*rank 1; limit 30
from torch import nn
from job import RANK, mark, start, train

start()
mark()
train(model=nn.Sequential(*[nn.Linear(16, 16) for _ in range(2 + RANK)], nn.Linear(16, 4)))
