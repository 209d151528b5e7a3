# ranks 2; expect AR739; says ranks 0 and 1 .*write the same file at once: .*last.pt; guilty; limit 40
import os
from job import mark, start, torch, train

def save(step, model):
    if step == 20:
        mark()
        torch.save(model.module.state_dict(), os.path.join(os.environ.get("FAULT_DIR", "/tmp"), "last.pt"))  #@guilty

start()
train(save, pause_s=0.02)
