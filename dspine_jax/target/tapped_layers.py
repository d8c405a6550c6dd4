"""Which target layers feed the drafter.

Ids are zero-based decoder layers; the feature of layer i is its output, which
Hugging Face lists as `hidden_states[i + 1]`. The last layer is never tapped:
its listed output has already passed the final norm.
"""


def tapped_layers(
  num_target_layers: int, num_draft_layers: int
) -> tuple[int, ...]:
  """Evenly spaced from layer 1 to layer L - 3, one per draft layer.

  tapped_layers(36, 5) = (1, 9, 17, 25, 33). One draft layer taps the middle.
  Ties are rounded to even, as Python does (baselines, section 2.1). A target
  too shallow for its drafter gives repeats or layers that do not exist, as the
  rule says; a configuration with them is refused (`check_tapped_layers`).
  """
  if num_draft_layers == 1:
    return (num_target_layers // 2,)
  step = (num_target_layers - 4) / (num_draft_layers - 1)
  return tuple(round(1 + i * step) for i in range(num_draft_layers))


def check_tapped_layers(
  ids: tuple[int, ...], num_target_layers: int | None
) -> tuple[int, ...]:
  """Returns `ids`, or raises ValueError naming the id that cannot be tapped.

  Where the depth is not known (None), only what no target has is refused.
  """
  for layer in ids:
    if layer < 0:
      raise ValueError(
        f"target_layer_ids={list(ids)}: layer {layer} cannot be tapped: layers"
        " count from 0 and the embedding's output is none of them"
      )
    if num_target_layers is not None and layer >= num_target_layers - 1:
      raise ValueError(
        f"target_layer_ids={list(ids)}: layer {layer} cannot be tapped in a"
        f" target of {num_target_layers} layers (0 to"
        f" {num_target_layers - 2}; the last layer is never tapped)"
      )
  if list(ids) != sorted(set(ids)):
    raise ValueError(
      f"target_layer_ids={list(ids)}: must be ascending, without repeats"
    )
  return ids
