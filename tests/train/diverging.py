"""A user's file with faults to be armed: a bit that flips in a parameter of one rank, and a schedule that differs on one."""

DIVERGING = '''
import json, os
import numpy as np
from mpitrain import models, nn
from mpitrain.train import Observer

MODELS = []


def network(name="mlp", **arguments):
    """One of our models, kept, so that the observer can reach its parameters."""
    MODELS.append(models.MODELS[name](**arguments))
    return MODELS[-1]


def flip(rank_of_fault, parameter, element, bit, rank):
    """Flips a bit of an element of the parameter (both counted around) that this rank holds."""
    held = [p for model in MODELS for p in model.parameters() if p.allocated and p.size]
    if rank == rank_of_fault:
        words = held[parameter % len(held)].array.reshape(-1).view(np.uint32)
        words[element % words.size] ^= np.uint32(1 << bit)
        print("flipped", held[parameter % len(held)].name, flush=True)


class Flip(Observer):
    """FLIP in the environment: [rank, step, parameter, element, bit]; nothing happens without."""

    def begin(self, run):
        self.rank, self.fault = run.rank, json.loads(os.environ.get("FLIP", "null"))

    def after_step(self, step, fields, seconds):
        if self.fault and step == self.fault[1]:
            flip(self.fault[0], *self.fault[2:], self.rank)


def rates(*, lr, min_lr, warmup_steps, total_steps):
    """A schedule that RANK_RATE in the environment of a rank multiplies from step 7 on."""
    factor = float(os.environ.get("RANK_RATE", "1"))
    return lambda step: lr * (factor if step >= 7 else 1)
'''
