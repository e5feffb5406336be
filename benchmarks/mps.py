"""NVIDIA's multi-process service: kernels of several processes run side by side, not in turns."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/bin", "/usr/local/nvidia/bin"))
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
TOUCH = "import torch; torch.zeros(1, device='cuda').add_(1).item()"


@contextmanager
def sharing(wanted: bool) -> Iterator[bool]:
    """Starts the service for the processes begun inside, and stops it; False where it will not.

    One that the caller has started, CUDA_MPS_PIPE_DIRECTORY being set, is used and left running.
    """
    control = shutil.which("nvidia-cuda-mps-control", path=PLACES) if wanted else None
    if control is None:
        yield False
        return
    if PIPES in os.environ:
        yield _serves(control)
        return
    with TemporaryDirectory(prefix="mps-") as folder:
        names = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ.update(names)
        works = _starts(control)
        if not works:
            _stop(control, names)
        try:
            yield works
        finally:
            if works:
                _stop(control, names)


def _starts(control: str) -> bool:
    try:
        subprocess.run([control, "-d"], check=True, timeout=20, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS: {error}", flush=True)
        return False
    return _serves(control)


def _serves(control: str) -> bool:
    """Whether a process that uses the GPU is really served, not just the daemon there."""
    try:
        subprocess.run([sys.executable, "-c", TOUCH], check=True, timeout=60, capture_output=True)
        asked = subprocess.run(
            [control], input="get_server_list\n", text=True, timeout=20, capture_output=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS: {error}", flush=True)
        return False
    return any(word.isdigit() for word in asked.stdout.split())


def _stop(control: str, names: dict[str, str]) -> None:
    try:
        subprocess.run([control], input="quit\n", text=True, timeout=20, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"MPS was not stopped: {error}", flush=True)
    for name in names:
        os.environ.pop(name, None)
