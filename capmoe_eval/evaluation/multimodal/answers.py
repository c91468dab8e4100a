"""Read a model's answers by fixed rules, without a judge.

The rules follow VLMEvalKit: ``vlmeval/dataset/utils/yorn.py`` for yes or no, and ``can_infer`` of
``vlmeval/utils/matching_util.py`` for options. The paper states no judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def yes_or_no(answer: str) -> str | None:
    """Return ``yes`` or ``no`` if that is the first word of an answer, else None.

    VLMEvalKit looks for the word anywhere, lmms-eval (``lmms_eval/tasks/mme/utils.py``) in the
    first four characters.
    """
    found = re.match(r"\W*(yes|no)\b", answer.lower())
    return found[1] if found else None


def first_word(answer: str) -> str | None:
    """Return the first word of an answer in small letters, None if it has none."""
    found = re.search(r"\w+", answer.lower())
    return found[0] if found else None


def option(answer: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the option that an answer chooses, None if that is not clear.

    An answer chooses an option by its letter as a word of its own, else by the option's text. ``A``
    is no letter among more than three words, where it may be an article.

    Args:
        answer: The answer.
        options: The text of each option by its letter.
    """
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
    letters = [letter for letter in options if letter in words]
    if len(letters) == 1 and not (letters == ["A"] and len(words) > 3):
        return letters[0]
    told = answer.lower()
    named = [letter for letter, text in options.items() if text.lower() in told]
    return named[0] if len(named) == 1 else None
