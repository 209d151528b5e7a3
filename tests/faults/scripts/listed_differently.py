# ranks 2; expect AR748; says ranks 0 and 1 .*Folder.files in another order; guilty; limit 40
import os
from torch.utils.data import Dataset
from job import RANK, loader, mark, start, torch, train

place = os.path.join(os.environ.get("FAULT_DIR", "/tmp"), "files")
os.makedirs(place, exist_ok=True)
for i in range(160):
    open(os.path.join(place, f"{i}.txt"), "w").close()
listed = os.listdir(place)  # as each host lists them: its own order  #@guilty

class Folder(Dataset):
    def __init__(self):
        self.files = list(listed[:: 1 if RANK == 0 else -1])
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index):
        number = int(self.files[index].split(".")[0])
        return torch.full((16,), number / 160), number % 4

start()
mark()
train(batches=loader(Folder()), epochs=20, pause_s=0.02)
