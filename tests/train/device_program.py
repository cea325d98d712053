"""``python -m mpitrain`` with the stand-in for a GPU: python device_program.py train run.toml train.device=gpu"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fakegpu

from mpitrain.__main__ import main

fakegpu.instead_of_cupy()
main()
