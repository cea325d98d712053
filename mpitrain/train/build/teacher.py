"""What [distil] means for a run: a saved run's model, whose outputs its loss compares with."""

from __future__ import annotations

from mpitrain.autograd import Tensor, no_grad
from mpitrain.config import Config
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.shrink.distil import Teacher
from mpitrain.train.build.assembly import Job
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.saved import load


def give_teacher(job: Job, config: Config, inputs: Inputs) -> None:
    """Lets the job's loss follow the teacher too. ConfigError for one that has other classes, transforms or numbers."""
    pipeline, d = job.trainer.pipeline, config.distil
    path = config.folder / d.teacher
    saved = load(path)
    if saved.config.data.transform != config.data.transform:
        raise ConfigError(f"distil.teacher was trained with data.transform = {list(saved.config.data.transform)}, found "
                          f"{list(config.data.transform)}; set data.transform to the teacher's", file=path)
    dtype, own = saved.state().parameters.dtype, job.policy.layout.dtype
    if dtype != own:
        raise ConfigError(f"distil.teacher has parameters in {dtype}, and this run in {own}; set train.precision to the "
                          "teacher's", file=path)
    x, _ = inputs.try_some(1)
    try:
        with no_grad():
            classes = int(saved.model(Tensor(pipeline.feed.inputs(x))).shape[-1])
    except ShapeError as error:
        raise ConfigError(f"distil.teacher cannot take this run's samples: {error.message}", file=path) from error
    wanted = job.trainer.loader.reader.n_classes
    if classes != wanted:
        raise ConfigError(f"distil.teacher tells {classes} classes apart, and the model {wanted}; use a teacher of the same "
                          "classes", file=path)
    if pipeline.stage.is_last:
        pipeline.teach = Teacher(saved.model, d.temperature, d.weight, getattr(pipeline.loss, "ignore_index", None))
