# ranks 2; expect AR304; says eth9
import os
os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
from job import mark, start

mark()
start()
