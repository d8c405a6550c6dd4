"""Recipes and their plans: flags that exist, figures that still hold."""

import dataclasses
import shlex
import sys

import pytest
from absl import flags

from experiments import plan_training, train_drafter
from experiments.stages import training_plan, training_work

RECIPES = sorted(path.stem for path in plan_training.RECIPES.glob("*.flags"))


@pytest.fixture(autouse=True)
def no_flags_are_left():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["pytest"])
  yield
  forget_flags()
  flags.FLAGS.unparse_flags()


def forget_flags():
  for module in (train_drafter, plan_training):
    for flag in flags.FLAGS.flags_by_module_dict()[module.__name__]:
      flag.unparse()


def planned(recipe, *arguments):
  forget_flags()
  plan_training.parse(plan_training.recipe_file(recipe), arguments)
  return plan_training.planned_run()


def written_flags(recipe):
  """Name -> value of the lines of a recipe."""
  text = plan_training.recipe_file(recipe).read_text()
  lines = [line for line in text.splitlines() if line.startswith("--")]
  return dict(line.removeprefix("--").split("=", 1) for line in lines)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_parses_and_its_comment_says_what_is_planned(recipe):
  path = plan_training.recipe_file(recipe)
  arguments, written = plan_training.written_block(path)
  words = shlex.split(arguments)
  assert words[0] == f"--recipe={recipe}"
  run = planned(recipe, *words)
  found = plan_training.lines(run, flags.FLAGS.device)
  assert plan_training.block(found, arguments) == written
  assert run.drafter.method in recipe
  assert f"experiments/recipes/{recipe}.flags" in path.read_text()


def test_recipes_at_equal_budget_differ_in_the_method_alone():
  ours = written_flags("qwen3_8b_dspine")
  own = {"method", "block_size", "top_k", "transfer_rank", "message_size"}
  own |= {"alignment_weight", "objective", "head_rank", "gru_hidden_dim"}
  own.add("markov_head_type")
  for method in ("dflash", "dflash2", "domino", "dspark"):
    other = written_flags(f"qwen3_8b_{method}")
    assert other["method"] == method
    differing = {k for k in ours | other if ours.get(k) != other.get(k)}
    assert differing <= own


def test_the_published_recipe_is_what_is_trained():
  run = planned("qwen3_8b_dspine", "--devices=8")
  train, options = run.train, run.drafter.dspine
  assert run.sequences == 128 and train.num_anchors == 512
  assert (run.length, run.drafter.num_layers) == (3072, 5)
  assert run.drafter.target_layer_ids == (1, 9, 17, 25, 33)
  assert run.drafter.mask_token_id == 151669
  assert (options.transfer_rank, options.message_size) == (1024, 512)
  assert (options.top_k, options.alignment_weight) == (16, 0.5)
  assert options.alignment_warmup_steps == 146
  assert options.replacement_layers == 3
  chosen = train.optimizer
  assert (chosen.name, chosen.learning_rate, chosen.clip_norm) == (
    *("adamw", 6e-4),
    1.0,
  )
  assert (chosen.warmup_ratio, chosen.schedule) == (0.04, "cosine")
  assert (train.seed, run.drafter.dtype) == (42, "bfloat16")
  # 33.0 million more than DFlash, and codes of 155.6 million.
  ours = training_plan.parameters(run)
  plain = training_plan.parameters(planned("qwen3_8b_dflash", "--devices=8"))
  assert round((ours["drafter"] - plain["drafter"]) / 1e6, 1) == 33.0
  assert round(ours["frozen"] / 1e6, 1) == 155.6


def test_flags_of_the_optimiser_reach_the_run():
  given = {
    "schedule": "wsd",
    "warmup_ratio": 0.1,
    "decay_ratio": 0.3,
    "final_lr_ratio": 0.2,
    "weight_decay": 0.01,
    "clip_norm": 0.5,
    "adam_b1": 0.8,
    "adam_b2": 0.999,
  }
  words = [f"--{name}={value}" for name, value in given.items()]
  run = planned("smollm2_dspine", *words, "--alignment_warmup_steps=7")
  for name, value in given.items():
    assert getattr(run.train.optimizer, name) == value
  assert run.drafter.dspine.alignment_warmup_steps == 7
  with pytest.raises(ValueError, match=r"adam_b2=1\.0"):
    planned("smollm2_dspine", "--adam_b2=1")


def test_devices_share_state_and_rows_and_nothing_else():
  one = planned("qwen3_4b_dspine", "--batch_size=16")
  eight = planned("qwen3_4b_dspine", "--batch_size=16", "--devices=8")
  held = [training_plan.held(run) for run in (one, eight)]
  for name in ("float32 parameters", "moments", "window of a step"):
    assert held[0][name] == pytest.approx(8 * held[1][name], rel=0.01)
  # AdamW's two, in float32 like the parameters.
  assert held[0]["moments"] == pytest.approx(
    2 * held[0]["float32 parameters"], rel=1e-6
  )
  for name in ("embedding and head", "frozen buffers"):
    assert held[0][name] == held[1][name]
  step = [training_plan.during_step(run) for run in (one, eight)]
  assert step[0]["activations"] == 8 * step[1]["activations"]
  assert step[0]["cast kernels"] == step[1]["cast kernels"]
  assert "gathered parameters" in step[1].keys() - step[0].keys()
  assert training_work.work(one) == training_work.work(eight)
  seconds = [plan_training.seconds(run, "h100") for run in (one, eight)]
  assert seconds[0] == pytest.approx(8 * seconds[1])


def test_a_larger_chunk_pays_until_the_room_is_full():
  run = planned("qwen3_8b_dspine", "--devices=8", "--chunk_blocks=16")
  assert training_plan.paying_chunk(run, 1e9) == 64
  assert training_plan.paying_chunk(run, 0.5e9) == 32
  assert training_plan.paying_chunk(run, 0.2e9) == 16
  more = dataclasses.replace(
    run, train=dataclasses.replace(run.train, chunk_blocks=64)
  )
  rows = [training_plan.during_step(x)["vocabulary rows"] for x in (run, more)]
  assert rows[1] == 4 * rows[0]


def test_what_a_recipe_cannot_have_is_named(tmp_path):
  path = tmp_path / "mine.flags"
  path.write_text("# a comment\n--no_such_flag=1\n")
  with pytest.raises(ValueError, match=r"mine\.flags: .*no_such_flag"):
    plan_training.parse(path, [])
  path.write_text("--method=dspin\n")
  with pytest.raises(ValueError, match=r"mine\.flags: .*method"):
    plan_training.parse(path, [])
  with pytest.raises(ValueError, match="--recipe=nothing: .*qwen3_8b_dspine"):
    plan_training.recipe_file("nothing")
  with pytest.raises(ValueError, match="--recipe: needed.*qwen3_8b_dspine"):
    plan_training.recipe_file(None)
  path.write_text("# nothing\n")
  with pytest.raises(ValueError, match=r"--recipe=.*mine\.flags: no flag in"):
    plan_training.recipe_file(str(path))
  path.write_bytes(b"\x7fELF\xff")
  with pytest.raises(ValueError, match=r"mine\.flags: not a text file"):
    plan_training.recipe_file(str(path))
  path.write_text("Some prose.\n--seed=1\n")
  with pytest.raises(ValueError, match=r"mine\.flags: 'Some prose\.' is no"):
    plan_training.parse(path, [])
  with pytest.raises(ValueError, match="--num_layers=100: .* has 36 layers"):
    planned("qwen3_8b_dspine", "--num_layers=100")
  with pytest.raises(ValueError, match="--devices=8: --device=cpu is planned"):
    planned("embedded_dspine", "--device=cpu", "--devices=8")
  with pytest.raises(ValueError, match="--target=Qwen9: .*Qwen3-8B"):
    planned("qwen3_8b_dspine", "--target=Qwen9")
  with pytest.raises(ValueError, match="--batch_size=16.*--devices=3"):
    planned("qwen3_8b_dspine", "--devices=3")
  with pytest.raises(ValueError, match="--mesh=2,2,1: .*--devices=8"):
    planned("qwen3_8b_dspine", "--devices=8", "--mesh=2,2,1")
  with pytest.raises(ValueError, match="--length"):
    planned("embedded_dspine")


def test_a_folder_s_own_config_comes_before_the_published_one(tmp_path):
  folder = tmp_path / "Qwen3-8B"
  folder.mkdir()
  known = plan_training.hf_config.read_json(plan_training.TARGETS)["Qwen3-8B"]
  plan_training.hf_config.write_json(
    folder / "config.json", known | {"num_hidden_layers": 40}
  )
  run = planned("qwen3_8b_dspine", f"--target={folder}", "--devices=8")
  assert run.target.num_layers == 40
  elsewhere = f"--target={tmp_path}/gone/Qwen3-8B"
  assert planned("qwen3_8b_dspine", elsewhere).target.num_layers == 36


def test_a_folder_that_cannot_be_written_is_told_before_the_plan(
  tmp_path, monkeypatch
):
  (tmp_path / "file").touch()
  out = tmp_path / "file" / "plans"
  arguments = ["--recipe=qwen3_8b_dspine", "--devices=8", f"--out={out}"]
  flags.FLAGS(["plan_training", *arguments])
  monkeypatch.setattr(sys, "argv", ["plan_training", *arguments])
  monkeypatch.setattr(plan_training, "lines", None)
  with pytest.raises(ValueError, match=f"--out={out}: cannot make or write"):
    plan_training.main([])


@pytest.mark.parametrize("name", ["learning_rate", "num_layers", "steps"])
def test_help_says_which_targets_a_default_is_for(name):
  words = flags.FLAGS[name].help
  assert "embedded target" in words and "recipes" in words
