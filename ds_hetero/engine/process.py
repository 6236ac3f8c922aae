"""This process among the ranks of a job: how they meet, agree on what to build, and say why one of them ends.

Jobs that torchrun starts again meet under a new name in its store. Its agent keeps one store over all restarts. torch's
process groups would read the addresses of the ranks before the restart there, and fail ("Connection refused").
``TORCHELASTIC_RESTART_COUNT`` cannot tell them apart: every agent counts for itself. So rank 0 draws a name for the
start, and tells it to each rank in answer to a word of that rank's:

    hello/RANK     the word that RANK has drawn; afterwards the name that it has read
    answer/WORD    the name of the start, for the process that has drawn WORD

An error that ends a rank is one message, and no raw text of a backend is the last word. A refusal that all ranks raise
is printed once per host, by its first rank, without a traceback. Any other error is shown as Python does. The other
ranks learn of it from this one's last words, see `ds_hetero.runtime.peers`.

A rank may never have registered. It runs stock DeepSpeed then, and takes part in nothing of ours, and the others would
wait for it in their first collective without a word. So each registered rank says in the process group's store that it
is here, and waits for the others there, where it can see who is missing.

DeepSpeed reads its configuration on every rank by itself. Where one host has another file, ranks wait for each other in
different collectives, or train on by different rules. So every rank takes part here first, with a section or without,
and a difference is the same error on all of them.

Every host has an environment of its own, too, and launchers pass on a part of it. A variable that sets how collectives
run, on one rank alone, makes ranks wait for each other; one that sets how numbers are rounded makes them train apart.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ds_hetero.common.announce import announce
from ds_hetero.common.extras import release_of
from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.elastic.node.place import AGENT
from ds_hetero.elastic.worker import own_worker
from ds_hetero.engine.ds_config import enabled
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import ConfigError, HeteroError, PeerError, StepError
from ds_hetero.job.start import World
from ds_hetero.runtime.collectives import timeout_of_job
from ds_hetero.runtime.devices import collectives_library, default_device
from ds_hetero.runtime.peers.board import FAILED, STOPPED
from ds_hetero.runtime.peers.watch import current_watch, is_lost_peer, lost_peer_error, waiting_for_peers
from ds_hetero.values.section import SECTION, expect_section_name

logger = logging.getLogger(__name__)

_PREFIX = "ds_hetero/starts"
_WARN_AFTER_S = 60.0  # other ranks may be importing, or reading a large model
_POLL_S = 0.05

_has_named_store = False


def is_elastic() -> bool:
    """Whether an agent of an elastic job has started this process, see `ds_hetero.elastic.worker`."""
    return AGENT in os.environ


def install(patches: Patches) -> None:
    """Let process groups that are made from here on meet under `name_of_start`, where torchrun keeps the store."""

    def named(stock: Callable[..., Store]) -> Callable[..., Store]:
        @functools.wraps(stock)
        def create(hostname: str, port: int, rank: int, world_size: int, *args: object, **kwargs: object) -> Store:
            global _has_named_store
            store = stock(hostname, port, rank, world_size, *args, **kwargs)
            if not is_kept_by_launcher(hostname, port):
                return store
            _has_named_store = True
            return PrefixStore(f"{_PREFIX}/{name_of_start(store, rank, world_size)}", store)

        return create

    module = importlib.import_module("torch.distributed.rendezvous")  # whose name is that of a function, too
    patches.replace(module, "_create_c10d_store", named)


def is_kept_by_launcher(hostname: str, port: int) -> bool:
    """Whether torchrun keeps the store at this address, so that it outlives the ranks."""
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address == (hostname, str(port))


@functools.cache
def announce_lost_restarts() -> None:
    """Say once, on rank 0, that this job's process group was made too early to be started again; every rank."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_kept and restarts and not _has_named_store and dist.get_world_size() > 1 and dist.get_rank() == 0:
        announce(
            f"torchrun is to restart this job (--max-restarts {restarts}), but its process group was made before "
            "ds_hetero.register(). torch's ranks find the addresses of those before a restart then, and fail with "
            '"Connection refused". Call register() before anything that makes a process group, such as '
            "TrainingArguments; or start torchrun with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )


def name_of_start(store: Store, rank: int, size: int) -> str:
    """Return a name for the processes that call this together, new at each start. Raises `PeerError`: who is absent.

    Caller: every rank; waits for all, as long as the store's timeout.
    """
    meeting = PrefixStore(_PREFIX, store)
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return _give_name(meeting, size, timeout) if rank == 0 else _ask_name(meeting, rank, timeout)


def _give_name(meeting: Store, size: int, timeout: timedelta) -> str:
    """Rank 0's part: answer every word, also those that ranks before a restart have left, until all have the name."""
    name, missing = secrets.token_hex(8), list(range(1, size))
    begin, has_warned = time.monotonic(), False
    while missing:
        words = {r: meeting.get(f"hello/{r}").decode() for r in missing if meeting.check([f"hello/{r}"])}
        for word in words.values():
            meeting.set(f"answer/{word}", name)
        missing = [r for r in missing if words.get(r) != name]
        waited_s = time.monotonic() - begin
        if missing and waited_s > timeout.total_seconds():
            raise PeerError(_missing_text(missing, waited_s))
        if missing and waited_s > _WARN_AFTER_S and not has_warned:
            logger.warning("%s", _missing_text(missing, waited_s))
            has_warned = True
        time.sleep(_POLL_S if missing else 0)
    return name


def _ask_name(meeting: Store, rank: int, timeout: timedelta) -> str:
    """Return the part of the other ranks."""
    word = secrets.token_hex(8)
    meeting.set(f"hello/{rank}", word)
    try:
        name = meeting.get(f"answer/{word}").decode()
    except RuntimeError as error:
        raise PeerError(_missing_text([0], timeout.total_seconds())) from error
    meeting.set(f"hello/{rank}", name)
    return name


def _missing_text(missing: list[int], waited_s: float) -> str:
    return (
        f"{ranks_text(missing)} did not come to the making of the process group within {waited_s:.0f} s, or called "
        "ds_hetero.register() after it, or not at all: every rank has to call it at the same place."
    )


TRACEBACK_VARIABLE = "DS_HETERO_TRACEBACK"
"""The environment variable that, set to 1, has every rank show full tracebacks."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install_excepthook(patches: Patches) -> None:
    """Replace ``sys.excepthook``."""
    stock: Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _show(stock, kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = stock

    sys.excepthook = hook
    patches.on_undo(undo)


def _show(stock: Hook, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    lost = lost_peer_error(error, "in its script") if is_lost_peer(error) else None
    watch = current_watch()
    is_said = False
    if watch is not None:
        shown = error if lost is None else lost
        watch.say_last_words(STOPPED if isinstance(shown, (PeerError, StepError)) else FAILED, _text(shown))
        is_first_of_host = os.environ.get("LOCAL_RANK") == "0"  # a host's own log has the reason too
        is_said = isinstance(error, HeteroError) and not is_first_of_host and watch.is_said_by_rank_0(_text(error))
    _leave_behind(error if lost is None else lost)
    if not _is_message(error) or os.environ.get(TRACEBACK_VARIABLE) == "1":
        stock(kind, error, traceback)
    elif not is_said:
        print(_text(error), file=sys.stderr, flush=True)
    if lost is not None:
        print(_text(lost), file=sys.stderr, flush=True)


def _leave_behind(error: BaseException) -> None:
    """Tell this process's agent why it ends, in an elastic job."""
    worker = own_worker()
    if worker is not None and not isinstance(error, KeyboardInterrupt):
        is_refusal = isinstance(error, HeteroError) and not isinstance(error, (PeerError, StepError))
        worker.note_error(_text(error), is_refusal=is_refusal, is_of_peer=isinstance(error, PeerError))


def _is_message(error: BaseException) -> bool:
    """Whether the text of an error is all that a user needs: not where it hides an error in the code of this rank."""
    cause = error.__cause__
    return isinstance(error, (HeteroError, PeerError)) and (
        cause is None or isinstance(cause, HeteroError) or is_lost_peer(cause)
    )


def _text(error: BaseException) -> str:
    kind = type(error)
    return f"{'' if kind.__module__ == 'builtins' else f'{kind.__module__}.'}{kind.__qualname__}: {error}"


MAY_DIFFER = (
    "aio",  # how fast a host's disks are
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "tensorboard",  # rank 0 alone writes these
    "wandb",
    "comet",
    "csv_monitor",
    "flops_profiler.output_file",
    "dump_state",  # printing
    "steps_per_print",
    SECTION,  # its content is compared when it has been read, by `ds_hetero.job.start`
)
"""Keys of ds_config.json, with all that is below them, which may differ between ranks."""


_REGISTERED = "ds_hetero/registered"
_STORE_LINGER_S = 1.0

_calls = 0

_MISSING = "missing"
_ON = "switched on"
_MODEL = "the model"


@waiting_for_peers("comparing the configurations of all ranks")
def agree_on_configuration(
    ds_config: Mapping[str, object] | None, model: nn.Module | None = None, error: Exception | None = None
) -> None:
    """Compare configuration, model and environment of all ranks, if any rank's configuration asks for this engine.

    Args:
        ds_config: this rank's; None where there is none, or none that could be read.
        error: why ``ds_config`` could not be read.

    Caller: every rank of the world, with a section or without.
    Collectives: one `on_all_ranks`, if there is a process group.

    Raises:
        ConfigError: on every rank, when a difference is found, naming key, ranks and values; or when a key of the
            configuration is a misspelling of the section's name.
    """

    def view() -> dict[str, str]:
        if ds_config is None:
            return {SECTION: _MISSING if error is None else f"unknown, since ds_config.json cannot be read: {error}"}
        expect_section_name(ds_config)
        if not enabled(ds_config):
            state = 'switched off ("enabled": false)' if SECTION in ds_config else _MISSING
            return {SECTION: state, **dict(_leaves(ds_config))}
        return {SECTION: _ON, **dict(_leaves(ds_config)), **({} if model is None else {_MODEL: _structure(model)})}

    def view_and_environment() -> tuple[dict[str, str], dict[str, str]]:
        own_view = view()
        return own_view, own_environment() if own_view[SECTION] == _ON else {}

    expect_all_registered()
    views, environments = zip(*World.current().on_all_ranks(view_and_environment), strict=True)
    if any(configuration[SECTION] == _ON for configuration in views):
        _expect_same_configuration(views)
        expect_same_environment(environments)
        announce_lost_restarts()


def _expect_same_configuration(views: Sequence[Mapping[str, str]]) -> None:
    keys = [SECTION] if len({view[SECTION] for view in views}) > 1 else sorted({key for view in views for key in view})
    if lines := differing_lines(views, {key: f'"{key}"' for key in keys if key != _MODEL}, absent=_MISSING):
        raise ConfigError("all ranks must be given the same ds_config.json, but these differ:\n" + "\n".join(lines))
    if lines := differing_lines(views, {_MODEL: _MODEL}, absent=_MISSING):
        raise ConfigError("all ranks must build the same model, but these differ:\n" + "\n".join(lines))


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and canonical text of every value in nested objects, except what may differ."""
    if path in MAY_DIFFER:
        return
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, default=lambda other: f"a {type(other).__name__}")


def _structure(model: nn.Module) -> str:
    """The parameters' names and whole shapes, and which are trained, in short: how many there are, and a checksum."""
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    shapes = [(name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in parameters.items()]
    checksum = hashlib.sha256(repr((shapes, trained)).encode()).hexdigest()[:8]
    return f"{len(shapes)} parameters, {len(trained)} of them trained, names and shapes {checksum}"


COMPARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "DS_HETERO_")
"""Variables that begin so are compared, except those in `HOST_VARIABLES`."""

COMPARED = (
    "DS_ACCELERATOR",  # which backend the process group has
    "TORCH_DISTRIBUTED_DEBUG",  # DETAIL adds collectives of its own
    "CUDA_LAUNCH_BLOCKING",  # a kernel that waits for its end can wait for a collective of another rank
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",  # the next three: how products are rounded
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)
"""Further variables that are compared."""

HOST_VARIABLES = (
    "NCCL_CONF_FILE",  # paths and names that belong to a host
    "NCCL_GRAPH_DUMP_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_HOSTID",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_OOB_NET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_DEBUG",  # printing
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_RANK",
    "DS_HETERO_TRACEBACK",
    "DS_HETERO_ELASTIC_AGENT",
    "DS_HETERO_ELASTIC_AGENT_PID",
    "DS_HETERO_ELASTIC_NODE",
    "DS_HETERO_ELASTIC_SHM",
    "DS_HETERO_ELASTIC_SILENCE_S",
    "DS_HETERO_ELASTIC_TOKEN",
)
"""Variables of those families that describe one host, or only what is printed."""

_MOST_SHOWN = 5  # differing keys in one message
_LONGEST_SHOWN = 60  # characters of a value in a message
_PACKAGES = ("ds-hetero", "deepspeed", "transformers")
_LIBRARIES = ("NCCL", "RCCL")


def own_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings that must be equal on all ranks, as texts by a name for people; what is not set is left out.

    Builds of one torch for different CUDA releases count as equal where their NCCL is the same: NCCL is what they talk
    with.

    Args:
        variables: of the environment; this process's if left out.
    """
    variables = os.environ if variables is None else variables
    names = sorted(name for name in variables if name.startswith(COMPARED_PREFIXES) or name in COMPARED)
    compared = {f"environment variable {name}": variables[name] for name in names if name not in HOST_VARIABLES}
    return {**_versions(), **compared}


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__.partition("+")[0]}
    versions |= {name: release_of(name) or "not installed" for name in _PACKAGES}
    if default_device().type == "cuda":
        library, version = collectives_library()
        versions[library] = version
    return {f"version of {name}": text for name, text in versions.items()}


def expect_same_environment(environments: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks whose `own_environment` differs where it must not. Raises `ConfigError`: names, ranks, values."""
    _expect_one_library(environments)
    names = sorted({name for environment in environments for name in environment})
    if lines := differing_lines(environments, {name: name for name in names}, absent="not set"):
        raise ConfigError("all ranks must run in the same environment, but these differ:\n" + "\n".join(lines))


def _expect_one_library(environments: Sequence[Mapping[str, str]]) -> None:
    """Refuse NVIDIA's GPUs beside AMD's. Raises `ConfigError`: nothing carries messages between them."""
    libraries = [next((name for name in _LIBRARIES if f"version of {name}" in each), "none") for each in environments]
    if {"NCCL", "RCCL"} <= set(libraries):
        by_library = ranks_by_value(enumerate(libraries))
        nvidia, amd = ranks_text(by_library["NCCL"]), ranks_text(by_library["RCCL"])
        raise ConfigError(
            f"{nvidia} on NVIDIA GPUs, which talk by NCCL, and {amd} on AMD GPUs, which talk by RCCL. The two do not "
            "understand each other, and a build of torch has one of them, so that no setting lets these ranks train "
            "together. Start a job for each."
        )


def differing_lines(views: Sequence[Mapping[str, str]], labels: Mapping[str, str], *, absent: str) -> list[str]:
    """Return one line for each key whose values differ between ranks, with the ranks of every value; at most six.

    Args:
        views: of every rank, texts by key.
        labels: how each key that is compared is written.
        absent: stands for a key that a rank does not have.
    """
    values = {key: [view.get(key, absent) for view in views] for key in labels}
    lines = [f"  {labels[key]}: {_by_rank(of_ranks)}" for key, of_ranks in values.items() if len(set(of_ranks)) > 1]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} more"]
    return lines


def _by_rank(values: Sequence[str]) -> str:
    """Return every value with its ranks: ``1.0 on rank 0, 2; missing on rank 1``."""
    by_value = ranks_by_value(enumerate(values))
    return "; ".join(f"{_short(value)} on rank {', '.join(map(str, ranks))}" for value, ranks in by_value.items())


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_SHOWN else value[: _LONGEST_SHOWN - 3] + "..."


def expect_all_registered(
    warn_after_s: float = _WARN_AFTER_S,
    give_up_after_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until every rank of the world is here; those that never registered are named.

    Args:
        warn_after_s: seconds until a warning says who is missing.
        give_up_after_s: seconds until that is an error; left out, the timeout of the default process group.

    Caller: every registered rank, as often as the others; nothing happens without a process group.
    Collectives: none; one key of the store per rank and call.

    Raises:
        ConfigError: ranks are missing.
        PeerError: the store cannot be reached any more.
    """
    global _calls
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _calls += 1
    if give_up_after_s is None:
        give_up_after_s = timeout_of_job().total_seconds()
    start, has_warned = time.monotonic(), False
    while missing := _missing_ranks(_calls):
        waited_s = time.monotonic() - start
        if waited_s > give_up_after_s:
            if dist.get_rank() == 0:
                sleep(_STORE_LINGER_S)  # it may keep the store, which the others ask until they give up, too
            raise ConfigError(_unregistered_text(missing, waited_s))
        if waited_s > warn_after_s and not has_warned:
            logger.warning("%s", _unregistered_text(missing, waited_s))
            has_warned = True
        sleep(_POLL_S)


def _missing_ranks(call: int) -> list[int]:
    """Return the ranks that have not reached this call yet, and note that this one has."""
    try:
        store = PrefixStore(f"{_REGISTERED}/{call}", _get_default_store())
        store.set(str(dist.get_rank()), "here")
        return [rank for rank in range(dist.get_world_size()) if not store.check([str(rank)])]
    except RuntimeError as error:
        raise PeerError(
            "rank 0 or the launcher, whichever keeps the store of the job, could not be reached any more while this "
            "rank waited for all to come to deepspeed.initialize."
        ) from error


def _unregistered_text(missing: list[int], waited_s: float) -> str:
    return (
        f"{ranks_text(missing)} did not reach deepspeed.initialize with ds_hetero registered within {waited_s:.0f} s "
        "of this rank. Call ds_hetero.register() on every rank of all nodes: a rank without it runs stock DeepSpeed "
        "and never joins. (One that is still reading its model comes later; one that has ended never does.)"
    )
