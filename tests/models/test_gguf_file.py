"""The reader of GGUF headers, compared with the package gguf, and damaged files."""

import itertools
import struct

import gguf
import numpy as np
import pytest

from paged_jax.models.gguf_file import GgufError, GgufFile, Texts
from tests.support.gguf_files import write

METADATA = {
    "general.architecture": "llama",
    "a.text": "wörld",
    "a.number": 7,
    "a.factor": 0.25,
    "a.flag": True,
    "a.texts": ["", "a", "é" * 40],
    "a.numbers": [3, 1, 2],
    "a.factors": [0.5, -1.5],
}
_NUMBERS = itertools.count()
TENSORS = {
    "one": np.arange(5, dtype=np.float32),
    "two": np.arange(12, dtype=np.float16).reshape(3, 4),
    "three": (np.arange(2 * 3 * 34, dtype=np.uint8).reshape(2, 3, 34), "Q8_0"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", METADATA, TENSORS)


def header(*, version=3, num_tensors=0, num_entries=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: gguf.GGUFValueType, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def tensor(name="t", shape=(4,), kind=0, offset=0, num_dims=None) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    count = struct.pack("<I", len(shape) if num_dims is None else num_dims)
    return text(name) + count + dims + struct.pack("<IQ", kind, offset)


def open_bytes(tmp_path, data: bytes) -> GgufFile:
    # A new name for each file, because headers are cached by name, size and time.
    path = tmp_path / f"{next(_NUMBERS)}.gguf"
    path.write_bytes(data)
    try:
        return GgufFile.open(path)
    finally:
        path.unlink()


def test_open_reads_metadata(path):
    metadata = dict(GgufFile.open(path).metadata)
    for key, value in METADATA.items():
        found = metadata.pop(key)
        assert isinstance(found, Texts) or not isinstance(found, str | list) or found == value
        assert list(found) == value if isinstance(value, list) else found == value
    assert metadata == {}


def test_open_agrees_with_the_gguf_package(path):
    expected = {each.name: each for each in gguf.GGUFReader(path).tensors}
    found = GgufFile.open(path).tensors
    assert list(found) == list(expected)
    for name, entry in found.items():
        other = expected[name]
        assert entry.shape == tuple(other.shape.tolist()[::-1])
        assert (entry.offset, entry.num_bytes) == (other.data_offset, other.n_bytes)
        assert entry.type == other.tensor_type.name


def test_open_reads_split_models(tmp_path):
    names = [tmp_path / f"m-{i:05}-of-00002.gguf" for i in (1, 2)]
    for number, (name, part) in enumerate(zip(names, ("one", "two"), strict=True)):
        more = {"split.no": number, "split.count": 2}
        write(name, METADATA | more, {part: TENSORS[part]})
    file = GgufFile.open(names[0])
    assert list(file.tensors) == ["one", "two"]
    assert [entry.path for entry in file.tensors.values()] == names
    with pytest.raises(GgufError, match="must be the first of the 2 files"):
        GgufFile.open(names[1])
    write(tmp_path / "text.gguf", METADATA | {"split.count": "2"}, TENSORS)
    with pytest.raises(GgufError, match="split.count must be an integer, got '2'"):
        GgufFile.open(tmp_path / "text.gguf")
    names[1].unlink()
    with pytest.raises(FileNotFoundError, match="m-00002-of-00002.gguf: no such file"):
        GgufFile.open(names[0])


def test_every_truncation_is_an_error(path, tmp_path):
    data = path.read_bytes()
    end = max(each.offset + each.num_bytes for each in GgufFile.open(path).tensors.values())
    for size in range(end):
        with pytest.raises(GgufError) as raised:
            open_bytes(tmp_path, data[:size])
        assert "\n" not in str(raised.value)


def test_damaged_bytes_never_read_outside(path, tmp_path):
    """Every byte of the header is set to 255: lengths, counts, types and offsets become absurd."""
    data = path.read_bytes()
    start = min(entry.offset for entry in GgufFile.open(path).tensors.values())
    for place in range(start):
        try:
            file = open_bytes(tmp_path, data[:place] + b"\xff" + data[place + 1 :])
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            for each in file.tensors.values():
                assert 0 < each.num_bytes <= len(data) - each.offset


_STRING, _ARRAY, _U32 = (gguf.GGUFValueType[name] for name in ("STRING", "ARRAY", "UINT32"))
_HUGE = 2**63


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "got an empty file"),
        (b"PK\3\4" * 9, "its first four bytes are not 'GGUF'"),
        (header(version=1), "must have version 2 or 3 of GGUF, got 1"),
        (header(version=3 << 24), "big-endian file, which is not supported"),
        (
            header(num_tensors=_HUGE),
            f"{_HUGE} tensors, which do not fit into the remaining 8 bytes",
        ),
        (
            header(num_entries=_HUGE),
            f"{_HUGE} entries, which do not fit into the remaining 0 bytes",
        ),
        (
            header(num_entries=1, rest=struct.pack("<Q", 2**62) + b"x" * 40),
            f"a key must have at most 256 bytes, got {2**62}",
        ),
        (
            header(num_entries=1, rest=entry("a\n", _U32, b"\0" * 4)),
            r"a key must be printable, got",
        ),
        (
            header(num_entries=1, rest=entry("k", _STRING, struct.pack("<Q", 2**62))),
            f"must contain {2**62} bytes of k, but only 0 are left",
        ),
        (
            header(num_entries=1, rest=entry("k", _ARRAY, struct.pack("<IQ", _STRING, 2**40))),
            f"must contain {8 * 2**40} bytes of the {2**40} strings of k, but only 0",
        ),
        (
            header(num_entries=1, rest=entry("k", _ARRAY, struct.pack("<IQQ", _STRING, 1, 2**62))),
            "must contain the 1 strings of k, but the file is too short",
        ),
        (
            header(num_entries=1, rest=entry("k", _ARRAY, struct.pack("<IQ", _U32, 2**61))),
            f"must contain {2**63} bytes of k, but only 0 are left",
        ),
        (
            header(num_entries=1, rest=entry("k", _ARRAY, struct.pack("<IQ", _ARRAY, 1))),
            "metadata key k has a value of type 9, which is not supported",
        ),
        (
            header(num_entries=2, rest=2 * entry("k", _U32, b"\0\0\0\0")),
            "metadata key 'k' occurs more than once",
        ),
        (
            header(num_entries=1, rest=entry("general.alignment", _U32, struct.pack("<I", 24))),
            "general.alignment must be a power of two, got 24",
        ),
        (header(num_tensors=1, rest=tensor(num_dims=2**31) + b"\0" * 64), "1 to 4 dims"),
        (header(num_tensors=1, rest=tensor(shape=(2**32,) * 4)), "should be at bytes"),
        (header(num_tensors=1, rest=tensor(shape=(4, 0))), "must be a positive multiple of 1, got"),
        (
            header(num_tensors=1, rest=tensor(shape=(48,), kind=2)),
            "must be a positive multiple of 32, got",
        ),
        (header(num_tensors=1, rest=tensor(offset=2**62) + b"\0" * 64), "should be at bytes"),
        (header(num_tensors=1, rest=tensor(kind=99) + b"\0" * 64), "the unknown type 99"),
        (header(num_tensors=2, rest=2 * tensor() + b"\0" * 64), "tensor 't' occurs more than once"),
    ],
)
def test_hostile_headers_are_rejected_before_anything_is_allocated(tmp_path, data, message):
    with pytest.raises(GgufError, match=message) as raised:
        open_bytes(tmp_path, data)
    assert "\n" not in str(raised.value)


def test_open_explains_a_missing_package(path, monkeypatch, tmp_path):
    """The package may also be there, and lack a library."""
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    expected = (
        r"package gguf is required .*\(import of gguf halted.* pip install 'paged-jax\[gguf\]'"
    )
    with pytest.raises(GgufError, match=expected):
        open_bytes(tmp_path, path.read_bytes())
