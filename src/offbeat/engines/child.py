"""What a process started by ``offbeat.launch`` runs."""

import importlib.util
import itertools
import operator
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from offbeat.elastic.restarts import ALIVE_S, ROW, alive_note, met_note, return_number
from offbeat.errors import WorkerLost
from offbeat.records import disk
from offbeat.transport import groups


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threading.Thread(target=_end_with_parent, daemon=True, name="offbeat-parent").start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if size > 1:
        groups.stay_on_this_host()
        store = TCPStore("127.0.0.1", port, is_master=False)
        if number := return_number():
            # Nobody waits for it at init_process_group: only its replica's own processes do.
            size = int(os.environ[ROW])
            own: Store = store.clone()  # type: ignore[attr-defined]
            arguments = own, alive_note(number, rank % size)
            threading.Thread(
                target=_say_alive, args=arguments, daemon=True, name="offbeat-alive"
            ).start()
            fresh = PrefixStore(f"return-{number}", store)
            groups.join_at(fresh, rank % size, size)
        else:
            groups.join_at(store, rank, size)
            store.set(met_note(rank), "yes")
    function, args = _call(folder / "call")
    error: BaseException | None = None
    value = None
    try:
        value = function(*args)
    except BaseException as caught:
        sys.last_value = error = caught
        traceback.print_exc()
    disk.write(folder / f"result-{rank}", [_safe((time.time(), error, value))])
    sys.exit(0 if error is None else 1)


def _call(file: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    script, function, args = pickle.loads(file.read_bytes())  # written by our own parent
    if script is None:
        return function, args
    # Not as __main__: what the script does when it is run must not happen here again.
    spec = importlib.util.spec_from_file_location("__offbeat_main__", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["__offbeat_main__"] = module
    spec.loader.exec_module(module)
    return operator.attrgetter(function)(module), args


def _safe(outcome: tuple[float, BaseException | None, object]) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
        return data
    except Exception as error:
        moment, caught, _ = outcome
        words = f"{type(caught).__name__}: {caught}" if caught else f"its result: {error}"
        return pickle.dumps((moment, WorkerLost(f"a process could not send back {words}"), None))


def _say_alive(store: Store, note: str) -> None:
    """The launcher waits for nobody who comes back and is frozen, or cut off, on the way."""
    with suppress(RuntimeError):  # the launcher has ended, and this process ends with it
        for beat in itertools.count():
            store.set(note, str(beat))
            time.sleep(ALIVE_S)


def _end_with_parent() -> None:
    # Read straight from the descriptor: a lock on sys.stdin would hold up the interpreter's exit.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
