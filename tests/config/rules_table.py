"""Configurations that are refused, and some that are not, and what `train` and `inspect` say of each: as one program for both.

    mpirun -n 4 python rules_table.py FOLDER           what a run on so many ranks says of each
    python rules_table.py FOLDER 1 2 4                 what `inspect --ranks` says, without MPI
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RANKS = (1, 2, 4)


class Case(NamedTuple):
    """Overrides of one of `FILES`, and a part of the line that refuses them on so many ranks (nothing: they are not refused)."""

    file: str
    overrides: str
    said: str
    on: tuple[int, ...]


FILES = {"mlp": """
model = {name = "mlp", inputs = 64, hidden = [16, 16], outputs = 10}
data = {path = "digits", transform = ["scale"]}
""", "gpt": """
model = {name = "gpt", layers = 2, heads = 2, width = 16, block = 8, vocabulary = 64}
data = {path = "tokens", validation = "tail:0.2"}
""", "experts": """
model = {name = "gpt", layers = 2, heads = 2, width = 16, block = 8, vocabulary = 64, experts = 4}
data = {path = "tokens", validation = "tail:0.2"}
""", "norm": """
model = {name = "own.py:norm"}
data = {path = "digits"}
""", "rows": """
model = {name = "own.py:rows"}
data = {path = "digits"}
""", "plain": """
model = {name = "own.py:plain"}
data = {path = "digits"}
"""}
COMMON = """train = {steps = 1, batch_size = 8, micro_batches = 4}
log = {every = 1}
"""
OWN = """
from mpitrain import nn, optim
from mpitrain.schedules.pipeline import Action
from mpitrain.schedules.steps import Send, data
def norm(): return nn.Sequential(("flat", nn.Flatten()), ("first", nn.Linear(64, 8)),
                                 ("norm", nn.SyncBatchNorm(8)), ("head", nn.Linear(8, 10)))
class Whole(nn.Module):
    def __init__(self): self.flat, self.layer = nn.Flatten(), nn.Linear(64, 10)
    def forward(self, x): return self.layer(self.flat(x))
def plain(): return Whole()
def rows(): return nn.Sequential(("layer", nn.Linear(8, 10)))
def backwards(stage, n_stages, n_micro):
    yield from (Action(kind, micro) for micro in range(n_micro) for kind in "BF")
def shout(rank, n, length):
    yield [Send((rank + 1) % n, data(0, length))] if n > 1 else []
number = 3
def no_rate(*, lr, **more): raise ValueError("no rate")
class Picky(optim.SGD):
    def __init__(self, model, lr=0.1): raise ValueError("not today")
import numpy as np
from mpitrain import ops
from mpitrain.parallel.policies.policy import Policy
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.train import Observer
def doubled(x): return np.concatenate([x, x])
def halved(x): return x[::2]
def fails(*x): return {}["not there"]
def none(*x): return None
def one(x): return x
class NoSum(nn.Loss):
    kind = "classes"
    def __call__(self, output, target): return None
class Vector(nn.Loss):
    kind = "classes"
    def __call__(self, output, target): return output
class Raises(nn.Loss):
    kind = "classes"
    def __call__(self, output, target): return {}["loss"]
class Uncalled(nn.Loss):
    kind = "classes"
class Unruly(optim.Optimizer): pass
def no_function(*, lr, **more): return None
def poly(*, lr, min_lr, warmup_steps, total_steps, power): return lambda step: lr * (1 - step / total_steps) ** power
def given(*, lr, min_lr, warmup_steps, total_steps, values): return lambda step: values[0] if values else None
def late(*, lr, min_lr, warmup_steps, total_steps): return lambda step: lr if step < 1 else float("nan")
class Unfinished(Policy): pass
class Watcher(Observer):
    def __init__(self, needed): pass
class Broken(Whole):
    def forward(self, x): raise ValueError("no forward")
def broken(): return Broken()
class Thing: pass
thing = Thing()
class Unequal(Raises):
    def __call__(self, output, target): return ops.mse(output, output.reshape(-1))
class Alone(Replicated):
    def __init__(self, setup): pass
def half(*, lr, min_lr, warmup_steps, total_steps): return lambda step: lr / 2
class Plain(optim.SGD):
    def __init__(self, model, lr=0.1, *, damping=1.0): super().__init__(model, lr)
"""
TABLE = """
# words
mlp train.device=tpu => train.device = "tpu" is not there
mlp train.precision=float8 => train.precision = "float8" is not there (did you mean "float64"?)
mlp train.precision=tf32 => train.precision = "tf32" is for train.device = "gpu", found "cpu"; set train.precision = "float32"
mlp train.precision=float16 => train.precision = "float16" is for train.device = "gpu", found "cpu"; set train.precision = "float3
mlp train.reproducible=layuot => train.reproducible = "layuot" is not there (did you mean "layout"?)
mlp optimizer.decay=some => optimizer.decay = "some" is not there
mlp optimizer.offload=disk => optimizer.offload = "disk" is not there
mlp comm.progress=threads => comm.progress = "threads" is not there (did you mean "thread"?)
mlp comm.sharding=optimiser => comm.sharding = "optimiser" is not there (did you mean "optimizer"?)
mlp comm.wire_dtype=float8 => comm.wire_dtype = "float8" is not there
mlp mesh.stages=blcks => mesh.stages = "blcks" is not there (did you mean "blocks"?)
mlp comm.bucket_mb=many => comm.bucket_mb must be more than 0, at most 1048576, or "auto", found "many"
# names
mlp model.name=mlpp => unknown model "mlpp" (did you mean "mlp"?)
mlp optimizer.name=adamv => unknown optimizer "adamv" (did you mean "adam
mlp optimizer.schedule=cosin => unknown schedule "cosin" (did you mean "cosine"?)
mlp train.loss=mes => unknown loss "mes" (did you mean "mse"?)
mlp comm.algorithm=rign => unknown all-reduce algorithm "rign" (did you mean "ring"?)
mlp mesh.schedule=1f1 => unknown pipeline schedule "1f1" (did you mean "1f1b"?)
mlp data.transform=scal => unknown transform "scal" (did you mean "scale"?)
mlp data.augment=flop => unknown augmentation "flop"
mlp comm.sharding=own.py:nobody => own.py has no "nobody"
mlp log.observers=own.py:nobody => own.py has no "nobody"
mlp optimizer.name=own.py:nobody => own.py has no "nobody"
# numbers and pairs
mlp train.steps=0 => give train.epochs or train.steps, one of them
mlp train.epochs=1 train.steps=1 => give train.epochs or train.steps, not both
mlp train.batch_size=0 => train.batch_size must be at least 1
mlp train.micro_batches=9 => train.micro_batches = 9 is more than the 8 samples of train.batch_size
mlp optimizer.lr=-1 => optimizer.lr must be a finite number, 0 or more
mlp optimizer.eps=inf => optimizer.eps must be finite, found inf
mlp optimizer.eps=0.0 => optimizer.eps is more than 0, not 0.0
mlp optimizer.name=lars optimizer.momentum=1.0 => optimizer.momentum must lie in [0, 1), found 1.0
mlp optimizer.betas=[0.5,1.0] => optimizer.betas must be two numbers in [0, 1)
mlp optimizer.min_lr=0.5 optimizer.schedule=cosine => optimizer.min_lr must lie between 0 and lr
mlp optimizer.schedule=own.py:no_rate => no rate
mlp optimizer.name=own.py:Picky => not today
mlp train.label_smoothing=2.0 => label_smoothing lies in [0, 1], not 2.0
mlp train.loss=mse train.label_smoothing=0.1 => train.label_smoothing is for train.loss = "cross_entropy", not "mse"
mlp model.hiden=3 => model "mlp" has no model.hiden (did you mean "hidden"?)
mlp model.outputs=0 => model.outputs must be
mlp data.stride=2 => data.stride=2 is for tokens
mlp data.validation=1.5 => data.validation=1.5
mlp train.batch_size=2000 => train.batch_size=2000 is more than the 1437 training rows
gpt data.transform=scale => tokens are not transformed
gpt data.validation=0.2 => windows of tokens overlap
mlp train.recompute=nothing* => train.recompute names "nothing*", and no block is called so
plain train.recompute=true => train.recompute needs a model that is a Sequential of blocks
# threads and devices
mlp train.reproducible=layout train.threads=2 => needs one BLAS thread a rank, found train.threads = 2
mlp train.precision=bfloat16 train.threads=2 => computes on one thread a rank, found train.threads = 2
mlp train.reproducible=layout train.device=gpu => is for train.device = "cpu", found "gpu": there the order in which a
mlp comm.progress=thread train.device=gpu => comm.progress = "thread" is for train.device = "cpu": a GPU computes
mlp comm.device_buffers=on => comm.device_buffers = "on" hands MPI memory of train.device = "gpu", found "cpu"; set
mlp comm.device_buffers=auto comm.library=nccl train.device=gpu => is for messages of our own algorithms, found comm.library
mlp comm.device_buffers=on comm.algorithm=mpi train.device=gpu => is for messages of our own algorithms, found comm.alg
mlp comm.library=ipc => comm.library = "ipc" adds up gradients of train.device = "gpu", found "cpu"; set comm.library = "mpi"
mlp comm.library=ipc comm.sharding=optimizer train.device=gpu => comm.library = "ipc" adds up whole gradients, found comm.sharding
mlp comm.library=ipc comm.wire_dtype=bfloat16 train.device=gpu => comm.library = "ipc" adds up gradients as they are, found
mlp comm.library=nccl comm.wire_dtype=float16 train.device=gpu => comm.library = "nccl" adds up gradients as they are, found
mlp@2,4 comm.node_shared=true train.device=gpu => found gradients on a GPU; set train.device = "cpu", or comm.node_shared
mlp optimizer.offload=host => where it is already with train.device = "cpu"; set optimizer.offload = "file"
mlp comm.node_shared=true optimizer.offload=file => comm.node_shared = true has one copy that the ranks of a node share; set
# the same bits on any number of ranks
mlp train.reproducible=layout train.micro_batches=0 => needs train.micro_batches: each micro-batch is computed by itself
mlp train.reproducible=layout comm.algorithm=ring => found comm.algorithm = "ring"; leave comm.algorithm = "auto"
mlp train.reproducible=layout comm.wire_dtype=bfloat16 => found comm.wire_dtype = "bfloat16"; leave it "float32"
gpt@2,4 train.reproducible=layout mesh.tp=2 => cannot have mesh.tp = 2: ranks that share a layer add up parts of its products
gpt@2,4 train.reproducible=layout mesh.cp=2 => cannot have mesh.cp = 2: ranks that share samples add up parts
experts@2,4 train.reproducible=layout mesh.ep=2 => cannot have mesh.ep = 2: a gradient of an expert adds up rows of several
mlp train.reproducible=layout comm.sharding=gradients => in one tree; set comm.sharding = "optimizer", or train.reproducible = "ru
norm train.reproducible=layout => cannot have the layer "norm" (SyncBatchNorm): its statistics
# one copy per node
mlp comm.node_shared=true comm.progress=thread => updates parameters while gradients are summed, found comm.progress = "thread"; s
mlp comm.node_shared=true comm.progress=auto => updates parameters while gradients are summed, found comm.progress = "auto"; set
mlp comm.node_shared=true comm.bucket_mb=auto => updates parameters while gradients are summed, found comm.bucket_mb = "auto"; set
mlp@2,4 comm.node_shared=true comm.algorithm=ring => memory that ranks share, found comm.algorithm = "ring"; set comm.algorithm
# what is cut over data-parallel ranks
mlp comm.sharding=parameters comm.bucket_mb=auto => found comm.bucket_mb = "auto", which cuts them anew; set comm.bucket_mb to a
mlp comm.sharding=gradients comm.progress=thread => of each micro-batch from backward itself, found comm.progress
mlp@2 comm.sharding=parameters train.micro_batches=5 => found 5 micro-batches for 2 data-parallel ranks; set train.micro_batches t
mlp@2,4 comm.sharding=parameters train.batch_size=29 data.drop_last=false train.micro_batches=20 => an epoch ends with a batch of
mlp@4 comm.sharding=parameters mesh.pp=2 mesh.schedule=zb_h1 => backward in two halves; set mesh.schedule
gpt@4 comm.sharding=gradients mesh.pp=2 mesh.chunks=2 mesh.schedule=interleaved train.micro_batches=5 => comm.sharding = "gradient
# meshes
mlp mesh.dp=3 => mesh pp=1 x dp=3 x tp=1 needs 3 ranks, found
mlp mesh.tp=8 => needs a multiple of 8 ranks, found
mlp@2,4 train.micro_batches=1 => data-parallel ranks share 1 micro-batches, so some would have none
mlp@4 train.batch_size=3 train.micro_batches=0 => 4 micro-batches of a global batch of 3 samples; set train.batch_size to 4
mlp mesh.chunks=2 mesh.schedule=interleaved => mesh.chunks = 2 cuts the model for the stages of a pipeline, and
mlp@2,4 mesh.pp=2 mesh.chunks=2 => it knows one chunk a stage, not 2; set mesh.chunks = 1
mlp@2,4 mesh.pp=2 mesh.schedule=interleaved => interleaved 1F1B needs at least 2 chunks a stage, found 1
mlp@2,4 mesh.pp=2 mesh.schedule=own.py:backwards => pipeline schedule "own.py:backwards" with n_stages=2
mlp mesh.schedule=own.py:number => must be a function of (stage, n_stages, n_micro) that yields actions
mlp comm.algorithm=own.py:number => must be a function of (rank, n, length) that yields rounds, found 3 (int)
mlp@2,4 comm.algorithm=own.py:shout => all-reduce "
mlp comm.algorithm=mpi comm.wire_dtype=bfloat16 => comm.algorithm = "mpi" sends numbers as they are; for comm.wire
mlp@4 mesh.pp=4 model.hidden=[16] => mesh.pp=4 needs 4 blocks at least, and the model has 3
mlp@2,4 mesh.pp=2 mesh.stages=[1,1] => must be 2 numbers of blocks, 1 or more each, that add up to the 4 blocks
plain@2,4 mesh.pp=2 => cuts a model between its blocks, and this one is a Whole
mlp@2,4 mesh.pp=2 comm.bucket_mb=auto => comm.bucket_mb = "auto" finds one list of buckets for all ranks
# layers of several ranks
gpt mesh.sequence=true => mesh.sequence = true cuts activations over the ranks that share layers, and mesh.tp is 1
experts@2,4 mesh.tp=2 mesh.sequence=true => mesh.sequence = true cuts what "block0.mixture" gets along the
gpt@2,4 mesh.tp=2 mesh.sequence=true mesh.plan={"block*.wide"="column","block*.narrow"="row"} => and the plan has no "sequence" la
gpt mesh.plan={"nothing"="column"} => mesh.plan: no layer matches "nothing"
gpt@2,4 mesh.tp=2 mesh.plan={"head"="coloumn"} => the style "coloumn" of "head" is not there (did you mean "column"?)
gpt@4 mesh.tp=4 => mesh.tp = 4
plain@2,4 mesh.tp=2 => mesh.tp cuts layers by a plan, and this model has none
gpt@2,4 mesh.tp=2 train.loss=mse => mesh.plan leaves the outputs of
gpt@2,4 mesh.tp=2 optimizer.name=lamb => LAMB needs norms of whole parameters, and mesh.tp = 2 cuts
experts@2,4 mesh.ep=2 optimizer.name=lars => LARS needs norms of whole parameters, and mesh.ep = 2 cuts
norm@2,4 mesh.cp=2 => mesh.cp = 2 cuts samples along their positions, and
experts@2,4 mesh.cp=2 => mesh.cp = 2 cuts samples, and experts ("block0.mixture") choose among whole ones
gpt@2,4 mesh.cp=2 model.block=6 => mesh.cp = 2 cuts the positions of samples into 4 chunks, and theirs are 6
rows@2,4 mesh.cp=2 => mesh.cp = 2 cuts inputs and targets along their positions (dim 1)
# experts of several ranks
gpt@2,4 mesh.ep=2 => mesh.ep = 2 shares out experts over ranks, and the model has none
experts@4 mesh.ep=4 model.experts=6 => mesh.ep = 4 does not divide the 6 experts
experts@2,4 mesh.ep=2 comm.sharding=gradients => and mesh.ep = 2 gives them different experts; set comm.sharding
experts@2,4 mesh.ep=2 comm.bucket_mb=auto => those of experts are apart from the rest, found mesh.ep = 2
experts@2,4 mesh.ep=2 comm.node_shared=true => and with mesh.ep = 2 those of experts go over others
experts@2 mesh.ep=2 train.micro_batches=5 => found 5 micro-batches for 2 data-parallel ranks; set train.micro_batches to 4
experts@2,4 mesh.ep=2 data.drop_last=false train.batch_size=10 train.micro_batches=8 => an epoch ends with a batch of
# statistics of all ranks
norm@2,4 train.batch_size=40 train.micro_batches=5 => synchronised batch norm needs as many micro-batches
norm data.drop_last=false => synchronised batch norm needs as many micro-batches on each rank, which a short last
# what does not fit the data
mlp model.inputs=63 => the model cannot take samples of shape (1, 8, 8) (float32): the model expects 63 numbers
mlp train.loss=mse => the model's output for one sample is (10,), the targets are ()
# files
mlp data.path=nowhere => no such file or folder, and no built-in data set of that name
mlp data.path=empty => the folder has neither
mlp data.path=own.py => is not an HDF5 file (no HDF5 signature found)
gpt data.path=more => the folder also holds late.h5, of which manifest.json says nothing, so no run would train on it
mlp data.x=foo => "foo"
mlp data.validation=gone.h5 => no such file or folder
mlp model.init_from=nope => model.init_from names neither a run folder nor a folder of checkpoints
mlp optimizer.offload=file optimizer.offload_folder=/proc/nonexistent => a file for optimizer state cannot be made: No such file
mlp optimizer.offload=file optimizer.offload_folder=own.py => cannot be made: Not a directory (ENOTDIR); set optimizer.offload_fol
mlp model.init_from=own.py => model.init_from names neither a run folder nor a folder of checkpoints
mlp model.init_from=other => the checkpoint is of another model
# labels
mlp data.validation=negative.h5 => label -3 is outside 0..9
mlp model.outputs=5 => is outside 0..4 (5 classes)
# code of the user's that does not do what is expected of it, or fails
mlp data.transform=own.py:doubled => data.transform "own.py:doubled" must return as many rows as it gets, 2, found the shape (4,
mlp data.transform=own.py:halved => data.transform "own.py:halved" must return as many rows as it gets, 2, found the shape (1,
mlp data.transform=own.py:none => data.transform "own.py:none" must return an array, found None
mlp data.transform=own.py:fails => data.transform "own.py:fails" failed: KeyError at own.py:27 in fails: 'not there'
mlp data.augment=own.py:one => data.augment "own.py:one" does not accept its arguments: one() takes 1 positional argument but 2
mlp data.augment=own.py:fails => data.augment "own.py:fails" failed: KeyError at own.py:27 in fails: 'not there'
mlp data.augment=own.py:none => data.augment "own.py:none" must return an array, found None
mlp train.loss=own.py:NoSum => train.loss, "own.py:NoSum", must return the sum of its terms, a Tensor without dims, found None
mlp train.loss=own.py:Vector => a Tensor without dims, found mpitrain.autograd.tensor:Tensor of shape (4, 10)
mlp train.loss=own.py:Raises => train.loss, "own.py:Raises", failed: KeyError at own.py:38 in __call__: 'loss'
mlp train.loss=own.py:Uncalled => train.loss = "own.py:Uncalled" must define total or __call__, and own.py:Uncalled has neither
mlp train.loss=own.py:none => train.loss = "own.py:none" must give an mpitrain.nn.Loss, found None
mlp train.ignore_index=x => train.ignore_index must be an integer, found "x"
mlp train.loss=huber train.delta=a => train.delta must be a number, found "a"
mlp optimizer.name=own.py:Unruly => must define change, or kernel and scalars, and own.py:Unruly does not
mlp optimizer.name=own.py:none => optimizer.name = "own.py:none" must give an mpitrain.optim.Optimizer, found None
mlp optimizer.name=lars optimizer.trust=a => optimizer.name = "lars": optimizer.trust must be a number, found "a"
mlp optimizer.name=rmsprop optimizer.alpha=[1] => optimizer.name = "rmsprop": optimizer.alpha must be a number, found [1]
mlp optimizer.schedule=own.py:no_function => must give a function of the step, and own.py:no_function gives None
mlp optimizer.schedule=own.py:poly optimizer.power=two => asked for step 0, failed: TypeError at own.py:43 in
mlp optimizer.schedule=own.py:given optimizer.values=[] => must give a finite number for each step, found None for step 0
mlp optimizer.schedule=own.py:given optimizer.values=["a"] => must give a finite number for each step, found 'a' for step 0
mlp optimizer.schedule=own.py:late train.steps=5 => must give a finite number for each step, found nan for step 2
mlp optimizer.maximize="false" => optimizer.name = "adamw": optimizer.maximize must be true or false, found "false"
mlp optimizer.amsgrad=1 => optimizer.amsgrad must be true or false, found 1
mlp optimizer.name=asgd optimizer.lambd=x => optimizer.name = "asgd": optimizer.lambd must be a number, found "x"
mlp optimizer.name=rprop optimizer.weight_decay=0.1 => optimizer.name = "rprop" does not take optimizer.weight_decay = 0.1; leave
mlp optimizer.name=lbfgs optimizer.weight_decay=0.1 => optimizer.name = "lbfgs" does not take optimizer.weight_decay = 0.1; leave
mlp optimizer.name=sgd optimizer.betas=[0.9,0.99] => optimizer.name = "sgd" does not take optimizer.betas = [0.9, 0.99]; leave
mlp optimizer.momentum=0.8 => optimizer.momentum = 0.8; leave it at 0.9, the default; it takes lr, betas, eps, weight_decay, decay
mlp optimizer.name=adamw optimizer.nesterov=true => optimizer.name = "adamw" does not take optimizer.nesterov = true; leave it
mlp optimizer.name=adamw optimizer.momentum=0.9 optimizer.nesterov=false
mlp optimizer.name=own.py:Plain optimizer.momentum=0.8 => does not take optimizer.momentum = 0.8; leave it at 0.9, the default; it
mlp optimizer.schedule=sequential optimizer.schedules=["cosine"] => optimizer.schedules must be a list of tables, found ["cosine"]
mlp optimizer.schedule=plateau optimizer.lr_eps=-1 => schedule plateau wants threshold and lr_eps of 0 or more
mlp optimizer.groups=[{lr=0.1}] => optimizer.groups: a group needs params
mlp optimizer.groups=[{params="hed*"}] => optimizer.groups: params = "hed*" names no parameter of the model
mlp optimizer.groups=[{params="*",frozen=true}] => optimizer.groups freeze every parameter of the model
mlp optimizer.groups=[{params="*"},{params="*.bias"}] => optimizer.groups: the group of *.bias has no parameter
mlp optimizer.groups=[{params="*.bias",maximize="no"}] => the group of *.bias: maximize must be true or false, found "no"
mlp optimizer.groups=[{params="*.bias",betas=[2,3]}] => the group of *.bias: optimizer.betas is two numbers in [0, 1), not [2, 3]
mlp train.loss=focal train.gamma=-1 => the gamma of focal_loss is a finite number, 0 or more, not -1
mlp train.loss=huber train.delta=0 => train.loss = "huber": the delta of the huber loss is more than 0, not 0
mlp train.weight=[0,0,0,0,0,0,0,0,0,0] => the run divides by: weight has a number for each class, 0 or more, and not all 0
mlp train.loss=nll train.weight=[1,1,1,1,1,1,1,1,1,-1] => the run divides by: weight has a number for each class, 0 or more
mlp train.loss=focal train.weight=[1,1,1,1,1,1,1,1,1,-1]
gpt@2,4 mesh.tp=2 mesh.sequence=true mesh.plan={"norm"="sequence"} => the plan does not name "embed.token" (Embedding): its
mlp optimizer.schedule=chained optimizer.schedules=[{name="own.py:half"}]
mlp optimizer.schedule=chained optimizer.schedules=[{name="sequential",schedules=[{name="own.py:half"}]}]
mlp optimizer.schedule=chained optimizer.schedules=[{name="own.py:hlf"}] => schedule "own.py:hlf": own.py has no "hlf" (did
mlp optimizer.schedule=chained optimizer.schedules=[{name="own.py:half",gama=1}] => "own.py:half" has no key gama
mlp optimizer.gamma=-3 => optimizer.gamma must be a finite number, 0 or more, found -3
mlp optimizer.momentum=5 => optimizer.momentum must lie in [0, 1), found 5.0
mlp model.activation=7 => model "mlp": model.activation must be a string, found 7
mlp comm.sharding=own.py:Unfinished => comm.sharding = "own.py:Unfinished" must define make_reducer, update
mlp comm.sharding=own.py:Vector => must be a subclass of mpitrain.parallel.policies.policy.Policy, found own.py:Vector
mlp log.observers=own.py:Watcher => observer "own.py:Watcher" does not accept its arguments:
plain model.name=own.py:broken => the model, run on one sample, failed: ValueError at own.py:50 in forward: no forward
mlp train.loss=own.py:number => train.loss = "own.py:number" does not accept its arguments: 'int' object is not callable
mlp train.loss=own.py:Unequal => train.loss, "own.py:Unequal", failed: mse: shapes (4, 10) and (40,) differ
mlp optimizer.name=own.py:number => 'int' object is not callable
mlp optimizer.schedule=own.py:number => 'int' object is not callable
mlp log.observers=own.py:number => observer "own.py:number" does not accept its arguments: 'int' object is not callable
mlp comm.sharding=own.py:Alone => comm.sharding = "own.py:Alone" is made with (setup, channel): too many positional arguments
mlp comm.algorithm=own.py:thing => that yields rounds, found <Thing object> (Thing)
# what is not refused
mlp
gpt
experts
gpt data.path=more data.validation=more/late.h5
norm
plain
mlp comm.sharding=parameters
mlp comm.node_shared=true comm.sharding=optimizer
mlp train.reproducible=layout comm.sharding=optimizer
gpt optimizer.name=lamb
mlp comm.algorithm=ring comm.wire_dtype=bfloat16
mlp comm.progress=thread comm.bucket_mb=auto
mlp mesh.schedule=zb_h1
"""


def case(line: str) -> Case:
    asked, _, said = line.partition(" => ")
    name, _, overrides = asked.partition(" ")
    file, _, on = name.partition("@")
    return Case(file, overrides, said, tuple(map(int, on.split(","))) if on else RANKS)


CASES = [case(line) for line in TABLE.strip().splitlines() if not line.startswith("#")]


def write(folder: Path) -> None:
    """The configurations, the user's file, and tokens."""
    from mpitrain.checkpoint.store import Piece, save
    from mpitrain.cli import main
    from mpitrain.files.hdf5_file import write_hdf5
    for name, text in FILES.items():
        (folder / f"{name}.toml").write_text(text + COMMON)
    (folder / "own.py").write_text(OWN)
    (folder / "empty").mkdir()
    write_hdf5(folder / "negative.h5", {"x": np.zeros((3, 1, 8, 8), np.float32), "y": np.array([1, -3, 2])})
    save(folder / "other" / "checkpoints", 1, [Piece.whole("parameters/weight", np.zeros(3, np.float32))], {})
    (folder / "corpus.txt").write_text("".join(chr(32 + (i * i + 3 * i) % 64) for i in range(400)))
    for out in ("tokens", "more"):
        main(["data", "import", "text", str(folder / "corpus.txt"), "--out", str(folder / out)])
    (folder / "more" / "late.h5").write_bytes((folder / "more" / "shard-00000.h5").read_bytes())


def verdict(action: Callable[[], Any]) -> list[Any]:
    """The exit status, and the line without rank and host."""
    from mpitrain.errors import MpitrainError
    try:
        action()
    except MpitrainError as error:
        return [error.exit_code, f"{error.code}: {error}"]
    return [0, ""]


def overrides(case: Case, out: str = "") -> list[str]:
    return [*case.overrides.split(), *([f"run.out={out}"] if out else [])]


def trained(folder: Path) -> list[Any]:
    """What runs on these ranks say; raises where ranks say different things."""
    from mpi4py import MPI

    from mpitrain.config import load_config
    from mpitrain.run import Run, session
    session.describe_files = functools.cache(session.describe_files)      # a child process each
    comm, found = MPI.COMM_WORLD, []
    for number, case in enumerate(CASES):
        def train(number: int = number, case: Case = case) -> None:
            config = load_config(folder / f"{case.file}.toml", overrides(case, f"{folder}/run{number}-{comm.size}"))
            with Run(config, comm, quiet=True) as run:
                run.train()
        said = verdict(train)
        everyone = comm.allgather(said)
        assert all(other == said for other in everyone), (case, everyone)
        found.append(said)
    return found if comm.rank == 0 else []


def inspected(folder: Path, ranks: list[int]) -> dict[str, list[Any]]:
    """What `inspect` says of each, for each number of ranks: before its first line, or not at all."""
    sys.modules["mpi4py"] = None                             # type: ignore[assignment]
    from mpitrain.plan import inspect as verb
    from mpitrain.plan import prepare
    prepare.describe_files = functools.cache(prepare.describe_files)      # a child process each

    def one(case: Case, n: int) -> list[Any]:
        return verdict(lambda: next(verb.inspect(folder / f"{case.file}.toml", overrides(case), ranks=n)))
    return {str(n): [one(case, n) for case in CASES] for n in ranks}


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if len(sys.argv) > 2:
        result: Any = inspected(where, [int(n) for n in sys.argv[2:]])
    else:
        result = trained(where)
    if result:
        print(json.dumps(result))
