"""The server: completions as the command makes them, several at a time, refused where it is full, and stopped in order."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import Job, clean_environment, launch, mpirun, send

from mpitrain.infer import completion, connections
from mpitrain.infer.text import Bytes

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
    ({"prompt": "a", "temperature": 10 ** 400}, 400, "expected a number of at most"),
    (b'{"prompt": "\\ud800"}', 400, "no character of Unicode"), (b'{"prompt": "a", "temperature": 1e999}', 400, "inf"),
    ({"prompt": "a", "max_tokens": True}, 400, "expected a whole number"), ({"prompt": "a", "echo": 0}, 400, "echo other than"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature is nan"), (b"[" * 100000, 400, "not JSON")])
def test_what_is_not_understood_is_refused(server: tuple[Any, int], body: Any, status: int, said: str) -> None:
    found = ask(server[1], body)
    assert found[0] == status and said in found[1]["error"]["message"], found


def test_null_is_the_default_of_each_key_but_the_prompt(server: tuple[Any, int]) -> None:
    keys = (*completion.ONLY, *completion.NUMBERS, "stream", "model", "user")
    status, found, _ = ask(server[1], {"prompt": "Der ", **dict.fromkeys(keys)})
    assert status == 200 and found["choices"] == ask(server[1], {"prompt": "Der "})[1]["choices"], found
    assert ask(server[1], {"prompt": None})[0] == 400


def test_a_body_that_is_too_long_is_not_read(server: tuple[Any, int]) -> None:
    assert ask(server[1], None, **{"Content-Length": "1048577"})[0] == 413
    assert ask(server[1], None, **{"Content-Length": "9" * 30})[0] == 413
    assert ask(server[1], None, **{"Content-Length": "-1"})[0] == 411
    assert ask(server[1], b" " * (4 << 20))[0] == 413                              # it reads why, though it sends on


def test_other_paths_and_other_names_of_this_machine_are_refused(server: tuple[Any, int]) -> None:
    assert ask(server[1], None, "/x", "GET")[0] == ask(server[1], {}, "/v1/chat/completions")[0] == 404
    assert ask(server[1], None, "/health", "GET")[1]["status"] == "ok"
    assert ask(server[1], None, "/v1/models", "GET")[1]["data"][0]["id"] == "run"
    for host in ("evil.example:80", "evil.example", ":80"):
        assert ask(server[1], None, "/health", "GET", Host=host)[0] == 403
    for host in ("localhost", "127.0.0.1:80", "LOCALHOST:1"):
        assert ask(server[1], None, "/health", "GET", Host=host)[0] == 200


def test_who_hangs_up_gives_the_slot_back(server: tuple[Any, int]) -> None:
    """Two that go away, one waiting for the whole text and one that reads a stream, and two more before they are answered."""
    asked = json.dumps({"prompt": "D", "max_tokens": 399, "stream": False}).encode()
    for body in (asked, asked.replace(b"false", b"true")):
        with socket.create_connection(("127.0.0.1", server[1])) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            if b"true" in body:
                assert client.recv(10)
    with socket.create_connection(("127.0.0.1", server[1])) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
    while ask(server[1], None, "/health", "GET")[1]["live"]:
        assert server[0].poll() is None
    assert ask(server[1], {"prompt": "D", "max_tokens": 3})[1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_a_client_that_hangs_up_is_noticed_while_no_token_comes(stream: bytes) -> None:
    server = connections.Server(0, Bytes(), 10, "m", 1, 1)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with socket.create_connection(server.server_address) as client:
        body = b'{"prompt": "a", "stream": %b}' % stream
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        asked = server.waiting.get(timeout=10)
        assert not asked.gone.is_set()
    assert asked.gone.wait(10)
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_client_that_sends_for_ever_or_many_at_once_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MORE", 2)
    server = connections.Server(0, Bytes(), 10, "m", 1, 1)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(server.server_address)) for _ in range(6)]
        assert all(b"503" in client.recv(1000) for client in clients[4:])
        clients[0].sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        monkeypatch.setattr(connections, "READING_S", 0.0)
        assert [len(client.recv(1)) for client in clients[1:4]] == [0, 0, 0]
    server.shutdown()
    thread.join()
    server.server_close()


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


def serving(folder: Path, ranks: int, *words: str) -> tuple[Job, int]:
    job = launch(ranks, "-m", "mpitrain", "serve", "run", "--port", "0", "--slots", "2", *words, cwd=folder)
    job.wait_for("Ctrl-C")
    return job, int(job.out.partition("127.0.0.1:")[2].partition("/")[0])


@pytest.mark.parametrize("words", [("mesh.pp=2",), pytest.param(("mesh.tp=2",), marks=pytest.mark.slow),
                                   pytest.param((), marks=pytest.mark.slow)])
def test_a_server_on_two_ranks_answers_as_one_does_and_a_signal_ends_both(folder: Path, words: tuple[str, ...]) -> None:
    job, port = serving(folder, 2, *words)
    asked = {"prompt": "Der Zug f\u00e4", "max_tokens": 40, "temperature": 0}
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(ask(port, asked)[1]["choices"][0]["text"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = mpirun(1, "-m", "mpitrain", "generate", "run", "--prompt", asked["prompt"], "--tokens", "40", cwd=folder)
    assert [str(asked["prompt"]) + text + "\n" for text in texts] == [done.out] * 3
    job.signal(signal.SIGUSR1)                       # mpirun passes it on; after SIGTERM Open MPI kills
    ended = job.finish(20)
    assert ended.rc == 0 and not ended.err, ended.err


@pytest.mark.slow
def test_a_lost_rank_ends_the_server(folder: Path) -> None:
    job, port = serving(folder, 2, "mesh.pp=2")
    assert ask(port, {"prompt": "D"})[0] == 200
    send(job.ranks()[1], signal.SIGKILL)
    assert job.finish(20).rc not in (0, None)


@pytest.mark.slow
def test_a_port_that_is_taken_is_refused_on_all_ranks_in_a_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = mpirun(2, "-m", "mpitrain", "serve", "run", "--port", str(taken.getsockname()[1]), "mesh.pp=2", cwd=folder)
    assert done.rc not in (0, None) and len(done.error_lines) == 1 and "cannot be had" in done.error_lines[0], done.err
