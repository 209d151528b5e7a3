# ranks 4; expect AR211 AR739; says ranks? .*(wrote|write) .*best\.pt; guilty; limit 30
"""C56: all ranks write one file, and read it back."""
import os, torch
from job import RANK, mark, start

start()
path = os.path.join(os.environ.get("FAULT_DIR", "."), "best.pt")
mark()
for turn in range(20):
    torch.save({"weights": torch.randn(200_000 + 1000 * RANK), "rank": RANK}, path)  #@guilty
    torch.load(path)
