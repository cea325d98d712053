"""A whole run on a device: the same losses as on the host."""

import numpy as np
import pytest
from fakegpu import open_device
from runs import steps, train, write


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2])
def test_a_run_on_the_gpu_has_the_losses_of_the_host(tmp_path, n):
    open_device("cupy")
    curves = []
    for device in ("cpu", "gpu"):
        result = train(n, write(tmp_path), f"train.device={device}", f"run.out={device}", timeout=120)
        assert result.rc == 0, result.err
        curves.append([line["loss"] for line in steps(tmp_path / device)])
    np.testing.assert_allclose(*curves, rtol=1e-4)


def test_auto_trains_where_there_is_no_gpu_and_gpu_says_what_is_missing(tmp_path):
    config = write(tmp_path)
    assert train(1, config, "train.device=auto", "train.steps=8").rc == 0
    result = train(1, config, "train.device=gpu", "run.out=g", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.rc == 78 and 'train.device = "gpu", but CuPy' in result.error_lines[0]
