"""What a study has spent of privacy in all: its trials have seen the same rows, or clients, and what they tell of these adds up.

Each trial keeps the steps that it has done (privacy.json of its folder). The accountant takes the steps of all trials as those of
one run: Renyi divergences add up over mechanisms on the same data, also where a later one is chosen by what an earlier one
gave (Mironov, 2017, proposition 1). Where trials have other accountants or deltas, epsilons and deltas are added instead: a
bound, too, and a looser one (Dwork and Roth, 2014, theorem 3.16). It is no bound that held beforehand: how many steps a trial got
is counted as if it had been fixed, though pruners decide it by evaluations (Rogers et al., 2016, have bounds for that).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.config import Config, changed
from mpitrain.config.load import load_run
from mpitrain.errors import CheckpointError, MpitrainError
from mpitrain.search.table import Trial
from mpitrain.train.observers.ledger import FILE

ACCOUNTANT = "privacy.accountant"


def spent_of(folder: Path, trials: Sequence[Trial], base: Config | None = None) -> dict[str, Any] | None:
    """What the trials of the study in `folder` have spent, as plain data, with lines that say it under "said"; None for a study
    without [privacy]. `base` is its run (default: that of its folder). CheckpointError for a trial's record that is damaged."""
    found = {trial.id: _ledger(folder / "trials" / f"{trial.id:04d}" / FILE) for trial in trials}
    ledgers = {number: one for number, one in found.items() if one is not None}
    if base is None and (folder / "config.toml").is_file():
        try:
            base = load_run(folder, [])
        except MpitrainError:
            base = None                                       # of a version with other keys, say
    if base is None or not (ledgers or base.privacy.unit != "none"):
        return None
    without = [trial.id for trial in trials if trial.results and ledgers.get(trial.id, {}).get("history") is None]
    units = {(one["unit"], one["count"]) for one in ledgers.values()}
    if without or len(units) > 1:
        why = f"trial {without[0]} has none of its own" if without else "trials hide others: " + ", ".join(
            f"{count} {unit}s" for unit, count in sorted(units))
        return {"epsilon": None, "trials": len(ledgers), "said": [f"privacy: no epsilon is told of the study in all: {why}"]}
    if not units:
        return {"epsilon": 0.0, "trials": 0, "said": ["privacy: no trial has trained, and nothing is spent"]}
    return _added(base, ledgers, trials, *units.pop())


def _added(base: Config, ledgers: Mapping[int, Mapping[str, Any]], trials: Sequence[Trial], unit: str,
           count: int) -> dict[str, Any]:
    from mpitrain.train.build.privacy import make_accountant  # few studies are private
    own = {trial.id: trial.values[ACCOUNTANT] for trial in trials if ACCOUNTANT in trial.values}
    accountant, one_by_one = make_accountant(base), dict[int, float]()
    everything: dict[tuple[float, float], int] = {}
    for number, found in ledgers.items():
        history: dict[tuple[float, float], int] = {}
        for q, sigma, steps in found["history"]:
            history[q, sigma] = history.get((q, sigma), 0) + int(steps)
            everything[q, sigma] = everything.get((q, sigma), 0) + int(steps)
        mine = make_accountant(changed(base, privacy={"accountant": own[number]})) if number in own else accountant
        one_by_one[number] = mine.epsilon(history, found["delta"])
    deltas = [found["delta"] for found in ledgers.values()]
    composed = len(set(deltas)) == 1 and not own
    delta = deltas[0] if composed else sum(deltas)
    epsilon = accountant.epsilon(everything, delta) if composed else sum(one_by_one.values())
    how = f'the steps of all added up by privacy.accountant = "{base.privacy.accountant}"' if composed else \
        "the plain sum of their epsilons, at that of their deltas"
    what = {"client": "client", "sample": "row"}[unit]
    said = [f"privacy: epsilon {epsilon:.4g} at delta {delta:g} for the {len(ledgers)} trials together, {how}; for one alone "
            f"{max(one_by_one.values()):.4g} at most",
            f"that is for the presence of one {what} among {count}, whoever sees the parameters of all trials, with the steps of "
            "each as if they had been fixed before; evaluations and losses are not in it, nor are other runs on the same data, "
            "such as best.toml or a study that was overwritten"]
    return {"unit": unit, "count": count, "epsilon": epsilon, "delta": delta, "composed": composed, "trials": len(ledgers),
            "each": {str(number): value for number, value in one_by_one.items()},
            "history": [[q, sigma, steps] for (q, sigma), steps in everything.items()], "said": said}


def _ledger(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
        history = found["history"]
        plain = isinstance(found["unit"], str) and isinstance(found["count"], int) and 0 < found["delta"] < 1
        if not (plain and (history is None or all(len(one) == 3 for one in history))):
            raise ValueError("other fields")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError("the record of what the trial has spent of privacy is damaged, and what the study has spent in all "
                              "is unknown; restore it", file=path) from None
    return dict(found)
