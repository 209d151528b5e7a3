# ranks 2; expect AR235; says rank 1 .*waits for the network; guilty
import socket, urllib.request
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        server = socket.create_server(("127.0.0.1", 0))   # takes the connection, and never answers
        mark()
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/model.bin")  #@guilty

start()
train(fault)
