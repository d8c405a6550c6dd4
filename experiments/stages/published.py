"""What the releases use and the papers report, to lay beside our figures."""

# Slots of a block, the anchor's included (baselines, section 1).
BLOCKS = {
  "dflash": 16,
  "domino": 16,
  "dspark": 7,
  "dflash2": 8,
  "dspine": 16,
}

# How they draft and accept above temperature 0, where that is not what we use
# for all: rejection with the best proposal (baselines, sections 1 and 7).
RULES = {
  "dflash": {"rule": "exact_match", "proposal": "greedy"},
  "domino": {"rule": "exact_match", "proposal": "sampled"},
  "dflash2": {"rule": "rejection", "proposal": "candidates"},
}

# Advancement of DSpine over the other, mean of seven benchmarks (dspine, 8).
DSPINE_OVER = {"dflash": 1.278, "dflash2": 1.098}

# What parts of DSpine are worth, by the ablation's variants: change of
# advancement on three benchmarks, or advancement on MATH-500 where the
# published method has 3.85 (dspine, 8).
DSPINE_PARTS = {
  "+ replacement curriculum": "3.85",
  "injection without alignment": "3.75 of 3.85",
  "full without refinement": "-6.6 to -7.1 %",
  "full without refinement and injection": "-8.8 to -10.7 %",
  "layer supervision by token CE": "3.67 of 3.85",
}
