"""What can go wrong, as one small tree. Every class is also a standard error, so callers need not know us."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrinityError(Exception):
    """Shown to a person as its message alone: what was found, where, what is allowed, what to do."""

    exit_code = 1


class ConfigError(TrinityError, ValueError):
    """The pipeline file cannot be run as it stands."""

    exit_code = 2


class OperatorError(TrinityError, ValueError):
    """An operator cannot be found, built, or broke its contract."""


class StoreError(TrinityError, OSError):
    """The run's files cannot be read or written."""


class StoreLockedError(StoreError):
    """Another process has become the writer of this store."""


class PlaceHeldError(StoreLockedError):
    """The name is another process's, on a machine that may be lost: it is asked for again."""


class ConflictError(StoreError):
    """A write that rests on what another process has changed meanwhile."""


class ClusterLostError(StoreError):
    """The Ray that a process shared with others has ended, and its store with it; it may join a new one."""


class PlacementError(TrinityError, RuntimeError):
    """The cluster has no room for processes of the run."""


class NoClusterError(ClusterLostError):
    """The cluster that the user names cannot be reached, or none starts on this machine."""


class RolloutError(TrinityError, RuntimeError):
    """One rollout failed; the explorer turns it into a row."""


class BrokenAnswerError(RolloutError):
    """An engine ended in the middle of an answer of which a part was passed on."""


class SessionError(TrinityError, ValueError):
    """A request of an agent outside does not fit what is on record of its session."""


class UnknownSessionError(SessionError):
    """Of a session that has asked nothing."""


class TemplateError(TrinityError, ValueError):
    """A chat template cannot make a prompt of these messages."""


class EngineError(TrinityError, RuntimeError):
    """An engine cannot start, or died."""


class EngineDiedError(EngineError):
    """The process of an engine ended."""


class WeightsGoneError(EngineError):
    """Weights that an engine was to load are not where they were published."""


class WrongModelError(EngineError):
    """What an engine samples from is not the model that is trained."""


class TrainerError(TrinityError, RuntimeError):
    """A rank of the trainer cannot start, or died."""


class WorkerDiedError(TrainerError):
    """A rank of the trainer ended by itself, or hangs; the workers can be started again."""


class SyncError(TrinityError, RuntimeError):
    """Explorer or trainer waited too long for the other."""


class NothingLearntError(TrinityError, RuntimeError):
    """Steps train nothing, and the run stops instead of going on."""


class ContractError(TrinityError, RuntimeError):
    """The rows of a step break a contract that stops the run."""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known name is near.

    Small and capital letters are the same.
    """
    by_small_letters = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(word.casefold(), list(by_small_letters), n=1, cutoff=0.6)
    return f" (did you mean {by_small_letters[near[0]]!r}?)" if near else ""


def unknown_name(what: str, word: str, names: Iterable[str]) -> str:
    """The one wording for a name that is in no registry."""
    ordered = sorted(names)
    return f"unknown {what} {word!r}; known: {', '.join(ordered)}{did_you_mean(word, ordered)}"
