"""All commands: each is a public function, `vla_rl.run` as `vla-rl run`, which imports its modules when it is called.
From Python they return what the command line prints, and raise UserError where that prints and exits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vla_rl.cli.command_line import PYTHON_ONLY, command, with_path_errors

if TYPE_CHECKING:
    from vla_rl.cli.benchmark.paired import Pair
    from vla_rl.cli.convert.convert import Conversion
    from vla_rl.cli.run_record import RunRecord
    from vla_rl.cli.serve import Served
    from vla_rl.cli.why.causes import Diagnosis
    from vla_rl.core.spec.spec import Spec
    from vla_rl.serving.policy import Policy
    from vla_rl.testing.common.findings import Findings

AnyPath = str | Path
SpecLike = Annotated["Spec | Mapping[str, Any] | str | Path", typer.Argument(metavar="SPEC")]
"""A Spec, plain data, a spec file, or the folder of a run."""
Overrides = Annotated[Sequence[str], typer.Argument(metavar="[PATH=VALUE]...")]
Devices = Annotated[int | None, typer.Option(min=0, max=100_000)]
Cpus = Annotated[float | None, typer.Option(min=1, max=10_000_000)]
Memory = Annotated[float | None, typer.Option(min=1, max=1e9)]
GpuMemory = Annotated[float | None, typer.Option(min=0.1, max=1e6)]
NewFolder = Annotated[AnyPath | None, typer.Option(metavar="FOLDER")]
Say = Annotated[Callable[[str], object], PYTHON_ONLY]


def ignore(line: str) -> None:
    """Print nothing."""


@command()
def run(
    spec: SpecLike,
    folder: AnyPath | None = None,
    *,
    overrides: Overrides = (),
    resume: bool = False,
    live: Annotated[bool | None, PYTHON_ONLY] = None,
) -> RunRecord:
    """Train as a spec says; metrics, checkpoints, videos and results.json go to the run's folder.

    From Python a spec may also be a `Spec`, or plain data.

    Args:
        spec: A spec file, or the folder of a run.
        overrides: Changes, such as algorithm.clip_high=0.3
        folder: Of the run; default: runs/NAME.
        resume: Continue from the last checkpoint in the folder.
        live: Show growing curves, by the hook `notebook`; None: in a Jupyter notebook.

    Raises UserError, and RunStopped after Ctrl-C (saved)."""
    from vla_rl.runtime.start import run as train

    return _train_in_folder(train, spec, folder, "", overrides, resume, live)


@command("sft")
def clone(
    spec: SpecLike,
    folder: AnyPath | None = None,
    *,
    overrides: Overrides = (),
    resume: bool = False,
    live: Annotated[bool | None, PYTHON_ONLY] = None,
) -> RunRecord:
    """Clone demonstrations as the spec's `imitation` says: of the simulator's expert, or recorded ones.

    Args:
        spec: A spec file, or the folder of a run.
        overrides: Changes, such as algorithm.clip_high=0.3
        folder: Of the run; default: runs/NAME-sft.
        resume: Continue from the last checkpoint in the folder.
        live: As of `run`.
    """
    from vla_rl.runtime.start import clone as imitate

    return _train_in_folder(imitate, spec, folder, "-sft", overrides, resume, live)


@with_path_errors
def open_run(folder: AnyPath) -> RunRecord:
    """Open an earlier run, or one that another process is still running. Raises UserError if the folder holds none."""
    from vla_rl.cli.run_record import RunRecord

    return RunRecord(folder)


@command(show="fit_rewards:print_accuracy")
def fit_rewards(
    data: Annotated[AnyPath, typer.Argument(metavar="DATA")],
    to: AnyPath,
    *,
    cameras: Annotated[Sequence[str], typer.Option(metavar="NAME")] = (),
    label: Annotated[str | None, typer.Option(metavar="FEATURE")] = None,
    episodes: Annotated[str | Any | None, typer.Option(metavar="CHOICE")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 400,
    held_out: Annotated[float, typer.Option(min=0.01, max=0.9)] = 0.2,
    threshold: Annotated[float, typer.Option(min=1e-6, max=1)] = 0.5,
    image_size: Annotated[int, typer.Option(min=16, max=1024)] = 64,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: str | None = None,
    say: Say = ignore,
) -> dict[str, Any]:
    """Train a success classifier on recorded episodes, for `rewards: {type: classifier, folder: ...}` in a spec.

    Args:
        data: Recorded episodes, a data set in LeRobot's format.
        to: The folder to write.
        cameras: Look at this camera only; may be repeated.
        label: Feature above 0 at frames of success; default: next.success.
        episodes: As in a spec: 100, '[0, "5-9"]', '{exclude: [3]}'.
        steps: Optimiser steps.
        held_out: Share of the episodes that measures it and is not trained on.
        threshold: Probability that counts as success.
        image_size: Side that images are scaled to.
        seed: Of weights, batches and held-out episodes.
        device: cpu, cuda, cuda:1; default: a GPU, if available.
        say: Receives lines about the loss.

    Returns its accuracy on held-out episodes and their frames. Raises UserError."""
    from vla_rl.cli.fit_rewards import fit_and_save, open_frames
    from vla_rl.toolkit.reward_models.fitting import ClassifierSettings

    settings = ClassifierSettings(steps=steps, held_out=held_out, threshold=threshold, image_size=image_size, seed=seed)
    chosen = open_frames(Path(data), cameras, label, episodes)
    return dict(fit_and_save(chosen, Path(to), settings, device, say))


@command("data", show="inspect_data:print_inspection", json=True)
def inspect_data(
    folder: Annotated[AnyPath, typer.Argument(metavar="FOLDER")],
    *,
    type: Annotated[str | None, typer.Option(metavar="PLUGIN")] = None,  # noqa: A002 - as `--type`
    page: Annotated[AnyPath | None, typer.Option(metavar="FILE")] = None,
    all_images: bool = False,
) -> dict[str, Any]:
    """Say what is in a data set and what is wrong with it: clocks, numbers, images. Exit with 1 if anything is.

    Args:
        folder: A data set: LeRobot, RLDS or LIBERO's HDF5 files.
        type: Data plugin; default: the one that knows the files.
        page: Write a page with curves and images, as HTML.
        all_images: Read every image, to find repeated ones.

    Returns folder, format, fps, episodes, frames, lengths, tasks, cameras, features, and findings: of each subject,
    message, remedy, episodes, and seconds within the first of them; uncompared: episodes that were not compared, in
    words. Raises UserError for a folder of no known format."""
    from vla_rl.cli.inspect_data import describe_inspection, open_recordings, render_data_page
    from vla_rl.core.paths import check_file
    from vla_rl.toolkit.data.inspection.report import inspect_recordings

    if page is not None:
        check_file("--page", Path(page))
    inspected = inspect_recordings(open_recordings(Path(folder), type), all_images)
    if page is not None:
        Path(page).write_text(render_data_page(inspected), encoding="utf-8")
    return describe_inspection(inspected)


@command()
def check(
    spec: SpecLike,
    *,
    overrides: Overrides = (),
    show: bool = False,
    devices: Devices = None,
    cpus: Cpus = None,
    memory: Memory = None,
    gpu_memory: GpuMemory = None,
    say: Say = ignore,
) -> Spec:
    """Report what `run` would refuse, with file and line: on this machine, or with --devices on one with that many
    GPUs. Needs no GPU and builds no simulator.

    Args:
        spec: A spec file, or the folder of a run.
        overrides: Changes, such as algorithm.clip_high=0.3
        show: Print the spec with all defaults.
        devices: GPUs that the machine has; default: this one's.
        cpus: CPUs; default: 16 a GPU, or this machine's.
        memory: Host memory in GiB; default: 128 a GPU, or this machine's.
        gpu_memory: Memory of each GPU in GiB; default: this machine's.
        say: Receives what was checked, and the memory that GPUs are expected to need.

    Returns the spec with all defaults. Raises UserError."""
    from vla_rl.cli.inputs import other_machine, read_spec
    from vla_rl.runtime.start import check as check_run

    loaded, _ = read_spec(spec, overrides)
    if show:
        from vla_rl.core.spec.yaml import dump_yaml

        print(dump_yaml(loaded.to_dict()), end="")
    gpus = check_run(loaded, other_machine(devices, cpus, memory, gpu_memory))
    if not show:
        say(
            f"{spec}: ok: {loaded.model.type} on {loaded.env.type} ({loaded.env.num_envs} envs) with "
            f"{loaded.algorithm.type}, {loaded.train.steps} steps, {loaded.placement.type} on {loaded.runtime.backend}"
        )
        if gpus:
            say(gpus)
    return loaded


@command("eval", show="evaluate:print_result")
def evaluate(
    what: Annotated[Spec | Mapping[str, Any] | AnyPath, typer.Argument(metavar="RUN|CHECKPOINT|SPEC")],
    checkpoint: Annotated[AnyPath | None, PYTHON_ONLY] = None,
    *,
    overrides: Overrides = (),
    policy: Annotated[str | None, typer.Option(metavar="URL")] = None,
    output: AnyPath | None = None,
    benchmark: Annotated[str | None, typer.Option(metavar="NAME|FILE")] = None,
    suites: Sequence[str] = (),
    folder: AnyPath | None = None,
    record: NewFolder = None,
    protocol: Annotated[str | None, typer.Option(metavar="NAME|FILE")] = None,
    until: Annotated[str | None, typer.Option(metavar="RULE")] = None,
    refute: bool = False,
    progress: Annotated[Callable[[str, int, int], None] | None, PYTHON_ONLY] = None,
    say: Say = print,
) -> dict[str, Any]:
    """Measure success on the evaluation states: of a run's last checkpoint, of one checkpoint, or of a spec's model;
    with --benchmark on all suites that the field reports, next to published figures.

    Args:
        what: Folder of a run or a checkpoint, or a spec.
        checkpoint: With a spec: the checkpoint folder whose weights are used.
        overrides: Changes, such as algorithm.clip_high=0.3
        policy: Evaluate what is served there instead: ws://HOST:PORT.
        output: Write the result as JSON to this file.
        benchmark: All suites of one, such as libero or metaworld.
        suites: Only this suite of the benchmark; may be repeated.
        folder: Of the benchmark's results; default: RUN/benchmarks/NAME. Suites there stay.
        record: Append the episodes to a data set in LeRobot's format.
        protocol: Measure as openvla, openvla_oft, openpi, lerobot, simplevla or rlinf does: states, steps, cameras.
        until: End when this is known: "above 0.9", or "better than RUN" on the same states.
        refute: Evaluate it without text, cameras, state and feedback too, each on a quarter of the states, to name what
            its success does not depend on.
        progress: Called with the current phase ("eval", or what it waits for), the number done and the total; None: a
            line on stderr.
        say: Receives the lines of a benchmark's suites.

    Returns {"success": {"rate", "low", "high", "n"}, "tasks": {name: the same}, "episodes": [...] ...}; of a benchmark
    one for each suite. Raises UserError: CheckpointError for damaged files; a place that cannot be written, before the
    first episode; what could not be written at the end."""
    _leave_if_importing()
    from vla_rl.cli.evaluate import PlannedEvaluation, find_source
    from vla_rl.cli.until import read_rule
    from vla_rl.core.errors import UserError
    from vla_rl.core.paths import check_folder

    if record is not None:
        check_folder("--record", Path(record))
    if benchmark is None and (suites or folder):
        raise UserError("--suite and --folder are of a benchmark; name it: --benchmark libero")
    if benchmark is not None and (until is not None or refute):
        raise UserError("--until and --refute are for a single evaluation; a benchmark's suites are evaluated whole")
    if benchmark is not None and output is not None:
        raise UserError("--output is for a single evaluation; a benchmark's suites go to --folder, a file each")
    planned = PlannedEvaluation(
        source=find_source(what, overrides, policy, protocol),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        record=None if record is None else Path(record),
        protocol=protocol,
        progress=progress,
        until=None if until is None else read_rule(until),
        refute=say if refute else None,
    )
    if benchmark is None:
        return planned.evaluate_once(None if output is None else Path(output))
    return planned.evaluate_suites(benchmark, suites, None if folder is None else Path(folder), say)


@command(show="identify.identify:print_findings", json=True)
def identify(
    what: Annotated[Spec | Mapping[str, Any] | AnyPath, typer.Argument(metavar="RUN|CHECKPOINT|SPEC")],
    *,
    overrides: Overrides = (),
    data: NewFolder = None,
    env: bool = False,
    frames: Annotated[int, typer.Option(min=32, max=10_000)] = 64,
    passes: Annotated[int, typer.Option(min=100)] = 3000,
    episodes: Annotated[int, typer.Option(min=0)] = 0,
    device: str | None = None,
    say: Say = ignore,
) -> dict[str, Any]:
    """Find out with which conventions a policy was trained: under which keys of the spec it does what demonstrations
    show. Without simulation, unless asked.

    Args:
        what: Folder of a run or a checkpoint, or a spec that names one.
        overrides: Changes, such as model.checkpoint=FOLDER
        data: Demonstrations: a data set of this robot.
        env: Let the simulator's scripted expert demonstrate.
        frames: Frames of demonstrations.
        passes: Most forward passes of a frame.
        episodes: Confirm the best two answers in the simulator, on this many of the same states.
        device: cpu, cuda, cuda:1; default: a GPU, if available.
        say: Receives what it costs, before it starts.

    Returns keys: of each convention given, found, status, others that are not told apart, and evidence; changed: the
    keys to write; confidence; table: where the table of known checkpoints differs. Raises UserError."""
    _leave_if_importing()
    from vla_rl.cli.evaluate import find_source
    from vla_rl.cli.identify.identify import confirm_in_simulator, identify_conventions, open_scorer
    from vla_rl.runtime.start import evaluate as evaluate_spec

    source = find_source(what, overrides, None, None)
    folder = None if data is None else Path(data)
    scorer = open_scorer(source.read_spec(()), source.checkpoint, folder, env, frames, passes, device)
    result, best = identify_conventions(scorer, say)
    if episodes and len(best) > 1 and result["better_than_random"]:
        result["episodes"] = confirm_in_simulator(scorer.spec, best, episodes, evaluate_spec)
    return result


@command(show="benchmark.paired:print_comparison")
def compare(
    first: Annotated[AnyPath, typer.Argument()], second: Annotated[AnyPath, typer.Argument()]
) -> dict[str, Pair]:
    """Compare two policies on the evaluation states that both ran, with McNemar's exact test.

    Args:
        first: What `vla-rl eval RUN --output FILE` wrote, or a benchmark's folder.
        second: The same of another policy.

    Returns "all", and each task -> `Pair`, whose `p` is McNemar's."""
    from vla_rl.cli.benchmark.paired import check_evaluations, compare_episodes, read_episodes

    check_evaluations(Path(first), Path(second))
    return compare_episodes(read_episodes(Path(first)), read_episodes(Path(second)))


@command()
def export(
    what: Annotated[AnyPath, typer.Argument(metavar="RUN|CHECKPOINT")],
    to: AnyPath,
    *,
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME")] = None,
    public: bool = False,
    format: str = "own",  # noqa: A002 - as `--format`
    asset_id: str | None = None,
    say: Say = print,
) -> Path:
    """Write a checkpoint in its model's public layout, with a card of what it does and the spec that made it.

    Args:
        what: Folder of a run or of one checkpoint.
        to: The folder to write.
        push: Upload it there too, with your own login to the hub.
        public: Let everybody see what is uploaded.
        format: own, as the model is saved; lerobot (pi0, pi05, smolvla); or openpi (pi0, pi05).
        asset_id: openpi's name of the statistics, such as physical-intelligence/libero.
        say: Receives what was written and uploaded.

    Returns the folder."""
    from vla_rl.cli.export import export_checkpoint

    return export_checkpoint(Path(what), Path(to), push, public, format, asset_id, say)


@command(show="serve:serve_until_stopped")
def serve(
    what: Annotated[AnyPath | Policy, typer.Argument(metavar="RUN|CHECKPOINT")],
    *,
    overrides: Overrides = (),
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    dialect: str = "openpi",
    keys: str | None = None,
    resize: bool = False,
    prompt: str | None = None,
    api_key_file: AnyPath | None = None,
    sample: bool = False,
    device: str | None = None,
    max_batch: Annotated[int, typer.Option(min=1)] = 16,
    max_wait_ms: Annotated[float, typer.Option(min=0)] = 2.0,
    record: NewFolder = None,
    allow_hosts: Annotated[Sequence[str], typer.Option(metavar="NAME")] = (),
    allow_origins: Annotated[Sequence[str], typer.Option(metavar="ORIGIN")] = (),
    idle_minutes: Annotated[float, typer.Option(min=0.01)] = 60.0,
) -> Served:
    """Let robots and other people's simulators use a checkpoint, over a websocket, as openpi's clients speak.

    From Python it is served by a thread of this process, also a `Policy` that is open.

    Args:
        what: Folder of a run or of one checkpoint.
        overrides: Changes, such as algorithm.clip_high=0.3
        host: Address to listen on; 0.0.0.0: all of this machine.
        port: 0: a free one.
        dialect: openpi, roboarena or vla-eval.
        keys: Names in requests: libero, droid, aloha, or a YAML file.
        resize: Scale images to the size of training.
        prompt: The instruction of requests that have none.
        api_key_file: Let in only who has the key in this file.
        sample: Draw actions; else act greedily.
        device: cpu, cuda, cuda:1; default: a GPU, if available.
        max_batch: Requests that are inferred together.
        max_wait_ms: Milliseconds that a request waits for others.
        record: Append sessions to a data set in LeRobot's format.
        allow_hosts: Another host name that clients use for it; may be repeated.
        allow_origins: Answer this web page too, as browsers name it; may be repeated.
        idle_minutes: Send a client away that asks for nothing for so long.

    Returns when it listens."""
    from vla_rl.cli.serve import check_serving, open_server

    check_serving(dialect)
    from vla_rl.core.plan import Batching
    from vla_rl.serving.server import Settings, read_api_key

    settings = Settings(
        host=host,
        port=port,
        dialect=dialect,
        prompt=prompt,
        api_key=None if api_key_file is None else read_api_key(Path(api_key_file)),
        batching=Batching(max_batch=max_batch, max_wait_s=max_wait_ms / 1e3),
        record=None if record is None else Path(record),
        allow_hosts=allow_hosts,
        allow_origins=allow_origins,
        idle_s=60.0 * idle_minutes,
    )
    return open_server(what, settings, keys, resize, device=device, greedy=not sample, overrides=overrides)


@command(show="plan:print_forecasts", json=True)
def plan(
    spec: SpecLike,
    profiles: Annotated[Sequence[AnyPath], typer.Option(metavar="FILE")] = (),
    *,
    overrides: Overrides = (),
    devices: Devices = None,
    cpus: Cpus = None,
    memory: Memory = None,
    gpu_memory: GpuMemory = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME|FILE")] = None,
) -> list[dict[str, Any]]:
    """Forecast throughput, idle time and memory of every placement strategy, with the latencies of a run or those that
    are estimated for a GPU. Needs no GPU and no simulator.

    Args:
        spec: A spec file, or the folder of a run.
        overrides: Changes, such as algorithm.clip_high=0.3
        profiles: Latencies: RUN/trace.json, or a profile; traces of several sizes show how time grows.
        devices: GPUs that the machine has; default: this one's.
        cpus: CPUs; default: 16 a GPU, or this machine's.
        memory: Host memory in GiB; default: 128 a GPU, or this machine's.
        gpu_memory: Memory of each GPU in GiB; default: this machine's.
        gpu: Latencies estimated for a GPU: h100, h200, a100, 4090, or a file of its rates.

    Returns an entry for each strategy, with the "reason" of one that does not fit."""
    from vla_rl.cli.inputs import read_spec
    from vla_rl.cli.plan import forecast_placements, load_or_estimate_latencies

    loaded, run_folder = read_spec(spec, overrides)
    files = [Path(file) for file in profiles] or ([run_folder / "trace.json"] if run_folder and gpu is None else [])
    return forecast_placements(
        loaded, load_or_estimate_latencies(loaded, files, gpu, (devices, cpus, memory, gpu_memory))
    )


@command(show="report.write:print_file")
def report(
    folder: Annotated[AnyPath, typer.Argument(metavar="RUN")],
    output: AnyPath | None = None,
    *,
    video_mb: Annotated[float, typer.Option(min=0)] = 20.0,
) -> Path:
    """Make one self-contained HTML page: curves, time split, timeline, videos, results, spec and environment.

    Args:
        folder: Folder of a run, which may still be running.
        output: The file; default: RUN/report.html.
        video_mb: Megabytes of episode videos in it, at most.

    Returns its file."""
    from vla_rl.cli.report.write import write_report

    return write_report(Path(folder), None if output is None else Path(output), video_mb)


@command(show="why.why:print_diagnosis", json=True)
def why(
    folder: Annotated[AnyPath, typer.Argument(metavar="RUN")],
    *,
    step: Annotated[int | None, typer.Option(min=1)] = None,
    budget: str = "20%",
    say: Say = ignore,
) -> Diagnosis:
    """Say why a run does not learn: its files first, then a training step, played again with one thing changed.

    Args:
        folder: Folder of a run, which may still be running; it is only read.
        step: Training step that is played again; default: the newest with a checkpoint before it.
        budget: Of time: a share of the run's own, such as 20%, or seconds, such as 90s.
        say: Receives what will be done, and what it takes.

    Returns causes with their evidence, or why there are none, and what was not looked at. Raises UserError."""
    _leave_if_importing()
    from vla_rl.cli.why.why import find_causes

    return find_causes(Path(folder), step, budget, say)


@command(show="check_env:print_findings")
def check_env(
    name: Annotated[str, typer.Argument(metavar="TYPE")],
    *,
    overrides: Annotated[Sequence[str], typer.Argument(metavar="[KEY=VALUE]...")] = (),
    num_envs: Annotated[int, typer.Option(min=1)] = 2,
    chunk: Annotated[int, typer.Option(min=1)] = 4,
    device: str = "cpu",
    expert: bool = True,
    seconds: Annotated[float, typer.Option(min=0)] = 60,
    whole_range: bool = True,
    plugins: Annotated[Sequence[str], typer.Option(metavar="MODULE")] = (),
) -> Findings:
    """Play with a simulator and compare it with the contract: states, masks, chunks, ends, independent envs, expert.

    Args:
        name: Of the simulator, as in a spec.
        overrides: Its settings, such as suite=libero_goal
        num_envs: Simulator envs.
        chunk: Actions in a chunk.
        device: For simulators that compute on one: cpu, cuda, cuda:1.
        expert: Play an episode with the scripted expert, if any.
        seconds: About how long to run episodes; less means fewer, shorter episodes.
        whole_range: Parts of an action's range that do nothing, as a throttle below 0, are findings.
        plugins: Where the simulator is, when it is not installed.

    Returns the findings; empty if all pass."""
    _leave_if_importing()
    from vla_rl.cli.check_env import examine_named_env

    settings = {"num_envs": num_envs, "chunk": chunk, "device": device}
    return examine_named_env(
        name, overrides, plugins, settings, {"expert": expert, "seconds": seconds, "whole_range": whole_range}
    )


@command("plugins", show="list_plugins:print_plugins", json=True)
def list_plugins() -> list[dict[str, Any]]:
    """List all plugins: kind, name, distribution, version, and whether what they need is installed.

    Returns kind, name, dist, version, ready, status and summary of each."""
    from vla_rl.cli.list_plugins import plugin_rows

    return plugin_rows()


@command("models", show="models:print_checkpoints", json=True)
def known_checkpoints(
    name: Annotated[str | None, typer.Argument(metavar="[OWNER/NAME]")] = None,
) -> list[dict[str, Any]] | dict[str, Any]:
    """List the public checkpoints whose keys are known, or say what is known of one, and who says so.

    Args:
        name: One of them, with all its keys.

    Returns name, types, keys, env_keys, tell, required and facts of each, or of the one, with their sources."""
    from vla_rl.cli.models import checkpoint_entries, checkpoint_entry

    return checkpoint_entries() if name is None else checkpoint_entry(name)


@command(show="convert.convert:print_conversion", json=True)
def convert(
    file: Annotated[AnyPath, typer.Argument(metavar="FILE")],
    *,
    checkout: NewFolder = None,
    to: Annotated[AnyPath | None, typer.Option(metavar="FILE")] = None,
) -> Conversion:
    """Turn a configuration of RLinf, SimpleVLA-RL, siiRL or lerobot into a spec, and account for every key of it.

    Args:
        file: RLinf's YAML, SimpleVLA-RL's or siiRL's script, lerobot's train_config.json.
        checkout: The project's repository; default: the one that holds the file.
        to: The spec to write; default: on the command line ./NAME.yaml.

    Returns the spec, and what became of each key. Raises UserError for a file of no known project, one that cannot be
    composed, and an experiment that cannot run here; the message says what is missing."""
    from vla_rl.cli.convert.convert import convert_file

    converted = convert_file(Path(file), None if checkout is None else Path(checkout))
    if to is not None:
        converted.write(Path(to))
    return converted


@command(show="new_plugin:print_project")
def new_plugin(
    kind: Annotated[str, typer.Argument()],
    name: Annotated[str, typer.Argument()],
    folder: Annotated[AnyPath | None, typer.Argument()] = None,
) -> Path:
    """Make a third-party project: pyproject, a plugin that works, and its passing test.

    Args:
        kind: model, env, single_env (an env of one scene), algorithm, trainer, engine, placement, data, world_model,
            reward_model or hook.
        name: Its name in specs.
        folder: Of the new project; default: ./NAME.

    Returns its folder."""
    from vla_rl.cli.new_plugin import new_plugin as make

    return make(kind, name, Path(folder or name))


@command()
def install_gl(what: Annotated[str, typer.Argument(metavar="egl|vulkan")] = "egl") -> int:
    """Install what simulators draw with on a machine without a display: EGL (MuJoCo) or Vulkan (SAPIEN).

    Args:
        what: What simulators draw with.

    Returns the exit status of the script that installs it."""
    from vla_rl.toolkit.envs.rendering import install_interface

    return install_interface(what)


@command(show="doctor:print_report", json=True)
def doctor() -> list[dict[str, Any]]:
    """Say what works on this machine, what does not, and the command that fixes it.

    Returns an entry for each thing that was looked at: area, what, state, detail and fix."""
    from attrs import asdict

    from vla_rl.cli.doctor import examine_machine

    return [asdict(finding) for finding in examine_machine()]


Action = Annotated[str, typer.Argument(metavar="list|show|copy")]
SpecNames = Annotated[Sequence[str], typer.Argument(metavar="[NAME]...")]


@command(show="shipped_specs:print_specs")
def examples(action: Action = "list", names: SpecNames = (), *, to: NewFolder = None) -> list[Path]:
    """List the specs of small runs that come with vla-rl; `vla-rl run NAME` takes them.

    Args:
        action: list prints their names, show the specs themselves, and copy copies them to a folder, to be changed.
        names: Of some of them; default: all.
        to: The folder to copy to; default: this one.

    Returns their files, or the copies."""
    from vla_rl.cli.shipped_specs import EXAMPLES, choose_specs

    return choose_specs(EXAMPLES, action, names, None if to is None else Path(to))


@command(show="shipped_specs:print_specs")
def recipes(action: Action = "list", names: SpecNames = (), *, to: NewFolder = None) -> list[Path]:
    """List the specs of published experiments; `vla-rl run NAME` takes them.

    Args:
        action: list prints their names, show the specs themselves, and copy copies them to a folder, to be changed.
        names: Of some of them; default: all.
        to: The folder to copy to; default: this one.

    Returns their files, or the copies."""
    from vla_rl.cli.shipped_specs import RECIPES, choose_specs

    return choose_specs(RECIPES, action, names, None if to is None else Path(to))


# ------------------------------------------------------------------------------------------------ internal


def _leave_if_importing() -> None:
    from vla_rl.toolkit.processes import leave_if_importing

    leave_if_importing()


def _train_in_folder(
    train: Callable[[Spec, Path, bool], object],
    spec: SpecLike,
    folder: AnyPath | None,
    ending: str,
    overrides: Sequence[str],
    resume: bool,
    live: bool | None,
) -> RunRecord:
    _leave_if_importing()
    from vla_rl.cli.inputs import read_spec

    loaded, run_folder = read_spec(spec, overrides)
    target_folder = Path(folder) if folder is not None else run_folder or Path("runs") / f"{loaded.name}{ending}"
    if (in_notebook() if live is None else live) and all(hook.type != "notebook" for hook in loaded.hooks):
        data = loaded.to_dict()
        loaded, _ = read_spec({**data, "hooks": [*data["hooks"], {"type": "notebook"}]})
    train(loaded, target_folder, resume)
    return open_run(target_folder)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a Jupyter notebook that can draw."""
    from importlib.util import find_spec

    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel") and find_spec("matplotlib") is not None
