"""The command line: `skyserve-lb serve`, the commands of a service on one machine, `demo`, `doctor`.

Click only splits the arguments; their meaning is in `lb.settings`, so that flags and environment
variables are checked alike and all faults come out together. What a command needs is imported when
it runs: `--help` and a fault must not wait for the HTTP stack.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click

from lb import __version__
from lb.kinds import duration, nearest, shown
from lb.settings import OPTIONS, Settings, SettingsError, load

PROGRAM = "skyserve-lb"
BAD_CONFIGURATION = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
STATE = Path("~/.skyserve-lb")


class _Commands(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for a misspelt one name the nearest, as older releases of click do not."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            near = nearest(name, self.commands)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(self.commands)}."
            raise click.UsageError(f"{shown(name)}: no such command, {hint}", ctx)
        return super().resolve_command(ctx, args)


class _Serve(click.Command):
    """`serve`: its options are `OPTIONS`, in the help under the headings of their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for group, options in groupby(OPTIONS, key=lambda option: option.group):
            with formatter.section(group):
                rows = [records.pop(option.name) for option in options]
                formatter.write_dl([row for row in rows if row])
        with formatter.section("Other"):
            formatter.write_dl([row for row in records.values() if row])


def _params() -> Iterator[click.Parameter]:
    """All without a check and without a default of click's: both are `load`'s."""
    for option in OPTIONS:
        default = option.default or option.unset or "required"
        yield click.Option(
            [*option.flags, option.name],
            metavar=option.kind.metavar or None,
            help=f"{option.meaning}  [{default}]",
            is_flag=None if option.takes_value else True,
        )


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    click.echo(f"{PROGRAM} {__version__}")
    ctx.exit()


@click.group(cls=_Commands, no_args_is_help=False, context_settings={"max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def commands() -> None:
    """A load balancer for SkyPilot's SkyServe that survives an empty ready list."""


def serve(**given: str | bool | None) -> int:
    """Balance the requests of one service over its replicas.

    Each option can also be set in the environment: --total-timeout as SKYSERVE_LB_TOTAL_TIMEOUT.
    A flag beats its variable. Durations are such as 20s, 500ms or 5m, sizes such as 16MiB.
    """
    settings = _settings(given, click.get_current_context().args)
    from lb.app import run

    return run(settings)


commands.add_command(
    _Serve(
        "serve",
        callback=serve,
        help=serve.__doc__,
        params=list(_params()),
        # What click does not know becomes a fault beside the others, and not one before them.
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
)


def _duration(text: str) -> float:
    try:
        seconds: float = duration(zero=True).parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return seconds


def _state_dir(function: Callable[..., int]) -> Callable[..., int]:
    """Let a command have --state-dir."""
    option = click.option(
        *("--state-dir", "state"),
        type=click.Path(file_okay=False, path_type=Path),
        default=STATE,
        help=f"Where the services of this machine are kept.  [{STATE}]",
        callback=lambda _ctx, _param, folder: folder.expanduser().absolute(),
    )
    return option(function)


@commands.command()
def example() -> int:
    """Print the task file of a small service, to begin with."""
    from controller_client import embedded

    click.echo((Path(embedded.__file__).parent / "examples/http_server.yaml").read_text(), nl=False)
    return 0


@commands.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="SERVICE.YAML")
@click.option("--name", metavar="NAME", help="Name of the service.  [that in the file, or service]")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the endpoint.  [a free one]")
@click.option(
    "--gap",
    metavar="DURATION",
    default="0",
    callback=lambda _ctx, _param, text: _duration(text),
    help="A fault, on purpose: for so long after an update the ready list goes by the versions "
    "from before it, as SkyPilot's does.  [0]",
)
@_state_dir
def up(file: Path, name: str | None, port: int | None, gap: float, state: Path) -> int:
    """Run a SkyServe service on this machine: replicas as local processes, a controller, a balancer.

    The load balancer takes its options from SKYSERVE_LB_... in the environment, but for the address.
    """
    from lb import services

    click.echo(services.up(file, state, name=name, port=port or 0, gap=gap))
    return 0


@commands.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path), metavar="SERVICE.YAML")
@click.option(
    "--mode",
    type=click.Choice(["rolling", "blue_green"]),
    default="rolling",
    help="Serve old and new replicas side by side, or switch when enough new ones are ready.  [rolling]",
)
@_state_dir
def update(name: str, file: Path, mode: str, state: Path) -> int:
    """Update a service to what the file says now.

    A change of nothing but its `service:` section takes the running replicas over.
    """
    from controller_client.embedded.versions import Mode
    from lb import services

    version = services.update(name, file, state, Mode(mode))
    click.echo(f"{name} goes to version {version}; watch it: skyserve-lb status {name} --watch")
    return 0


@commands.command()
@click.argument("name", required=False)
@click.option("--watch", is_flag=True, help="Go on showing it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--balancer", metavar="URL", help="Show the balancer with this admin port instead.")
@_state_dir
def status(name: str | None, watch: bool, as_json: bool, balancer: str | None, state: Path) -> int:
    """Show the services of this machine and their replicas, or one balancer anywhere."""
    if balancer is not None:
        if name is not None:
            raise click.UsageError("a NAME and --balancer do not go together.")
        from lb.terminal import show

        return show(balancer, watch=watch, as_json=as_json)
    from lb import services

    services.status(name, state, watch=watch, as_json=as_json)
    return 0


@commands.command()
@click.argument("name")
@click.argument("which", default="controller", metavar="[ID|controller|balancer]")
@click.option("--follow", "-f", is_flag=True, help="Go on as it grows.")
@_state_dir
def logs(name: str, which: str, follow: bool, state: Path) -> int:
    """Print the log of a replica, of the controller or of the load balancer."""
    from lb import services

    services.logs(name, which, state, follow=follow)
    return 0


@commands.command()
@click.argument("name")
@_state_dir
def down(name: str, state: Path) -> int:
    """End a service, its replicas and all else of it."""
    from lb import services

    services.down(name, state)
    return 0


@commands.command()
def demo() -> int:
    """Show the fault, the cure and three updates on this machine.

    A ready list that goes empty, met with and without a grace period; then a service under load
    through a count-only, a rolling and a blue-green update. Needs no cloud and no network, and takes
    less than a minute.
    """
    from lb.demo import demo as run

    return run()


@commands.command()
@click.option("--python", metavar="FILE", help="Python of SkyPilot's environment.  [this one]")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(python: str | None, as_json: bool) -> int:
    """Check the add-on in SkyPilot's environment.

    Which SkyPilot, whether the hook is active and why, which load balancer each service has, and
    whether its versions agree. The exit code is 0 only if all is well.
    """
    from controller_client.skypilot.doctor import doctor as run

    return run(python=python, as_json=as_json)


def main() -> int:
    """Run the command line and return its exit code, with one line on stderr for each fault."""
    try:
        code: int = commands.main(prog_name=PROGRAM, standalone_mode=False)
    except SettingsError as error:
        faults: Sequence[str] = error.faults
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else PROGRAM
        faults = [f"{error.format_message()} Try '{command} --help'."]
    except click.ClickException as error:
        click.echo(f"{PROGRAM}: {error.format_message()}", err=True)
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    else:
        return code
    for fault in faults:
        click.echo(f"{PROGRAM}: {fault}", err=True)
    return BAD_CONFIGURATION


def _settings(given: dict[str, str | bool | None], rest: Sequence[str]) -> Settings:
    """The settings, or SettingsError with the faults of arguments, values and environment."""
    values = {
        name: "yes" if value is True else value
        for name, value in given.items()
        if value is not None and value is not False
    }
    faults = list(_unknown_arguments(rest))
    try:
        settings = load(values, os.environ)
    except SettingsError as error:
        faults += error.faults
    if faults:
        raise SettingsError(faults)
    return settings


def _unknown_arguments(rest: Sequence[str]) -> Iterator[str]:
    flags = [flag for option in OPTIONS for flag in option.flags]
    after_flag = False
    for word in rest:
        flag, is_pair, _ = word.partition("=")
        if word.startswith("-"):
            near = nearest(flag, flags)
            hint = f", did you mean {near}?" if near else ""
            yield f"{shown(flag)}: no such option{hint}"
        elif not after_flag:  # a word behind an unknown flag is most likely its value
            yield f"{shown(word)}: unexpected argument"
        after_flag = word.startswith("-") and not is_pair
