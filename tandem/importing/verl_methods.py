"""What each trainer of verl does: the values of `tandem import verl --trainer`."""

METHODS = ("ppo", "sft", "one_step_off", "fully_async")
