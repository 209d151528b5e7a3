# ranks 2; expect AR730; says rank 1 .*loss became nan first, at step 21; guilty; limit 40
"""One sample of rank 1's is broken."""
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from job import DDP, RANK, mark, network, nn, samples, start, time, torch

start()
x, y = samples().tensors
x[2 * (20 * 8 + 3) + 1, 5] = float("nan")  # the 4th sample of rank 1's batch 21
data = TensorDataset(x, y)
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
for epoch in range(8):
    for step, (x, y) in enumerate(batches):
        if step == 20 and epoch == 0:
            mark()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  #@guilty
        optimizer.step()
        time.sleep(0.01)
