# ranks 2; expect AR300 AR226; says rank 1 .*(has not come|sleeps); guilty; limit 15
import time
from job import RANK, mark, start

if RANK == 1:
    mark()
    time.sleep(100)  #@guilty
start()
