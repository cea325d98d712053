"""The server: completions as the command makes them, several at a time, refused where it is full, and stopped in order."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import clean_environment, mpirun

KEYS = ("model.name=gpt", "model.layers=2", "model.heads=2", "model.width=32", "model.block=400", "model.vocabulary=256",
        "train.steps=2", "train.batch_size=4", "data.validation=tail:0.1", "data.path=tokens", "run.out=run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "text.txt").write_text("Der Zug fährt über die Brücke. " * 200)
    (folder / "run.toml").write_text("")
    for words in (("data", "import", "text", "text.txt", "--level", "byte", "--out", "tokens"), ("train", "run.toml", *KEYS)):
        done = mpirun(1, "-m", "mpitrain", *words, cwd=folder)
        assert done.rc == 0, done.err
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    started = subprocess.Popen([sys.executable, "-m", "mpitrain", "serve", "run", "--port", "0", "--slots", "2", "--queue", "1"],
                               cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    line = started.stdout.readline()
    assert "http://127.0.0.1:" in line, started.stderr and started.stderr.read()
    yield started, int(line.partition("127.0.0.1:")[2].partition("/")[0])
    started.kill()
    started.communicate()


def ask(port: int, body: Any, path: str = "/v1/completions", method: str = "POST", **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body if isinstance(body, (bytes, type(None))) else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read()), answer.headers


def test_a_completion_is_what_the_command_prints_also_in_company(folder: Path, server: tuple[Any, int]) -> None:
    asked = {"prompt": "Der Zug f\u00e4", "max_tokens": 40, "temperature": 0}
    done = mpirun(1, "-m", "mpitrain", "generate", "run", "--prompt", asked["prompt"], "--tokens", "40", cwd=folder)
    status, found, _ = ask(server[1], asked)
    assert status == 200 and asked["prompt"] + found["choices"][0]["text"] + "\n" == done.out
    assert found["usage"] == {"prompt_tokens": 11, "completion_tokens": 40, "total_tokens": 51}
    assert found["choices"][0]["finish_reason"] == "length"
    texts: list[str] = []
    others = [threading.Thread(target=lambda: texts.append(ask(server[1], asked)[1]["choices"][0]["text"])) for _ in range(2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert texts == [found["choices"][0]["text"]] * 2


def test_a_stream_brings_the_same_text_in_pieces(server: tuple[Any, int]) -> None:
    asked = {"prompt": "Die ", "max_tokens": 30, "temperature": 1.5, "seed": 3}
    whole = ask(server[1], asked)[1]["choices"][0]["text"]
    connection = http.client.HTTPConnection("127.0.0.1", server[1], timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({**asked, "stream": True}))
    events = [line[6:] for line in connection.getresponse().read().decode().split("\n\n") if line]
    assert events[-1] == "[DONE]" and len(events) > 8
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


@pytest.mark.parametrize(("body", "status", "said"), [
    (b"{", 400, "not JSON"), (b"[]", 400, "a JSON object"), ({"prompt": 3}, 400, "prompt is a text"),
    ({"prompt": ""}, 400, "the prompt has 0 tokens"), ({"prompt": "a" * 401}, 400, "takes 1 to 400"),
    ({"prompt": "a", "n": 2}, 400, "n other than 1"), ({"prompt": "a", "best": 2}, 400, "'best' is not a key"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature is -1.0"), ({"prompt": "a", "top_p": "x"}, 400, "expected a number"),
    ({"prompt": "a", "max_tokens": True}, 400, "expected a whole number"), ({"prompt": "a", "echo": 0}, 400, "echo other than"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature is nan"), (b"[" * 100000, 400, "not JSON")])
def test_what_is_not_understood_is_refused(server: tuple[Any, int], body: Any, status: int, said: str) -> None:
    found = ask(server[1], body)
    assert found[0] == status and said in found[1]["error"]["message"], found


def test_a_body_that_is_too_long_is_not_read(server: tuple[Any, int]) -> None:
    assert ask(server[1], None, **{"Content-Length": "1048577"})[0] == 413
    assert ask(server[1], None, **{"Content-Length": "9" * 30})[0] == 413
    assert ask(server[1], None, **{"Content-Length": "-1"})[0] == 411


def test_other_paths_and_other_names_of_this_machine_are_refused(server: tuple[Any, int]) -> None:
    assert ask(server[1], None, "/x", "GET")[0] == ask(server[1], {}, "/v1/chat/completions")[0] == 404
    assert ask(server[1], None, "/health", "GET")[1]["status"] == "ok"
    assert ask(server[1], None, "/v1/models", "GET")[1]["data"][0]["id"] == "run"
    assert ask(server[1], None, "/health", "GET", Host="evil.example:80")[0] == 403


def test_where_as_many_wait_as_may_the_next_is_told_to_come_back_and_a_stop_answers_those_taken(server: tuple[Any, int]) -> None:
    found: list[tuple[int, Any, Any]] = []
    asked = {"prompt": "D", "max_tokens": 390}
    threads = [threading.Thread(target=lambda: found.append(ask(server[1], asked))) for _ in range(12)]
    for thread in threads:
        thread.start()
    while not any(status == 503 for status, *_ in found):
        assert any(thread.is_alive() for thread in threads), found
    server[0].send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    refused = [headers for status, _, headers in found if status == 503]
    assert refused[0]["Retry-After"] == "1" and all(status in (200, 503) for status, *_ in found)
    assert all(body["usage"]["completion_tokens"] == 390 for status, body, _ in found if status == 200)
    out, err = server[0].communicate(timeout=30)
    assert server[0].returncode == 0 and not err, err
