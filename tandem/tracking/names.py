"""The names of all metrics. docs/metrics.md says what each means; `<…>` stands for what a run fills in."""

OF_EVERY_RUN = ("data/epoch", "mixture/<set>/epoch", "time/step_s", "time/checkpoint_s", "time/checkpoint_wait_s",
                "perf/tokens", "perf/tokens_per_s", "perf/tokens_per_s_per_gpu",
                "perf/peak_memory_gib", "perf/peak_memory_gib/<phase>")  # fmt: skip
OF_ANSWERS = (
    "conversation/turns", "conversation/out_of_turns", "conversation/without_room", "conversation/environment_errors",
    "conversation/<number>", "reward/mean", "reward/max", "reward/min", "reward/std", "reward/<part>",
    "reward/<part>/share", "reward/errors", "reward/timeouts", "reward/not_scored", "reward/group_std/zero_share",
    "mixture/<set>/reward", "data/solve_rate/mean", "data/solve_rate/never_share", "data/solve_rate/always_share",
    "data/solve_rate/seen_share", "response_length/mean", "response_length/max",
    "response_length/min", "response_length/clip_ratio", "prompt_length/mean", "prompt_length/max", "prompt_length/min",
    "rollout/mismatch_kl", "rollout/mismatch_max", "rollout/mismatch_share", "rollout/correction_mean",
    "rollout/correction_share", "rollout/staleness/mean", "rollout/staleness/max", "rollout/mixed_share",
    "rollout/drift_kl", "rollout/ess", "rollout/entropy", "rollout/resample/replaced",
    "rollout/resample/uninformative", "perf/wanted_staleness", "time/rollout_idle_s", "time/generation_s",
    "time/reward_s", "time/preparation_s", "time/advantages_s", "time/update_s", "time/publish_s",
)  # fmt: skip
OF_THE_ACTOR = (
    "actor/pg_loss", "actor/entropy", "actor/kl", "actor/kl_coefficient", "actor/clip_fraction", "actor/ratio/mean",
    "actor/ppo_kl", "actor/grad_norm", "actor/lr", "actor/expert_load/max", "actor/expert_load/min",
    "actor/trained_share", "teacher/kl",
)  # fmt: skip
OF_THE_CRITIC = ("critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm", "critic/lr",
                 "critic/expert_load/max", "critic/expert_load/min")  # fmt: skip
OF_SFT = ("sft/loss", "sft/grad_norm", "sft/lr")
OF_DPO = ("dpo/loss", "dpo/margin", "dpo/accuracy", "dpo/grad_norm", "dpo/lr")
OF_REWARD_MODELS = ("reward_model/loss", "reward_model/margin", "reward_model/accuracy", "reward_model/grad_norm",
                    "reward_model/lr")  # fmt: skip
OF_VALIDATION = (
    "val/<source>/reward/mean@<N>", "val/<source>/acc/mean@<N>", "val/<source>/acc/best@<N>",
    "val/<source>/acc/maj@<N>", "val/<source>/acc/share", "val/<source>/unscored",
)  # fmt: skip
OF_SUPERVISED_VALIDATION = ("val/loss",)
OF_PAIRED_VALIDATION = ("val/loss", "val/margin", "val/accuracy")
EVERY_NAME = frozenset((
    *OF_EVERY_RUN, *OF_ANSWERS, *OF_THE_ACTOR, *OF_THE_CRITIC, *OF_SFT, *OF_DPO, *OF_REWARD_MODELS, *OF_VALIDATION,
    *OF_SUPERVISED_VALIDATION, *OF_PAIRED_VALIDATION,
))  # fmt: skip
