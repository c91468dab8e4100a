"""Compose ``conf/`` and the words of a command line by Hydra."""

import functools
import glob
import hashlib
import itertools
import os
import pickle
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from capmoe_eval.errors import UsageError, bad_choice, check_choice, first_line, shown
from capmoe_eval.experiment.datasource import cache_directory
from capmoe_eval.experiment.files import with_imported
from capmoe_eval.experiment.observation import observer_options
from capmoe_eval.experiment.settings import GROUPS, NAMES, check_words
from capmoe_eval.routing.knobs import check, says
from capmoe_eval.routing.registry import knobs, methods_with

# ${capmoe.cache:name}, a directory in the user's cache.
OmegaConf.register_new_resolver("capmoe.cache", lambda name: str(cache_directory() / name))
# ${capmoe.beside:path}, the directory that a path is in.
OmegaConf.register_new_resolver("capmoe.beside", lambda path: str(Path(path).absolute().parent))

# ${capmoe.ranks:backend,n}, the emulated ranks: an engine has the tokens of one.
OmegaConf.register_new_resolver(
    "capmoe.ranks", lambda backend, ranks: ranks if backend == "transformers" else 1
)

# The options that were composed, by group and name.
_options_composed: dict[tuple[str, str], DictConfig] = {}

_BARE = re.compile(r"[A-Za-z0-9_./-]+(?:[:][A-Za-z0-9_./-]+)*")
_NOT_TEXT = re.compile(
    r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)|true|false|null", re.IGNORECASE
)
# The beginning of a word of the command line that sets a grid or one of its keys.
_IN_A_GRID = re.compile(r"(grid|parts)[.=]")
_NO_GRID_OF_MODELS = "++grid.model=null"
_FILE: Final = re.compile(r"[^\s,\[\]()=\"']+\.ya?ml(?=[,\])\"']|$)")
_TASKS: Final = re.compile(r"\+{0,2}(grid\.|parts\.\w+\.)?tasks=")
# The first metric that lm-eval reports where a file names none.
_METRICS: Final = {
    "loglikelihood": "perplexity",
    "loglikelihood_rolling": "word_perplexity",
    "multiple_choice": "acc",
    "generate_until": "exact_match",
}
_Entries = Annotated[list[dict[str, Any]], says("a list of mappings, such as [{metric: acc}]")]
_stored: dict[str, tuple[Path, str]] = {}  # the files that became options, and as typed, by name


def config_directory() -> Path:
    """Return ``conf/``: beside the package in a checkout, inside it where it is installed."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def check_once(words: Iterable[str]) -> None:
    """Refuse a key that words set to two values, of which Hydra takes the last (UsageError)."""
    before: dict[str, str] = {}
    for word in words:
        key, equals, _ = word.lstrip("+").partition("=")
        if equals and not key.startswith("-") and before.setdefault(key, word) != word:
            raise UsageError(
                f"{shown(word)}: {shown(key)} is set before, by {shown(before[key])}; leave one out"
            )


def check_grammar(words: Iterable[str]) -> None:
    """Refuse words ``KEY=VALUE`` that Hydra cannot read, and what is no name of an option.

    Raises:
        UsageError: With the word and how to write it.
    """
    for word in words:
        if "=" not in word or word.startswith("-"):
            continue
        try:
            parsed = OverridesParser.create().parse_override(word)
        except Exception as error:  # of any kind: of a deep nesting it is a RecursionError
            raise UsageError(f"{shown(word)}: {_how_to_write(word, error)}") from error
        group = parsed.key_or_group
        of_group = group in ("", "hydra", *GROUPS) or "/" in group or parsed.package is not None
        if parsed.is_sweep_override() or not of_group:
            continue
        chosen = parsed.value()
        for name in chosen if isinstance(chosen, list) else [chosen]:
            if not isinstance(name, str):
                if not group or parsed.package is not None:
                    raise UsageError(f"{shown(word)}: is no option of a group; --help names them")
                raise bad_choice(group, parsed.get_value_element_as_str(), options(group))


def _how_to_write(word: str, error: Exception) -> str:
    key, _, value = word.partition("=")
    message = f"{error} {error.__cause__ or ''}"
    if word.count("[") > word.count("]"):  # the shell splits a list with spaces
        return "has no closing bracket; quote the word: 'KEY=[VALUE,VALUE]'"
    is_of_a_character = re.search("LexerNoViableAlt|token recognition error", message)  # by antlr
    if not set(value) & set("[]{}'\"") and ("/" in value or is_of_a_character):
        quoted = shlex.quote(override(key, value))
        return f"Hydra reads such text only in quotes, inside those of the shell: {quoted}"
    if word.endswith(",") or " " in word:
        return "cannot be read; each setting is one word, KEY=VALUE or KEY=A,B"
    return f"{first_line(error).replace(word, shown(word))[:500]}; --help says what there is"


def for_hydra(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, new keys of grids forced on Hydra, which refuses them.

    They are checked on expansion. A model that is chosen takes the place of those of an
    experiment's grid, and a task file becomes a task. UsageErrors are those of
    :func:`store_task_files`, :func:`check_words`, :func:`check_grammar` and :func:`check_once`.
    """
    words = [*map(store_task_files, words)]
    check_words(words)
    check_grammar(words)
    check_once(words)
    keys = {word.lstrip("+").partition("=")[0] for word in words}
    one_model = {"experiment", "model"} <= keys and not keys & {"grid", "grid.model"}
    forced = [f"++{word}" if _IN_A_GRID.match(word) else word for word in words]
    return [*forced, _NO_GRID_OF_MODELS] if one_model else forced


def as_typed(words: Iterable[str]) -> list[str]:
    """Return the words of a command line of which :func:`for_hydra` made others."""
    forced = re.compile(rf"\+\+(?={_IN_A_GRID.pattern})")
    return [forced.sub("", word, count=1) for word in words if word != _NO_GRID_OF_MODELS]


def override(key: str, *values: object) -> str:
    """Return a word of the command line, in Hydra's grammar; several values are a sweep."""
    text = ",".join(map(_spelled, values))
    # Hydra reads a bare comma as a sweep, so several tasks are a list in brackets.
    return f"{key}=[{text}]" if key == "tasks" and len(values) > 1 else f"{key}={text}"


def _spelled(value: object) -> str:
    if value is None or isinstance(value, bool):
        return shown(value)
    if not isinstance(value, str) or (_BARE.fullmatch(value) and not _NOT_TEXT.fullmatch(value)):
        return str(value)
    # Within quotes Hydra unescapes quotes, and backslashes before them.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'"{escaped}"'


def options(group: str) -> list[str]:
    """Return the names of a configuration group, such as the models, also those of packages."""
    return list(_options(config_directory(), group))


@functools.cache
def _options(_directory: Path, group: str) -> Sequence[str]:
    with composing():  # whose search path has the directories of packages beside the suite
        names: Sequence[str] = GlobalHydra.instance().config_loader().get_group_options(group)
    return names


def load_option(group: str, name: str) -> DictConfig:
    """Return one option of a group, composed, or raise UsageError if there is none."""
    check_choice(group, name, options(group))
    load_options(group, [name])
    return _options_composed[group, name].copy()


def load_options(group: str, names: Iterable[str]) -> None:
    """Compose some options of a group, and keep them: all at once takes half as long as singly."""
    new = [name for name in dict.fromkeys(names) if (group, name) not in _options_composed]
    if new:
        config = compose_words([f"+{group}@_{n}={name}" for n, name in enumerate(new)], None)
        OmegaConf.set_struct(config, False)
        _options_composed.update({(group, name): config[f"_{n}"] for n, name in enumerate(new)})


@contextmanager
def composing() -> Iterator[None]:
    """Have Hydra's ``compose`` read ``conf/``, also inside a job that Hydra runs."""
    store_knobs()
    of_all = GlobalHydra.instance()
    running = of_all.hydra
    of_all.clear()
    try:
        with initialize_config_dir(str(config_directory()), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().clear()
        if running is not None:
            GlobalHydra.instance().initialize(running)


def store_knobs() -> None:
    """Store the knobs of methods, the options of observers and their defaults as ``knobs``.

    ``conf/config.yaml`` begins with them, so that a method that a user registers brings its own.
    A knob with the name of another key is a UsageError.
    """
    for name in knobs().keys() & {*NAMES}:
        raise UsageError(
            f"{name}: this knob of method {', '.join(methods_with(name))} has the name of a key of "
            "conf/config.yaml; give the knob another name"
        )
    defaults = {name: knob.default for name, knob in {**knobs(), **observer_options()}.items()}
    ConfigStore.instance().store("knobs", defaults)


def compose_words(words: Sequence[str], config: str | None = "config") -> DictConfig:
    """Return what Hydra composes of a file of ``conf/``, or of none, and the words of a command."""
    with composing():
        whole: DictConfig = compose(config, list(words))
    return whole


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a command line; HydraException for an unknown override."""
    words = tuple(overrides)
    # A task file, or its documents, may have changed since.
    pickled = _pickled.__wrapped__ if any(map(_FILE.search, words)) else _pickled
    config: DictConfig = pickle.loads(pickled(words))
    return config


# A report asks for each of its experiments several times, and changes what it gets.
@functools.lru_cache(maxsize=64)
def _pickled(overrides: tuple[str, ...]) -> bytes:
    """Return a configuration as pickle has it, which copies it in a sixth of deepcopy's time."""
    return pickle.dumps(compose_words(for_hydra(overrides)))


class _Loader(yaml.SafeLoader):
    """Loads a file of lm-eval; of ``!function module.name`` it keeps the module's file."""


_Loader.add_constructor(
    "!function", lambda _, node: Path(f"{str(node.value).rpartition('.')[0]}.py")
)


def store_task_files(word: str) -> str:
    """Return a word of the command line whose task files became options, by their tasks' names.

    A user's own task file of lm-eval becomes an option of the group ``tasks``, for example of
    ``tasks=[obqa,mine.yaml]``. A word that sets no tasks, or names no file, stays as it is.

    Raises:
        UsageError: If a file cannot be read, or declares no task of its own name.
    """
    files: dict[str, str] = {}

    def name_of(match: re.Match[str]) -> str:
        file = files.setdefault(name := _task_option(match[0]), match[0])
        if file != match[0]:
            raise UsageError(f"tasks={match[0]}: {name} is the task of {file}, too; rename one")
        return name

    setting = _TASKS.match(word)
    return word if setting is None else setting[0] + _FILE.sub(name_of, word[setting.end() :])


def _task_option(text: str) -> str:
    """Store the option that a file becomes, and return its name."""
    file = Path(text).expanduser().absolute()
    config, file_hash = hashed_config(file, text)
    name = config.get("task")
    if not isinstance(name, str):
        raise UsageError(
            f"tasks={text}: declares no task (task: NAME); a group's tasks are named one by one"
        )
    if name in options("tasks") and (name not in _stored or _stored[name][0] != file):
        raise UsageError(f"tasks={text}: {name} is a task of the suite; give it another name")
    metrics, filters = (
        check(f"tasks={text}: {field}", config.get(field) or [{}], _Entries)
        for field in ("metric_list", "filter_list")
    )
    output = config.get("output_type", "generate_until")
    option = {
        "title": config.get("task_alias") or name,
        "lm_eval": name,
        "dataset": config.get("dataset_path") or "none",
        "fewshot": None,
        "metric": metrics[0].get("metric") or _METRICS.get(output, "acc"),
        "filter": filters[0].get("name", "none"),
        "images": "doc_to_image" in config,
        "file": str(file),
        "file_hash": file_hash,
    }
    ConfigStore.instance().store(name, {name: option}, group="tasks")
    _stored[name] = file, text
    _options_composed.pop(("tasks", name), None)
    return name


def task_word(name: str) -> str:
    """Return the word of a task on a command line: its file, as it was typed, or its name."""
    return _stored[name][1] if name in _stored else name


def hashed_config(file: Path, text: str) -> tuple[dict[str, Any], str]:
    """Return the settings of a task file, ``text`` in messages, and a hash of all that it needs."""
    read: dict[Path, bytes] = {}
    config = _task_config(file, text, read)
    for path in data_files(config):
        with path.open("rb") as stream:
            read[path] = hashlib.file_digest(stream, "sha256").digest()
    names = Counter(path.name for path in read)
    hashes = sorted(
        # Of files with the same name the folder says which is which.
        (path.name if names[path.name] == 1 else os.path.relpath(path, file.parent)).encode()
        + hashlib.sha256(content).digest()
        for path, content in read.items()
    )
    return config, hashlib.sha256(b"".join(hashes)).hexdigest()[:16]


def data_files(config: Mapping[str, Any]) -> list[Path]:
    """Return the files on this disk that a task's data set is read from."""
    kwargs = of if isinstance(of := config.get("dataset_kwargs"), dict) else {}
    names = config.get("dataset_path"), kwargs.get("data_dir"), kwargs.get("data_files")
    return [*_local_files(list(names))]


def _local_files(data: Any) -> Iterator[Path]:
    """Yield the files on this disk that a dataset's path, ``data_dir`` or ``data_files`` names."""
    for text in (leaf for leaf in _leaves(data) if isinstance(leaf, str)):
        for path in map(Path, glob.glob(text, recursive=True)):  # noqa: PTH207 - may be absolute
            yield from (file for file in [path, *path.rglob("*")] if file.is_file())


def _leaves(data: Any) -> Iterator[Any]:
    """Yield what lists and mappings hold, at any depth."""
    if isinstance(data, (list, dict)):
        parts = data.values() if isinstance(data, dict) else data
        yield from itertools.chain.from_iterable(map(_leaves, parts))
    else:
        yield data


def _task_config(file: Path, text: str, read: dict[Path, bytes]) -> dict[str, Any]:
    """Return a file's settings over those that it includes; ``read`` gets every file's bytes."""
    try:
        read[file] = file.read_bytes()
        config: dict[str, Any] = yaml.load(read[file], Loader=_Loader)
        if not isinstance(config, dict):
            raise TypeError("it is no mapping of settings")
        for module in (leaf for leaf in _leaves(config) if isinstance(leaf, Path)):
            read |= {path: path.read_bytes() for path in with_imported(file.parent / module)}
    except FileNotFoundError as error:
        raise UsageError(f"tasks={text}: no such file: {error.filename}") from error
    except (OSError, ValueError, TypeError, SyntaxError, yaml.YAMLError) as error:
        why = first_line(error)
        raise UsageError(f"tasks={text}: {file} is no task file of lm-eval ({why})") from error
    above = config.pop("include", [])
    for name in reversed([above] if isinstance(above, str) else above):
        config = _task_config(file.parent / name, text, read) | config
    return config
