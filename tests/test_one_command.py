"""``capmoe-eval``: its subcommands and its help."""

import re
import sys

import pytest

from capmoe_eval import beside
from capmoe_eval.__main__ import main, subcommands
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation import run_command as evaluation
from pages import ROOT, pages
from tests.conftest import Shell
from tests.project import run


@pytest.mark.parametrize("name", subcommands())
def test_each_subcommand_has_a_help(name: str, shell: Shell) -> None:
    status, out, _ = shell(name, "--help")
    assert not status
    assert "capmoe-eval" in out or name == "lm-eval"


def test_every_command_that_a_page_names_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    others = "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"
    texts = [path.read_text("utf-8") for path in (*pages(), *(ROOT / name for name in others))]
    main(["--help"])
    texts.append(capsys.readouterr().out)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    listed = "\n".join(re.findall(r"(?ms)^(?:\.PHONY:|TABLES  |FIGURES ).*?[^\\]$", makefile))
    targets = {*re.findall(r"[a-z0-9_-]+", listed)} | {"ep"}
    wrong = []
    for text in texts:
        used = re.findall(r"(?m)(?:^ +|`)make ([a-z0-9_ -]+)", text)
        wrong += [word for words in used for word in words.split() if word not in targets]
        used = re.findall(r"capmoe-eval ([a-z][a-z-]*)(?![\w=/.-])", text)
        wrong += [word for word in used if word not in subcommands()]
    assert wrong == []


def test_make_refuses_a_setting_that_it_would_ignore() -> None:
    ended = run("make", "-n", "table2", "gamma=1.0", "PROFILE=tiny")
    assert ended.returncode == 2
    assert 'gamma=1.0: no variable of this Makefile; write ARGS="gamma=1.0"' in ended.stderr
    arguments = "ARGS=gamma=1.0 results_dir=elsewhere"
    ended = run("make", "-n", "table2", arguments, "PROFILE=tiny")
    assert "table table2 profile=tiny gamma=1.0 results_dir=elsewhere" in ended.stdout


def test_make_prints_a_mistake_once() -> None:
    """Also where several processes share the cells."""
    words = "-o", "install", f"PY={sys.executable}", "JOBS=2", "table2", "ARGS=gamma=x"
    ended = run("make", *words)
    assert ended.returncode == 2
    assert ended.stderr.count("gamma=x: the capacity factor must be") == 1


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ([], []),
        (["gamma=1.0", "method=score"], ["gamma=1.0", "method=score"]),
        (["-m", "gamma=1.0,1.5"], ["-m", "gamma=1.0,1.5"]),
        (["+grid.gamma=[1.0]"], ["+grid.gamma=[1.0]"]),
        (["run", "gamma=1.0"], ["gamma=1.0"]),
        (["sweep", "gamma=1.0,1.5"], ["-m", "gamma=1.0,1.5"]),
    ],
)
def test_run_is_the_default_and_a_sweep_is_one_with_m(
    words: list[str], rest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(evaluation, "main", calls.append)
    main(words)
    assert calls == [rest]


def test_the_help_of_an_option_names_its_groups() -> None:
    line = "tasks=table2 or experiment=table2; see --help tasks experiment"
    with pytest.raises(UsageError, match=f"^--help=table2: is written {line}$"):
        evaluation.usage("table2")


@pytest.mark.parametrize(("word", "close"), [("tabel", "table"), ("swep", "sweep")])
def test_a_mistyped_subcommand_is_named(word: str, close: str) -> None:
    with pytest.raises(UsageError, match=f"subcommand={word}: did you mean '{close}'"):
        main([word])


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "BESIDE", {"my-package": {"speak"}})
    line = (
        r"^speak: my-package is not installed; in a checkout, pip install \./packages/my-package, "
    )
    with pytest.raises(UsageError, match=line):
        main(["speak"])


@pytest.mark.parametrize(
    "words",
    [
        ("run", "data.root=~/none"),
        ("run", 'data.root="~/none"'),
        ("run", "grid.tasks=[obqa]", "data.root='~/none'"),
        ("claims", "results_dir=~/none"),
        ("table", "table2", "--bench=~/none"),
    ],
)
def test_a_path_that_begins_with_a_tilde_is_in_the_home_directory(
    words: tuple[str, ...], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(shell.cwd))
    assert f"={shell.cwd}/none: no such directory" in shell(*words)[2]
