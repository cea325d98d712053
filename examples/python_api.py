"""The same engine from Python: mpirun -n 2 python examples/python_api.py"""

import mpitrain
from mpitrain import nn, optim
from mpitrain.config import Config, RunConfig, TrainConfig
from mpitrain.train import assemble, open_data


def main() -> int:
    inputs = open_data("digits", transform=["scale"], validation=0.2)
    world = mpitrain.start()
    mesh = mpitrain.Mesh(world.comm)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    job = assemble(model, inputs, mesh, loss=nn.LOSSES["cross_entropy"](),
                   optimizer=lambda storage: optim.AdamW(storage, lr=3e-3),
                   config=Config(run=RunConfig(seed=1), train=TrainConfig(epochs=10, batch_size=64)))
    metrics, hashes = job.fit(), job.state.hashes()            # on all ranks: with a model that is cut, hashes communicate
    if world.rank == 0:
        print(f"validation accuracy {metrics['accuracy']:.3f}", hashes["parameters_sha256"][:12])
    mesh.close()
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
