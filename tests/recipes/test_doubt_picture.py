"""The README's picture: sentences are chosen by the stated rule, and a word has the shares of its tokens."""

import pytest
import torch

from bayesattn_recipes.doubt.picture import choose_answers, share_of_words


def test_the_rule_takes_doubtful_sure_answers_and_the_surest_of_each_class():
    confidence = torch.tensor([0.95, 0.6, 0.92, 0.99, 0.91, 0.98])
    t = torch.tensor([7.0, 1.0, 5.0, 40.0, 9.0, 30.0])
    second = torch.tensor([True, True, False, True, False, False])
    probabilities = torch.where(
        second[:, None], torch.stack([1 - confidence, confidence], 1), torch.stack([confidence, 1 - confidence], 1)
    )
    correct = torch.tensor([False, False, True, False, True, True])
    # row 1 has the lowest t but is not sure
    assert choose_answers(probabilities, t, correct, sure=0.9, num_each=1) == ([0, 2], [3, 5])
    assert choose_answers(probabilities, t, correct, sure=0.9, num_each=2) == ([0, 3, 2, 4], [3, 5])


def test_a_word_has_the_shares_of_its_tokens():
    shares = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    assert share_of_words([None, 0, 0, 1, None], shares) == pytest.approx([0.5, 0.15])
