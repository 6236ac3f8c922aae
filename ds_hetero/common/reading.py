"""Read and check the JSON and YAML files that users write: ds_config.json, schedules, plans, clusters, models.

    content = read_file(path, "schedule", ScheduleError)

The reader returns plain data: objects with text keys that occur once, lists, text, true, false, null, and numbers that
are finite and fit into 64 bits. It refuses everything else with a message: files that are too large, nesting that would
exhaust the stack, YAML aliases that expand to millions of values, NaN and infinity. Only a model's config.json may hold
the last two, as transformers writes it.

Bounds of numbers, such as `MAX_RANKS`, are far above anything that exists, and low enough that sums of bounded numbers
fit into 64 bits and their products into a float. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import isfinite
from pathlib import Path
from typing import Any

from ds_hetero.errors import HeteroError

MAX_RANKS = 1_000_000
MAX_HEADS = 4096  # the planner tries them one by one
MAX_LAYERS = 100_000
MAX_SEQ_LEN = 2**40  # tokens
MAX_BATCH = 2**20  # sequences of a micro-batch, and micro-batches of a step
MAX_STEPS = 10**9
MAX_WEIGHT = 1e18  # weights of tokens or of ZeRO shares, whose ratios alone matter


def is_whole(value: Any, minimum: int, maximum: int) -> bool:
    """Return True if a value is a whole number from ``minimum`` to ``maximum``; true and false are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def is_weight(value: Any) -> bool:
    """Return True if a value is a number from 0 to `MAX_WEIGHT`; true, false and NaN are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_WEIGHT


def whole_rule(value: Any, minimum: int, maximum: int) -> str:
    """Return the rule of `is_whole` that ``value`` breaks, in words: ``a whole number >= 1``."""
    is_too_large = isinstance(value, int) and value > maximum
    return f"a whole number <= {maximum:,}" if is_too_large else f"a whole number >= {minimum}"


def expect_whole_number(where: str, value: Any, minimum: int, maximum: int, error: type[HeteroError]) -> int:
    """Check that a value is a whole number from ``minimum`` to ``maximum``, and return it.

    Args:
        where: name or place of the value, for the message.
        error: class of the error that any other value raises.
    """
    if not is_whole(value, minimum, maximum):
        raise error(f"{where} must be {whole_rule(value, minimum, maximum)}, got {shortened(value)}.")
    return int(value)


def is_list(value: Any) -> bool:
    """Return True if a value is a list, or a tuple from Python; text is neither."""
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
"""An object that the package makes and writes to a JSON or YAML file."""

MAX_BYTES = 16 * 2**20  # bytes of a file; like the next two chosen, never measured
MAX_DEPTH = 64  # levels of nested objects and lists
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
    path: str | Path,
    what: str,
    error: type[HeteroError],
    *,
    yaml: bool | None = None,
    max_bytes: int = MAX_BYTES,
    finite: bool = True,
) -> Any:
    """Read a JSON or YAML file.

    Args:
        what: kind of the file, for messages: ``"schedule"``.
        error: class of the errors that are raised.
        yaml: whether it is YAML; left out, whether its name ends in .yaml or .yml.
        max_bytes: larger files are refused.
        finite: whether NaN and infinity are refused; transformers writes them into config.json.

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
        raise error(
            f"{what} file {shortened(str(path))} has {size:,} bytes; at most {max_bytes:,} are read. Check that it is "
            "the right file."
        )
    if yaml is None:
        yaml = Path(path).suffix in (".yaml", ".yml")
    return parse(text, f"{what} file {shortened(str(path))}", error, yaml=yaml, finite=finite)


def parse(text: str, where: str, error: type[HeteroError], *, yaml: bool = False, finite: bool = True) -> Any:
    """Parse JSON or YAML.

    Args:
        where: origin of the text, for messages.
        error: class of the errors that are raised.
        yaml: whether the text is YAML; otherwise it must be JSON.
        finite: whether NaN and infinity are refused.

    Raises:
        HeteroError: of class ``error``; the text cannot be parsed, or has other content than plain data.
    """
    content = _parse_yaml(text, where, error) if yaml else _parse_json(text, where, error)
    max_values = MAX_VALUES if yaml else len(text)  # JSON has no aliases
    check_content(content, where, error, max_values=max_values, finite=finite)
    return content


def check_content(
    content: Any, where: str, error: type[HeteroError], *, max_values: int = MAX_VALUES, finite: bool = True
) -> None:
    """Refuse content other than plain data, also in objects that were not read from a file.

    Args:
        where: origin of the content, for messages.
        error: class of the error that is raised; its message names the place.
        max_values: largest number of values.
        finite: whether NaN and infinity are refused.
    """
    num_values = 0
    pending: list[tuple[tuple[str, ...], Any]] = [((), content)]
    while pending:
        place, value = pending.pop()
        num_values += 1
        if num_values > max_values or len(place) > MAX_DEPTH:
            raise error(_too_large_text(_place_text(where, place[:4])))
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise error(f"{_place_text(where, place)}: the key {shortened(key)} must be text.")
                if not _is_text(key):
                    raise error(f"{_place_text(where, place)}: the key {shortened(key)!a} has half a surrogate pair.")
                pending.append(((*place, key), inner))
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            pending.extend(((*place, str(i)), inner) for i, inner in enumerate(value))
        else:
            _check_scalar(value, where, place, error, finite)


def _check_scalar(value: Any, where: str, place: Iterable[str], error: type[HeteroError], finite: bool) -> None:
    """Refuse a value that is neither text, a number of 64 bits that is finite (if ``finite``), true, false nor null."""
    if finite and isinstance(value, float) and not isfinite(value):
        raise error(f"{_place_text(where, place)} is {value}; numbers must be finite.")
    if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
        raise error(f"{_place_text(where, place)} is {shortened(value)}; whole numbers must fit into 64 bits.")
    if isinstance(value, str) and not _is_text(value):
        raise error(f"{_place_text(where, place)} is {shortened(value)!a}, which has half a surrogate pair.")
    if not (value is None or isinstance(value, (str, bool, int, float))):
        raise error(
            f"{_place_text(where, place)} is a {type(value).__name__}; only objects, lists, text, numbers, true, false "
            "and null are read."
        )


def _is_text(value: str) -> bool:
    """Return True if a text can be encoded in UTF-8. Half of a surrogate pair, which JSON can escape, cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _place_text(where: str, place: Iterable[str]) -> str:
    """Return the name of a place in a file, for messages: ``cluster file 'x': nodes.0.name``."""
    path = ".".join(place)
    return f"{where}: {shortened(path)[1:-1]}" if path else where


def _too_large_text(where: str) -> str:
    """Return the message on content with too many levels or values."""
    return f"{where} is nested more than {MAX_DEPTH} deep or holds more than {MAX_VALUES:,} values."


def _parse_json(text: str, where: str, error: type[HeteroError]) -> Any:
    """Return the content of a JSON text. Raises ``error``: it is not JSON, or a key occurs twice in an object."""

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            repeated = _first_repeated(key for key, _ in pairs)
            raise error(f"{where}: the key {shortened(repeated)} is given twice in one object.")
        return content

    def make_whole_number(digits: str) -> int:
        # `check_content` refuses a number of 25 digits, and names the key; int() refuses thousands without naming it.
        return int(digits[:25])

    try:
        return json.loads(text, object_pairs_hook=make_object, parse_int=make_whole_number)
    except RecursionError:
        raise error(_too_large_text(where)) from None
    except json.JSONDecodeError as cause:
        raise error(f"{where} is not JSON: {cause}.") from None


def _parse_yaml(text: str, where: str, error: type[HeteroError]) -> Any:
    """Return the content of a YAML text, by a safe loader. Checks the size first, before any value is built."""
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
        if "maximum nesting depth" in str(cause):  # from 0.2.6 on libyaml has a limit, which is below `MAX_DEPTH`
            raise error(_too_large_text(where)) from None
        raise error(f"{where} is not YAML: {_one_line(cause)}.") from None


class _DuplicateKey(ValueError):
    """A key occurs twice in one object of a YAML file."""

    def __init__(self, key: Any) -> None:
        super().__init__(key)
        self.key = key


def _yaml_loader() -> Any:
    """Return a safe loader class that refuses keys that occur twice in an object, and reads dates as text."""
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
    """Refuse a YAML document that is nested too deeply, or has too many values once its aliases are expanded.

    Only parser events are read; no value is built. ``[&a [1, 2], *a, *a]`` has 10 values: the outer list, and 3
    for each of the three inner ones.
    """
    import yaml

    size_of_anchor: dict[str, int] = {}  # number of values of every complete anchor
    # Anchor of every open collection, and its number of values so far. The first entry stands for the document.
    open_sizes: list[tuple[str | None, int]] = [(None, 0)]
    for event in events:
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_sizes.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_sizes.pop()
            if anchor is not None:
                size_of_anchor[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor is not None:
                size_of_anchor[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in size_of_anchor:
                raise error(
                    f"{where}: the alias *{event.anchor} refers to an anchor that does not exist or is not complete "
                    "before it."
                )
            size = size_of_anchor[event.anchor]
        anchor, open_size = open_sizes[-1]
        open_size += size
        open_sizes[-1] = (anchor, open_size)
        if len(open_sizes) > MAX_DEPTH or open_size > MAX_VALUES:
            raise error(_too_large_text(where))


def _first_repeated(keys: Iterable[str]) -> str:
    """Return the first key that has occurred before; there must be one."""
    earlier_keys: set[str] = set()
    for key in keys:
        if key in earlier_keys:
            return key
        earlier_keys.add(key)
    raise AssertionError("no key is repeated")


def _one_line(cause: Exception) -> str:
    """Return an error's message on one line, shortened and without its full stop."""
    return " ".join(str(cause).split())[:300].rstrip(".")


def config_dir() -> Path:
    """Return the folder with the package's ds_config.json files, ``clusters/`` and ``models/``.

    In a clone this is the link ds_hetero/configs to ds_configs/, in an installed wheel a folder in the same place.
    """
    return Path(__file__).parents[1] / "configs"


# Unlike the methods of Path, these return False for impossible names, such as those that are too long or have a NUL.
is_file, is_folder = os.path.isfile, os.path.isdir


def is_pipe(path: str | Path) -> bool:
    """Return whether a path is a pipe, such as a shell makes for ``<(command)``; False for impossible names."""
    try:
        return Path(path).is_fifo()
    except (OSError, ValueError):
        return False
