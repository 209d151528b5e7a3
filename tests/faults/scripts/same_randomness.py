# ranks 2; expect AR745; says ranks 0 and 1 .*Noisy .*same random numbers .*torch; guilty; limit 40
from torch.utils.data import Dataset
from job import loader, mark, start, torch, train

class Noisy(Dataset):
    def __len__(self):
        return 640
    def __getitem__(self, index):  #@guilty
        return torch.full((16,), index / 640) + torch.randn(16), index % 4

if __name__ == "__main__":
    start()
    mark()
    train(batches=loader(Noisy(), num_workers=1), epochs=5)  # job.py's loop: torch.manual_seed(0) on all ranks
