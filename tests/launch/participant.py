"""Takes part in a run under a name, after so many sessions; test_shared_ray.py starts it.

Answers each line of standard input with one of its own: `commit N`, `progress`, `wait` until its place or Ray
is lost, `end`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trinity_data.config import load_pipeline_file
from trinity_data.errors import TrinityError
from trinity_data.launch.shared_ray import SharedRun, shared_run
from trinity_data.store.types import Commit


def answer(run: SharedRun, words: list[str]) -> object:
    match words:
        case ["commit", number]:
            run.store.commit(Commit(progress={run.participant: int(number)}))
            return "done"
        case ["progress", key]:
            return run.store.progress(key)
        case ["wait"]:
            return run.lost.exception()
    raise ValueError(words)


def main() -> None:
    # Ray prints on standard output too
    answers, sys.stdout = sys.stdout, sys.stderr

    def say(line: object) -> None:
        print(line, file=answers, flush=True)

    config = load_pipeline_file(Path(__file__).with_name("fake.yaml"))
    try:
        with shared_run(config, sys.argv[1], session=int(sys.argv[2])) as run:
            say("joined")
            for line in sys.stdin:
                if line == "end\n":
                    break
                try:
                    say(answer(run, line.split()))
                except TrinityError as error:
                    say(error)
    except TrinityError as error:
        say(error)
        sys.exit(error.exit_code)
    say("ended")


if __name__ == "__main__":
    main()
