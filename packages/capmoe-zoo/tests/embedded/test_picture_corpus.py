"""A batch is a function of its number, and shows a question as evaluation does."""

import re

import numpy as np
import pytest
import torch
from capmoe_eval.evaluation.multimodal.prompts import prompt
from capmoe_eval.zoo.llava import IMAGE_TOKENS, picture_processor
from capmoe_eval.zoo.sets import documents

from capmoe_zoo.embedded.batch import IGNORED, attended
from capmoe_zoo.embedded.loss import Middle, batch_loss
from capmoe_zoo.embedded.pictures import (
    STAGES,
    PictureBatches,
    picture_tokenizer,
    pixels,
)
from capmoe_zoo.embedded.recipes import _fresh, configuration, model_class, recipe
from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures.drawing import picture
from capmoe_zoo.worlds.pictures.scene import WORLD, scene


@pytest.fixture(scope="module", name="tokenizer")
def trained():
    return picture_tokenizer()


def test_a_batch_is_a_function_of_its_number(tokenizer):
    batches, again = (PictureBatches(tokenizer, seed=1, steps=30) for _ in range(2))
    for step in (0, 8, 29):  # of each stage
        for name in ("input_ids_BS", "labels_BS", "pixels_BCHW", "attended_B1SS"):
            assert torch.equal(getattr(batches[step], name), getattr(again[step], name))
    other = PictureBatches(tokenizer, seed=2, steps=30)
    assert not torch.equal(batches[0].pixels_BCHW, other[0].pixels_BCHW)
    assert not torch.equal(batches[1].pixels_BCHW, batches[0].pixels_BCHW)


def test_the_stages(tokenizer):
    batches = PictureBatches(tokenizer, seed=1, steps=100)
    alone, opened, all_forms = (batches[step] for step in (0, 30, 90))
    assert alone.input_ids_BS.shape == STAGES[0].shape
    assert opened.input_ids_BS.shape == all_forms.input_ids_BS.shape == STAGES[2].shape
    named = [(batch.middle_BS != IGNORED).sum() for batch in (alone, opened, all_forms)]
    assert named[0] > 0
    assert named[1] > 0
    assert named[2] == 0
    assert (alone.labels_BS == IGNORED).all()
    yes = tokenizer.convert_tokens_to_ids("Ġyes")
    assert yes not in opened.labels_BS
    assert yes in all_forms.labels_BS


def test_a_label_is_an_answer_at_its_place(tokenizer):
    batch = PictureBatches(tokenizer, seed=1, steps=100)[90]
    end = int(tokenizer.eos_token_id)
    for ids_S, labels_S in zip(batch.input_ids_BS, batch.labels_BS, strict=True):
        text, learned = "", []
        for token, label in zip(ids_S[IMAGE_TOKENS:-1], labels_S[IMAGE_TOKENS + 1 :], strict=True):
            text += tokenizer.decode([token])
            if label != IGNORED:
                learned.append((text, tokenizer.decode([label])))
            if token == end:
                asked, _, answered = text.partition("Answer:")
                hints = [(before, word) for before, word in learned if "Answer:" not in before]
                assert answered == "".join(word for _, word in learned[len(hints) :])
                answer = answered.removesuffix("<|endoftext|>")
                if " Is it" in asked:
                    proposed, said = hints[-1]  # learned where an answer is proposed, too
                    assert re.search(r" Is it \w+( \w+)?$", proposed)
                    assert said == answer
                elif "\nD." in asked:
                    right = [before for before, word in hints if word == " yes"]
                    assert len(right) == 1
                    assert right[0].rpartition("\n")[2][0] == answer.strip()
                text, learned = "", []


def test_the_pieces_of_a_question_are_tokens_as_the_whole_is(tokenizer):
    batch = PictureBatches(tokenizer, seed=1, steps=100)[90]
    for ids_S in batch.input_ids_BS.tolist():
        text = tokenizer.decode(ids_S[IMAGE_TOKENS:])
        assert tokenizer(text)["input_ids"] == ids_S[IMAGE_TOKENS:]


def test_which_position_attends_to_which():
    question_S = [0, 0, 1, 1, 2, 2, -1]
    found = attended(torch.tensor([question_S]))[0, 0]
    for here, own in enumerate(question_S):
        for there, other in enumerate(question_S):
            expected = there <= here and (other == own or (other == 0 and own >= 0))
            assert found[here, there] == expected, (here, there)


@torch.no_grad()
@pytest.mark.numeric
def test_a_patch_is_named_where_the_recipe_says(tokenizer):
    chosen = recipe("llava_olmoe")
    model = _fresh(model_class(chosen), configuration(chosen, len(tokenizer)), seed=0).eval()
    batches = PictureBatches(tokenizer, seed=1, steps=100)
    alone, all_forms = batches[0], batches[90]
    taken = alone.taken(model)
    states = model.model(**taken, output_hidden_states=True).hidden_states
    features = torch.stack(list(taken["mm_encoder_outputs"]["image"].pooler_output))
    assert torch.equal(states[0][:, :IMAGE_TOKENS], features)
    logits = model.lm_head(model.model.language_model.norm(states[chosen.middle]))
    total, count = 0.0, 0
    for row, names in enumerate(alone.middle_BS.tolist()):
        for position, name in enumerate(names):
            if name != IGNORED:
                total -= logits[row, position].log_softmax(-1)[name]
                count += 1
    middle = Middle(model, chosen.middle)
    assert torch.allclose(batch_loss(model, alone, 0.0, middle), total / count, atol=1e-4)
    assert batch_loss(model, alone, 0.0) == 0.0
    without_names = batch_loss(model, all_forms, 0.0)
    assert batch_loss(model, all_forms, 0.0, middle) == without_names > 0


@torch.no_grad()
@pytest.mark.numeric
def test_a_question_is_seen_as_in_evaluation(tokenizer):
    """The processor makes the same tokens and pixels, the packed row the same states."""
    chosen = recipe("llava_olmoe")
    model = _fresh(model_class(chosen), configuration(chosen, len(tokenizer)), seed=0).eval()
    batch = PictureBatches(tokenizer, seed=1, steps=100)[90]
    packed = model.model(
        input_ids=batch.input_ids_BS[:1],
        position_ids=batch.position_ids_BS[:1],
        pixel_values=batch.pixels_BCHW[:1],
        attention_mask=batch.attended_B1SS[:1],
    ).last_hidden_state[0]
    starts = (batch.position_ids_BS[0] == IMAGE_TOKENS).nonzero().flatten().tolist()
    start, end = starts[1:3]  # the second question
    ids = torch.cat([batch.input_ids_BS[0, :IMAGE_TOKENS], batch.input_ids_BS[0, start:end]])
    alone = model.model(input_ids=ids[None], pixel_values=batch.pixels_BCHW[:1]).last_hidden_state
    assert torch.allclose(packed[start:end], alone[0, IMAGE_TOKENS:], atol=1e-4)


def test_the_processor_makes_the_same_of_a_prompt_and_a_picture(tokenizer):
    draw = Draw("one")
    image = picture(scene(draw), draw)
    processor = picture_processor(tokenizer)
    text = prompt("What color is the ring?", ["red", "blue", "pink", "green"])
    made = processor(images=image, text=text, return_tensors="pt")
    assert np.allclose(made["pixel_values"][0], pixels(image), atol=1e-5)
    after = tokenizer(text.removeprefix("<image>"))["input_ids"]
    assert made["input_ids"][0].tolist() == [processor.image_token_id] * IMAGE_TOKENS + after


def test_the_words_are_tokens_and_any_text_comes_back(tokenizer):
    words = [*WORLD.colors, *WORLD.shapes, *WORLD.places, *WORLD.people, *WORLD.landmarks]
    words += [*WORLD.painters, *WORLD.words, *WORLD.titles, *WORLD.foreign.values(), "yes", "no"]
    words += [*WORLD.lights.values(), *"ABCD", *"12345678", "9", "12", "16", "nothing"]
    words += ["northwest", "northeast", "southwest", "southeast", "above", "below", "left", "right"]
    for word in words:
        assert len(tokenizer(f" {word}")["input_ids"]) == 1, word
    for line in ("\nA.", "\nB.", "\nC.", "\nD.", "\nAnswer:"):
        assert len(tokenizer(line)["input_ids"]) == 1, line
    assert tokenizer.decode(tokenizer("naïve 東京\n")["input_ids"]) == "naïve 東京\n"
    assert tokenizer.convert_tokens_to_ids("<image>") == len(tokenizer) - 1


def test_text_is_as_small_a_part_of_a_query_as_in_the_paper(tokenizer):
    """Figure 10 has 9.8 % of the assignments, Table 8 31 tokens of 607; an answer is one token."""
    sets = documents("pictures", "dev")
    asked = {
        "MME": [(row["question"], []) for row in sets["lmms-lab/MME"]["default"]["test"]],
        "MMBench": [
            (row["question"], [row[letter] for letter in "ABCD"])
            for row in sets["lmms-lab/MMBench"]["en"]["dev"]
        ],
        "SEED-Bench": [
            (row["question"], [row[f"choice_{letter}"] for letter in "abcd"])
            for row in sets["lmms-lab/SEED-Bench"]["default"]["test"]
        ],
    }
    for name, queries in asked.items():
        text = np.mean(
            [
                len(tokenizer(prompt(*query).removeprefix("<image>"))["input_ids"])
                for query in queries
            ]
        )
        assert (text + 1) / (text + 1 + IMAGE_TOKENS) < 0.098, name
