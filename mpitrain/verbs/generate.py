"""`mpitrain generate`: text that a trained language model goes on with, printed as it comes, or for a file of prompts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.config import load_run
from mpitrain.verbs import add_language_model

HELP = "continue a text with a trained language model, or each prompt of a file"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="the text to go on with; what follows it is printed as it comes")
    what.add_argument("--prompts", type=Path, metavar="FILE", help='a prompt a line; .jsonl: {"prompt": ...} a line')
    parser.add_argument("--out", type=Path, metavar="FILE", help="where answers to --prompts go, a line of JSON each, in order")
    parser.add_argument("--overwrite", action="store_true", help="replace --out where it is there")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="how many tokens to add at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token; 1 draws as trained")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest tokens; 0 (default): all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest tokens of this share")
    parser.add_argument("--seed", type=int, default=0,
                        help="of the draws, 0 or more; a text depends on it and its prompt's number alone")
    parser.add_argument("--slide", action="store_true", help="go on beyond model.block, from the last so many tokens")
    parser.add_argument("--no-cache", action="store_true", help="read the whole text anew for each token: slower, the same text")
    add_language_model(parser)


def run(options: Namespace, process: Process) -> int:
    with guard.symmetric():
        config = load_run(options.folder, options.arguments)
    from mpitrain.infer.answers import answer
    return answer(options, config, process)
