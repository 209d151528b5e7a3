# ranks 2; expect AR223; says rank 1 .*lock; guilty
import threading, time
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        first, second = threading.Lock(), threading.Lock()
        def other():
            with second:
                time.sleep(0.2)
                with first: pass  #@guilty
        with first:
            threading.Thread(target=other, daemon=True).start()
            time.sleep(0.1)
            second.acquire()  #@guilty

start()
train(fault)
