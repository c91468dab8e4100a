import hashlib
import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.zoo.synthetic.models import MAX_POSITIONS
from capmoe_eval.zoo.synthetic.tokenizer import tiny_tokenizer

DIGEST = (
    "import hashlib; from capmoe_eval.zoo.synthetic.tokenizer import tiny_tokenizer as t; "
    "print(hashlib.sha256(t().backend_tokenizer.to_str().encode()).hexdigest())"
)


def test_special_tokens_are_those_of_olmoe():
    tokenizer = tiny_tokenizer()
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|padding|>"]) == [0, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert tokenizer("apple")["input_ids"] == tokenizer.encode("apple", add_special_tokens=False)
    assert tokenizer.encode("a<|endoftext|>")[-1] == 0


def test_it_is_small_and_learned_words():
    tokenizer = tiny_tokenizer()
    assert 512 < len(tokenizer) <= 1024
    assert tokenizer.model_max_length == MAX_POSITIONS
    assert len(tokenizer.encode("Which of these is a bird?")) == 6 + 1


@given(st.text())
def test_every_text_comes_back(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_texts_that_normalisation_or_clean_up_would_change():
    tokenizer = tiny_tokenizer()
    for text in ("e\u0301 \u00e9", " a , b .  do n't", "\r\n\t\n", "🦊\u200d日本\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_another_process_trains_the_same_tokenizer():
    own = hashlib.sha256(tiny_tokenizer().backend_tokenizer.to_str().encode()).hexdigest()
    result = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == own
