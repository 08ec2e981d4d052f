"""What the trainers of verl do: the values of `tandem import verl --trainer`."""

METHODS = ("ppo", "sft", "one_step_off", "fully_async")
