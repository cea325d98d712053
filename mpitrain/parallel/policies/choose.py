"""Which policy a run has: by `comm.sharding` and `comm.node_shared`, as far as its ranks can share memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.comm.face import AnyChannel
from mpitrain.config.sections import Config
from mpitrain.errors import ConfigError
from mpitrain.parallel.policies.node_copy import NodeCopy
from mpitrain.parallel.policies.node_memory import refuse_copies, refuse_unlike_nodes
from mpitrain.parallel.policies.node_shared import NodeShared
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.parallel.policies.sharded import ShardedGradients, ShardedOptimizer, ShardedParameters
from mpitrain.registry import Registry
from mpitrain.schedules.grid import REPLICAS

AUTO = "auto"
POLICIES: Registry[type[Policy]] = Registry("policy")
"""Policies by what `comm.sharding` calls them; `comm.node_shared` puts the copies of one on each node together."""
POLICIES.register("none")(Replicated)
POLICIES.register("optimizer")(ShardedOptimizer)
POLICIES.register("gradients")(ShardedGradients)
POLICIES.register("parameters")(ShardedParameters)


def find_policy(config: Config) -> type[Policy]:
    """The policy that `comm.sharding` names, ours or a user's own. ConfigError for anything else."""
    found: Any = POLICIES.resolve(config.comm.sharding, config.folder)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f'comm.sharding = "{config.comm.sharding}" must be a subclass of '
                          f"mpitrain.parallel.policies.policy.Policy, found {found!r}")
    return found


def choose(setup: Setup) -> Policy:
    """The policy that the configuration asks for, or the nearest that the nodes of this run allow: `notes` says which, and why.

    ConfigError and StorageError, on all ranks, for what cannot be had. It communicates.
    """
    comm = setup.config.comm
    asked = find_policy(setup.config)
    if comm.sharding in POLICIES and setup.context.mesh[REPLICAS].size == 1:
        asked = Replicated                                    # A single rank has nothing to cut.
    channel = gradient_channel(setup, by_messages=asked.cuts_gradients and not comm.node_shared)
    return one_per_node(asked, setup, channel) if comm.node_shared and channel.size > 1 else asked(setup, channel)


def choose_to_evaluate(setup: Setup) -> Policy:
    """The policy of a run without training: parameters stay in slices, since the model may be larger than a rank's memory. It
    communicates."""
    cut = setup.config.comm.sharding == "parameters" and setup.context.mesh[REPLICAS].size > 1
    return (ShardedParameters if cut else Replicated)(setup, setup.context.control)


def gradient_channel(setup: Setup, *, by_messages: bool) -> AnyChannel:
    """The channel of the ranks that add up gradients. With `comm.algorithm` "auto", those on the CPU go through shared memory
    where a node has room; a named algorithm goes by messages."""
    comm, mesh, algorithm = setup.config.comm, setup.context.mesh, setup.algorithm
    wire = None if comm.wire_dtype == "float32" else comm.wire_dtype
    channel = mesh.channel(REPLICAS, "gradients", algorithm=algorithm, wire=wire)
    if algorithm == AUTO and setup.device.name == "cpu" and channel.size > 1 and not by_messages:
        return mesh.share_memory(channel)
    return channel


def one_per_node(asked: type[Policy], setup: Setup, shared: Any) -> Policy:
    """The policy with one copy on each node, as far as there is anything to have one of."""
    mesh, kind = setup.context.mesh, setup.config.comm.sharding
    if shared.size < mesh[mesh.axes].size:
        refuse_unlike_nodes(mesh, shared)
    several, why = shared.size > shared.node.size, ""
    if not shared.shared:
        refuse_copies(shared)
        why = "every rank keeps a copy of its own"
    elif asked is ShardedParameters and several:
        why = (f'with comm.sharding = "{kind}" on several nodes a rank keeps slices, of which there are no copies, and puts '
               "blocks together for itself")
    if why:
        policy: Policy = asked(setup, shared.messages if asked.cuts_gradients else shared)
        policy.said.append(f"comm.node_shared: {why}")
        return policy
    if asked is Replicated or (asked is ShardedOptimizer and not several):
        return NodeShared(setup, shared)                      # All ranks that share the copy are on one node.
    of_copy = ShardedOptimizer if asked is ShardedOptimizer else ShardedGradients       # Its parameters lie in the one copy.
    return of_copy(setup, shared, NodeCopy(shared))


def change(was: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """One line where gradients are summed in another way than before on as many ranks, so that bits change; else nothing."""
    if not was or not now or was == now or was.get("ranks") != now["ranks"]:
        return ""
    if now["ranks"] == 2 and was.get("wire") == now["wire"]:
        return ""                                             # The sum of two has no order.
    before, after = (f"{choice.get('way')} ({choice.get('wire')})" for choice in (was, now))
    return (f"gradients were summed by {before}, and are by {after}: from here on the bits are not those of the run that was "
            "interrupted")
