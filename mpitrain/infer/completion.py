"""A completion over HTTP: what a client may ask for, and the JSON of the answer, as OpenAI's /v1/completions has them."""

from __future__ import annotations

import json
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.infer.generate import BLOCK, Request
from mpitrain.infer.sample import Sampling
from mpitrain.infer.text import Encoding

ONLY: dict[str, tuple[Any, ...]] = {      # keys of which we do what they do by default; null is that, too
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (None, 0), "suffix": (None, ""), "stop": (None, []),
    "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "logit_bias": (None, {}), "stream_options": (None,)}
MOST = 2**63 - 1                                  # of any number
NUMBERS = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}         # with their defaults


@dataclass
class Asked:
    """A request of a client on its way: its tokens come through `tokens`, and None after the last, when the request says why."""

    request: Request
    stream: bool
    tokens: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    gone: threading.Event = field(default_factory=threading.Event)      # the client has hung up
    sent: threading.Event = field(default_factory=threading.Event)      # the answer is on its way


def read(body: bytes, encoding: Encoding, block: int) -> Asked:
    """UsageError, in the words of the client's keys, for what is not understood."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise UsageError('the body is a JSON object: {"prompt": "...", "max_tokens": 16}')
    known = {"prompt", "model", "user", "stream", *NUMBERS, *ONLY}
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"{key[:40]!r} is not a key of a completion; those are {', '.join(sorted(known))}")
        if key in ONLY and value is not None and not any(value == one and type(value) is type(one) for one in ONLY[key]):
            raise UsageError(f"{key} other than {json.dumps(ONLY[key][0])} is not there; leave it out")
    prompt, stream = given.get("prompt"), False if given.get("stream") is None else given["stream"]
    if not isinstance(prompt, str) or not isinstance(stream, bool):
        raise UsageError("prompt is a text, and stream true or false")
    numbers = {key: _number(key, given.get(key), default) for key, default in NUMBERS.items()}
    if numbers["max_tokens"] < 0:
        raise UsageError(f"max_tokens is {numbers['max_tokens']}, expected a whole number of 0 or more")
    sampling = Sampling(float(numbers["temperature"]), numbers["top_k"], float(numbers["top_p"]), numbers["seed"])
    if len(prompt) > block * encoding.longest:    # else a long word may keep the encoding busy for long
        raise UsageError(f"the prompt has {len(prompt):,} characters, and the model takes 1 to {block:,} tokens (model.block)")
    tokens = encoding.encode(prompt)
    if not 0 < len(tokens) <= block:
        raise UsageError(f"the prompt has {len(tokens):,} tokens, and the model takes 1 to {block:,} (model.block)")
    return Asked(Request(0, tokens, numbers["max_tokens"], sampling), stream)


def _number(key: str, value: Any, default: float) -> Any:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if isinstance(default, int) else (int, float)):
        whole = "whole " if isinstance(default, int) else ""
        raise UsageError(f"{key} is {json.dumps(value)[:40]}, expected a {whole}number")
    if abs(value) > MOST:
        raise UsageError(f"{key} is {str(value)[:40]}, expected a number of at most {MOST:,}")
    return value


def answer(asked: Asked, text: str, model: str, *, last: bool = True) -> dict[str, Any]:
    """The object of an answer, or of a piece of one."""
    reason = {BLOCK: "length"}.get(asked.request.ended, asked.request.ended) if last else None
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    found: dict[str, Any] = {"id": f"cmpl-{id(asked):x}", "object": "text_completion", "created": int(time.time()),
                             "model": model, "choices": [choice]}
    if last and not asked.stream:
        prompt, made = len(asked.request.prompt), len(asked.request.made)
        found["usage"] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return found
