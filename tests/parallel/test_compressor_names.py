"""What comm.compress may say, and the pieces that a compressor is made for; each mistake has its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_compressors import pieces_of

from mpitrain.errors import ConfigError, ShapeError
from mpitrain.parallel.compress.compressor import Piece, block_bounds, make_compressor


@pytest.mark.parametrize("text,line", [
    ("topk:0", "expected the share of elements that travel, above 0 and at most 1, as in topk:0.01, found 0"),
    ("topk:1.5", "expected the share .* found 1.5"), ("topk:nan", "expected the share .* found nan"),
    ("topk:-1", "expected the share .* found -1"), ("topk", "expected the share .* found nothing"),
    ("topk:0.0001", "0.0001 of a block of 4096 elements is less than one, and parameters would never send; take 0.000244 or "
                    "more"),
    ("randomk:0.9", "one of each 1.11 neighbours is nearly all of them; take 0.5 or less"),
    ("powersgd:0", "expected a rank, a whole number above 0, as in powersgd:2, found 0"),
    ("powersgd:2.5", "expected a rank, .* found 2.5"), ("powersgd", "expected a rank, .* found nothing"),
    ("int8:4", "its one option is int8:stochastic, found :4"),
    ("int4:stochastic", "it takes no option, found :stochastic"),
    ("onebit:", "it takes no option, found :"),
    ("levels", "expected one of 3, 5, 7, 9, 11 levels, as in levels:11, found nothing"),
    ("levels:4", "expected one of 3, 5, 7, 9, 11 levels, as in levels:11, found 4"),
    ("int7", r'unknown compressor "int7" \(did you mean "int8"\?\); your own is "package.module:name" or "file.py:name"')])
def test_a_wrong_compressor_is_refused_in_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=f'^comm.compress = "{text}": {line}$'):
        make_compressor(text)


def test_a_share_that_saves_nothing_between_so_many_workers_is_said() -> None:
    pieces = pieces_of((4096,))
    assert make_compressor("topk:0.01")(pieces, 100).notes == []
    assert make_compressor("topk:0.02")(pieces, 100).notes == [
        "topk:0.02 between 100 workers sends no less than dense gradients, as each message goes to all others; a share below "
        "0.02 does"]


def test_own_classes_are_found_beside_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from mpitrain.parallel.compress.blocks import Int8\nclass Mine(Int8): pass\n"
                                     "from mpitrain.parallel.compress.compressor import Packed\nclass Half(Packed): pass\n"
                                     "def function(): pass\n")
    make = make_compressor("own.py:Mine", tmp_path)
    assert make.own and not make_compressor("int8").own and make.kind == "packed" and make.block == 256
    with pytest.raises(ConfigError, match='^comm.compress = "own.py:function": expected a subclass of Packed, Linear or Gath'):
        make_compressor("own.py:function", tmp_path)
    with pytest.raises(ConfigError, match='"own.py:Half": it lacks decode, encode, nbytes; derive it'):
        make_compressor("own.py:Half", tmp_path)
    with pytest.raises(ConfigError, match=r'own.py has no "Min" \(did you mean "Mine"\?\)'):
        make_compressor("own.py:Min", tmp_path)


def test_pieces_that_do_not_follow_or_are_cut_inside_of_a_block_are_refused() -> None:
    make = make_compressor("int8")
    with pytest.raises(ShapeError, match="after 0 elements"):
        make([Piece("w", 3, 10, 0, (7,))], 2)
    with pytest.raises(ShapeError, match="it may be cut at multiples of 256"):
        make([Piece("w", 0, 300, 100, (400,))], 2)
    with pytest.raises(ShapeError, match="it may be cut nowhere"):
        make_compressor("powersgd:1")([Piece("w", 0, 200, 0, (20, 20))], 2)
    two = [Piece("w", 0, 144, 256, (400,)), Piece("v", 144, 744, 0, (600,))]
    assert block_bounds(two, 256).tolist() == [0, 144, 400, 656, 744]
