"""Which policy a run has: by `comm.sharding` and `comm.node_shared`, as far as its ranks can share memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mpitrain.arguments import call
from mpitrain.backend import Device
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.channel import Channel
from mpitrain.config.sections import POLICIES, Config
from mpitrain.errors import ConfigError
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.placement.shard_cuts import probe
from mpitrain.registry import named
from mpitrain.schedules.grid import REPLICAS

AUTO = "auto"


def find_policy(config: Config) -> type[Policy]:
    """The policy that `comm.sharding` names, ours or a user's own. ConfigError for anything else."""
    if config.workers.count:
        from mpitrain.parallel.workers.policy import Federated
        return Federated
    if config.privacy.unit != "none":
        from mpitrain.parallel.policies.private import Private
        return Private
    found: Any = POLICIES.resolve(config.comm.sharding, config.folder)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f'comm.sharding = "{config.comm.sharding}" must be a subclass of '
                          f"mpitrain.parallel.policies.policy.Policy, found {named(found)}")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f'comm.sharding = "{config.comm.sharding}" must define {", ".join(missing)}')
    try:
        inspect.signature(found).bind("setup", "channel")
    except TypeError as error:
        raise ConfigError(f'comm.sharding = "{config.comm.sharding}" is made with (setup, channel): {error}') from None
    if config.comm.node_shared:
        from mpitrain.parallel.policies.node_shared import KNOWN
        if found not in KNOWN:
            raise ConfigError("comm.node_shared = true keeps parameters in a way of its own, and comm.sharding = "
                              f'"{config.comm.sharding}" in another; set comm.node_shared = false')
    policy: type[Policy] = found
    return policy


def choose(setup: Setup) -> Policy:
    """The policy that the configuration asks for, or the nearest that the nodes of this run allow: `notes` says which, and why.

    ConfigError and StorageError, on all ranks, for what cannot be had. It communicates.
    """
    comm = setup.config.comm
    asked = find_policy(setup.config)
    if comm.cuts != "none" and setup.context.mesh[REPLICAS].size == 1:
        asked = Replicated                                    # A single rank has nothing to cut.
    if setup.optimizer is not None and setup.optimizer(probe()).sends:
        from mpitrain.parallel.policies.one_bit import OneBitReplicated
        asked = OneBitReplicated
    forced = bool(comm.compress) and comm.compress_force
    channel = gradient_channel(setup, by_messages=forced or (asked.cuts_gradients and not comm.node_shared))
    if not comm.node_shared or channel.size == 1:
        made: Policy = call(asked, f'comm.sharding = "{comm.sharding}"', {}, setup, channel)
        return made
    from mpitrain.parallel.policies.node_shared import one_per_node
    return one_per_node(asked, setup, channel)


def choose_to_evaluate(setup: Setup) -> Policy:
    """The policy of a run without training: parameters stay in slices, since the model may be larger than a rank's memory. It
    communicates."""
    cut = setup.config.comm.cuts == "parameters" and setup.context.mesh[REPLICAS].size > 1
    made: Policy = POLICIES[setup.config.comm.sharding if cut else "none"](setup, setup.context.control)
    return made


def gradient_channel(setup: Setup, *, by_messages: bool) -> AnyChannel:
    """The channel of the ranks that add up gradients. With `comm.algorithm` "auto", those on the CPU go through shared memory
    where a node has room; a named algorithm goes by messages."""
    comm, mesh, algorithm = setup.config.comm, setup.context.mesh, setup.algorithm
    wire = None if comm.wire_dtype == "float32" else comm.wire_dtype
    channel = mesh.channel(REPLICAS, "gradients", algorithm=algorithm, wire=wire)
    if comm.device_buffers != "off" and setup.device.name == "gpu":
        hand_over(channel, setup.device, insist=comm.device_buffers == "on")
    if algorithm == AUTO and setup.device.name == "cpu" and channel.size > 1 and not by_messages:
        return mesh.share_memory(channel)
    return channel


def hand_over(channel: Channel, device: Device, *, insist: bool) -> None:
    """Makes the channel hand memory of GPUs to MPI, where MPI takes that on every rank. Else a note says why not; ConfigError on
    all ranks where the user insists."""
    from mpitrain.comm.messages.gpu_probe import refusal
    refused = channel.gather_objects(refusal(int(device.xp.cuda.Device().id)) if channel.size > 1 else "")
    rank = next((rank for rank, why in enumerate(refused) if why), None)
    channel.device_buffers = rank is None
    if rank is None:
        return
    said = f"MPI takes no addresses of GPU memory on rank {rank}: {refused[rank]}"
    if insist:
        raise ConfigError(f'comm.device_buffers = "on", but {said}; set it "off", or use an MPI that was built with CUDA')
    channel.notes.append(f'comm.device_buffers = "auto": gradients go by way of host memory, since {said}')


def change(was: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """One line where gradients are summed in another way than before on as many ranks, so that bits change; else nothing."""
    if not was or not now or was == now or was.get("ranks") != now["ranks"]:
        return ""
    if now["ranks"] == 2 and was.get("wire") == now["wire"]:
        return ""                                             # The sum of two has no order.
    before, after = (f"{choice.get('way')} ({choice.get('wire')})" for choice in (was, now))
    return (f"gradients were summed by {before}, and are by {after}: from here on the bits are not those of the run that was "
            "interrupted")
