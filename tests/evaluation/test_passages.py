"""Documents of one length, cut from passages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.evaluation.passages.task import cut

WORDS = st.lists(st.text("aé漢", min_size=1, max_size=6), min_size=1, max_size=30).map(" ".join)


@given(st.lists(WORDS, max_size=8), st.integers(40, 90))
def test_documents_are_the_text_in_order_and_end_before_a_word(
    passages: list[str], size: int
) -> None:
    text = "\n\n".join(dict.fromkeys(passages))
    documents = cut(passages, size)
    whole = " ".join(documents)
    assert text.startswith(whole)
    assert len(text.encode()) - len(whole.encode()) <= size + 1, "the rest is shorter"
    for document in documents:
        # The next word would not have fitted; one of at most 18 bytes, or two and a blank line.
        assert size - 38 <= len(document.encode()) <= size
