"""Changes that a file may have suffered, by chance or on purpose."""

import io
import json
import random
import zipfile
import zlib
from pathlib import Path

import numpy as np

from penstock.experiments.reporting import checkpoint as checkpoints
from penstock.streaming.stores import store_files

NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    255,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    2**63,
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
]
WORDS = [
    "",
    "-",
    ":",
    "[",
    "}",
    "!!int ",
    "0x",
    "\t",
    "1e999",
    "&a ",
    "*a",
    "\0",
    "é",
    "null",
    "~",
    "2.5E-",
    "1e",
    "%",
    "\n",
]


def altered_text(text: str, rng: random.Random, most: int = 4) -> str:
    """Return a text with some characters cut out, replaced or repeated, or cut off."""
    characters = list(text)
    for _ in range(rng.randint(1, most)):
        place = rng.randrange(len(characters) + 1)
        length = rng.choice([0, 1, 1, 2, 5, 40])
        piece = rng.choice(
            [rng.choice(WORDS), str(rng.choice(NUMBERS)), "".join(characters[place : place + length]) * 2]
        )
        characters[place : place + length] = piece
    return "".join(characters[: rng.randrange(1, len(characters) + 1)] if rng.random() < 0.2 else characters)


def altered_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with some of them changed, or cut off."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content[: rng.randrange(len(content) + 1)] if rng.random() < 0.3 else content)


def altered_array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """Return an array of other values, another type or another shape."""
    kind = rng.randrange(7)
    with np.errstate(all="ignore"):
        if kind == 0 or not array.size:
            return (
                array.astype(rng.choice(["f4", "i8", "i4", "c16", "U3", "?"]))
                if array.dtype.kind not in "US"
                else array[..., None]
            )
        if kind == 1:
            return array.reshape(-1)[: rng.randrange(array.size + 1)]
        if kind == 2:
            return np.concatenate([array.reshape(-1)] * 2)
        if kind == 3:
            return array[None] if rng.random() < 0.5 else array.reshape(-1, 1)
        changed = array.copy().reshape(-1)
        if array.dtype.kind in "US":
            return np.array(altered_text(str(array), rng))
        value = rng.choice([of for of in NUMBERS if array.dtype.kind == "f" or (np.isfinite(of) and abs(of) < 2**31)])
        changed[slice(None) if kind == 4 else rng.randrange(array.size)] = np.array(value).astype(array.dtype)
        return changed.reshape(array.shape)


def altered_archive(content: bytes, rng: random.Random) -> bytes:
    """Return an ``.npz`` file of which one array is another one, or missing, or damaged."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    if rng.random() < 0.1:
        del members[name]
    elif rng.random() < 0.3:
        members[name] = altered_bytes(members[name], rng)
    else:
        buffer = io.BytesIO()
        np.save(buffer, altered_array(np.load(io.BytesIO(members[name])), rng))
        members[name] = buffer.getvalue()
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return result.getvalue()


def altered_checkpoint(content: bytes, rng: random.Random) -> bytes:
    """Return a checkpoint with other arrays and numbers, and a checksum that fits them."""
    data = dict(np.load(io.BytesIO(content)))
    data.pop("checksum")
    for name in rng.sample(sorted(data), rng.randint(1, 2)):
        data[name] = altered_array(data[name], rng)
    data["checksum"] = np.array(checkpoints.checksum(data))
    result = io.BytesIO()
    np.savez(result, **data)
    return result.getvalue()


def alter_store(path: Path, rng: random.Random) -> None:
    """Change offsets, indices or the index of a store, and make the checksums fit."""
    data = json.loads((path / "index.json").read_text())
    version = data.pop("penstock_store")
    data.pop("checksum")
    content = bytearray((path / "slabs.bin").read_bytes())
    if rng.random() < 0.7:
        number = rng.randrange(len(data["subdivisions"]))
        base = sum(of["nbytes"] for of in data["subdivisions"][:number])
        piece = data["subdivisions"][number]
        field = rng.choice([of for of in piece["fields"] if of["dtype"].startswith("int") and np.prod(of["shape"])])
        start = base + field["offset"]
        array = np.frombuffer(content, field["dtype"], int(np.prod(field["shape"])), start).copy()
        if rng.random() < 0.2:
            np.random.default_rng(rng.randrange(2**32)).shuffle(array)
        else:
            place = slice(None) if rng.random() < 0.2 else rng.randrange(array.size)
            array[place] = rng.choice(
                [-1, -2, 0, 10**6, 2**30, 2**31 - 1, -(2**31), int(array[0]) + 1, int(array[-1]) - 1]
            )
        content[start : start + array.nbytes] = array.tobytes()
        values = base + min(of["offset"] for of in piece["fields"] if of["dtype"].startswith("float"))
        parts = content[base:values], content[values : base + piece["nbytes"]]
        piece["checksums"] = [zlib.crc32(part) for part in parts]
    else:
        places: list[tuple[object, object]] = []
        _collect(data, places)
        container, key = rng.choice(places)
        container[key] = rng.choice(
            [0, -1, 1, 2, 3, 7, 2**31, 2**40, "x", None, 1.5, [], {}, "float64", "int32", "csr"]
        )
    checksum = store_files._json_checksum(data)
    (path / "index.json").write_text(json.dumps({"penstock_store": version, "checksum": checksum, **data}))
    (path / "slabs.bin").write_bytes(content)


def _collect(data: object, places: list) -> None:
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        if isinstance(value, dict | list):
            _collect(value, places)
        else:
            places.append((data, key))
