"""Which model types of Hugging Face transformers can be planned from their default configurations, and why others not.

    python benchmarks/hugging_face.py plan RESULTS.jsonl [MODEL_TYPE ...]    needs transformers; goes on where it ended
    python benchmarks/hugging_face.py table RESULTS.jsonl

Every type that `hf:` takes, as the first of its classes, with 2 layers, or 4 where its layers are of several kinds, and
at most 256 tokens a sample. Some defaults cannot be built, or nobody trains them: that is an outcome too.
"""

import contextlib
import io
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

LIMIT_S = 300
MOST_TOKENS = 256
COMMAND = ("--hw", "dgx_a100_x8", "--global-batch", "16", "--time-limit", "3")
OUTCOMES = {0: "planned", 1: "a bug", 3: "refused", 4: "cannot be traced", 5: "nothing fits", 6: "no plan in time"}
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
FOLDERS = re.compile(r"/\S*/(site-packages|models/[0-9a-f]+|tmp\w*)/")  # of this machine, before names of files
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")


def plan_all(results: Path, only: list[str]) -> None:
    import autoplan.cli
    import autoplan.tracing.trace  # noqa: F401, before the processes that need it

    results.touch()
    done = {row["model_type"] for row in rows_of(results)}
    for model_type, class_name in classes().items():
        if model_type not in done and (not only or model_type in only):
            plan_one(results, model_type, class_name)


def classes() -> dict[str, str]:
    """Model type -> the class that `hf:` builds for the first task it is listed under."""
    from transformers.models.auto import modeling_auto

    from autoplan.tracing.hugging_face import TASKS

    found: dict[str, str] = {}
    for task in TASKS:
        for model_type, names in getattr(modeling_auto, task.table).items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return found


def plan_one(results: Path, model_type: str, class_name: str) -> None:
    """Add the row of one type, made in a process of its own, which may end in any way or not at all."""
    start_s = time.perf_counter()
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=send_outcome, args=(theirs, model_type, class_name))
    process.start()
    theirs.close()
    try:
        code, message = ours.recv() if ours.poll(LIMIT_S) else (None, f"no end after {LIMIT_S} s")
    except EOFError:
        code, message = None, "its process ended"
    process.kill()
    process.join()
    took_s = round(time.perf_counter() - start_s, 1)
    message = FOLDERS.sub("", message)
    row = {"model_type": model_type, "class": class_name, "exit_code": code, "took_s": took_s, "message": message}
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(model_type, code, took_s, flush=True)


def send_outcome(connection: Any, model_type: str, class_name: str) -> None:
    import torch
    import transformers

    import autoplan.cli

    torch.set_num_threads(1)
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
    except Exception as error:
        connection.send((3, f"its default configuration: {error}"))
        return
    values, printed = config.to_dict(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*few_layers(values), *few_tokens(config)]
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(values | {"model_type": model_type, "architectures": [class_name]}, default=str))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            code = autoplan.cli.run(["plan", f"hf:{path}", *arguments, *COMMAND])
    said = printed.getvalue().replace(f"{folder}/", "")
    connection.send((code, said[said.find("autoplan: ") :].removeprefix("autoplan: ")[:600] if code else ""))


def few_layers(values: dict[str, Any]) -> list[str]:
    """The `--set` for few layers, as a user gives it; `--set` reaches no part of a configuration, so these are cut."""
    for name, part in values.items():
        if isinstance(part, dict) and (name.endswith("_config") or name in ("encoder", "decoder")):
            cut(part)
    few = n_few(values)
    if "depths" in values:  # counts stages
        return []
    return [
        argument
        for name in LAYERS
        if isinstance(values.get(name), int) and values[name] > few
        for argument in ("--set", f"{name}={few}")
    ]


def cut(part: dict[str, Any]) -> None:
    few = n_few(part)
    for layers in [name for name in LAYERS if isinstance(part.get(name), int) and part[name] > few]:
        for name, value in part.items():
            if isinstance(value, list) and len(value) == part[layers]:
                part[name] = value[:few]
        part["per_layer_config"] = {key: x for key, x in (part.get("per_layer_config") or {}).items() if int(key) < few}
        part[layers] = few


def n_few(values: dict[str, Any]) -> int:
    return 4 if any(len(set(values.get(name) or ())) > 1 for name in KINDS) else 2


def few_tokens(config: Any) -> list[str]:
    most = getattr(config, "max_position_embeddings", None)
    return ["--set", f"context={MOST_TOKENS}"] if isinstance(most, int) and most > MOST_TOKENS else []


def rows_of(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def table(results: Path) -> None:
    found = defaultdict(list)
    for row in rows_of(results):
        found[OUTCOMES.get(row["exit_code"], "no answer")].append(row)
    for outcome, rows in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(rows):4d} {outcome}")
    for outcome, rows in found.items():
        for row in rows if outcome != "planned" else ():
            print(f"{outcome}: {row['model_type']}: {' '.join(row['message'].split())[:200]}")


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        plan_all(Path(sys.argv[2]), sys.argv[3:])
    else:
        table(Path(sys.argv[2]))
