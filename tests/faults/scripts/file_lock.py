# ranks 2; expect AR233; says rank 1 .*waits for a lock on a file .*holds; guilty
import fcntl, os, subprocess, sys, tempfile
from job import RANK, mark, start, train

HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(300)"

def fault(step, model):
    if RANK == 1 and step == 12:
        path = os.path.join(tempfile.mkdtemp(), "cache.lock")
        holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE)
        holder.stdout.readline()
        with open(path, "w") as file:
            mark()
            fcntl.flock(file, fcntl.LOCK_EX)  #@guilty

start()
train(fault)
