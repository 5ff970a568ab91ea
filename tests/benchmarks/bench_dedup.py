"""Near duplicates among 100,000 task prompts: `near_duplicate_filter` beside Data-Juicer's MinHash
deduplicator, with the same n-grams, threshold and number of permutations.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import numpy as np
import pyarrow as pa
from datasets import disable_progress_bars
from loguru import logger

from tests.benchmarks.measure import in_turns, show, show_machine
from trinity_operators.near_duplicates import NearDuplicateFilter

WORDS = 45
"""Of a prompt, as in GSM8K."""
NGRAM, THRESHOLD, PERMUTATIONS = 5, 0.8, 128


def prompts(count: int) -> list[str]:
    """Random words, every tenth prompt a copy of an earlier one with one word more."""
    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(20_000)])
    texts = [" ".join(each) for each in words[rng.zipf(1.3, (count, WORDS)) % len(words)]]
    for number in range(9, count, 10):
        texts[number] = f"{texts[number - 9]} indeed"
    return texts


def ours(tasks: pa.Table) -> int:
    operator = NearDuplicateFilter(
        column="prompt", threshold=THRESHOLD, ngram_size=NGRAM, num_permutations=PERMUTATIONS
    )
    return int(operator.apply(tasks).keep.sum())


def data_juicers(tasks: pa.Table) -> int:
    from data_juicer.core.data import NestedDataset
    from data_juicer.ops.deduplicator.document_minhash_deduplicator import DocumentMinhashDeduplicator

    operator = DocumentMinhashDeduplicator(
        window_size=NGRAM,
        jaccard_threshold=THRESHOLD,
        num_permutations=PERMUTATIONS,
        text_key="prompt",
        num_proc=1,
    )
    return len(operator.run(NestedDataset.from_dict(tasks.to_pydict())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logger.disable("data_juicer")
    disable_progress_bars()
    show_machine()
    tasks = pa.table({"prompt": prompts(arguments.tasks)})
    sides = {"ours": lambda: ours(tasks), "Data-Juicer": lambda: data_juicers(tasks)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        print(
            f"kept of {arguments.tasks:,}: " + ", ".join(f"{name} {run():,}" for name, run in sides.items())
        )
        times = in_turns(sides, arguments.rounds)
    show(times, ours="ours", rows=arguments.tasks)
    show_machine()


if __name__ == "__main__":
    main()
