"""Runs the train.py of the folder that it is in as if a CPU could capture graphs, and says what became of them.

Replays compute nothing: losses stay what they were. What is told, in order: `replay`, `ahead` and `forget` of
`StepGraph`, and `look`, every time that modules are looked at.
"""

import contextlib
import runpy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from runtime.config import Config
from runtime.stages import cuda_graph

told: list[str] = []


class Recorded:
    def replay(self) -> None:
        told.append("replay")


def telling(word: str, method):
    def told_and_done(*arguments):
        told.append(word)
        return method(*arguments)

    return told_and_done


def patch() -> None:
    torch.cuda.Stream, torch.cuda.CUDAGraph = lambda device: None, Recorded
    torch.cuda.graph = lambda graph, **options: contextlib.nullcontext()
    torch.cuda.current_stream = lambda device: None
    torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode = lambda: 0, lambda mode: None
    Config.runs_as_graph = lambda self, device: True
    own = cuda_graph.StepGraph
    own._on_own_stream = lambda self: contextlib.nullcontext()
    own.look_ahead, own.forget_seen = telling("ahead", own.look_ahead), telling("forget", own.forget_seen)
    cuda_graph.Watched.changes = telling("look", cuda_graph.Watched.changes)


patch()
try:
    runpy.run_path(str(Path(__file__).parent / "train.py"), run_name="__main__")
finally:  # it exits
    print("told:", *told)
