"""The short-lived process that parses HDF5 metadata, so that a damaged or hostile file cannot take a rank with it.

`parser` starts it with the interpreter isolated and HDF5's plugins off; memory and CPU time are limited here. It reads one JSON
request per line and answers each with one JSON line: where the values of the datasets lie (`hdf5_map`).
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
from typing import Any

from mpitrain.files.hdf5_map import Refused, choose, describe, one_line, printable, read_attributes, resolve, texts

SPARE_MEMORY = 1 << 30        # The parser may use so many bytes on top of the interpreter,
LEAST_MEMORY = 192 << 20      # and for a small file so many,
MEMORY_A_BYTE = 16            # and so many more for each of its bytes: an entry of a chunk index takes 8 there and 130 here.


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import h5py
    path, size = request["file"], os.stat(request["file"]).st_size
    with h5py.File(path, "r") as file:
        read_attributes(file["/"], "/")
        asked = request["datasets"]
        if not asked:
            x, y = choose(file)
            asked = {"x": x, "y": y}
        user_block = file.userblock_size
        found = {label: describe(resolve(file, name), f"/{name.strip('/')}", size, path, user_block)
                 for label, name in asked.items() if name is not None}
        more = {"attributes": texts(file["/"])} if request.get("attributes") else {}
        return {**found, "y": found.get("y"), **more}


def reply_to(request: dict[str, Any]) -> dict[str, Any]:
    """The answer, or why there is none."""
    try:
        return answer(request)
    except Refused as error:
        return {"refused": str(error), "dataset": error.dataset and printable(error.dataset)}
    except MemoryError:
        spare = spare_memory(request["file"]) >> 20
        return {"refused": f"parsing it needs more than {spare} MiB of memory", "dataset": None, "memory": True}
    except Exception as error:          # Whatever libhdf5 says about a broken file is its refusal.
        return {"refused": f"cannot be read as HDF5: {why(error)}; it is damaged or incomplete: copy it again from its source",
                "dataset": None}


def why(error: BaseException) -> str:
    """What libhdf5 says, in numbers that mean something where a file ends too early."""
    said = one_line(error)
    early = re.search(r"truncated file: eof = (\d+), sblock->base_addr = (\d+), stored_eof = (\d+)", said)
    return f"truncated file, {int(early[1]):,} bytes of {int(early[2]) + int(early[3]):,}" if early else said


def spare_memory(path: str) -> int:
    """The bytes that parsing this file may take: a few bytes must not make libhdf5 fill the node."""
    try:
        return min(SPARE_MEMORY, LEAST_MEMORY + MEMORY_A_BYTE * os.stat(path).st_size)
    except OSError:
        return SPARE_MEMORY


def address_space() -> int:
    """The bytes of address space that this process uses."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    sys.path += [p for p in setup["paths"] if p not in sys.path]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        import h5py  # noqa: F401
    except (ImportError, MemoryError, OSError) as error:
        print(json.dumps({"ready": False, "message": one_line(error)}), flush=True)
        return
    base = address_space()
    memory, allowed = base + SPARE_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]
    if allowed != resource.RLIM_INFINITY:
        memory = min(memory, allowed)              # nobody may raise it: batch systems set it for the job (ulimit -v)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(usage.ru_utime + usage.ru_stime + request["cpu_seconds"])
        spare = min(memory, base + spare_memory(request["file"]))
        resource.setrlimit(resource.RLIMIT_AS, (spare, memory))
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]                     # the job's own may be shorter (ulimit -t)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard))
        print(json.dumps(reply_to(request)), flush=True)
