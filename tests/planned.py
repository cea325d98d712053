"""A small GPT and machines, for which tests plan."""

from __future__ import annotations

from pathlib import Path

from mpitrain.data.importers import import_text

LAYERS, HEADS, WIDTH, BLOCK = 3, 2, 16, 8
GPT = f"""
[model]
name = "gpt"
layers = {LAYERS}
heads = {HEADS}
width = {WIDTH}
block = {BLOCK}
dropout = 0.1
[data]
path = "tokens"
validation = 0
[train]
steps = 4
batch_size = 16
[log]
every = 1
progress_s = 0
"""
MACHINE = """
name = "made-up"
flops = {float32 = 1e10}
efficiency = 0.5
memory_bandwidth = 1e10
memory_bytes = 1e9
collective_s = 5e-6
message_s = 2e-6
spread = 0.02
%s
[[levels]]
name = "host"
ranks = 4
alpha = 1e-5
beta = 1e-9
gamma = 1e-10
[[levels]]
name = "net"
ranks = 0
alpha = 5e-5
beta = %s
gamma = 1e-10
"""

MEASURED = """
[measured]
nodes = 2
[measured.by_ranks.8]
step_s = 1e-4
turns = 1.0
collective_s = 2e-6
shared = {alpha = 3e-4, beta = 1e-8, gamma = 0.0, points = [[8.0, 3e-4], [1e6, 1e-2]]}
messages = {alpha = 1e-6, beta = 1e-9, gamma = 0.0, points = [[8.0, 1e-6], [1e6, 1e-3]]}
layers = {2 = [[8.0, 1e-6], [1e6, 1e-4]]}
[measured.between]
step_s = 2e-4
overlap = 0.7
alpha = 1e-4
beta = 1e-8
gamma = 0.0
points = [[8.0, 1e-4], [1e5, 2e-3], [1e6, 1.1e-2]]
at_once = 1e-8
"""


def write(folder: Path) -> Path:
    """gpt.toml with its tokens, and machines."""
    (folder / "corpus.txt").write_text("".join(chr(97 + i * i % 23) for i in range(2000)))
    import_text(folder / "corpus.txt", folder / "tokens")
    (folder / "gpt.toml").write_text(GPT)
    (folder / "made-up.toml").write_text(MACHINE % ("busy_watts = 20.0\nidle_watts = 5.0", 1e-8))
    (folder / "slow.toml").write_text(MACHINE % ("", 1e-6))
    (folder / "one-host.toml").write_text((MACHINE % ("", 1e-8)).rpartition("[[levels]]")[0])
    (folder / "measured.toml").write_text(MACHINE % ("", 1e-6) + MEASURED)      # memory that ranks share is slower than messages
    return folder
