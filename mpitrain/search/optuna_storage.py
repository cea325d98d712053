"""What a study of Optuna keeps in memory: the trials that we tell it, as they are now, and the one that it is asked for.

Optuna's own storage in memory takes each trial as a copy, and a trial that has ended can change no more. Ours can (a trial that
has paused, which is a pruned one to Optuna, may be promoted), and a sampler's time went into telling it all trials again.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from datetime import datetime
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

NUMBER, NAME = 0, "mpitrain"              # of the only study


class OneStudy(BaseStorage):
    """The trials of one study, whose numbers are their places; a trial that is looked at is not changed, but replaced."""

    def __init__(self) -> None:
        self.trials: list[FrozenTrial] = []
        self.directions: list[StudyDirection] = []
        self.about: dict[str, dict[str, Any]] = {"user": {}, "system": {}}

    def tell(self, trials: Sequence[FrozenTrial]) -> None:
        """Takes these trials as those that there are; what a sampler has noted about the study is forgotten."""
        self.trials = list(trials)
        self.about = {"user": {}, "system": {}}
        for place, trial in enumerate(self.trials):
            if trial.number != place:
                trial.number = trial._trial_id = place

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        place = len(self.trials)
        made = copy.deepcopy(template_trial) if template_trial is not None else FrozenTrial(
            number=place, trial_id=place, state=TrialState.RUNNING, value=None, datetime_start=datetime.now(),
            datetime_complete=None, params={}, distributions={}, user_attrs={}, system_attrs={}, intermediate_values={})
        made.number = made._trial_id = place
        self.trials.append(made)
        return place

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return copy.deepcopy(self.trials[trial_id])

    def get_all_trials(self, study_id: int, deepcopy: bool = True,
                       states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        found = [trial for trial in self.trials if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def set_trial_param(self, trial_id: int, param_name: str, param_value_internal: float,
                        distribution: BaseDistribution) -> None:
        trial = self._replaced(trial_id)
        trial.params = {**trial.params, param_name: distribution.to_external_repr(param_value_internal)}
        trial.distributions = {**trial.distributions, param_name: distribution}

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        trial = self._replaced(trial_id)
        trial.state = state
        if values is not None:
            trial.values = list(values)
        return True

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        trial = self._replaced(trial_id)
        trial.intermediate_values = {**trial.intermediate_values, step: intermediate_value}

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        trial = self._replaced(trial_id)
        trial.user_attrs = {**trial.user_attrs, key: value}

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        trial = self._replaced(trial_id)
        trial.system_attrs = {**trial.system_attrs, key: value}

    def _replaced(self, trial_id: int) -> FrozenTrial:
        self.trials[trial_id] = found = copy.copy(self.trials[trial_id])
        return found

    # -- the study itself ------------------------------------------------------------------------------------------------

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        self.directions = list(directions)
        return NUMBER

    def delete_study(self, study_id: int) -> None:
        self.tell([])

    def get_study_id_from_name(self, study_name: str) -> int:
        return NUMBER

    def get_study_name_from_id(self, study_id: int) -> str:
        return NAME

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self.directions

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self.about["user"][key] = value

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self.about["system"][key] = value

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return copy.deepcopy(self.about["user"])

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return copy.deepcopy(self.about["system"])

    def get_all_studies(self) -> list[FrozenStudy]:
        return [FrozenStudy(NAME, None, self.get_study_user_attrs(NUMBER), self.get_study_system_attrs(NUMBER), NUMBER,
                            directions=self.directions)]
