"""Files of a run directory, written and read from a host that does not see it: as they are where it is seen."""

import asyncio
import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from realgraph.runtime.files import client as client_module
from realgraph.runtime.files.client import FileClient
from realgraph.runtime.files.messages import PIECE_BYTES, FileBox, FileRequest, bytes_at
from realgraph.runtime.files.paths import RemotePath, make_folder, sync_path, write_synced
from realgraph.runtime.files.server import FileServer
from realgraph.runtime.hosts.agent import _look
from realgraph.runtime.hosts.messages import Look
from realgraph.runtime.job.manifest import sum_file
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.models.checkpoint_files import CheckpointTarget, Reader, TensorEntry, Writer, write_parts
from realgraph.runtime.models.remote_tensors import RemoteTensors, UnreadableTensors
from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.shares import shares
from realgraph.runtime.wire.curve import LOOPBACK, KeyPair, make_keys
from tests.test_train_parts import held


class Served:
    """A run directory that a server of its own serves, and a way to it."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self.keys: KeyPair = make_keys()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.do(self._make())
        self.client = FileClient(self.server.address, self.server.key, self.keys)

    async def _make(self) -> FileServer:
        return FileServer(self.folder, (self.keys.public,), LOOPBACK)

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def path(self, *names: str) -> RemotePath:
        return RemotePath(self.client, str(self.folder.checkpoints.joinpath(*names)))

    def close(self) -> None:
        self.client.close()
        self.do(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("run"))
    yield made
    made.close()


Held = tuple[dict[str, tuple[int, ...]], dict[int, dict[str, Box]]]


@pytest.mark.slow
@given(held(), st.sampled_from([100, 10**9]), st.randoms(use_true_random=False))
def test_writers_here_and_there_write_the_files_of_one_and_read_them_back(
    served: Served, case: Held, limit: int, rng: random.Random
) -> None:
    """Whichever workers are on the host of the run, the bytes are the same; so are the tensors that they read. Others
    send what no worker on it holds, and nothing else."""
    shapes, boxes = case
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
    full = {name: torch.randn(shape).to(rng.choice(dtypes)) for name, shape in shapes.items()}
    entries = [TensorEntry(name, tensor.dtype, shapes[name]) for name, tensor in full.items()]
    served.folder.checkpoints.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=served.folder.checkpoints) as name, TemporaryDirectory() as alone:
        remote, local = served.path(Path(name).name, "actor"), Path(name, "actor")
        make_folder(remote)
        apart = {worker for worker in boxes if rng.random() < 0.5}
        every = shares(boxes, shapes, apart)
        for worker, mine in every.items():
            near = [boxes[other] for other in boxes if other not in apart]
            if worker in apart:
                sent = [(name, box) for name, found in mine.items() for box in found]
                assert not any(one[name].intersect(box) for name, box in sent for one in near if name in one)
            parts = [WeightPart(name, box, full[name][box.slices]) for name, found in mine.items() for box in found]
            to = CheckpointTarget(remote if worker in apart else local, "x", limit)
            write_parts(to, entries, parts, Writer(worker, len(every)))
        sync_path(remote)
        whole = [WeightPart(name, Box((0,) * t.ndim, tuple(t.shape)), t) for name, t in full.items()]
        write_parts(CheckpointTarget(Path(alone), "x", limit), entries, whole, Writer())
        assert {f.name: f.read_bytes() for f in local.iterdir()} == {
            f.name: f.read_bytes() for f in Path(alone).iterdir()
        }
        with Reader(remote, "x") as reader:
            for own_boxes in boxes.values():
                for tensor, box in own_boxes.items():
                    values = torch.empty(box.shape, dtype=full[tensor].dtype)
                    reader.read(tensor, WeightPart(tensor, box, values))
                    assert torch.equal(values, full[tensor][box.slices])


def test_what_is_larger_than_a_message_goes_in_pieces(served: Served) -> None:
    rng = random.Random(0)
    content = rng.randbytes(2 * PIECE_BYTES + 17)
    make_folder(served.path("large"))
    for name, data in {"file": content, "empty": b""}.items():
        path = served.path("large", name)
        write_synced(path, data)
        assert Path(path.text).read_bytes() == path.read_bytes() == data
    tensor = torch.randn(3, 1_000_000)
    part = WeightPart("t", Box((0, 0), (3, 1_000_000)), tensor)
    write_parts(
        CheckpointTarget(served.path("large"), "y"), [TensorEntry("t", torch.float32, (3, 10**6))], [part], Writer()
    )
    columns = torch.empty(3, 500_000)
    with Reader(served.path("large"), "y") as reader:
        reader.read("t", WeightPart("t", Box((0, 250_000), (3, 500_000)), columns))
    assert torch.equal(columns, tensor[:, 250_000:750_000])


def test_lines_of_several_runs_are_whole(served: Served) -> None:
    """Half a line that a killed run has left goes; what is whole stays."""
    file = served.folder.samples / "worker-0.jsonl"
    file.parent.mkdir()
    file.write_bytes(b'{"a": 1}\n{"a"')
    path = RemotePath(served.client, str(file))
    path.append(b'{"a": 2}\n')
    path.append(b'{"a": 3}\n')
    assert file.read_bytes() == b'{"a": 1}\n{"a": 2}\n{"a": 3}\n'


@pytest.mark.parametrize(
    "place",
    ["join.key", "job.json", "checkpoints/../join.key", "link/x", "../elsewhere", "/etc/passwd", "checkpoints/a\0b"],
)
def test_nothing_but_checkpoints_and_samples_is_read_or_written(served: Served, place: str) -> None:
    served.folder.checkpoints.mkdir(exist_ok=True)
    link = served.folder.checkpoints / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(served.folder.root)
    text = f"checkpoints/{place}" if place.startswith("link") else place
    path = RemotePath(served.client, text if place.startswith("/") else f"{served.folder.root}/{text}")
    tries: list[Callable[[], object]] = [
        lambda: path.read_at(0, 1),
        lambda: write_synced(path, b"x"),
        lambda: path.append(b"x"),
        lambda: make_folder(path),
        lambda: sync_path(path),
    ]
    for each in tries:
        with pytest.raises(PermissionError, match="not a file of the run's checkpoints or samples"):
            each()


@pytest.mark.parametrize(
    ("box", "data", "file_bytes"),
    [
        (bytes_at(0, 4), b"123", 4),  # fewer bytes than the box has
        (bytes_at(8, 4), b"1234", 11),  # behind the end of the file
        (bytes_at(0, PIECE_BYTES + 1), bytes(PIECE_BYTES + 1), PIECE_BYTES + 1),
        (FileBox(0, 1, (4,), (2,), (3,)), b"123", 4),
        (FileBox(0, 1, (4,), (-1,), (3,)), b"123", 4),
        (FileBox(0, 1, (4, 4), (0,), (3,)), b"123", 16),
        (FileBox(0, 1, (1,) * 99, (0,) * 99, (1,) * 99), b"1", 1),
        (FileBox(0, 1, (10**18, 5), (0, 0), (10**18, 0)), b"", 10**19),
        (FileBox(2**63, 1, (1,), (0,), (1,)), b"1", 2**63 + 1),
    ],
)
def test_what_is_no_box_of_a_file_is_refused_at_once(
    served: Served, box: FileBox, data: bytes, file_bytes: int
) -> None:
    make_folder(served.path("boxes"))
    path = served.path("boxes", "file")
    path.write_box(box, data, file_bytes)
    with pytest.raises(OSError, match="box") as caught:
        sync_path(path)
    assert caught.value.errno == errno.EINVAL
    assert not Path(path.text).exists()


def test_errors_of_the_disk_are_those_of_a_disk_here(served: Served) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing/config\.json"):
        served.path("missing", "config.json").read_bytes()
    assert not served.path("missing", "config.json").is_file()
    with pytest.raises(FileNotFoundError):
        list(served.path("missing").glob("*"))
    make_folder(served.path("short"))
    Path(served.path("short", "x").text).write_bytes(b"\x10" + bytes(7) + b"{}")
    with pytest.raises(UnreadableTensors):
        RemoteTensors(served.path("short", "x"))
    with pytest.raises(OSError, match="it ends before byte 20"):
        served.path("short", "x").read_at(0, 20)


def test_who_has_no_key_of_the_run_gets_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_SECONDS", 2.0)
    stranger = FileClient(served.server.address, served.server.key, make_keys())
    with pytest.raises(ConnectionError):
        stranger.make_folder(str(served.folder.checkpoints / "stranger"))
    stranger.close()
    assert not (served.folder.checkpoints / "stranger").exists()


def test_a_refusal_that_is_faster_than_the_request_is_no_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ has no queue any more to put the request into."""
    connect = client_module._Connection.send

    def send_late(self: client_module._Connection, request: FileRequest) -> None:
        time.sleep(1.0)
        connect(self, request)

    monkeypatch.setattr(client_module._Connection, "send", send_late)
    stranger = FileClient(served.server.address, served.server.key, make_keys())
    started = time.monotonic()
    with pytest.raises(ConnectionError, match="its key was refused"):
        stranger.make_folder(str(served.folder.checkpoints / "stranger"))
    assert time.monotonic() - started < client_module.CONNECT_SECONDS
    stranger.close()


def test_a_server_that_has_ended_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_SECONDS", 2.0)
    one = Served(tmp_path)
    make_folder(one.path("before"))
    one.do(one.server.close())
    with pytest.raises(ConnectionError, match=r"broke|can't be reached"):
        make_folder(one.path("after"))
    one.client.close()


def test_a_host_apart_says_which_data_are_others(tmp_path: Path) -> None:
    """Only where it does not see the run directory: else it would read what the host of the run has read."""
    files = {name: tmp_path / f"{name}.jsonl" for name in ("same", "longer", "other", "missing")}
    for file in files.values():
        file.write_text("{}\n")
    known = {str(file): sum_file(file) for file in files.values()}
    files["longer"].write_text("{}\n{}\n")
    files["other"].write_text("[]\n")
    files["missing"].unlink()
    (tmp_path / "token").write_text("abc")
    assert _look(Look((), str(tmp_path / "token"), "abc", known)).other_data == ()
    assert _look(Look((), str(tmp_path / "none"), "abc", known)).other_data == (
        f"{files['longer']} has 6 bytes, and 3 on the host of the run",
        f"{files['other']} has other bytes than on the host of the run",
        f"{files['missing']} can't be read: No such file or directory",
    )
