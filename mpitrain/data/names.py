"""What the whole numbers of a dataset stand for: its classes, the words of its tokens, the categories of its columns.

Shapes are alike where the names are not, and a metric looks right then: sets are compared before the model of one judges another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.errors import DataError

LONGEST = 1 << 20            # characters of names that a run keeps; of more the numbers of names are kept
KINDS = ("classes", "vocabulary", "categories")
SAYS = {"classes": "the class", "vocabulary": "the token"}


def names_of(description: Mapping[str, Any]) -> dict[str, Any]:
    """The names that a described dataset has: "classes" and "vocabulary", lists, and "categories", a list or the number of codes
    for each column."""
    found = {kind: list(description[kind]) for kind in SAYS if description.get(kind)}
    return found | ({"categories": dict(description["categories"])} if description.get("categories") else {})


def kept_names(description: Mapping[str, Any]) -> dict[str, Any]:
    """The same, of a size that a checkpoint may hold."""
    found = names_of(description)
    return {kind: names for kind, names in found.items() if len(json.dumps(names)) <= LONGEST}


def refuse_other_names(trained: Mapping[str, Any], other: Mapping[str, Any], file: str,
                       kinds: Sequence[str] = KINDS) -> None:
    """DataError where a number of the `other` dataset, in `file`, stands for another name than in the one that a model is trained
    on. Where one has fewer names they are the same as far as they go: numbers beyond are found where they are used."""
    for kind in kinds:
        known, found = trained.get(kind), other.get(kind)
        if not known or not found:
            continue
        if kind in SAYS:
            _refuse(SAYS[kind], "", known, found, file)
            continue
        if list(known) != list(found):
            raise DataError(f"the columns of categories are {', '.join(found)}, and in the training data {', '.join(known)}; "
                            "import both alike", file=file)
        for column, words in known.items():
            if isinstance(words, list) and isinstance(found[column], list):
                _refuse("the code", f' of the column "{column}"', words, found[column], file)


def _refuse(what: str, where: str, known: Sequence[str], found: Sequence[str], file: str) -> None:
    for i, (here, there) in enumerate(zip(found, known)):
        if here != there:
            raise DataError(f'{what} {i}{where} is "{here}", and in the training data "{there}"; number both alike: import all '
                            "rows as one set, and set data.validation to a share or a fold of them", file=file)
