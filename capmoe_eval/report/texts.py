"""The texts of numbers and names in Markdown, LaTeX and on a screen."""

from typing import Final

ABSENT: Final = "—"
_LATEX: Final = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        # Bare, these two would be read as arguments of the line break before them.
        "[": "{[}",
        "*": "{*}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "γ": r"$\gamma$",
        "∞": r"$\infty$",
        "×": r"$\times$",
        "±": r"$\pm$",
        "−": r"$-$",
        "▼": r"$^{\dagger}$",
        "▲": r"$^{\ddagger}$",
        "§": r"\S{}",
        "–": "--",
        "—": "---",
    }
)
_MARKDOWN: Final = {ord(sign): f"\\{sign}" for sign in r"\`*_[]<>|&~"}


def one_line(text: object) -> str:
    """Return a text with every white space as one blank."""
    return " ".join(str(text).split())


def markdown(text: object) -> str:
    """Return a text of one line that Markdown shows as it is."""
    return one_line(text).translate(_MARKDOWN)


def latex(text: str) -> str:
    """Return a text of one line that LaTeX shows as it is."""
    return one_line(text).translate(_LATEX).replace(r"+$\infty$", r"$+\infty$")


def shown(number: float | None, pattern: str = "{:g}", scale: float = 1.0) -> str:
    """Return a number as text, or a dash where there is none."""
    return ABSENT if number is None else pattern.format(scale * number).replace("-", "−")
