"""Bases that are loaded before a worker is forked, so that workers share their memory and do not wait for them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import msgspec
import torch

import gradserve.compute.engine.worker  # noqa: F401  (whatever a worker imports is to be there before it is forked)
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.machine import Machine
from gradserve.compute.tasks import WorkerSpec

log = logging.getLogger(__name__)

torch.set_num_threads(1)  # before anything runs: OpenMP's pool of threads would not survive a fork


@dataclass(frozen=True)
class Preloaded:
    """Bases by name and what they compute with. One that could not be loaded is left out: its users will hear why."""

    spec: WorkerSpec
    machine: Machine
    bases: dict[str, Base]

    def fits(self, spec: WorkerSpec) -> bool:
        """Whether a worker of ``spec`` would load the same."""
        return _what_counts(spec) == _what_counts(self.spec)


def preload(spec: WorkerSpec) -> Preloaded | None:
    """Load the bases of ``spec`` on one thread, or None where workers must do it themselves.

    That is where there is a GPU (its memory does not survive a fork) or the spec cannot be met: a worker says why.
    """
    if spec.device == "cuda" or (spec.device == "auto" and _sees_a_gpu()):
        return None
    try:
        machine = _machine(spec)
    except ValueError as error:  # ModelUnusable
        log.warning("nothing is loaded before workers are forked: %s", error)
        return None
    bases = {}
    for base in spec.bases:
        try:
            bases[base.name] = Base.load(base, machine.device, machine.dtype, machine.kernels, spec.threads)
        except Exception:
            log.exception("base model %r could not be loaded", base.name)
    return Preloaded(spec, machine, bases)


def _machine(spec: WorkerSpec) -> Machine:
    if spec.numerics == "batch_invariant":
        return Machine.of(spec)  # refuses any other number of threads than one
    return Machine.of(msgspec.structs.replace(spec, threads=1))


def _what_counts(spec: WorkerSpec) -> tuple[object, ...]:
    return spec.bases, spec.device, spec.dtype, spec.numerics, spec.threads


def _sees_a_gpu() -> bool:
    """Asked in a child: a process that has asked cannot fork any more that computes on it."""
    if torch.version.cuda is None:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda.is_available()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
