"""Where the values of a dataset lie in an HDF5 file, found by libhdf5; `parser_child` calls this, and nobody else needs libhdf5.

A link is looked at before it is followed; nothing outside the file is ever opened.
"""

from __future__ import annotations

import base64
import math
from typing import Any

MAX_LINKS = 32                # One name leads over at most so many soft links.
MAX_OBJECTS = 10_000          # The child looks at so many objects when the user names no dataset.
MAX_CHUNK = 1 << 30           # A chunk has at most so many bytes.
MAX_UNPACKED = 128 << 20      # A packed one may have more than so many, unpacked,
MAX_RATIO = 100               # if it is not more than so many times larger than packed; gzip makes 1029 bytes of one.
MAX_ATTRIBUTE = 1 << 20       # Attributes of more bytes are left unread.
MAX_TEXTS, MAX_TEXT = 64, 200         # So many texts among attributes are told, of at most so many bytes.
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32"}
OTHER_FILTERS = {4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32015: "zstd"}


class Refused(Exception):
    """This file is not read, because of this dataset where one is to blame."""

    def __init__(self, message: str, dataset: str | None = None):
        super().__init__(message)
        self.dataset = dataset


def printable(name: str | bytes) -> str:
    """A name from the file, with control characters escaped and at most 200 characters long."""
    text = name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)[:200]


def read_attributes(obj: Any, path: str) -> None:
    """Every small attribute of an object on our way is read, because whoever inspects the file later will read it too."""
    import h5py
    manager = h5py.AttributeManager(obj)
    for i in range(h5py.h5a.get_num_attrs(obj.id)):
        attribute = h5py.h5a.open(obj.id, index=i)
        if attribute.get_storage_size() > MAX_ATTRIBUTE:
            continue
        try:
            manager[attribute.name]
        except TypeError:
            continue          # NumPy has no word for this type; the file is sound.
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise Refused(f'attribute "{printable(attribute.name)}" of "{path}" is damaged: {one_line(error)}') from error


def texts(obj: Any) -> dict[str, str]:
    """The short texts among the attributes of an object that `read_attributes` has read."""
    import h5py
    found = {}
    for i in range(min(h5py.h5a.get_num_attrs(obj.id), MAX_TEXTS)):
        attribute = h5py.h5a.open(obj.id, index=i)
        if attribute.get_storage_size() <= MAX_TEXT and attribute.get_type().get_class() == h5py.h5t.STRING:
            value = obj.attrs[attribute.name]
            if isinstance(value, bytes | str):
                found[printable(attribute.name)] = printable(value)
    return found


def one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).split())) or type(error).__name__


def open_link(group: Any, name: bytes, path: str) -> Any:
    """The low-level object behind one link, or the target (str) of a soft link; links to other files are refused."""
    import h5py
    link = group.links.get_info(name)
    if link.type == h5py.h5l.TYPE_SOFT:
        return group.links.get_val(name).decode("utf-8", "surrogateescape")
    if link.type == h5py.h5l.TYPE_EXTERNAL:
        target = group.links.get_val(name)
        raise Refused(f'"{path}" is an external link to "{printable(target[1])}" in "{printable(target[0])}"; '
                      f"only values inside this file are read: copy them in (h5copy, h5repack)", path)
    if link.type != h5py.h5l.TYPE_HARD:
        raise Refused(f'"{path}" is a user-defined link (type {link.type}); only values inside this file are read', path)
    return h5py.h5o.open(group, name)


def resolve(file: Any, name: str) -> Any:
    """The low-level dataset called `name`, walking its path link by link."""
    import h5py
    group, parts, path, hops = file["/"].id, [p for p in name.split("/") if p], "", 0
    found: Any = group
    while parts:
        part = parts.pop(0)
        raw = part.encode("utf-8", "surrogateescape")
        if not isinstance(group, h5py.h5g.GroupID) or not group.links.exists(raw):
            there = ", ".join(sorted(printable(n) for n in list(group)[:20])) if isinstance(group, h5py.h5g.GroupID) else ""
            raise Refused(f'no dataset "{printable(name)}" ("{path or "/"}" holds: {there or "nothing"})', name)
        found = open_link(group, raw, f"{path}/{printable(part)}")
        if isinstance(found, str):
            hops += 1
            if hops > MAX_LINKS:
                raise Refused(f'"{printable(name)}" is a soft link that leads in a circle', name)
            if found.startswith("/"):
                group, path = file["/"].id, ""
            parts = [p for p in found.split("/") if p] + parts
            found = group
            continue
        path = f"{path}/{printable(part)}"
        if isinstance(found, h5py.h5g.GroupID):
            read_attributes(h5py.Group(found), path)
        group = found
    if not isinstance(found, h5py.h5d.DatasetID):
        raise Refused(f'"{printable(name)}" is a {type(found).__name__.removesuffix("ID").lower()}, not a dataset', name)
    return found


def list_datasets(file: Any) -> tuple[dict[str, tuple[tuple[int, ...], str]], set[str]]:
    """(path -> (shape, dtype kind) of every dataset in the file, all paths there); soft links and types we cannot train on have
    a path alone."""
    import h5py
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    paths: set[str] = set()
    seen: set[object] = set()
    waiting: list[tuple[Any, str]] = [(file["/"].id, "")]
    while waiting:
        group, path = waiting.pop()
        for name in list(group):
            here = f"{path}/{name.decode('utf-8', 'surrogateescape')}"
            child = open_link(group, name, printable(here))
            paths.add(here)
            if isinstance(child, str):
                continue
            identity = h5py.h5o.get_info(child).addr
            if identity in seen:
                continue
            seen.add(identity)
            if len(seen) > MAX_OBJECTS:
                raise Refused(f"holds more than {MAX_OBJECTS} objects; name the datasets with data.x and data.y")
            if isinstance(child, h5py.h5g.GroupID):
                read_attributes(h5py.Group(child), printable(here))
                waiting.append((child, here))
            elif isinstance(child, h5py.h5d.DatasetID):
                refuse_outside_storage(child, printable(here))
                kind = child.dtype.kind
                if kind in "biuf" and child.shape:
                    found[here] = (child.shape, kind)
    return found, paths


def choose(file: Any) -> tuple[str, str | None]:
    """The (x, y) of a file when the user named neither: datasets called x and y, or the only ones that can be meant."""
    datasets, paths = list_datasets(file)
    if not datasets:
        raise Refused("holds no dataset of numbers that can be trained on (soft links are not followed unless named)")
    for usable in (datasets, paths):                          # what cannot be trained on is named, where nothing else is meant
        for x in sorted(usable, key=lambda p: (p.count("/"), p)):
            y = x[:-1] + "y"
            if x.endswith("/x") and y in usable and not datasets.keys().isdisjoint((x, y)):
                return x, y
    names = sorted(datasets)
    if len(names) == 1:
        return names[0], None
    if len(names) == 2:
        labels = [n for n in names if len(datasets[n][0]) == 1 and datasets[n][1] in "biu"]
        if len(labels) == 1 and datasets[names[0]][0][0] == datasets[names[1]][0][0]:
            return next(n for n in names if n != labels[0]), labels[0]
    listed = ", ".join(f"{printable(n)} {'x'.join(map(str, datasets[n][0]))}" for n in names[:10])
    raise Refused(f"cannot tell inputs from targets among {len(names)} datasets ({listed}); set data.x and data.y")


def refuse_outside_storage(dataset: Any, name: str) -> Any:
    """The dataset's creation list, unless its values lie in other files; asked before anything else about a dataset."""
    import h5py
    plist = dataset.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        raise Refused(f'"{name}" is a virtual dataset: its values lie in other files; '
                      f"make a real one (h5repack --layout CONTI)", name)
    if plist.get_external_count():
        outside = printable(plist.get_external(0)[0])
        raise Refused(f'"{name}" keeps its values in the external file "{outside}"; only values inside this file are read', name)
    return plist


def element_type(dataset: Any, name: str) -> Any:
    """The NumPy dtype of the elements; refuses what is not a plain integer, boolean or float of 1 to 8 bytes."""
    import h5py
    stored = dataset.get_type()
    words = {h5py.h5t.STRING: "strings", h5py.h5t.VLEN: "variable-length values", h5py.h5t.COMPOUND: "compound records",
             h5py.h5t.REFERENCE: "references", h5py.h5t.OPAQUE: "opaque bytes", h5py.h5t.ENUM: "enumeration values",
             h5py.h5t.ARRAY: "array elements", h5py.h5t.BITFIELD: "bit fields", h5py.h5t.TIME: "times"}
    number = stored.get_class() in (h5py.h5t.INTEGER, h5py.h5t.FLOAT)
    if not number and not (stored.get_class() == h5py.h5t.ENUM and stored.dtype.kind == "b"):
        raise Refused(f'"{name}" holds {words.get(stored.get_class(), "values of an unknown type")}; expected plain integers '
                      f"or floats", name)
    dtype = stored.dtype
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or not h5py.h5t.py_create(dtype).equal(stored):
        raise Refused(f'"{name}" holds a {stored.get_size()}-byte number format of its own; expected integers of 1, 2, 4 or 8 '
                      f"bytes or IEEE floats of 2, 4 or 8", name)
    return dtype


def describe(dataset: Any, name: str, size: int, path: str, user_block: int) -> dict[str, Any]:
    """Everything a reader needs to find the values of one dataset in the file without libhdf5."""
    import h5py
    plist = refuse_outside_storage(dataset, name)
    read_attributes(h5py.Dataset(dataset), name)
    dtype = element_type(dataset, name)
    shape = dataset.get_space().shape
    if not shape:
        raise Refused(f'"{name}" is {"empty" if shape is None else "a scalar"}; expected rows along the first dim', name)
    if 0 in shape:
        raise Refused(f'"{name}" has no values: its shape is {"x".join(map(str, shape))}', name)
    declared = math.prod(shape) * dtype.itemsize
    found: dict[str, Any] = {"name": name, "shape": list(shape), "dtype": dtype.str}
    layout = plist.get_layout()
    if layout == h5py.h5d.COMPACT:
        values = h5py.Dataset(dataset)[()]
        return found | {"storage": "inline", "data": base64.b64encode(values.tobytes()).decode()}
    if layout == h5py.h5d.CONTIGUOUS:
        offset = dataset.get_offset()
        if offset is None or offset + declared > size:
            raise Refused(f'"{name}" declares {declared:,} bytes, but the file of {size:,} bytes does not hold them'
                          + (" (never written)" if offset is None else ""), name)
        return found | {"storage": "contiguous", "offset": offset}
    if layout != h5py.h5d.CHUNKED:
        raise Refused(f'"{name}" has the unknown storage layout {layout}', name)
    return found | describe_chunks(dataset, plist, name, size, declared, path, user_block)


def describe_chunks(dataset: Any, plist: Any, name: str, size: int, declared: int, path: str, user_block: int) -> dict[str, Any]:
    """The chunk table in C order of the chunk grid: file offset, stored size, and mask of skipped filters of each."""
    filters = []
    for i in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(i)
        if code not in FILTERS:
            label = OTHER_FILTERS.get(code) or printable(label) or "unnamed"
            raise Refused(f'"{name}" needs the HDF5 filter {label} (number {code}); read are gzip, shuffle, fletcher32 and no '
                          f"filter: h5repack --filter GZIP=4", name)
        filters.append(FILTERS[code])
    chunk, shape = plist.get_chunk(), dataset.shape
    chunk_bytes = math.prod(chunk) * dataset.dtype.itemsize
    if chunk_bytes > MAX_CHUNK:
        raise Refused(f'"{name}" has chunks of {chunk_bytes:,} bytes; at most {MAX_CHUNK:,} are read', name)
    grid = [-(-n // c) for n, c in zip(shape, chunk)]
    expected = math.prod(grid)
    stored = dataset.get_num_chunks()
    if stored != expected:
        raise Refused(f'"{name}" declares {declared:,} bytes in {expected:,} chunks, but the file of {size:,} bytes holds '
                      f"{stored:,} of them", name)
    offsets, sizes, masks = [-1] * expected, [0] * expected, [0] * expected

    def note(info: Any) -> None:
        place = 0
        for at, length, extent in zip(info.chunk_offset, chunk, grid):
            place = place * extent + at // length
        if not 0 <= place < expected or info.byte_offset + info.size > size or not filters and info.size != chunk_bytes:
            raise Refused(f'chunk at {info.chunk_offset} of "{name}" ({info.size:,} bytes at offset {info.byte_offset:,}) '
                          f"does not fit the file of {size:,} bytes", name)
        if chunk_bytes > MAX_UNPACKED and chunk_bytes > MAX_RATIO * info.size:
            raise Refused(f'chunk at {info.chunk_offset} of "{name}" unpacks from {info.size:,} bytes to {chunk_bytes:,}; beyond '
                          f"{MAX_UNPACKED:,} it may grow {MAX_RATIO} times: repack it in smaller chunks (h5repack)", name)
        offsets[place], sizes[place], masks[place] = info.byte_offset, info.size, info.filter_mask

    if hasattr(dataset, "chunk_iter"):
        dataset.chunk_iter(note)
    else:                                          # This h5py was built against an HDF5 older than 1.12.3.
        for i in range(stored):
            note(dataset.get_chunk_info(i))
    if -1 in offsets:
        raise Refused(f'chunk {offsets.index(-1)} of "{name}" is not in the chunk index', name)
    if user_block:                                 # HDF5 versions differ: is a chunk's offset counted from the user block?
        shift = offset_shift(dataset, path, offsets[0], sizes[0], user_block, name)
        offsets = [offset + shift for offset in offsets]
    return {"storage": "chunked", "chunk": list(chunk), "filters": filters, "offsets": offsets, "sizes": sizes,
            "masks": masks if any(masks) else []}


def offset_shift(dataset: Any, path: str, offset: int, size: int, user_block: int, name: str) -> int:
    """What to add to reported chunk offsets so that the file's bytes there are the chunk's."""
    _, expected = dataset.read_direct_chunk((0,) * len(dataset.shape))
    with open(path, "rb") as file:
        for shift in (0, user_block):
            file.seek(offset + shift)
            if file.read(size) == expected:
                return shift
    raise Refused(f'the chunks of "{name}" are not where the index says, in a file with a user block', name)
