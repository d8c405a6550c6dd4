import pytest
import tokenizers
from tokenizers import models

from experiments import targets


def with_tokenizer(target, *names):
  vocab = {name: index for index, name in enumerate(names)}
  return target._replace(
    tokenizer=tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=names[0]))
  )


@pytest.fixture(name="target", scope="module")
def fixture_target(tiny):
  return targets.load(str(tiny.target))


def test_a_target_comes_with_its_tokenizer_and_name(tiny, target):
  assert target.name == str(tiny.target)
  assert target.model.cfg.vocab_size == target.tokenizer.get_vocab_size() == 300


def test_the_mask_token_is_the_given_then_the_named_then_an_unused_one(target):
  assert targets.mask_token_id(target, 7) == 7
  assert targets.mask_token_id(target, 0) == 0
  assert targets.mask_token_id(target, None) == 1
  named = with_tokenizer(target, "a", "b", "<|mask|>")
  assert targets.mask_token_id(named, None) == 2
  unnamed = with_tokenizer(target, "a", "b", "c", "d")
  assert targets.mask_token_id(unnamed, None) == 4


def test_a_full_vocabulary_without_mask_token_asks_for_the_flag(target):
  full = with_tokenizer(target, *(f"w{i}" for i in range(300)))
  with pytest.raises(ValueError, match="name one with --mask_token_id"):
    targets.mask_token_id(full, None)
