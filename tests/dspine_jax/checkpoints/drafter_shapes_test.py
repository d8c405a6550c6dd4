"""What exports hold at the released sizes, and what loaders ask for by name."""

import pathlib

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.checkpoints import (
  drafter_folder,
)
from dspine_jax.drafters import contract, methods, transfer_space
from tests import drafter_files

TABLES = ("embed_tokens.weight", "lm_head.weight")


def shapes_of(method, width, feed):
  """Released names and shapes for Qwen3-4B and 8B, written out."""
  found = {"fc.weight": (width, 5 * width)}
  found |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
  for i in range(5):
    at = f"layers.{i}."
    found |= {
      f"{at}input_layernorm.weight": (width,),
      f"{at}post_attention_layernorm.weight": (width,),
      f"{at}self_attn.q_proj.weight": (4096, width),
      f"{at}self_attn.k_proj.weight": (1024, width),
      f"{at}self_attn.v_proj.weight": (1024, width),
      f"{at}self_attn.o_proj.weight": (width, 4096),
      f"{at}self_attn.q_norm.weight": (128,),
      f"{at}self_attn.k_norm.weight": (128,),
      f"{at}mlp.gate_proj.weight": (feed, width),
      f"{at}mlp.up_proj.weight": (feed, width),
      f"{at}mlp.down_proj.weight": (width, feed),
    }
    if method == "dflash2":
      for part in ("attention_conv", "mlp_conv"):
        found[f"{at}{part}.base_kernel"] = (2, 2, width)
        found[f"{at}{part}.kernel_projection.weight"] = (width // 4, width)
    if method == "dspine":
      found[f"injection.readouts.{i}.weight"] = (1024, width)
      found[f"injection.writes.{i}.weight"] = (width, 512)
  table = (151936, 256)
  found |= {
    "dflash": {},
    "dflash2": {
      "candidate_selector.hidden_projection.weight": (256, width),
      "candidate_selector.predecessor_codebook": table,
      "candidate_selector.successor_codebook": table,
    },
    "domino": {
      "prefix_gru.weight_ih_l0": (3072, width),
      "prefix_gru.weight_hh_l0": (3072, 1024),
      "embed_proj.0.weight": (256, width + 1024),
      "embed_proj.2.weight": table,
    },
    "dspark": {
      "embed_tokens.weight": (151936, width),
      "lm_head.weight": (151936, width),
      "markov_head.markov_w1.weight": table,
      "markov_head.markov_w2.weight": table,
      "confidence_head.proj.weight": (1, width + 256),
      "confidence_head.proj.bias": (1,),
    },
    "dspine": {
      "injection.message.weight": (512, 1024),
      "injection.receiver_gate.weight": (512, 1024),
      "injection.predecessor_gate.weight": (512, 1024),
      "injection.bias": (512,),
      "transfer_codes": (151936, 1024),
    },
  }[method]
  return found


def empty_space(head, rank):
  """Of the shapes that the head's decomposition, which takes minutes, has."""
  vocab, width = head.shape
  return transfer_space.TransferSpace(
    mean=np.zeros(width, np.float32),
    covariance=np.zeros((width, width), np.float32),
    eigenvalues=np.ones(rank, np.float32),
    directions=np.zeros((width, rank), np.float32),
    # Traced: never in memory.
    codes=jnp.zeros((vocab, rank), jnp.float32),
  )


COUNTS = {"dflash": 58, "dflash2": 81, "domino": 62, "dspark": 64, "dspine": 73}


@pytest.mark.parametrize(("width", "feed"), [(2560, 9728), (4096, 12288)])
@pytest.mark.parametrize("method", sorted(COUNTS))
def test_drafters_of_4b_and_8b_export_the_released_tensors(
  method, width, feed, monkeypatch
):
  target = configs.TargetConfig(
    vocab_size=151936,
    hidden_size=width,
    intermediate_size=feed,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
  )
  cfg = configs.drafter_for(target, method, num_layers=5, mask_token_id=151669)
  made = methods.drafter(cfg)
  table = jax.ShapeDtypeStruct((151936, width), jnp.float32)

  def init(embedding, head):
    tables = contract.TargetTables(embedding=embedding, head=head)
    params = made.init(jax.random.key(0), cfg, tables)
    return {"params": params, "buffers": made.make_buffers(cfg, tables)}

  want = shapes_of(method, width, feed)
  entries = {e.name: e for e in drafter_folder.entries(cfg)}
  required = {n: e.stored_shape for n, e in entries.items() if not e.optional}
  if method == "dspark":
    required |= {n: entries[n].stored_shape for n in TABLES}
  assert required == want and len(want) == COUNTS[method]
  # And that is what a fresh drafter's own tree holds.
  monkeypatch.setattr(transfer_space, "transfer_space", empty_space)
  tree = jax.eval_shape(init, table, table)
  for name, shape in want.items():
    leaf = tree
    for key in entries[name].path:
      leaf = leaf[key]
    stored = leaf.shape[::-1] if entries[name].transposed else leaf.shape
    assert stored == shape, name


KEYS = (
  pathlib.Path(__file__).parents[3]
  / "experiments/results/checkpoints/dspine_keys.md"
)


def listed(heading):
  """First cells of the table below a heading, without backticks."""
  part = KEYS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
  rows = [line for line in part.splitlines() if line.startswith("| `")]
  return [row.split("`")[1] for row in rows]


def test_a_dspine_export_has_what_loaders_ask_for_and_nothing_else(tmp_path):
  setup = drafter_files.save(tmp_path, "dspine")
  config = drafter_files.read_config(tmp_path)
  keys = [key for key in config if not isinstance(config[key], dict)]
  for nested in ("dflash_config", "dspine_config"):
    keys += [f"{nested}.{key}" for key in config[nested]]
  assert sorted([*keys, "auto_map"]) == sorted(listed("config.json"))
  assert config["auto_map"] == {"AutoModel": "dspine.DSpineDraftModel"}
  assert config["architectures"] == ["DSpineDraftModel"]
  want = set()
  for name in listed("Tensors"):
    for index in range(setup.cfg.num_layers):
      want.add(name.replace(".i.", f".{index}."))
  stored = drafter_files.raw(tmp_path)
  assert set(stored) == want
  assert stored["transfer_ready"] == ("bool", (), b"\x01")
