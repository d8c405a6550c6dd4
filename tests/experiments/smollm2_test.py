"""SmolLM2-135M-Instruct, where its package is installed.

Against recorded values of other implementations; see the README beside them.
"""

import json
import pathlib

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate
from dspine_jax.target import model
from experiments import targets

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "smollm2"
REFERENCE = json.loads((GOLDEN / "reference.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.slow


@pytest.fixture(name="target", scope="module")
def fixture_target():
  pytest.importorskip("gguf", reason="needs pip install gguf")
  try:
    targets.smollm2_file()
  except ValueError as error:
    pytest.skip(str(error))
  return targets.load(targets.SMOLLM2)


@pytest.mark.parametrize("case", REFERENCE["logits"], ids=["chat", "prose"])
def test_logits_are_those_of_the_reference(target, case):
  tokens = jnp.asarray([case["tokens"]])
  params, cfg = target.model.params, target.model.cfg
  hidden = model.forward(params, tokens, cfg=cfg).hidden[0]
  for row in case["rows"]:
    logits = np.asarray(model.logits(params, hidden[row["position"]]))
    # Twice what was seen; the logits go up to 40.
    near = {"rtol": 0, "atol": 2e-4}
    np.testing.assert_allclose(logits[row["ids"]], row["values"], **near)
    assert np.argmax(logits) == row["ids"][0]
    assert np.isclose(jax.nn.logsumexp(logits), row["logsumexp"], **near)


def test_ids_of_text_are_those_of_the_reference(target):
  for case in REFERENCE["texts"]:
    ids = target.tokenizer.encode(case["text"], add_special_tokens=False).ids
    assert ids == case["ids"], case["text"]


def test_the_mask_token_is_one_that_was_never_trained(target):
  token = targets.mask_token_id(target, None)
  assert target.tokenizer.id_to_token(token) == "<empty_output>"
  table = np.asarray(target.model.params["embed_tokens"])
  # The file's 8 bits put a few entries into the next step, 0.008 away.
  np.testing.assert_allclose(
    table[7:17], np.tile(table[token], (10, 1)), rtol=0, atol=0.009
  )


def test_a_question_is_answered(target):
  question = "What is the capital of France? Answer in one sentence."
  ids = targets.encode_chat(target, [{"role": "user", "content": question}])
  text = target.tokenizer.decode(ids, skip_special_tokens=False)
  assert text == (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained"
    f" by Hugging Face<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  out = generate.autoregressive(
    target.model,
    jnp.asarray(ids)[None],
    jnp.asarray([len(ids)]),
    decode=configs.DecodeConfig(
      max_new_tokens=16, stop_tokens=target.model.cfg.eos_token_ids
    ),
    keys=jax.random.split(jax.random.key(0), 1),
  )
  answer = out.tokens[0, : int(out.num_tokens[0])].tolist()
  assert answer[-1] == target.tokenizer.token_to_id("<|im_end|>")
  assert target.tokenizer.decode(answer) == "The capital of France is Paris."
