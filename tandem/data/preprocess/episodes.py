"""Rows for environments that need no data: a prompt, and a seed."""

from pathlib import Path

from tandem.data.preprocess.convert import writing


def write_episodes(out: Path, prompt: str, rows: int, val_rows: int) -> dict[str, int]:
    """Write `train.parquet`, of seeds 0 to `rows` - 1, and `val.parquet`, of the seeds that follow; the rows of each.

    An environment puts its first observation at the end of the prompt, which an empty line ends for that.
    """
    message = {"role": "user", "content": f"{prompt}\n\n"}
    counts = {"train": range(rows), "val": range(rows, rows + val_rows)}
    for name, seeds in counts.items():
        if seeds:
            with writing(out / f"{name}.parquet") as append:
                for seed in seeds:
                    append({"data_source": "episodes", "prompt": [message], "seed": seed})
    return {name: len(seeds) for name, seeds in counts.items()}
