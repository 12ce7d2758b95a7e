"""The command line. Parses, calls, and turns errors into exit codes; every command imports its own code when called."""

import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.yaml.document import COMMAND_LINE
from realgraph.plan.cli import app as plan_app
from realgraph.runtime.processes.early_interrupts import raise_interrupts
from realgraph.runtime.processes.titles import set_title
from realgraph.screen.output import say, standard_streams

# click's class: some releases of typer bring click along under a name of their own
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="realgraph",
    help="Compile, plan and run reinforcement learning of language models, declared as a graph in YAML.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="Run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATH=VALUE]...", help="Overrides, such as calls.train.lr=1e-5", show_default=False),
]


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file or graph file.", show_default=False)],
    overrides: Overrides = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the final run file, with each value's origin.")
    ] = False,
    json_out: Annotated[bool, typer.Option("--json", help="Print a report as JSON.")] = False,
) -> None:
    """Report every mistake in a run file or graph file, with its line. Loads no model and needs no network."""
    from realgraph.commands.check import check_command

    check_command(file, overrides or (), resolved, json_out)


app.add_typer(plan_app, name="plan")


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Run file.", show_default=False)] = None,
    overrides: Overrides = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Use this plan instead of searching for one.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Plan with measured costs: a table, or a finished run.")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Resume the run in this directory.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, plan and try the first rows; start nothing.")
    ] = False,
    new_data: Annotated[
        bool,
        typer.Option("--new-data", help="With --resume: accept data, and frozen models, that have changed since."),
    ] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="With --resume: search for a new plan, such as for other devices.")
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="Submit the run to Slurm as a batch job; with --dry-run show its script.")
    ] = False,
    no_train: Annotated[
        bool, typer.Option("--no-train", help="Measure generation and rewards alone: train, evaluate and save nothing.")
    ] = False,
) -> None:
    """Train: check, plan, start workers, run to the end. Ctrl-C saves after the step; a second one stops at once."""
    _need_torch(f"run {file}" if resume is None else f"run --resume {resume}")
    from realgraph.commands.run import RunOptions, run_command

    run_command(
        file, overrides or (), RunOptions(plan_file, costs, resume, dry_run, new_data, replan, submit, no_train)
    )


@app.command()
def worker(
    connect: Annotated[str, typer.Option("--connect", metavar="HOST:PORT", help="Where the run waits for its hosts.")],
    key: Annotated[
        str, typer.Option("--key", metavar="FILE|-", help="The run's join key: a file, or - for standard input.")
    ],
    name: Annotated[str, typer.Option("--name", help="Name of this host; default: its own.")] = "",
    interface: Annotated[
        str, typer.Option("--interface", help="Network interface for samples and weights; default: that to HOST.")
    ] = "",
) -> None:
    """Work for a run that was started on another host, with all devices of this one, until it ends."""
    _need_torch(f"worker --connect {connect}")
    from realgraph.commands.worker import worker_command

    worker_command(connect, key, name, interface)


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run directory.", show_default=False)],
) -> None:
    """Show what a run does right now: its workers and hosts, the calls in hand, how long to the end."""
    from realgraph.commands.status import status_command

    status_command(folder)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run directory.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the page here; default: report.html in the run directory.")
    ] = None,
) -> None:
    """Write one HTML page about a run: curves, timeline and memory beside the plan's, evaluations, samples."""
    from realgraph.report.command import report_command

    report_command(folder, out)


@app.command()
def doctor(
    hosts: Annotated[
        int | None, typer.Option("--hosts", min=1, help="Check so many hosts, which join at --listen.")
    ] = None,
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="With --hosts: where they join.")] = "",
    slurm: Annotated[bool, typer.Option("--slurm", help="Check the nodes of the allocation of Slurm.")] = False,
    interface: Annotated[
        str, typer.Option("--interface", help="Network interface to check; default: that of the way to others.")
    ] = "",
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for run directories, whose file system is checked.")
    ] = Path(),
    trusted_network: Annotated[
        bool, typer.Option("--trusted-network", help="Allow public addresses, behind a firewall.")
    ] = False,
    join_seconds: Annotated[float, typer.Option("--join-seconds", min=1.0, help="For all hosts to join.")] = 600.0,
    json_out: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check this machine, several hosts or an allocation before a run: versions, limits, disk, network, GPUs."""
    from realgraph.doctor.command import DoctorRequest, doctor_command

    doctor_command(DoctorRequest(hosts, listen, slurm, interface, folder, join_seconds, json_out, trusted_network))


@app.command()
def rehearse(
    file: RunFile,
    overrides: Overrides = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Rehearse this plan instead of searching for one.")
    ] = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep models, data and runs in this new folder.")] = None,
) -> None:
    """Run a plan on this machine's CPU at toy width, one process a device, and compare it with one process."""
    _need_torch(f"rehearse {file}")
    from realgraph.commands.rehearse import rehearse_command

    rehearse_command(file, overrides or (), plan_file, keep)


@app.command(name="eval")
def evaluate(
    file: RunFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Weights to evaluate: a checkpoint or model folder.")
    ] = None,
) -> None:
    """Score a model on the run's held-out data: accuracy and pass@k."""
    _need_torch(f"eval {file}")
    from realgraph.commands.eval import eval_command

    eval_command(file, overrides or (), checkpoint)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder, checkpoint or run directory.")],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Prompts, answered independently.")],
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    n: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    chat: Annotated[bool, typer.Option(help="Wrap prompts in the model's chat template, where it has one.")] = True,
    template_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Override an argument of the chat template, such as enable_thinking=false."
        ),
    ] = None,
) -> None:
    """Generate a model's answers to prompts, which are rendered as in its training run."""
    _need_torch(f"generate {model}")
    from realgraph.commands.generate import SamplingRequest, generate_command

    generate_command(model, prompts, SamplingRequest(temperature, max_new_tokens, n, seed, chat, template_arg or ()))


@app.command()
def quickstart(
    folder: Annotated[Path, typer.Option("--dir", help="Working directory.")] = Path("quickstart-run"),
    algorithm: Annotated[str, typer.Option(help="grpo or ppo.")] = "grpo",
    seed: Annotated[int, typer.Option(min=0)] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="RL steps; default: those of the run file.")] = None,
) -> None:
    """Train a tiny model to add, by SFT and then by RL, on this machine: a few minutes on two CPU cores."""
    _need_torch("quickstart")
    from realgraph.commands.quickstart import quickstart_command

    quickstart_command(folder, algorithm, seed, steps)


@app.command()
def graph(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Library graph, graph file or run file.")],
    overrides: Overrides = None,
    mermaid: Annotated[Path | None, typer.Option("--mermaid", help="Write a Mermaid flowchart to this file.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write an SVG picture to this file.")] = None,
) -> None:
    """Print a graph: its calls, what they read and write, and how they depend on each other."""
    from realgraph.commands.graph import graph_command

    graph_command(name, overrides or (), mermaid, svg)


@app.command()
def graphs() -> None:
    """List the graphs that come with realgraph."""
    from realgraph.commands.graph import graphs_command

    graphs_command()


@app.command()
def init(
    graph: Annotated[str, typer.Option("--graph", help="Library graph or graph file.")] = "grpo",
    out: Annotated[Path | None, typer.Option("--out", help="File to write; by default it is printed.")] = None,
) -> None:
    """Write a commented run file to start from."""
    from realgraph.commands.init import init_command

    init_command(graph, out)


@app.command()
def schema(
    out_dir: Annotated[Path, typer.Option("--out-dir", help="Folder to write to.")] = Path("docs"),
) -> None:
    """Write the YAML reference, and JSON Schemas with which editors complete and check run files and graphs."""
    from realgraph.reference.reference import schema_command

    schema_command(out_dir)


@app.command()
def profile(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Run file that describes this machine.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="File for the table of costs.")] = Path("costs.json"),
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to measure, all at once; default: the run's, or all of this node."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repeats: a less precise table in a third of the time.")
    ] = False,
    sglang: Annotated[
        str | None,
        typer.Option(
            "--sglang", metavar="URL", help="Time the decode steps of a running SGLang server, not the engine's."
        ),
    ] = None,
) -> None:
    """Measure this machine's costs, for realgraph plan FILE --costs costs.json. Takes at most 5 minutes."""
    _need_torch("profile")
    from realgraph.profile.command import ProfileRequest, profile_command

    profile_command(ProfileRequest(file, tuple(overrides or ()), devices, quick, sglang), out)


@app.command(name="replay-events")
def replay_events(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A run's events.log, or its directory.")],
    last: Annotated[
        int, typer.Option("--last", min=1, help="Number of events to show, each with the commands that it led to.")
    ] = 20,
) -> None:
    """Replay the events of a run: the scheduler's last commands, and what it was waiting for. Starts nothing."""
    from realgraph.commands.replay_events import replay_events_command

    replay_events_command(file, last)


def _need_torch(what: str) -> None:
    """Commands that run models say so at once where torch is not installed. `ps` shows which command: `what`, without
    overrides and prompts."""
    if importlib.util.find_spec("torch") is None:
        hint = "install a build of it: pip install 'realgraph[run]', or see the README for CUDA builds"
        raise ConfigError([Problem(Where("realgraph"), "this command needs torch, which is not installed", hint)])
    set_title(f"realgraph {what}")


def main() -> None:
    """The console script. Exits with 2 on the user's mistakes, after printing all of them; `plan` has further codes.

    Ctrl-C, SIGTERM and SIGHUP: 130.
    """
    raise_interrupts()
    with standard_streams():
        sys.exit(_exit_code())


def _exit_code() -> int:
    """The exit code of the command that was typed; its mistakes go to stderr."""
    try:
        _working_directory()
        code = app(prog_name="realgraph", standalone_mode=False)
    except ConfigError as error:
        problems, code = error.problems, error.exit_code
    except UsageError as error:
        asked = str(error) != ""  # else nothing was, and the help is printed already
        problems, code = (usage_problem(error),) if asked else (), ConfigError.exit_code
    else:
        return code if isinstance(code, int) else 0
    for problem in problems:
        say(problem, err=True)
    return code


def _working_directory() -> None:
    """Raises ConfigError where there is none, as after another shell has deleted it: all paths start there."""
    try:
        os.getcwd()
    except OSError as error:
        text = f"the working directory can't be used: {error.strerror}"
        raise ConfigError(
            [Problem(Where(COMMAND_LINE), text, "cd to another one, and type the command again")]
        ) from None


def usage_problem(error: Exception) -> Problem:
    """A mistake that the parser of the command line refuses, placed at its option or argument."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    command = context.command_path if context is not None else "realgraph"
    place = getattr(error, "option_name", None) or (_parameter_name(param) if param is not None else command)
    text = getattr(error, "message", "") or ("missing" if param is not None else str(error))
    close = ", ".join(getattr(error, "possibilities", None) or ())
    hint = f"did you mean {close}?" if close else f"see {command} --help"
    text = text.removeprefix("value error, ")
    return Problem(Where(COMMAND_LINE, path=place), (text[:1].lower() + text[1:]).rstrip("."), hint, "usage")


def _parameter_name(param: object) -> str:
    """`--seed` of an option, `FILE` of an argument."""
    names = [name for name in getattr(param, "opts", ()) if name.startswith("-")]
    return names[-1] if names else str(getattr(param, "metavar", None) or getattr(param, "name", ""))


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"realgraph {version('realgraph')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
