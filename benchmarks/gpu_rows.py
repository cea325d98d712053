"""The bars for a machine with one GPU: 23 rows, each with the pieces of benchmarks/gpu.py that measure it, and who judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Record = dict[str, Any]
Verdict = tuple[str, bool | None]            # (the figure, whether the bar is met; None: it is a figure without a bar)


class Row(NamedTuple):
    """`pieces` are all needed, and `judge` is given their records."""

    what: str
    bar: str
    pieces: tuple[str, ...]
    judge: Callable[[Sequence[Record]], Verdict]


def least(key: str, bar: float, *only: str) -> Callable[[Sequence[Record]], Verdict]:
    """All records with `key`, those of pieces whose names begin with one of `only`, must have so much."""
    def judge(records: Sequence[Record]) -> Verdict:
        found = [r[key] for r in records if key in r and (not only or r["piece"].startswith(only))]
        return (f"{key} {min(found):.3g} to {max(found):.3g}", min(found) >= bar) if found else (f"no {key}", False)
    return judge


def most(key: str, bar: float) -> Callable[[Sequence[Record]], Verdict]:
    def judge(records: Sequence[Record]) -> Verdict:
        found = [r[key] for r in records if key in r]
        return (f"{key} {max(found):.3g}", max(found) <= bar) if found else (f"no {key}", False)
    return judge


def every(*judges: Callable[[Sequence[Record]], Verdict]) -> Callable[[Sequence[Record]], Verdict]:
    def judge(records: Sequence[Record]) -> Verdict:
        found = [one(records) for one in judges]
        return "; ".join(text for text, _ in found), all(met is not False for _, met in found)
    return judge


def true(*keys: str) -> Callable[[Sequence[Record]], Verdict]:
    def judge(records: Sequence[Record]) -> Verdict:
        found = {key: [r[key] for r in records if key in r] for key in keys}
        return ", ".join(f"{key}: {all(values) and bool(values)}" for key, values in found.items()), all(
            values and all(values) for values in found.values())
    return judge


def tests(record: Record) -> Verdict:
    return (f"{record['passed']} passed, {record['skipped']} skipped, {record['failed']} failed, {record['seconds']:.0f} s",
            bool(record["passed"]) and not record["failed"])


def all_tests(records: Sequence[Record]) -> Verdict:
    text, passed = tests(records[0])
    return text, passed and not records[0]["skipped"] and records[0]["seconds"] < 120


def sanitizer(records: Sequence[Record]) -> Verdict:
    if any("missing" in r for r in records):
        return "compute-sanitizer is not installed", None
    return ("; ".join(f"{r['piece']}: {r['errors']} errors" for r in records),
            all(r["errors"] == 0 and r["passed"] and not r["failed"] for r in records))


def waits(records: Sequence[Record]) -> Verdict:
    return f"waits {[r['waits'] for r in records]}, {max(r['down'] for r in records)} bytes down", all(
        r["waits"] == 0 and r["down"] <= 72 for r in records)


def bytes_of_a_step(records: Sequence[Record]) -> Verdict:
    more = max(r["up"] - r["batch"] for r in records)
    return f"the batch and {more} bytes up, {max(r['down'] for r in records)} down", more <= 1024 and all(
        r["down"] <= 72 for r in records)


def launches(records: Sequence[Record]) -> Verdict:
    off, on = records
    return (f"{off['launches']} of a step; captured {on['graphs']} graph and {on['launches']} launches",
            off["launches"] <= 404 and on["graphs"] == 1 and on["launches"] <= 12)


def memory(records: Sequence[Record]) -> Verdict:
    found = [r["ours_bytes"] / r["compiled_bytes"] for r in records if r.get("compiled_bytes")]
    return (f"{max(found):.3g} of torch.compile's", max(found) <= 1.1) if found else ("no torch.compile", False)


def share_of_peak(bar: float) -> Callable[[Sequence[Record]], Verdict]:
    """Of the 989 TFLOP/s that an H100 or H200 has in bfloat16."""
    def judge(records: Sequence[Record]) -> Verdict:
        found = [r["tflops"] / 989 for r in records if "tflops" in r]
        return f"{max(found):.1%} of the peak", max(found) >= bar
    return judge


def first_steps(records: Sequence[Record]) -> Verdict:
    ours, torch = records
    return (f"{ours['cold']:.1f} s cold, {ours['warm']:.1f} s warm; torch.compile {torch['cold']:.1f} and {torch['warm']:.1f} s",
            ours["cold"] <= 10 and ours["warm"] <= 2)


def shared_sum(records: Sequence[Record]) -> Verdict:
    found = records[0]
    refused = "have one GPU" in found["refusal"] and "\n" not in found["refusal"]
    return (f"{found['faster']:.3g} x messages, bits equal: {found['equal']}, NCCL refused: {refused}",
            found["faster"] >= 3 and found["equal"] and refused)


def figure(key: str, unit: str) -> Callable[[Sequence[Record]], Verdict]:
    return lambda records: (f"{records[0][key]:.4g} {unit}", None)


GPT2 = "gpt2 16 x 1024", "gpt2 64 x 1024"
ROWS: dict[int, Row] = {
    1: Row("make test-gpu", "all pass, none skipped, < 120 s", ("tests",), all_tests),
    2: Row("kernels beside their references", "tests of kernels pass on the GPU", ("kernel tests",), lambda r: tests(r[0])),
    3: Row("memcheck, racecheck, initcheck", "0 errors", ("memcheck", "racecheck", "initcheck"), sanitizer),
    4: Row("losses beside the host's and PyTorch's", "1e-3 relative in float32; 0.02 in bfloat16", ("repeated",),
           every(most("from_host", 1e-3), most("from_torch", 0.02))),
    5: Row("the same run twice", "equal bits", ("repeated",), true("equal")),
    6: Row("waits of the host in a step", "0; 72 bytes down", ("transfers",), waits),
    7: Row("transfers of a step", "up: batch + 1 KiB; down: 72 bytes", ("transfers",), bytes_of_a_step),
    8: Row("launches of GPT-2", "400 and 4; captured 1 graph", ("transfers",), launches),
    9: Row("GPT-2 124M in bfloat16", "0.90 of compiled, 1.3 of eager, 40 % of the peak", GPT2,
           every(least("of_compiled", 0.90), least("of_eager", 1.3), share_of_peak(0.40))),
    10: Row("GPT 1.5B", "0.92 of compiled, 50 % of the peak", ("gpt 1.5B",),
            every(least("of_compiled", 0.92), share_of_peak(0.5))),
    11: Row("linear products", "0.95 of torch.matmul", ("products",), every(least("of_torch", 0.95), most("distance", 1e-2))),
    12: Row("attention", "0.95 of scaled_dot_product_attention", ("attention",),
            every(least("of_torch", 0.95), most("distance", 1e-2))),
    13: Row("memory-bound kernels", "0.8 of a copy's bandwidth", ("kernels",), least("of_copy", 0.8)),
    14: Row("AdamW, 124M with the copy of 16 bits", "1.1 ms", ("adamw",), every(most("update_s", 1.1e-3), least("moved", 0.9))),
    15: Row("peak memory of GPT-2", "1.1 of torch.compile's", GPT2, memory),
    16: Row("ResNet-18 and -50, 256 x 224^2", "0.85 of compiled, 1.0 of eager", ("resnet18 256", "resnet50 256"),
            every(least("of_compiled", 0.85), least("of_eager", 1.0))),
    17: Row("ResNet-20, batches of 128 and 1,024", "1.5 of eager, 0.8 of compiled", ("resnet20 128", "resnet20 1024"),
            every(least("of_eager", 1.5), least("of_compiled", 0.8))),
    18: Row("a loader's batches beside resident ones", "1.02", ("feed",), every(most("of_resident", 1.02), true("finite"))),
    19: Row("float16, infinite gradients on one of two ranks", "all skip them, scales of GradScaler", ("loss scale",),
            true("skipped", "alike", "as_torch")),
    20: Row("two ranks on one GPU, 124M numbers", "3 x messages, equal bits; NCCL refused in a line", ("ipc",), shared_sum),
    21: Row("messages of two ranks", "30 % of the exchange exposed", ("staged",), most("exposed", 0.30)),
    22: Row("the first step", "10 s cold, 2 s warm", ("first step",), first_steps),
    23: Row("before there were kernels", "a figure", ("baseline",), figure("per_s", "tokens/s")),
}


def table(records: Sequence[Record]) -> list[str]:
    """The rows in Markdown: bar, figure, and met, missed or not measured."""
    lines = ["| # | what | bar | figure | |", "|---|---|---|---|---|"]
    for number, row in ROWS.items():
        found = [r for name in row.pieces for r in records if r["piece"] == name]
        text, met = "", None
        if {r["piece"] for r in found} == set(row.pieces):
            text, met = row.judge(found)
            said = {True: "met", False: "missed", None: "measured"}[met] if "not installed" not in text else "not measured"
        else:
            said = "not measured"
        lines.append(f"| {number} | {row.what} | {row.bar} | {text} | {said} |")
    return lines
