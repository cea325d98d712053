"""The federation of `benchmarks/federated.py` by Flower's simulation and by APPFL's MPI communicators, as their examples do.

    python federated_peers.py flower IMAGES.npz ROUNDS
    mpirun -n 11 python federated_peers.py appfl IMAGES.npz ROUNDS       # a server, and a process for each client

Prints a line of JSON: rounds a second, from the end of the first round to that of the last, and the accuracy. PyTorch on one
thread does the training of both. APPFL has no draw of clients: ten of them train in each round.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
import torch
from torch import nn

CLIENTS, EACH_ROUND, HELD_OUT = 100, 10, 2000
BATCH, EPOCHS, RATE = 20, 5, 0.05


def data(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = np.load(path)
    return torch.from_numpy(found["x"].astype(np.float32) / 255), torch.from_numpy(found["y"].astype(np.int64))


def rows_of(client: int, n: int) -> np.ndarray:
    return np.array_split(np.random.RandomState(0).permutation(n), CLIENTS)[client]


def net(**_: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=RATE), nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for places in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            loss(model(x[places]), y[places]).backward()
            optimizer.step()


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def flower(path: str, rounds: int) -> dict[str, Any]:
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    x, y = data(path)
    n = len(x) - HELD_OUT
    ends: list[float] = []
    last: list[Any] = []

    class Client(NumPyClient):
        def __init__(self, number: int):
            self.rows = torch.from_numpy(rows_of(number, n))

        def fit(self, parameters: Any, config: Any) -> Any:
            torch.set_num_threads(1)
            model = net()
            model.load_state_dict(dict(zip(model.state_dict(), map(torch.tensor, parameters))))
            train(model, x[self.rows], y[self.rows])
            return [v.numpy() for v in model.state_dict().values()], len(self.rows), {}

    class Timed(FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            assert len(results) == EACH_ROUND and not failures
            found = super().aggregate_fit(server_round, results, failures)
            ends.append(time.perf_counter())
            last[:] = [parameters_to_ndarrays(found[0])]
            return found

    def components(context: Any) -> Any:
        start = ndarrays_to_parameters([v.numpy() for v in net().state_dict().values()])
        strategy = Timed(fraction_fit=EACH_ROUND / CLIENTS, fraction_evaluate=0.0, min_available_clients=CLIENTS,
                         initial_parameters=start)
        return ServerAppComponents(config=ServerConfig(num_rounds=rounds), strategy=strategy)

    run_simulation(server_app=ServerApp(server_fn=components),
                   client_app=ClientApp(client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client()),
                   num_supernodes=CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    model = net()
    model.load_state_dict(dict(zip(model.state_dict(), map(torch.tensor, last[0]))))
    return {"rounds_s": (len(ends) - 1) / (ends[-1] - ends[0]), "accuracy": accuracy(model, x[n:], y[n:])}


def share_right(labels: Any, outputs: Any) -> float:
    """APPFL's metric."""
    return float((np.argmax(outputs, axis=1) == labels).mean())


def appfl_data(path: str, client: int) -> Any:
    """What APPFL's data_configs name: (training, validation) sets of a client."""
    from appfl.misc.data import Dataset
    x, y = data(path)
    rows = torch.from_numpy(rows_of(client, len(x) - HELD_OUT))
    return Dataset(x[rows], y[rows]), None


def appfl(path: str, rounds: int) -> dict[str, Any] | None:
    from appfl.agent import ClientAgent, ServerAgent
    from appfl.comm.mpi import MPIClientCommunicator, MPIServerCommunicator
    from appfl.config import ClientAgentConfig, ServerAgentConfig
    from mpi4py import MPI
    from omegaconf import OmegaConf

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    train_configs = {"trainer": "VanillaTrainer", "mode": "epoch", "num_local_epochs": EPOCHS, "optim": "SGD",
                     "optim_args": {"lr": RATE}, "loss_fn": "CrossEntropyLoss", "train_batch_size": BATCH,
                     "train_data_shuffle": True, "do_validation": False,
                     "metric_path": __file__, "metric_name": "share_right"}
    if comm.rank == 0:
        server = ServerAgent(ServerAgentConfig(
            client_configs=OmegaConf.create({"train_configs": train_configs, "model_configs": {
                "model_path": __file__, "model_name": "net"}}),
            server_configs=OmegaConf.create({"num_clients": comm.size - 1, "scheduler": "SyncScheduler", "scheduler_kwargs": {},
                                             "aggregator": "FedAvgAggregator",
                                             "aggregator_kwargs": {"client_weights_mode": "equal"}, "device": "cpu",
                                             "num_global_epochs": rounds, "logging_output_dirname": "./appfl"})))
        MPIServerCommunicator(comm, server).serve()
        found: dict[str, Any] = comm.recv(source=1)
        model, (x, y) = net(), data(path)
        model.load_state_dict(dict(server.get_parameters(blocking=True, init_model=False)))
        return found | {"accuracy": accuracy(model, x[-HELD_OUT:], y[-HELD_OUT:])}
    client = ClientAgent(ClientAgentConfig(
        train_configs=OmegaConf.create({"device": "cpu", "logging_output_dirname": "./appfl"}),
        data_configs=OmegaConf.create({"dataset_path": __file__, "dataset_name": "appfl_data",
                                       "dataset_kwargs": {"path": path, "client": comm.rank - 1}})))
    talk = MPIClientCommunicator(comm, server_rank=0)
    client.load_config(talk.get_configuration())
    client.load_parameters(talk.get_global_model(init_model=True))
    ends = []
    while True:
        client.train()
        parameters = client.get_parameters()
        parameters, about = parameters if isinstance(parameters, tuple) else (parameters, {})
        changed, meta = talk.update_global_model(parameters, **about)
        ends.append(time.perf_counter())
        if meta["status"] == "DONE":
            break
        client.load_parameters(changed)
    talk.invoke_custom_action(action="close_connection")
    if comm.rank == 1:
        comm.send({"rounds_s": (len(ends) - 1) / (ends[-1] - ends[0])}, dest=0)
    return None


if __name__ == "__main__":
    try:
        found = {"flower": flower, "appfl": appfl}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)                                           # mpirun ends the other processes then
    if found is not None:
        print(json.dumps(found), flush=True)
