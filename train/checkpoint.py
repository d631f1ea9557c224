"""Checkpoints of a run: written while it goes on, whole or not at all, readable on any mesh."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from train.loop import TrainState
from train.run_config import differences

FORMAT = 2  # of 1, some know their text by path and time


class CheckpointMismatchError(ValueError):
    """A checkpoint of another run; the message names what differs."""


class Checkpoints:
    """The checkpoints in a folder, newest last. Writing happens in the background.

    A checkpoint holds the trainables, the optimizer's state and the number of the next update;
    noise, data position, temperature and learning rate follow from that number and the settings
    stored beside it. A step appears under its number only when it is complete.

    Args:
        folder: made if need be; relative paths count from the working directory.
        settings: what decides the run's numbers, as plain JSON values.
        keep: checkpoints to keep; older ones are deleted.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], *, keep: int = 2):
        from orbax.checkpoint import v1 as ocp

        self.folder = Path(folder).absolute()
        self.settings = dict(settings)
        # Any: orbax annotates paths, policies and trees more narrowly than it takes them.
        checkpointer: Any = ocp.training.Checkpointer
        self._checkpointer: Any = checkpointer(
            self.folder,
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,  # what a kill left half-written
        )
        self._writing: Any = None

    @property
    def latest(self) -> int | None:
        """The update that the newest complete checkpoint continues with."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, state: TrainState) -> None:
        """Start writing a checkpoint; waits until the one before is complete, and for the copy.

        So the newest complete checkpoint is never older than the last but one that was begun.
        """
        self.wait()
        # A copy: the next step donates these buffers, and on CPU the host would read the same ones.
        arrays = jax.tree.map(lambda x: x.copy(), (state.trainable, state.opt_state))
        self._writing = self._checkpointer.save_async(
            state.update,
            {"trainable": arrays[0], "opt_state": arrays[1]},
            force=True,
            custom_metadata={"format": FORMAT, "settings": self.settings},
        )

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; raises what its writing raised."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, placed like the arrays of `like` (or their abstract values).

        Raises:
            FileNotFoundError: there is no complete checkpoint.
            CheckpointMismatchError: it belongs to other settings or another model.
        """
        step = self.latest
        if step is None:
            raise FileNotFoundError(f"{self.folder} holds no complete checkpoint")
        metadata = self._checkpointer.metadata(step)
        stored = metadata.custom_metadata or {}
        found = f"checkpoint {step} in {self.folder}"
        if stored.get("format") != FORMAT:
            raise CheckpointMismatchError(
                f"{found} has format {stored.get('format')!r}, expected {FORMAT}: it was not "
                "written by this version; choose another run folder to start anew"
            )
        problems = differences(stored["settings"], self.settings)
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {"trainable": like.trainable, "opt_state": like.opt_state},
        )
        problems += _array_differences(metadata.metadata["trainable"], wanted["trainable"])
        if problems:
            raise CheckpointMismatchError(
                f"{found} belongs to another run: " + "; ".join(problems)
                + ". Choose another run folder, or the settings it was made with"
            )  # fmt: skip
        restored = self._checkpointer.load(step, wanted)
        return TrainState(restored["trainable"], restored["opt_state"], step)

    def close(self) -> None:
        """Wait until everything is written."""
        self._checkpointer.close()


def _array_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Names and shapes of trainables that do not agree."""
    problems = [f"it lacks {name}" for name in sorted(set(wanted) - set(stored))]
    problems += [f"it has an unknown {name}" for name in sorted(set(stored) - set(wanted))]
    for name in sorted(set(stored) & set(wanted)):
        if tuple(stored[name].shape) != tuple(wanted[name].shape):
            problems.append(
                f"{name} has shape {tuple(stored[name].shape)}, not {tuple(wanted[name].shape)}"
            )
    return problems
