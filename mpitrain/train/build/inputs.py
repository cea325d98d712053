"""The data of a run: training rows, validation rows, and their transforms on the way to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain import data
from mpitrain.comm.job.together import on_first
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config
from mpitrain.data.checks import Source
from mpitrain.data.keyed import key, sample_keys
from mpitrain.data.listed import Asked
from mpitrain.data.loader import SampleReader
from mpitrain.data.shards import Fields
from mpitrain.data.transforms import FIT_ROWS
from mpitrain.errors import ConfigError
from mpitrain.models.registry import require_sizes
from mpitrain.train.build.names import refuse_tables

if TYPE_CHECKING:
    from mpitrain.data.predictions import Predictions
    from mpitrain.data.tasks import Tasks

ROWS = "rows"                            # the kind of data without targets (`data.unlabelled`)
BALANCED = "balanced"                    # weights of classes, train.weight
EVALUATION_CHUNK = 256                   # rows; fixed, so that metrics do not depend on the number of ranks,
EVALUATION_TOKENS = 256 * 64             # tokens, so fewer rows of long windows: activations of 256 of 8192 tokens take gigabytes


@dataclass
class Inputs:
    """Training and validation rows of a dataset, with their transforms; made by `open_inputs`, the same on every rank."""

    training: Source
    train_rows: data.Index
    validation: Source | None
    validation_rows: data.Index
    transforms: data.Transforms
    augment: list[Any] = field(default_factory=list)
    token_rows: bool = False                  # rows without targets are those of a language model
    predictions: Predictions | None = None    # a teacher's, of the rows of `training`
    tasks: Tasks | None = None                # what a model of text is to say of a window, if not the next tokens

    @property
    def tokens(self) -> bool:
        return self.training.kind == "tokens" or self.token_rows

    def fit(self, channel: Channel) -> None:
        """Statistics of the training rows, computed by rank 0 and sent to the others."""
        def learn() -> dict[str, Any]:
            self.transforms.fit(self.training, self.train_rows)
            return {name: [list(array.shape), np.asarray(array, np.float64).reshape(-1).tolist()]     # every bit of a float
                    for name, array in self.transforms.state_dict().items()}

        self.transforms.load_state_dict({name: np.array(values, np.float64).reshape(shape)
                                         for name, (shape, values) in on_first(channel, learn).items()})

    def as_stored(self) -> Inputs:
        """The same for readers of a run on a device, which give rows as they are stored, and the device makes of them what the
        model sees, as far as it can."""
        if isinstance(self.training, data.TokenWindows) and self.tasks is None:
            return replace(self, training=self.training.as_stored())
        if self.tokens:
            return self
        from mpitrain.data.deferred import deferred  # few runs have a device
        transforms, augment = deferred(self.transforms, self.augment)
        return replace(self, transforms=transforms, augment=augment)

    def sample(self, rows: int = 1) -> tuple[Any, Any]:
        """The first training rows as the model would see them, for a trial before anything is allocated for real."""
        return self.reader(self.transforms).read(np.asarray(self.train_rows[:rows], np.int64))

    def reader(self, transforms: data.Transforms) -> SampleReader:
        """What reads training rows as they are without augmentation, by those transforms, which may be a saved model's."""
        return SampleReader(self.training, transforms, tasks=self.tasks)

    def example(self) -> tuple[Any, Any]:
        """A row and its target of the shapes that the model sees. Built-in transforms keep a row's shape; those of the
        user's own learn from the first rows here, and again from all of them before training."""
        if any(":" in name for own in (self.transforms, *self.transforms.by_input.values()) for name in own.names):
            self.transforms.fit(self.training, self.train_rows[:FIT_ROWS])
            return self.sample()
        return self.training.read(np.asarray(self.train_rows[:1], np.int64))

    def try_some(self, rows: int) -> tuple[Any, Any]:
        """The first training rows, after two have been transformed and augmented: what changes the number of rows is refused."""
        x, y = self.sample(max(rows, 2))
        changed, keys = x[:2].copy(), sample_keys(key("trial"), np.asarray(self.train_rows[:2], np.int64))
        for function in self.augment:
            changed = function(changed, keys)
        return x[:rows], y[:rows]

    def chunks(self, n_classes: int | None, ignore: int | None = None,
               dtype: Any = None) -> tuple[Callable[[int], tuple[Any, Any]], int]:
        """(reader of validation chunk c, number of chunks); the arguments are those of `SampleReader`."""
        rows, size = self.validation_rows, EVALUATION_CHUNK
        source = self.training if self.validation is None else self.validation
        reader = SampleReader(source, self.transforms, n_classes=n_classes, ignore=ignore, dtype=dtype, tasks=self.tasks)
        if isinstance(self.validation, data.TokenWindows):
            size = min(max(EVALUATION_TOKENS // self.validation.block, 1), size)

        def read(chunk: int) -> tuple[Any, Any]:
            return reader.read(np.asarray(rows[chunk * size:(chunk + 1) * size], np.int64))
        return read, 0 if self.validation is None else -(-len(rows) // size)


def describe_files(path: str, validation: float | str, folder: Path, x: Any, y: str,
                   started: Popen[bytes] | None = None, *, predictions: str = "", series: bool = False) -> dict[str, Any]:
    """Rank 0's description of the files, made before MPI starts: plain data, to be sent to the other ranks.

    `predictions` is a file of a teacher's, for the rows of `path`. `started` is what `files.parser.start_parser` gave, and is
    ended.
    """
    other = folder / str(validation) if data.is_file(validation) else None
    with data.Parser(process=started) as parser:
        found = {"training": data.describe(locate(path, folder), x=x or None, y=y or None, parser=parser, apart=other,
                                           series=series)}
        if other is not None:
            found["validation"] = data.describe(locate(str(validation), folder), x=x or None, y=y or None, parser=parser,
                                                series=series)
            data.check_validation(found["training"], found["validation"])
        if predictions:
            from mpitrain.data.predictions import describe_predictions  # few runs have some
            found["predictions"] = describe_predictions(folder / predictions, found["training"], parser)
    return found


def locate(path: str, folder: Path) -> Path | str:
    """A built-in name unchanged; any other path relative to the folder of the configuration."""
    return path if path in data.BUILT_IN else folder / path


def open_inputs(description: dict[str, Any], *, validation: float | str, seed: int, block: int | None = None, stride: int = 1,
                transform: Asked = (), target_transform: Asked = (), augment: Asked = (), folder: Path | None = None,
                length: int = 0, horizon: int = 1, targets: tuple[int, ...] = (),
                opened: dict[str, data.Dataset] | None = None) -> Inputs:
    """Opens what `describe_files` described and splits it; `block` is the window of a language model, `length`, `horizon` and
    `targets` are those of series. Datasets that are `opened` already by an earlier call are used again."""
    dataset, other = _datasets(description, {} if opened is None else opened)
    names = list(dataset.x.name) if isinstance(dataset.x, Fields) else []
    refuse_tables(names, {"data.transform": transform, "data.augment": augment})
    transforms = data.Transforms(transform, folder, target_transform, by_step=length > 0)
    if dataset.kind == ROWS and length:
        from mpitrain.data.series import SeriesWindows, Windows  # few runs have series
        every = SeriesWindows(dataset, Windows(length, 0, stride))
        return Inputs(every, range(len(every)), None, range(0), transforms)
    if dataset.kind == ROWS:
        return Inputs(dataset, range(len(dataset)), None, range(0), transforms, token_rows=block is not None)
    if dataset.kind == "series" or length or targets or horizon != 1:
        return _series(dataset, other, validation, transforms, data.augmentations(augment, folder), length, horizon, stride,
                       targets)
    if target_transform and dataset.kind != "regression":
        raise ConfigError(f"data.target_transform is for regression, and these data are for {dataset.kind}; leave it empty")
    if dataset.kind == "tokens":
        if block is None:
            raise ConfigError('the data are tokens, so the model must be a language model with a "block": its window')
        require_sizes(block=block)               # the model, which would say so too, is made after the windows
        if transform:
            raise ConfigError("tokens are not transformed; leave data.transform empty")
        tasks = None
        if augment:
            from mpitrain.data.tasks import Tasks  # most models of text say the next token
            tasks = Tasks(augment, seed, folder)
        windows, held_out = data.token_split(dataset, block, 0 if other else validation, stride=stride)
        if other is not None:
            held_out = data.TokenWindows(other, block, cover=True)
        rows = range(len(held_out)) if held_out is not None else range(0)
        return Inputs(windows, range(len(windows)), held_out, rows, transforms, tasks=tasks)
    functions = data.augmentations(augment, folder)
    predictions = None
    if "predictions" in description:
        from mpitrain.data.predictions import Predictions  # few runs have some
        predictions = Predictions(description["predictions"])
    if stride != 1:
        raise ConfigError(f"data.stride={stride} is for tokens; these data are for {dataset.kind}")
    if other is not None:
        return Inputs(dataset, range(len(dataset)), other, range(len(other)), transforms, functions, predictions=predictions)
    labels = partial(all_labels, dataset) if dataset.y is not None and has_labels(dataset) else None
    train_rows, validation_rows = data.split(len(dataset), validation, seed=seed, labels=labels)
    return Inputs(dataset, train_rows, dataset, validation_rows, transforms, functions, predictions=predictions)


def has_labels(dataset: data.Dataset) -> bool:
    """Whether each row has one whole number as its target."""
    return dataset.y is not None and dataset.y.dtype.kind in "biu" and dataset.y.row_bytes == dataset.y.stored.itemsize


def all_labels(dataset: data.Dataset) -> Any:
    """The labels of all rows, (rows,)."""
    assert dataset.y is not None
    return dataset.read_field(dataset.y, np.arange(len(dataset), dtype=np.int64)).reshape(-1)


class Balanced(list[float]):
    """Weights that nobody has typed, for messages about them."""


def balanced_weights(inputs: Inputs, ignore: int | None = None) -> Balanced:
    """A weight n / (C n_c) for each of C classes, of n labels of the training rows, n_c of them of class c, so that all classes
    weigh as much. ConfigError where the targets are no labels, and where a class has none."""
    source = inputs.training
    if not isinstance(source, data.Dataset) or source.y is None or source.y.dtype.kind not in "biu":
        raise ConfigError(f'train.weight = "{BALANCED}" is of labels, one whole number for each row or more; give a list of '
                          "numbers, one for each class, or leave it out")
    y = source.read_field(source.y, np.asarray(inputs.train_rows, np.int64)).reshape(-1)
    y = y if ignore is None else y[y != ignore]
    if not y.size or y.min() < 0:
        found = f"a label {y.min()}" if y.size else "no labels"
        raise ConfigError(f'train.weight = "{BALANCED}": the training rows have {found}; labels are 0 or more')
    counts = np.bincount(y.astype(np.int64), minlength=len(source.classes or ()))
    if not counts.all():
        raise ConfigError(f'train.weight = "{BALANCED}": no training row is of class {int(counts.argmin())}; give a list of '
                          "numbers, one for each class, or leave it out")
    return Balanced(y.size / (len(counts) * int(count)) for count in counts)


def _series(dataset: data.Dataset, other: data.Dataset | None, validation: float | str, transforms: data.Transforms,
            augment: list[Any], length: int, horizon: int, stride: int, targets: tuple[int, ...]) -> Inputs:
    """Windows over series."""
    from mpitrain.data.series import SeriesWindows, Windows, refuse_without_length, series_split  # few runs have series
    refuse_without_length(dataset.kind, length, targets, horizon)
    cut = Windows(length, horizon, stride, targets)
    training, held_out = series_split(dataset, cut, 0 if other is not None else validation)
    if other is not None:
        held_out = SeriesWindows(other, cut)
    rows = range(len(held_out)) if held_out is not None else range(0)
    return Inputs(training, range(len(training)), held_out, rows, transforms, augment)


def _datasets(description: dict[str, Any], opened: dict[str, data.Dataset]) -> tuple[data.Dataset, data.Dataset | None]:
    """The rows for training, and the others where they have files of their own: those that are `opened`, or are added there."""
    for name in ("training", "validation"):
        if name in description and name not in opened:
            opened[name] = data.Dataset(description[name])
    return opened["training"], opened.get("validation")


def inputs_of(config: Config, files: dict[str, Any], opened: dict[str, data.Dataset] | None = None) -> Inputs:
    """The data of a configuration, whose files have been described, and perhaps `opened` for others."""
    d = config.data
    return open_inputs(files, validation=d.validation, seed=config.run.seed, block=config.model.arguments.get("block"),
                       stride=d.stride, transform=d.transform, target_transform=d.target_transform, augment=d.augment,
                       folder=config.folder, length=d.length, horizon=d.horizon, targets=d.targets, opened=opened)


def open_data(path: str | Path, *, validation: float | str = 0.2, x: str = "", y: str = "", seed: int = 0,
              block: int | None = None, stride: int = 1, transform: Asked = (), augment: Asked = ()) -> Inputs:
    """`describe_files` and `open_inputs` in one, for programs: called before MPI starts, with the same arguments on all ranks."""
    folder = Path.cwd()
    description = describe_files(str(path), validation, folder, x, y)
    return open_inputs(description, validation=validation, seed=seed, block=block, stride=stride, transform=transform,
                       augment=augment, folder=folder)
