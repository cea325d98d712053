"""Text to tokens and back; byte pairs against what the `tokenizers` package makes of the same files (tests/infer/pairs)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import DataError, MissingError, MpitrainError, UsageError
from mpitrain.infer.byte_pairs import pieces, read_byte_pairs
from mpitrain.infer.sample import Sampling, likeliest
from mpitrain.infer.text import Bytes, Characters, Decoder, decode, encoding_of

PAIRS = Path(__file__).with_name("pairs")


def test_byte_pairs_are_those_of_the_reference() -> None:
    encoding = read_byte_pairs(PAIRS)
    for text, tokens in json.loads((PAIRS / "expected.json").read_text()):
        if "<|endoftext|>" not in text:
            assert encoding.encode(text) == tokens, text
        assert decode(encoding, encoding.encode(text)) == text
    assert encoding.end == 0 and encoding.encode("a<|endoftext|>b")[1] == 0


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    assert "".join(pieces(text)) == text
    for encoding in (read_byte_pairs(PAIRS), Bytes()):
        assert decode(encoding, encoding.encode(text)) == text


def test_a_vocabulary_is_of_characters_or_of_bytes() -> None:
    named = [chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in range(256)]
    assert isinstance(encoding_of(named), Bytes) and isinstance(encoding_of(["a", "ü"]), Characters)
    assert decode(Characters(["a", "ü"]), [1, 0]) == "üa"
    with pytest.raises(UsageError, match="character 2 of the prompt is 'b', which is not among the 2"):
        Characters(["a", "ü"]).encode("ab")


def test_a_character_of_several_bytes_appears_with_its_last() -> None:
    decoder = Decoder(Bytes())
    assert [decoder.add(byte) for byte in "aü".encode()] == ["a", "", "ü"]
    assert decoder.add(0xC3) == "" and decoder.end() == "\ufffd"


@pytest.mark.parametrize(("file", "text", "said"), [
    ("vocab.json", "{", "not JSON"), ("vocab.json", "[]", "gives each token a number"),
    ("vocab.json", '{"a": 1}', "gives each token a number"), ("vocab.json", '{"a": 0, "b": 0}', "gives each token a number"),
    ("vocab.json", '{"a b": 0}', "stand for no byte"), ("vocab.json", '{"a": true, "b": 0}', "gives each token a number"),
    ("merges.txt", "a b\nab", "line 2 is 'ab'"), ("merges.txt", "q zz", "line 1 is 'q zz'"), ("merges.txt", None, "is missing")])
def test_files_of_another_kind_are_refused(tmp_path: Path, file: str, text: str | None, said: str) -> None:
    if file == "merges.txt":
        (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "q": 3}')
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises((DataError, MissingError), match=said):
        read_byte_pairs(tmp_path)


def test_a_piece_without_tokens_is_refused(tmp_path: Path) -> None:
    shutil.copy(PAIRS / "merges.txt", tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(MpitrainError, match="no token for a part of it"):
        read_byte_pairs(tmp_path).encode("ab")


def choose(sampling: Sampling, logits: np.ndarray, request: int, position: int) -> int:
    return sampling.choose(*likeliest(logits, sampling.wanted), request, position)


def test_draws_follow_the_probabilities_and_keep_to_what_is_left() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    drawn = [choose(Sampling(1.0), logits, request, 7) for request in range(4000)]
    assert np.abs(np.bincount(drawn, minlength=4) / 4000 - [0.1, 0.4, 0.2, 0.3]).max() < 0.03        # 4 deviations
    assert {choose(Sampling(1.0, top_k=2), logits, request, 7) for request in range(200)} == {1, 3}
    assert {choose(Sampling(1.0, top_p=0.75), logits, request, 7) for request in range(400)} == {1, 2, 3}
    assert {choose(Sampling(1.0, top_p=1e-9), logits, request, 7) for request in range(20)} == {1}
    assert choose(Sampling(), np.array([1.0, 5, 5, 2]), 0, 0) == 1                                 # the first of equal ones
    assert [choose(Sampling(1.0, seed=1), logits, 0, place) for place in range(40)] != drawn[:40]
    cold = [choose(Sampling(0.05), logits, request, 7) for request in range(300)]
    assert cold.count(1) > 290
