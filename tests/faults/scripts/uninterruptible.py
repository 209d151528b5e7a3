# ranks 2; expect AR222; says rank 1 .*uninterruptible sleep .*(disk|file); guilty; needs loop devices; limit 40
import os, subprocess, tempfile
from job import RANK, mark, start, train

def frozen_disk():
    """A file system of its own that does not answer, until the agent of this job is gone."""
    folder = tempfile.mkdtemp(prefix="allranks-fault-")
    image, disk = f"{folder}/image", f"{folder}/disk"
    os.mkdir(disk)
    subprocess.run(f"truncate -s 16M {image} && mkfs.ext4 -q {image} && mount -o loop {image} {disk}", shell=True, check=True)
    file = open(f"{disk}/log.txt", "w")
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    agent = os.environ["ALLRANKS_AGENT_PID"]
    thaw = f"fsfreeze -u {disk}; sleep 1; umount -l {disk}; rm -r {folder}"
    subprocess.Popen(["sh", "-c", f"while [ -d /proc/{agent} ]; do sleep 0.2; done; {thaw}"], env={"PATH": os.environ["PATH"]}, start_new_session=True)
    return file

def fault(step, model):
    if RANK == 1 and step == 12:
        file = frozen_disk()
        mark()
        os.write(file.fileno(), b"x" * 4096)  #@guilty

start()
train(fault)
