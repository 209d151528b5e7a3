"""What does the probe see of scripts that know nothing of it, and are they as they were?

The scripts run as a world of one rank, started as the agent starts ranks (several: tests/ranks, tests/faults).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from allranks.record import layout as at
from allranks.record.models import read_models
from allranks.record.page import ExitKind, Phase, Record, Role, ask, read_pages, side_file
from support.command import Command, StartCommand

pytestmark = pytest.mark.e2e

BOOT = Path(at.__file__).parent / "boot"
TRAIN = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

def train(epochs=1, workers=0, batches=8, **loader):
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(4 * batches, 4), torch.randn(4 * batches, 2))
    for epoch in range(epochs):
        for x, y in DataLoader(data, batch_size=4, num_workers=workers, **loader):
            loss = ((model(x) - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model
"""

Rank = Callable[..., Command]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "record folder"
    made.mkdir()
    return made


@pytest.fixture
def start_rank(start_command: StartCommand, tmp_path: Path, folder: Path) -> Rank:
    """Start a rank as the agent does."""

    def start(
        source: str, *, prelude: str = TRAIN, module: str = "", env: Mapping[str, str] | None = None
    ) -> Command:
        script = tmp_path / "my train.py"
        script.write_text(prelude + source)
        settings = {
            "ALLRANKS_RECORD_DIR": str(folder),
            "ALLRANKS_AGENT_PID": str(os.getpid()),
            "PYTHONPATH": str(BOOT),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        program = ["-m", module] if module else [script]
        return start_command(sys.executable, *program, env=settings)

    return start


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def the_rank(folder: Path, rank: int = 0) -> Record:
    return next(r for r in read_pages(folder) if r.role == Role.RANK and r.rank == rank)


def wait_for(folder: Path, is_there: Callable[[list[Record]], bool], command: Command) -> list[Record]:
    deadline = time.monotonic() + 40
    while not is_there(found := read_pages(folder)):
        assert time.monotonic() < deadline and command.process.poll() is None, (found, command.err)
        time.sleep(0.02)  # a page has no readiness to wait on
    return found


SEVERAL_CALLS = """
from torch.distributed import all_reduce
dist.init_process_group("gloo")
train(epochs=2)
group = dist.new_group([0], group_desc="mine")
t = torch.ones(3, 4)
all_reduce(t, op=dist.ReduceOp.MAX)
handle = dist.all_reduce(t, group=group, async_op=True); handle.wait()
dist.broadcast(t, src=0)
gathered = [None]
dist.all_gather_object(gathered, {"a": 1})
dist.barrier()
torch.save(t, "x.pt")
import inspect, copy, pickle
assert list(inspect.signature(dist.all_reduce).parameters) == ["tensor", "op", "group", "async_op"]
assert pickle.loads(pickle.dumps(dist.all_reduce)) is dist.all_reduce is all_reduce
assert "loss" in inspect.getsource(train) and "tensor" in inspect.getsource(dist.broadcast)
model = train()
assert isinstance(model, DDP) and isinstance(copy.deepcopy(model), DDP)
try:
    dist.all_reduce("not a tensor")
except TypeError:
    print("refused as ever")
dist.destroy_process_group()
"""


def test_script_when_ordinary_then_everything_is_in_its_record(start_rank: Rank, folder: Path) -> None:
    command = start_rank(SEVERAL_CALLS)
    done = command.finish(50)
    assert done.code == 0, done.story()
    assert "refused as ever" in done.out and "allranks" not in done.out + done.err, done.story()
    record = the_rank(folder)
    assert record.pid == command.process.pid
    assert (record.rank, record.world_size, record.local_rank) == (0, 1, 0)
    assert (record.step, record.phase, record.exit.kind) == (24, Phase.EXIT, ExitKind.ENDED)
    assert record.is_probed and not record.has_stepped_aside and record.destroyed_ns > 0
    assert record.loader is not None and record.loader_before is not None
    assert (record.loader.drawn, record.loader.length, record.loader.number) == (8, 8, 3)
    assert record.loader.line.endswith("my train.py:12 train")
    spent = [
        Phase.IMPORT,
        Phase.INIT,
        Phase.BUILD,
        Phase.DATA,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    ]
    assert all(record.phase_ns[phase] > 0 for phase in [*spent, Phase.COLLECTIVE, Phase.CHECKPOINT])
    ops = [(c.op, c.group, c.line.rsplit(":", 1)[-1].split(" ")[0]) for c in record.collectives]
    assert ops == [
        ("new_group", "default", "22"),
        ("all_reduce", "default", "24"),
        ("all_reduce", "mine", "25"),
        ("wait(all_reduce)", "mine", "25"),
        ("broadcast", "default", "26"),
        ("all_gather_object", "default", "28"),
        ("barrier", "default", "29"),
        ("all_reduce", "default", "38"),
        ("destroy_process_group", "", "41"),
    ]
    maximum, handle = record.collectives[1], record.collectives[2]
    assert (maximum.reduce_op, maximum.shape, maximum.dtype, maximum.numel) == ("MAX", (3, 4), "float32", 12)
    assert (handle.ranks, handle.is_async, handle.was_waited) == ("0", True, True)
    assert record.collectives[4].root == 0 and record.collectives[7].has_failed
    assert record.issued == 7
    models = read_models(side_file(record, ".models.jsonl"))
    assert [m.number for m in models] == [1, 2] and models[0].hash == models[1].hash
    assert [t.name for t in models[0].tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]


STUCK_WORKER = """
import time
class Stuck(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i):
        if i == 9:
            time.sleep(600)
        return torch.zeros(4), torch.zeros(2)
if __name__ == "__main__":
    dist.init_process_group("gloo")
    for batch in DataLoader(Stuck(), batch_size=4, num_workers=2, multiprocessing_context=METHOD):
        pass
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_worker_when_stuck_then_its_sample_and_stack_are_known(
    start_rank: Rank, folder: Path, method: str
) -> None:
    command = start_rank(STUCK_WORKER.replace("METHOD", repr(method)))

    def is_stuck(found: list[Record]) -> bool:
        return any(r.role == Role.LOADER_WORKER and r.sample_at == 1 and 9 in r.samples for r in found)

    found = wait_for(folder, is_stuck, command)
    rank = the_rank(folder)
    worker = next(r for r in found if r.role == Role.LOADER_WORKER and 9 in r.samples)
    assert (worker.worker_id, worker.samples, worker.sample_count) == (0, (8, 9, 10, 11), 4)
    assert worker.pid in rank.loader_worker_pids and worker.parent_pid == rank.pid
    assert worker.rank == 0
    wait_for(folder, lambda _: the_rank(folder).phase == Phase.DATA, command)
    for record in (worker, rank):
        assert record.stack_signal == at.stack_signal()
        os.kill(record.pid, record.stack_signal)
        stack = side_file(record, ".stack")
        deadline = time.monotonic() + 20
        while not stack.read_text().rstrip().endswith("<module>") and time.monotonic() < deadline:
            time.sleep(0.02)  # a file has no readiness to wait on
        assert ("__getitem__" if record is worker else "my train.py") in stack.read_text()
    assert command.process.poll() is None  # both live on


@pytest.mark.parametrize(
    ("source", "code", "kind", "line"),
    [
        ("def f(x):\n    raise ValueError(f'bad {x}')\nf(3)", 1, ExitKind.EXCEPTION, "2 f"),
        ("import sys\nsys.excepthook = print\nraise OSError('x')", 1, ExitKind.EXCEPTION, "3 <module>"),
        (
            "import sys\ntry:\n    1 / 0\nexcept Exception:\n    sys.exit(3)",
            3,
            ExitKind.SYSTEM_EXIT,
            "5 <module>",
        ),
        ("import os\ndef leave():\n    os._exit(7)\nleave()", 7, ExitKind.HARD_EXIT, "3 leave"),
        ("import sys\nsys.exit()", 0, ExitKind.SYSTEM_EXIT, "2 <module>"),
        (
            "import sys\ntry:\n    sys.exit(1)\nexcept SystemExit:\n    pass",
            0,
            ExitKind.SYSTEM_EXIT,
            "3 <module>",
        ),
        ("print('well')", 0, ExitKind.ENDED, ""),
    ],
)
def test_end_when_of_each_kind_then_last_words(
    start_rank: Rank, folder: Path, source: str, code: int, kind: ExitKind, line: str
) -> None:
    done = start_rank(source, prelude="").finish(30)
    assert done.code == code, done.story()
    record = the_rank(folder)
    assert record.exit.kind == kind
    if kind == ExitKind.EXCEPTION:
        words = record.exception
        assert words is not None and words.line.endswith(line)
        assert (words.type, words.message) in [("ValueError", "bad 3"), ("OSError", "x")]
    else:
        assert record.exit.line.endswith(line)
    if "1 / 0" in source:
        assert record.exception is not None
        assert (record.exception.type, record.exception.line[-10:]) == ("ZeroDivisionError", "3 <module>")


UNUSED = """
import time
class Branchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(4, 2), nn.Linear(4, 2)
    def forward(self, x):
        return self.used(x)
dist.init_process_group("gloo")
model = DDP(Branchy())
model(torch.ones(1, 4)).sum().backward()
print("ready", flush=True)
time.sleep(600)
"""


def test_stopped_when_parameters_are_unused_then_names_and_all_are_still_readable(
    start_rank: Rank, folder: Path
) -> None:
    command = start_rank(UNUSED)
    command.wait_for("ready", 40)
    wait_for(folder, lambda _: the_rank(folder).ticks > 3, command)
    number = ask(the_rank(folder).path)
    wait_for(folder, lambda _: the_rank(folder).answered >= number, command)
    entries = side_file(the_rank(folder), ".fr.json").read_text()
    assert '"fr"' in entries and '["MainThread", true, [["' in entries
    os.kill(command.process.pid, signal.SIGSTOP)
    record = the_rank(folder)
    assert record.unused == "other.bias, other.weight" or "other.weight" in record.unused
    assert (record.phase, record.micro_step, record.step) == (Phase.PYTHON, 1, 0)
    assert record.group_seq > 0
    time.sleep(0.3)  # three ticks, if it were not stopped
    assert the_rank(folder).ticks - record.ticks <= 1
    os.kill(command.process.pid, signal.SIGCONT)


SPAWNED = """
import os, subprocess, torch.multiprocessing as mp
def main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        subprocess.run([sys.executable, "-c", "import json"], check=True)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        raise RuntimeError("spawned rank fails")
if __name__ == "__main__":
    mp.spawn(main, (int(os.environ["MASTER_PORT"]),), nprocs=2)
"""


@pytest.mark.timeout(120)
def test_ranks_when_script_spawns_them_itself_then_each_has_its_own_record(
    start_rank: Rank, folder: Path
) -> None:
    command = start_rank(SPAWNED, env={"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""})
    done = command.finish(110)
    assert done.code == 1 and "spawned rank fails" in done.err, done.story()
    records = read_pages(folder)
    ranks = [next(r for r in records if r.role == Role.RANK and r.rank == k) for k in (0, 1)]
    assert all((r.world_size, r.issued, r.parent_pid) == (2, 2, command.process.pid) for r in ranks)
    words = ranks[1].exception
    assert words is not None and words.message == "spawned rank fails" and words.line.endswith(" main")
    assert ranks[0].exception is None and ranks[0].exit.kind == ExitKind.ENDED
    forked = [r for r in records if r.was_forked and r.parent_pid == ranks[1].pid]
    assert [(r.role, r.step, r.exit.kind) for r in forked] == [(Role.OTHER, 0, ExitKind.HARD_EXIT)]
    assert not [r for r in records if "import json" in r.command]  # a tool leaves nothing behind


COMPILED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return torch.relu(self.layer(x)) * 2
dist.init_process_group("gloo")
graphs = []
def backend(module, example):
    graphs.append([n.name for n in module.graph.nodes if n.op.startswith("call")])
    return module.forward
model = DDP(Net())
compiled = torch.compile(model, backend=backend)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad(); compiled(torch.ones(2, 4)).sum().backward(); optimizer.step()
@torch.compile(backend="eager", fullgraph=True)
def summed(t):
    dist.all_reduce(t)
    return t + 1
assert summed(torch.ones(2)).tolist() == [2, 2]
compiled(torch.ones(2, 4)).sum().backward(); torch.compile(optimizer.step, backend=backend)()
print(graphs)
dist.destroy_process_group()
"""


@pytest.mark.timeout(150)
def test_compile_when_probed_then_as_without(start_rank: Rank, folder: Path) -> None:
    commands = [start_rank(COMPILED), start_rank(COMPILED, env={"ALLRANKS_RECORD_DIR": ""})]
    probed, plain = (command.finish(140) for command in commands)
    assert probed.code == 0, probed.story()
    assert the_rank(folder).step >= 3
    assert plain.code == 0, plain.story()
    assert "relu" in plain.out and probed.out == plain.out
    assert "allranks" not in probed.err and "get_ident" not in probed.err, probed.story()


def test_start_when_user_has_own_settings_then_kept(start_rank: Rank, folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "pack").mkdir(parents=True)
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 'hidden one ran'\n")
    (site / "pack" / "__init__.py").write_text("")
    (site / "pack" / "__main__.py").write_text(
        "import os, signal, sys, torch\n"
        "print(mine, sys.modules['sitecustomize'].__file__, os.environ['TORCH_FR_BUFFER_SIZE'])\n"
        "print(os.environ['TORCH_DISTRIBUTED_DEBUG'], signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)\n"
        "print(any('record/boot' in entry for entry in sys.path))\n"
    )
    settings = {"PYTHONPATH": f"{BOOT}{os.pathsep}{site}", "TORCH_FR_BUFFER_SIZE": "7"}
    done = start_rank("", env=settings, module="pack").finish(40)
    assert done.code == 0, done.story()
    assert done.out.splitlines() == [
        f"hidden one ran {site / 'sitecustomize.py'} 7",
        "INFO True",
        "False",
    ]
    assert the_rank(folder).has_torch


def test_start_when_folder_cannot_be_written_then_the_script_runs(start_rank: Rank) -> None:
    done = start_rank("print('well')", prelude="", env={"ALLRANKS_RECORD_DIR": "/proc/none"}).finish(30)
    assert (done.code, done.out) == (0, "well\n"), done.story()
    assert "no record of process" in done.err


def test_start_when_not_asked_for_then_nothing_is_imported(start_rank: Rank) -> None:
    source = "import sys; print([name for name in sys.modules if 'allranks' in name])"
    done = start_rank(source, prelude="", env={"ALLRANKS_RECORD_DIR": ""}).finish(30)
    # The names below are of the editable install's own finder, if there is one.
    assert "allranks.record" not in done.out, done.story()
