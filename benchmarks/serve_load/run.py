#!/usr/bin/env python3
"""What do 16 clients get of one server, beside one who asks alone?

    python benchmarks/serve_load/run.py --requests 200 --clients 16 --work FOLDER

A server process is asked the same requests twice, block by block in turn: by one client that waits
for each answer, and by several at once. Blocks that FOLDER has are not measured again. Prompts are
of mixed lengths, answers greedy, nothing is kept from one request to the next. `needle` is served
without its end tokens, so that every answer has all its tokens. Times are those a client sees: TTFT
from sending to the first token, ITL from one token to the next of the same answer. Stdout is one
JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from hybrid_kv.report.files import compact

MIX = {1024: 40, 2048: 30, 4096: 18, 8192: 8, 16384: 4}
"""Tokens of a prompt, and how many of a hundred prompts have them."""
STALLS, LATE = "stalls_total", "late_stalls_total"
HEX = [f"{number:02x}" for number in range(256)]


@dataclass(frozen=True)
class Asked:
    """One request: its prompt as text of so many words, which are the model's tokens."""

    tokens: int
    prompt: str


@dataclass
class Answered:
    """What came: the text, and when (seconds; sent first, then each piece)."""

    text: str
    times: list[float]
    usage: dict[str, Any]


def requests(count: int, seed: int) -> list[Asked]:
    """Records to look up, in the lengths of the mix, shuffled."""
    dice = random.Random(seed)
    lengths = [length for length, share in MIX.items() for _ in range(share)]
    chosen = [lengths[number * len(lengths) // count % len(lengths)] for number in range(count)]
    dice.shuffle(chosen)
    return [Asked(length, _text(length, dice)) for length in chosen]


def _text(length: int, dice: random.Random) -> str:
    words: list[str] = []
    while len(words) < length - 4:
        key, value = dice.choices(HEX, k=2), dice.choices(HEX, k=4)
        words += ["the", dice.choice(("river", "hill", "snow")), ".", "key", *key, ":", *value, "."]
    return " ".join([*words[: length - 4], "?", "key", *key])


async def ask(wire: httpx.AsyncClient, name: str, one: Asked, new: int, extra: Any) -> Answered:
    body = {"model": name, "prompt": one.prompt, "max_tokens": new, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "hybrid_kv": extra}
    times, pieces, usage = [time.perf_counter()], [], {}
    async with wire.stream("POST", "/v1/completions", json=body) as stream:
        if stream.status_code != 200:
            raise SystemExit(f"{stream.status_code}: {(await stream.aread()).decode()}")
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event["choices"] and event["choices"][0]["text"]:
                times.append(time.perf_counter())
                pieces.append(event["choices"][0]["text"])
    return Answered("".join(pieces), times, usage)


async def block(
    url: str, name: str, asked: list[Asked], clients: int, new: int, extra: Any
) -> tuple[list[Answered], float]:
    """The answers in their order, and seconds for all."""
    left, answers = iter(enumerate(asked)), dict[int, Answered]()

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=1200) as wire:
            for number, one in left:
                answers[number] = await ask(wire, name, one, new, extra)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return [answers[number] for number in range(len(asked))], time.perf_counter() - begin


def figures(answers: list[Answered], seconds: float, cpu_s: float) -> dict[str, Any]:
    """Of all answers of one way."""
    first = [1e3 * (one.times[1] - one.times[0]) for one in answers]
    gaps = np.concatenate([1e3 * np.diff(one.times[1:]) for one in answers])
    tokens = sum(one.usage["completion_tokens"] for one in answers)
    read = sum(one.usage["prompt_tokens"] for one in answers)
    found = {
        "seconds": seconds,
        "requests_per_s": len(answers) / seconds,
        "prompt_tokens_per_s": read / seconds,
        "new_tokens_per_s": tokens / seconds,
        "server_cpu_s": cpu_s,
        "ttft_ms": _percentiles(first),
        "itl_ms": _percentiles(gaps),
    }
    return {k: v if isinstance(v, dict) else float(f"{v:.4g}") for k, v in found.items()}


def _percentiles(values: Any) -> dict[str, float]:
    shares = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}
    return {name: round(float(np.percentile(values, at)), 1) for name, at in shares.items()}


def endless(folder: Path) -> Path:
    """The shipped model, which ends no answer by itself."""
    shipped = Path(__file__).parents[2] / "hybrid_kv" / "assets" / "needle"
    for file in shipped.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return folder


@contextmanager
def server(words: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "hybrid_kv", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, text=True, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"serving .* at (http://\S+) \(page\)", line):
                break
        else:
            raise SystemExit("".join(said))
        rest = process.stderr
        threading.Thread(target=lambda: [print(x, end="", file=sys.stderr) for x in rest]).start()
        yield found[1], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _served(model: str, folder: Path) -> str:
    return str(endless(folder)) if model == "needle" else model


def cpu_of(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def measured(
    url: str, process: psutil.Process, args: argparse.Namespace, part: list[Asked]
) -> dict[str, Any]:
    """One block in both ways, as JSON."""
    extra = {} if args.budget == "default" else {"budget": args.budget}
    found: dict[str, Any] = {}
    for way, clients in {"one_at_a_time": 1, "together": args.clients}.items():
        before = cpu_of(process)
        got, took = asyncio.run(block(url, args.model, part, clients, args.new, extra))
        cpu = cpu_of(process) - before
        found[way] = {"answers": [asdict(one) for one in got], "seconds": took, "cpu_s": cpu}
        print(f"{way}: {len(part)} requests in {took:.1f} s", file=sys.stderr)
    metrics = httpx.get(url + "/metrics").text
    own = re.findall(r"^hybrid_kv_(\w*stall\w*) (\S+)$", metrics, re.MULTILINE)
    return {**found, "stalls": {name: float(value) for name, value in own}}


def blocks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All that are there and, up to `--most`, those that are not yet."""
    every, new = requests(args.requests, args.seed), 0
    options = ["--name", args.model, "--prefix-memory", "0", *args.words]
    for number in range(args.blocks):
        kept = args.work / f"block-{number}.json"
        if kept.exists() or new == args.most:
            continue
        with (
            tempfile.TemporaryDirectory() as folder,
            server([_served(args.model, Path(folder)), *options]) as (url, process),
        ):
            warm = requests(3, args.seed + 1)
            asyncio.run(block(url, args.model, warm, 1, args.new, {}))
            found = measured(url, process, args, every[number :: args.blocks])
        args.work.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({**found, "load": os.getloadavg()[0]}))
        new += 1
    return [json.loads(path.read_text()) for path in sorted(args.work.glob("block-*.json"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="needle")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--most", type=int, default=100, help="blocks in this call")
    parser.add_argument("--work", type=Path, required=True, help="folder for finished blocks")
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--budget", default="100%", help="'default' for the method's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("words", nargs="*", help="more options of `hybrid-kv serve`, after --")
    args = parser.parse_args()
    done, found = blocks(args), dict[str, Any]()
    texts: dict[str, list[str]] = {}
    for way in ("one_at_a_time", "together"):
        answers = [Answered(**one) for each in done for one in each[way]["answers"]]
        seconds, cpu = (sum(each[way][name] for each in done) for name in ("seconds", "cpu_s"))
        found[way] = figures(answers, seconds, cpu)
        texts[way] = [one.text for one in answers]
    pairs = list(zip(texts["one_at_a_time"], texts["together"], strict=True))
    stalls = [each["stalls"] for each in done]
    late, all_of = (sum(each[name] for each in stalls) for name in (LATE, STALLS))
    document = {
        "model": args.model,
        "budget": args.budget,
        "requests": len(pairs),
        "clients": args.clients,
        "new_tokens": args.new,
        "mix": {str(length): share for length, share in MIX.items()},
        "options": args.words,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": [round(each["load"], 1) for each in done],
        **found,
        "answers_that_differ": sum(one != other for one, other in pairs),
        "waits_for_prompts": int(all_of),
        "beyond_the_bound": int(late),
        "bound_ms": 1e3 * stalls[0]["stall_bound_seconds"],
        "longest_ms": round(1e3 * max(each["stall_seconds"] for each in stalls), 1),
    }
    print(json.dumps(document, indent=1), file=sys.stderr)
    print(compact(document), end="")


if __name__ == "__main__":
    main()
