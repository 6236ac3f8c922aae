"""Reader of all JSON and YAML files that people write: ds_config.json, schedules, plans, clusters, models, caches.

    content = read_file(path, "schedule", ScheduleError)

It reads plain data and refuses everything else. Plain data are objects with text keys that occur once, lists, text,
true, false, null, and numbers that are finite and fit into 64 bits. Refused by name, before they do harm, are too large
files, nesting that exhausts the stack, YAML aliases that expand to millions of values, NaN and infinity.

Bounds of numbers (`MAX_RANKS` and its like) are far above anything that exists, and low enough that sums of bounded
numbers fit into 64 bits, and their products into a float. Nothing here imports torch.

A `NameRow` decides on one name that a user may write, such as a key of DeepSpeed or an argument. Tables have a row for
every name, since a name that changes the training and was never tried must be refused; refusals and pages of docs/ are
made from the rows.
"""

from __future__ import annotations

import fnmatch
import json
import os
import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

from ds_hetero.errors import HeteroError

MAX_RANKS = 1_000_000
MAX_HEADS = 4096  # the planner tries them one by one
MAX_LAYERS = 100_000
MAX_SEQ_LEN = 2**40  # tokens
MAX_BATCH = 2**20  # sequences of a micro-batch, and micro-batches of a step
MAX_STEPS = 10**9
MAX_WEIGHT = 1e18  # of tokens or of ZeRO shares, of which only ratios matter


def is_whole(value: Any, least: int, most: int) -> bool:
    """Return whether a value is a whole number within ``[least, most]``; true and false are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_weight(value: Any) -> bool:
    """Return whether a value is a number within ``[0, MAX_WEIGHT]``; true, false and NaN are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_WEIGHT


def whole_rule(value: Any, least: int, most: int) -> str:
    """Return the bound of `is_whole` that ``value`` breaks: ``a whole number >= 1``."""
    is_too_large = isinstance(value, int) and value > most
    return f"a whole number <= {most:,}" if is_too_large else f"a whole number >= {least}"


def expect_whole_number(where: str, value: Any, least: int, most: int, error: type[HeteroError]) -> int:
    """Return a whole number from ``least`` to ``most``. Raises ``error``: any other value, with its place ``where``."""
    if not is_whole(value, least, most):
        raise error(f"{where} must be {whole_rule(value, least, most)}, got {shortened(value)}.")
    return int(value)


def is_list(value: Any) -> bool:
    """Return whether a value is a list, or a tuple from Python; text is not."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def expect_object_keys(
    where: str, data: Any, required: AbstractSet[str], optional: AbstractSet[str], error: type[HeteroError]
) -> None:
    """Raise ``error`` if ``data`` is not an object, lacks a required key, or has a key that is not in either set."""
    if not isinstance(data, Mapping):
        raise error(f"{where} must be an object, got {shortened(data)}.")
    unknown = sorted(set(data) - required - optional, key=str)
    missing = sorted(required - set(data))
    if unknown or missing:
        raise error(
            f"{where}: unknown keys {shortened(unknown)}, missing keys {missing}; "
            f"it takes {', '.join(sorted(required | optional))}."
        )


JsonObject = Mapping[str, Any]
"""An object of a JSON or YAML file."""

JsonDict = dict[str, Any]
"""An object that the package makes, to be written."""

MAX_BYTES = 16 * 2**20  # of a file; like the next two chosen, never measured
MAX_DEPTH = 64  # of nested objects and lists
MAX_VALUES = 2_000_000  # values of a YAML file, with its aliases written out

_LARGEST_WHOLE = 2**63 - 1

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlist, _short.maxdict = 3, 80, 80, 8, 6


def shortened(value: Any) -> str:
    """Return the repr of a value for an error message, shortened to at most 200 characters."""
    try:
        text = _short.repr(value)
    except ValueError:  # Python does not write whole numbers of more than 4,300 digits
        text = f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= 200 else text[:197] + "..."


def read_file(
    path: str | Path, what: str, error: type[HeteroError], *, yaml: bool | None = None, max_bytes: int = MAX_BYTES
) -> Any:
    """Read a JSON or YAML file.

    Args:
        what: kind of the file, for messages: ``"schedule"``.
        error: class of the errors that are raised.
        yaml: whether it is YAML; left out, whether its name ends in .yaml or .yml.
        max_bytes: larger files are refused.

    Raises:
        HeteroError: of class ``error``; the file cannot be read or parsed, or has other content than the plain data
            that the module's docstring lists.
    """
    try:
        size = Path(path).stat().st_size
        if size <= max_bytes:
            with open(path, encoding="utf-8") as file:
                text = file.read(max_bytes + 1)  # a pipe or a device has size 0, and may have more content
    except (OSError, ValueError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise error(f"cannot read the {what} file {shortened(str(path))}: {reason}.") from None
    if size > max_bytes or len(text) > max_bytes:
        raise error(f"{what} file {shortened(str(path))} has {size:,} bytes; at most {max_bytes:,} are read.")
    if yaml is None:
        yaml = Path(path).suffix in (".yaml", ".yml")
    return parse(text, f"{what} file {shortened(str(path))}", error, yaml=yaml)


def parse(text: str, where: str, error: type[HeteroError], *, yaml: bool = False) -> Any:
    """Parse JSON or YAML. Raises `HeteroError`: of class ``error``, as `read_file`.

    Args:
        where: origin of the text, for messages.
        yaml: whether it is YAML; if not, it must be JSON.
    """
    content = _parse_yaml(text, where, error) if yaml else _parse_json(text, where, error)
    check_content(content, where, error, max_values=MAX_VALUES if yaml else len(text))  # JSON has no aliases
    return content


def check_content(content: Any, where: str, error: type[HeteroError], *, max_values: int = MAX_VALUES) -> None:
    """Refuse content other than plain data; `parse` calls it for its own. Raises ``error``: names the place."""
    num_values = 0
    pending: list[tuple[tuple[str, ...], Any]] = [((), content)]
    while pending:
        place, value = pending.pop()
        num_values += 1
        if num_values > max_values or len(place) > MAX_DEPTH:
            raise error(_too_large(_at(where, place[:4])))
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise error(f"{_at(where, place)}: the key {shortened(key)} must be text.")
                if not _is_text(key):
                    raise error(f"{_at(where, place)}: the key {shortened(key)!a} has half a surrogate pair.")
                pending.append(((*place, key), inner))
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            pending.extend(((*place, str(i)), inner) for i, inner in enumerate(value))
        else:
            _check_scalar(value, where, place, error)


def _check_scalar(value: Any, where: str, place: Iterable[str], error: type[HeteroError]) -> None:
    if isinstance(value, float) and not isfinite(value):
        raise error(f"{_at(where, place)} is {value}; numbers must be finite.")
    if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
        raise error(f"{_at(where, place)} is {shortened(value)}; whole numbers must fit into 64 bits.")
    if isinstance(value, str) and not _is_text(value):
        raise error(f"{_at(where, place)} is {shortened(value)!a}, which has half a surrogate pair.")
    if not (value is None or isinstance(value, (str, bool, int, float))):
        raise error(
            f"{_at(where, place)} is a {type(value).__name__}; only objects, lists, text, numbers, true, false and "
            "null are read."
        )


def _is_text(value: str) -> bool:
    """Whether a text can be encoded; JSON's escapes can name half of a surrogate pair, which cannot be."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _at(where: str, place: Iterable[str]) -> str:
    path = ".".join(place)
    return f"{where}: {shortened(path)[1:-1]}" if path else where


def _too_large(where: str) -> str:
    return f"{where} is nested more than {MAX_DEPTH} deep or holds more than {MAX_VALUES:,} values."


def _parse_json(text: str, where: str, error: type[HeteroError]) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            repeated = _first_repeated(key for key, _ in pairs)
            raise error(f"{where}: the key {shortened(repeated)} is given twice in one object.")
        return content

    def whole(digits: str) -> int:
        # `check_content` refuses numbers of 25 digits, and names the key; int() refuses thousands, without a name.
        return int(digits[:25])

    try:
        return json.loads(text, object_pairs_hook=unique, parse_int=whole)
    except RecursionError:
        raise error(_too_large(where)) from None
    except json.JSONDecodeError as cause:
        raise error(f"{where} is not JSON: {cause}.") from None


def _parse_yaml(text: str, where: str, error: type[HeteroError]) -> Any:
    import yaml  # takes 20 ms, which JSON files need not wait for

    loader = _yaml_loader()
    try:
        _check_events(yaml.parse(text, Loader=loader), where, error)
        return yaml.load(text, Loader=loader)  # a safe loader
    except HeteroError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as cause:  # "!!bool x" is a KeyError
        if isinstance(cause, _DuplicateKey):
            raise error(f"{where}: the key {shortened(cause.key)} is given twice in one object.") from None
        if "maximum nesting depth" in str(cause):  # libyaml has a limit of its own from 0.2.6 on, below ours
            raise error(_too_large(where)) from None
        raise error(f"{where} is not YAML: {_one_line(cause)}.") from None


class _DuplicateKey(ValueError):
    def __init__(self, key: Any) -> None:
        super().__init__(key)
        self.key = key


def _yaml_loader() -> Any:
    """Return a safe loader that refuses keys given twice and reads dates as text."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            if len(set(keys)) < len(keys):
                raise _DuplicateKey(_first_repeated(keys))
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    return Loader


def _check_events(events: Iterable[Any], where: str, error: type[HeteroError]) -> None:
    """Refuse nesting that is too deep, and too many values with aliases written out, without building anything.

    ``[&a [1, 2], *a, *a]`` has 10 values: the outer list, and 3 each time for the inner one.
    """
    import yaml

    sizes: dict[str, int] = {}  # values of every complete anchor
    # Anchor of every open collection, and its values so far. The first entry stands for the document.
    open_sizes: list[tuple[str | None, int]] = [(None, 0)]
    for event in events:
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_sizes.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_sizes.pop()
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise error(f"{where}: the alias *{event.anchor} stands for nothing that is complete before it.")
            size = sizes[event.anchor]
        anchor, so_far = open_sizes[-1]
        open_sizes[-1] = (anchor, so_far + size)
        if len(open_sizes) > MAX_DEPTH or so_far + size > MAX_VALUES:
            raise error(_too_large(where))


def _first_repeated(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def _one_line(cause: Exception) -> str:
    return " ".join(str(cause).split())[:300].rstrip(".")


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file so that a reader gets the old content or the new one. Raises `OSError`: it cannot be written.

    Args:
        durable: whether this also holds after a loss of power; then the call waits for the disk.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    # O_EXCL: in a folder that others may write, somebody could have made a link of this name to a file of this user.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def config_dir() -> Path:
    """Return the folder of ready ds_config.json files, ``clusters/`` and ``models/``: ds_configs/ of the repository.

    In a clone it is the link ds_hetero/configs, in an installed wheel a folder in the same place.
    """
    return Path(__file__).parents[1] / "configs"


# Unlike the methods of Path, these return False for impossible names, too long or with a NUL.
is_file, is_folder = os.path.isfile, os.path.isdir


def is_pipe(path: str | Path) -> bool:
    """Return whether a path is a pipe, such as that of a shell's ``<(command)``; False for impossible names."""
    try:
        return Path(path).is_fifo()
    except (OSError, ValueError):
        return False


Kind = Literal["exact", "untried", "harmless", "refused", "ignored"]


RowT = TypeVar("RowT", bound="NameRow")


@dataclass(frozen=True, kw_only=True, slots=True)
class NameRow:
    """Effect of one name, or of all names of a pattern.

    Args:
        kind: ``"exact"``: training equals that of one process with the same value, as a test shows; ``"untried"``: it
            should, but only a GPU could show it; ``"harmless"``: it does not change the results of training;
            ``"refused"``: any value that is not in ``off`` ends the job; ``"ignored"``: such a job does not read it.
    """

    kind: Kind
    why: str = ""
    off: tuple[object, ...] = (None, False)  # values with which a refused name has no effect; upper or lower case


def row_of(table: Mapping[str, RowT], name: str) -> RowT | None:
    """Return the row of a name, or that of the longest pattern with a ``*`` that fits it; None without either."""
    if name in table:
        return table[name]
    patterns = [pattern for pattern in table if "*" in pattern and fnmatch.fnmatchcase(name, pattern)]
    return table[max(patterns, key=len)] if patterns else None


def is_in(value: object, values: tuple[object, ...]) -> bool:
    """Return whether ``values`` has a value of the same type and content; 1 and True differ."""
    normal = value.lower() if isinstance(value, str) else value
    return any(type(normal) is type(listed) and normal == listed for listed in values)
