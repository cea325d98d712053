"""What `mpitrain generate` does: a prompt's text to standard output as it comes, or a file of prompts to a file of answers."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import launched_rank
from mpitrain.comm.job.together import on_first
from mpitrain.config import Config
from mpitrain.errors import AccessError, DataError, MissingError, OutputError, UsageError
from mpitrain.files import disk
from mpitrain.infer.engine import Engine, block_of
from mpitrain.infer.generate import BLOCK, Request, Writer, refuse_prompt
from mpitrain.infer.sample import Sampling
from mpitrain.infer.text import Decoder, Encoding, decode, find_encoding


def answer(options: Namespace, config: Config, process: Process) -> int:
    """Runs the verb on all ranks; its exit status."""
    with guard.symmetric():
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        for name, least in (("tokens", 0), ("slots", 1)):
            if getattr(options, name) < least:
                raise UsageError(f"--{name} is {getattr(options, name)}, expected a whole number of {least} or more")
        if (options.prompts is None) != (options.out is None):
            raise UsageError("--prompts FILE and --out FILE go together; a single --prompt is answered on standard output")
        block = block_of(config)
        encoding = find_encoding(config, options.vocabulary)
        prompts = [options.prompt] if options.prompts is None else read_prompts(options.prompts)
        if options.out is not None:
            refuse_output(options.out, options.prompts, options.overwrite)
        requests = []
        for number, text in enumerate(prompts):
            what = "the prompt" if options.prompts is None else f"prompt {number + 1} of {options.prompts}"
            requests.append(Request(number, encoding.encode(text, what), options.tokens, sampling))
            refuse_prompt(requests[-1].prompt, None if options.slide else block, what)
    guarding = process.guarding() if launched_rank()[1] > 1 else nullcontext()
    with guarding, Engine(config, options.folder, options.step, min(options.slots, len(prompts)), encoding.count,
                          cached=not options.no_cache, device=options.device) as engine:
        writer = Writer(engine, end=getattr(encoding, "end", None), slide=options.slide)
        if options.prompts is None:
            _print_answer(engine, writer, requests[0], encoding)
        else:
            _write_answers(engine, writer, requests, prompts, encoding, options.out)
    return 0


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file, or the "prompt" of each line of a .jsonl file. MissingError, AccessError, DataError name it."""
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise MissingError("there is no such file of prompts", file=path) from None
    except UnicodeDecodeError as error:
        raise DataError("prompts are UTF-8 text, and this is none; convert it (iconv)", file=path, offset=error.start) from None
    except OSError as error:
        raise AccessError(f"the file of prompts cannot be read: {error.strerror}", file=path) from None
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    prompts = [line.removesuffix("\r") for line in lines]
    if path.suffix == ".jsonl":
        prompts = [_prompt_of(line, number, path) for number, line in enumerate(prompts, 1)]
    if not prompts:
        raise DataError("there is no prompt in this file; write one a line", file=path)
    return prompts


def _prompt_of(line: str, number: int, path: Path) -> str:
    try:
        found = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        found = None
    if not isinstance(found, str):
        raise DataError(f'line {number} is not a JSON object with a text as "prompt": {line[:60]!r}', file=path)
    return found


def refuse_output(out: Path, source: Path, overwrite: bool) -> None:
    """OutputError where answers would replace a file that is there, or the prompts themselves."""
    if out.exists() and source.exists() and out.samefile(source):
        raise OutputError("the answers would replace their own prompts; name another --out", file=out)
    if out.exists() and not out.is_file() or not out.absolute().parent.is_dir():
        raise OutputError("--out names a file in a folder that is there", file=out)
    if out.exists() and not overwrite:
        raise OutputError("this file is there already; name another --out, or add --overwrite", file=out)


def _print_answer(engine: Engine, writer: Writer, request: Request, encoding: Encoding) -> None:
    if engine.place[0] != 0:
        return
    decoder, shown = Decoder(encoding), engine.is_first
    if shown:
        request.heard = lambda token: _show(decoder.add(token))
        _show(decode(encoding, request.prompt))
    for ended in writer.run([request]):
        if shown:
            _show(decoder.end() + "\n")
            if ended.ended == BLOCK:
                print(f"mpitrain: the text ends at model.block = {engine.capacity}, {len(ended.made)} of {ended.tokens} tokens; "
                      "go on with --slide", file=sys.stderr)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write_answers(engine: Engine, writer: Writer, requests: list[Request], prompts: list[str], encoding: Encoding,
                   out: Path) -> None:
    """Prompt i is for copy i modulo n of the model; the first rank writes all answers in the order of the prompts."""
    place, n = engine.place
    mine = [answer_of(request, prompts[request.number], encoding) for request in writer.run(requests[place::n])]
    control = engine.session.control
    everyone = control.gather_objects(mine if engine.is_first else [])
    found = sorted((line for lines in everyone for line in lines), key=lambda line: line["number"])
    assert len(found) == len(prompts), "each prompt is answered once"

    def write() -> str:
        partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        try:
            disk.write_file(partial, [b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in found)])
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)
        return str(out)

    on_first(control, write)


def answer_of(request: Request, prompt: str, encoding: Encoding) -> dict[str, Any]:
    return {"number": request.number, "prompt": prompt, "text": decode(encoding, request.made), "tokens": len(request.made),
            "ended": request.ended}
