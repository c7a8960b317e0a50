"""What a segment is to other users, and what strangers' files are to us: who may open it, what is never opened, followed or run."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import grp
import os
import pickle
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

import shmbuf
from shmbuf import Buffer, BufferExists, BufferFormatError, SchemaError, ShmbufError, destroy, drain, segment
from shmbuf.cli import main as shminfo
from tests.fuzz import segments
from tests.process import workers
from tests.unit.helpers import SMALL, k, numbers

NOBODY, STRANGER = 65_534, 65_533
as_root = pytest.mark.skipif(os.getuid() != 0, reason="makes files of other users")


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def files(name: str) -> list[str]:
    """Every file that carries the name, whatever it is."""
    return [f"{segment.SHM_DIR}/{f}" for f in os.listdir(segment.SHM_DIR) if name in f]


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def as_user(uid: int, call: Callable[[], object]) -> None:
    """In a process of that user; what it raises, or asserts, fails here."""

    def run() -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        call()

    assert os.waitpid(workers.fork(run), 0)[1] == 0


# ---- who may ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("schema", [None, SMALL["schema"]])
def test_only_its_user_may_open_it_whatever_the_umask(name, mask, schema):
    with umask(mask), Buffer.create(name, 10, **{**SMALL, "schema": schema}) as buf:
        assert [mode_of(f) for f in files(name)] == [0o600]
        buf.extend(k(1, 2))  # the first put builds the rows
        Buffer.attach(name).close()
        assert [mode_of(f) for f in files(name)] == [0o600]


@pytest.mark.parametrize("mask", [0, 0o077])
def test_an_unnamed_one_is_private_too(mask):
    with umask(mask), Buffer.create(None, 10, **SMALL) as buf:
        assert [mode_of(f) for f in files(buf.name)] == [0o600]


@as_root
@pytest.mark.parametrize("mask", [0, 0o077, 0o777])
@pytest.mark.parametrize("group", [54_321, grp.getgrgid(1).gr_name])
def test_mode_and_group_are_exact_whatever_the_umask(name, mask, group):
    gid = group if isinstance(group, int) else 1
    with umask(mask), Buffer.create(name, 10, mode=0o660, group=group, **{**SMALL, "schema": None}) as buf:
        buf.extend(k(1))
        assert [(mode_of(f), os.stat(f).st_gid) for f in files(name)] == [(0o660, gid)]


@as_root
def test_a_group_may_be_let_in_and_nobody_else_is(name):
    with Buffer.create(name, 10, mode=0o660, group=NOBODY, **SMALL) as buf:
        buf.extend(k(1))

        def let_in() -> None:
            with Buffer.attach(name, owner=0) as other:
                other.extend(k(2))

        def kept_out() -> None:
            for readonly in (False, True):
                with pytest.raises(PermissionError):
                    Buffer.attach(name, owner=0, readonly=readonly)

        as_user(NOBODY, let_in)
        as_user(STRANGER, kept_out)
        assert numbers(buf) == [1, 2]


@as_root
def test_by_default_another_user_gets_nowhere(name):
    with Buffer.create(name, 10, **SMALL) as buf:
        buf.extend(k(1))
        path = segment.path_of(name)

        def intrude() -> None:
            for readonly in (False, True):
                with pytest.raises(PermissionError):
                    Buffer.attach(name, owner=0, readonly=readonly)
            for force in (False, True):
                with pytest.raises(PermissionError):
                    destroy(name, owner=0, force=force)
            with pytest.raises(PermissionError):
                open(path, "rb").close()
            with pytest.raises(PermissionError):
                os.unlink(path)

        as_user(NOBODY, intrude)
        assert numbers(buf) == [1] and os.path.exists(path)


@as_root
def test_names_are_per_user(name):
    with Buffer.create(name, 10, **SMALL) as buf:
        buf.extend(k(1))

        def same_name() -> None:
            with pytest.raises(shmbuf.BufferNotFound, match="uid 0 has one"):
                Buffer.attach(name)
            with Buffer.create(name, 10, **SMALL) as other:
                other.extend(k(2, 3))
                assert numbers(other) == [2, 3] and len(files(name)) == 2
                path = segment.path_of(name)
                assert f".{NOBODY}." in path and os.stat(path).st_uid == NOBODY
            destroy(name)

        as_user(NOBODY, same_name)
        assert numbers(buf) == [1] and files(name) == [segment.path_of(name)]


@pytest.mark.parametrize("mode", [0o602, 0o606, 0o666, 0o777, 0o601])
def test_the_world_never_writes(name, mode):
    with pytest.raises(ValueError, match="lets everybody write"):
        Buffer.create(name, 10, mode=mode, **SMALL)
    assert files(name) == []


# ---- nothing is run --------------------------------------------------------------------------------------------------

# What brings objects to life out of bytes, or runs text. A handle's __reduce__ is the standard library's business.
RUNS = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
    "joblib",
    "yaml",
    "code",
}
CALLS = {"eval", "exec", "compile", "__import__", "ext_hook", "object_hook", "allow_pickle", "loads", "load"}


# Calls that run nothing, if they are told so.
SAFE: dict[str, tuple[str, object]] = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
# Plain data, and a method of the same name.
HARMLESS = {"json.loads", "json.load", "self.loads", "self.load"}


def _uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (n.name.split(".")[0] for n in names if n.name.split(".")[0] in RUNS)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in RUNS:
                yield module
            case ast.Call(func=ast.Name(id=called)) if called in CALLS:
                yield called
            case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=called)) if called in (
                "loads",
                "load",
                "import_module",
            ):
                told = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
                if told.get(SAFE.get(f"{of}.{called}", ("", None))[0]) is not SAFE.get(f"{of}.{called}", ("", 0))[1]:
                    yield f"{of}.{called}"
            case ast.keyword(arg=str(arg), value=value) if arg in CALLS and not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                yield arg


# Modules of the package by their own names.
ALLOWED = {
    "_extension.py": {"importlib.import_module"},
    "__init__.py": {"importlib.import_module"},
    "datasets.py": {"importlib.import_module"},
    "rays.py": {"importlib.import_module"},
    "state.py": {"loads"},  # of shmbuf.checkpoint
    # Classes and handles on their way between Ray's actors, whose every message is a pickle; nothing of a segment.
    **{
        name: {"pickle", "pickle.loads"}
        for name in ("client.py", "coordinator.py", "keeper.py", "places.py", "service.py")
    },
}


def test_the_package_uses_nothing_that_runs_what_it_reads():
    root = Path(shmbuf.__file__).parent
    sources = sorted(root.rglob("*.py"))
    assert len(sources) > 20
    for file in sources:
        found = set(_uses(ast.parse(file.read_text()))) - HARMLESS - ALLOWED.get(file.name, set())
        assert not found, f"{file.relative_to(root)} uses {', '.join(sorted(found))}"
    for text in (
        "import pickle",
        "from dill import x",
        "eval('1')",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "msgpack.unpackb(b, ext_hook=f)",
    ):
        assert list(_uses(ast.parse(text))), f"the search does not see {text}"
    native = [*root.rglob("native/*.h"), *root.rglob("native/*.cpp")]
    for file in native:
        assert not any(
            w in file.read_text() for w in ("PyRun_", "PyImport_", "import_(", "Py_CompileString", "PyEval_Eval")
        ), file.name


class Bomb:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def ext_bomb(path: str) -> bytes:
    """msgpack's own way of carrying foreign bytes, and a pickle in it."""
    return msgpack.packb(
        {"full": "block", "timeout": None, "drain": "caller", "columns": msgpack.ExtType(5, pickle.dumps(Bomb(path)))}
    )


@pytest.mark.parametrize("bomb", [lambda p: pickle.dumps(Bomb(p)), lambda p: pickle.dumps(Bomb(p), 0), ext_bomb])
@pytest.mark.parametrize("where", ["config", "schema"])
def test_a_pickle_in_a_segment_is_refused_and_not_run(name, tmp_path, where, bomb, capsys):
    path = tmp_path / "run"
    explosive = bomb(str(path))
    if bomb is not ext_bomb:
        pickle.loads(explosive)  # it works
        assert path.exists()
        path.rmdir()
    data = bytearray(segments.make("plain"))
    f = segments.fields(data)
    at, size = (f.config, f.config_used) if where == "config" else (f.schema, f.schema_bytes)
    room = f.members - f.config if where == "config" else f.rows - f.schema
    assert len(explosive) <= room
    data[at : at + size] = bytes(size)
    data[at : at + len(explosive)] = explosive
    field = 72 + 2 * 8 if where == "config" else segments.BUILT_AT + 3 * 8
    data[field : field + 8] = len(explosive).to_bytes(8, "little")
    segments.reseal(data)
    Path(segment.path_of(name)).write_bytes(data)
    os.chmod(segment.path_of(name), 0o600)
    segment.attach(name).close()  # the checksums are right: it is the blob itself that is refused
    for readonly in (False, True):
        if where == "config" and bomb is ext_bomb:
            Buffer.attach(name, readonly=readonly).close()  # an unknown entry, that nobody opens
            continue
        with pytest.raises(BufferFormatError), Buffer.attach(name, readonly=readonly) as buf:
            assert buf.schema
    for arguments in (["show", name], ["show", name, "--json"], ["list"]):
        assert shminfo(arguments) in (0, 1)
    with contextlib.suppress(ShmbufError):
        Buffer.create(name, 10, **{**SMALL, "exists": "attach"}).close()
    assert not path.exists(), "it was run"


def test_what_lies_in_a_segment_is_msgpack_of_plain_values(name):
    with Buffer.create(name, 10, config={"note": ["x", 1, None]}, **SMALL) as buf:
        buf.extend(k(1))
        data = Path(segment.path_of(name)).read_bytes()
    f = segments.fields(data)

    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(type(key) is str and plain(v) for key, v in value.items())
        return all(map(plain, value)) if isinstance(value, list) else type(value) in (int, float, str, bool, type(None))

    for at, n in ((f.config, f.config_used), (f.schema, f.schema_bytes)):
        assert plain(msgpack.unpackb(data[at : at + n], strict_map_key=True))
    assert b"\x80\x04\x95" not in data and b"\x80\x05\x95" not in data, "the beginning of a pickle"


def test_objects_are_no_rows_and_no_settings(name):
    with Buffer.create(name, 10, **SMALL) as buf:
        with pytest.raises(SchemaError):
            buf.put({"k": np.array([Bomb("x")], object)})
        assert len(buf) == 0
    with pytest.raises(ValueError, match="config"):
        Buffer.create(f"{name}x", 10, config={"x": Bomb("x")}, **SMALL)


# ---- what is not opened, followed or removed -------------------------------------------------------------------------


def make_link(path: str, target: str) -> None:
    os.symlink(target, path)


def make_dangling(path: str, target: str) -> None:
    os.symlink(f"{target}-nowhere", path)


def make_fifo(path: str, target: str) -> None:
    os.mkfifo(path, 0o600)


def make_directory(path: str, target: str) -> None:
    os.mkdir(path, 0o700)


def make_device(path: str, target: str) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero


def make_socket(path: str, target: str) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path)


CALLS_ON: dict[str, Callable[[str], object]] = {
    "attach": Buffer.attach,
    "attach readonly": lambda n: Buffer.attach(n, readonly=True),
    "attach owner": lambda n: Buffer.attach(n, owner=os.getuid()),
    "create": lambda n: Buffer.create(n, 10, **SMALL),
    "create attach": lambda n: Buffer.create(n, 10, **{**SMALL, "exists": "attach"}),
    "create replace": lambda n: Buffer.create(n, 10, **{**SMALL, "exists": "replace"}),
    "destroy": destroy,
    "destroy force": lambda n: destroy(n, force=True),
    "drain": lambda n: drain.run(n, quiet=True),
}


@pytest.fixture
def strange(name, make_name) -> Iterator[SimpleNamespace]:
    """A name, its path, and a whole segment of another name to point at."""
    target = make_name()
    with Buffer.create(target, 10, **SMALL) as buf:
        buf.extend(k(1, 2, 3))
        path = segment.path_of(name)
        yield SimpleNamespace(name=name, path=path, target=segment.path_of(target), whole=buf)
        with contextlib.suppress(OSError):
            os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def identity(path: str) -> tuple:
    st = os.lstat(path)
    return (
        st.st_ino,
        st.st_mode,
        st.st_uid,
        st.st_gid,
        st.st_size,
        st.st_nlink,
        os.readlink(path) if os.path.islink(path) else None,
    )


@pytest.mark.parametrize("make", [make_link, make_dangling, make_fifo, make_directory, make_device, make_socket])
@pytest.mark.parametrize("call", CALLS_ON)
def test_what_is_no_regular_file_is_neither_opened_nor_removed(strange, make, call):
    if make is make_device and os.getuid() != 0:
        pytest.skip("makes a device")
    make(strange.path, strange.target)
    before, target = identity(strange.path), identity(strange.target)
    with pytest.raises(BufferExists if call == "create" else BufferFormatError):
        CALLS_ON[call](strange.name)
    assert identity(strange.path) == before and identity(strange.target) == target
    assert numbers(strange.whole) == [1, 2, 3] and not strange.whole.destroyed
    assert len(strange.whole.members()) == 1, "nobody came by way of the link"


@pytest.mark.parametrize("make", [make_link, make_dangling, make_fifo, make_directory, make_socket])
@pytest.mark.parametrize("arguments", [["show"], ["show", "--json"], ["rm"], ["rm", "--force"]])
def test_shminfo_neither_opens_nor_removes_it(strange, make, arguments, capsys):
    make(strange.path, strange.target)
    before = identity(strange.path)
    assert shminfo([*arguments, strange.name]) == 1
    assert shminfo(["list"]) == 0 and "no regular file" in capsys.readouterr().out
    assert identity(strange.path) == before and numbers(strange.whole) == [1, 2, 3] and not strange.whole.destroyed


@pytest.mark.parametrize("mode", [0o602, 0o622, 0o666])
@pytest.mark.parametrize("call", [c for c in CALLS_ON if c != "destroy force"])
def test_what_everybody_may_write_is_refused(strange, mode, call):
    Path(strange.path).write_bytes(Path(strange.target).read_bytes())
    os.chmod(strange.path, mode)
    before = identity(strange.path)
    with pytest.raises(BufferExists if call == "create" else BufferFormatError):
        CALLS_ON[call](strange.name)
    assert identity(strange.path) == before


@as_root
@pytest.mark.parametrize("call", [c for c in CALLS_ON if c not in ("destroy force", "attach readonly")])
def test_a_file_of_another_user_under_our_name_is_refused(strange, call):
    Path(strange.path).write_bytes(Path(strange.target).read_bytes())
    os.chmod(strange.path, 0o660)
    os.chown(strange.path, STRANGER, -1)
    before, content = identity(strange.path), Path(strange.path).read_bytes()
    with pytest.raises(BufferExists if call == "create" else BufferFormatError):
        CALLS_ON[call](strange.name)
    assert identity(strange.path) == before and Path(strange.path).read_bytes() == content


@as_root
def test_a_file_of_another_user_may_be_looked_at(strange):
    Path(strange.path).write_bytes(Path(strange.target).read_bytes())
    os.chown(strange.path, STRANGER, -1)
    content = Path(strange.path).read_bytes()
    with Buffer.attach(strange.name, readonly=True) as buf:
        assert numbers(buf) == [1, 2, 3]
    assert Path(strange.path).read_bytes() == content
    assert shminfo(["show", strange.name]) == 1, "its name claims another owner than it has"


@as_root
def test_a_user_cannot_pose_as_another(strange):
    """Somebody puts a file of his under a name of ours before we do, and lets us in."""
    data, path = Path(strange.target).read_bytes(), segment.path_of(strange.name, NOBODY)

    def pose() -> None:
        Path(path).write_bytes(data)
        os.chmod(path, 0o644)

    def victim() -> None:
        for call in ("attach", "create attach", "create replace", "destroy", "drain", "create"):
            with pytest.raises(BufferExists if call == "create" else BufferFormatError):
                CALLS_ON[call](strange.name)

    try:
        as_user(STRANGER, pose)
        as_user(NOBODY, victim)
        assert os.stat(path).st_uid == STRANGER
    finally:
        os.unlink(path)


def swap_open_to(monkeypatch, becomes: Callable[[], None]) -> None:
    """Between the look at a file and its opening, its name comes to mean something else."""
    whole = segment._open_twice

    def open_twice(*args, **kw):
        becomes()
        return whole(*args, **kw)

    monkeypatch.setattr(segment, "_open_twice", open_twice)


def foreign(strange) -> None:
    os.unlink(strange.path)
    Path(strange.path).write_bytes(Path(strange.target).read_bytes())
    os.chown(strange.path, STRANGER, -1)


def open_to_all(strange) -> None:
    os.unlink(strange.path)
    Path(strange.path).write_bytes(Path(strange.target).read_bytes())
    os.chmod(strange.path, 0o666)


def linked(strange) -> None:
    os.unlink(strange.path)
    os.symlink(strange.target, strange.path)


def piped(strange) -> None:
    os.unlink(strange.path)
    os.mkfifo(strange.path)


@as_root
@pytest.mark.parametrize("becomes", [foreign, open_to_all, linked, piped])
@pytest.mark.parametrize("readonly", [False, True])
def test_what_is_opened_is_what_was_looked_at(strange, monkeypatch, becomes, readonly):
    Path(strange.path).write_bytes(Path(strange.target).read_bytes())
    os.chmod(strange.path, 0o600)
    swap_open_to(monkeypatch, lambda: becomes(strange))

    def attach() -> None:
        if becomes is foreign and readonly:  # which is allowed
            return Buffer.attach(strange.name, readonly=True).close()
        with pytest.raises((BufferFormatError, OSError)):
            Buffer.attach(strange.name, readonly=readonly)

    pid = workers.fork(attach)  # a FIFO opened for reading waits for a writer
    assert wait_for(pid) == 0


def wait_for(pid: int, seconds: float = 30) -> int | str:
    fd = os.pidfd_open(pid)
    import select

    try:
        if not select.select([fd], [], [], seconds)[0]:
            workers.kill(pid)
            return "hangs"
        return os.waitpid(pid, 0)[1]
    finally:
        os.close(fd)


# ---- descriptors, names ----------------------------------------------------------------------------------------------


def descriptors() -> dict[int, str]:
    out = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            out[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return out


def closes_on_exec(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)


def test_no_descriptor_is_inherited(name, monkeypatch):
    """Those that a handle keeps, and those that are open only while it is made."""
    passing: list[bool] = []
    real = segment.native.Handle

    def handle(map_fd: int, lock_fd: int, *more: int):
        passing.extend(map(closes_on_exec, (map_fd, lock_fd)))
        return real(map_fd, lock_fd, *more)

    monkeypatch.setattr(segment.native, "Handle", handle)
    before = descriptors()
    with (
        Buffer.create(name, 10, **{**SMALL, "drain": "thread"}) as buf,
        Buffer.attach(name) as other,
        Buffer.attach(name, readonly=True) as third,
    ):
        other.extend(k(1))
        third.draw(1)
        shminfo(["show", name])
        kept = {fd: path for fd, path in descriptors().items() if fd not in before}
        mine = [fd for fd, path in kept.items() if "shm" in path]
        assert len(mine) >= 3 and all(map(closes_on_exec, kept)), kept
        assert len(passing) >= 8 and all(passing)
        assert numbers(buf) == [1]


BAD = ["/", "../x", "..", ".", "a/b", "/etc/passwd", "a\0b", "\0", "x/../../tmp/y"]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("call", CALLS_ON)
def test_a_name_is_no_path(bad, call, nothing_moves):
    with pytest.raises(ValueError, match="are allowed"):
        CALLS_ON[call](bad)


@pytest.mark.parametrize("bad", [b for b in BAD if "\0" not in b])
@pytest.mark.parametrize("arguments", [["show"], ["rm"], ["rm", "--force"]])
def test_nor_for_shminfo(bad, arguments, tmp_path, capsys, nothing_moves):
    assert shminfo([*arguments, bad]) == 1
