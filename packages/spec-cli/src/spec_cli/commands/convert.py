"""`spec convert`: a drafter in any known packaging, as safetensors in DeepSpec's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spec_cli import bundled
from spec_cli.options import DTYPES, checkpoint, cpu_blas_option, json_option, log_level_option
from spec_cli.places import Command

if TYPE_CHECKING:
    from spec_drafters.convert import Converted
    from spec_drafters.load import SlotConvention
    from spec_drafters.readings import Reading

PROBED_SETS = ("chat", "tool", "code")


@dataclass(frozen=True, slots=True)
class Trial:
    """What trying a drafter on its target needs.

    Attributes:
        model: the target, as it was named.
        prompts: a user's own file, or None for one prompt of each set that comes with the program.
        tokens: to decode behind each prompt.
        dtype: of the target, or None for its own.
    """

    model: str | None
    prompts: Path | None
    tokens: int
    dtype: str | None


@click.command(cls=Command)
@click.argument("source")
@click.argument("dest", type=click.Path(path_type=Path))
@click.option(
    "--slot-convention",
    type=click.Choice(("auto", "anchor", "shifted")),
    default="auto",
    show_default=True,
    help="Which slot of a block predicts the token after the anchor: the anchor's own, or the one "
    "after it. auto: as the file says.",
)
@click.option(
    "--tap-shift",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Add N to the number of every target layer that the drafter reads.",
)
@click.option(
    "--target-layers",
    type=click.IntRange(min=4),
    help="The target's layer count, for a drafter whose file names no layers.",
)
@click.option(
    "--probe",
    is_flag=True,
    help="Load target and drafter, decode a few prompts, and report what is accepted slot by slot: "
    "as the file is read, with the other slot convention, and one layer higher and lower.",
)
@click.option(
    "--model",
    metavar="FOLDER|ID",
    callback=checkpoint,
    help="With --probe: the target. [default: the bundled spec-tiny]",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --probe: prompts, one a line or a JSON list. [default: three of ours]",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=48, show_default=True, help="With --probe."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="With --probe: cast the target.")
@cpu_blas_option
@json_option
@log_level_option("warning")
def convert(
    source: str,
    dest: Path,
    slot_convention: SlotConvention,
    tap_shift: int,
    target_layers: int | None,
    probe: bool,
    model: str | None,
    prompts: Path | None,
    max_tokens: int,
    dtype: str | None,
    cpu_blas: str,
    as_json: bool,
    log_level: str,
) -> None:
    """Write the drafter SOURCE into the new folder DEST.

    SOURCE is a folder, a hub id, or a GGUF file ("gguf:owner/name/file.gguf" for one on the hub).
    DEST gets config.json and model.safetensors in DeepSpec's layout; in z-lab's where that says
    what DeepSpec's cannot; with the source's own config where neither can. It appears complete or
    not at all.
    """
    trial = Trial(model, prompts, max_tokens, dtype)
    _refuse_unused(probe, trial)
    from spec_drafters.convert import check_free
    from spec_drafters.convert import convert as write
    from spec_drafters.errors import DrafterError
    from spec_drafters.load import inspect_drafter
    from spec_drafters.readings import hint

    path = _find(source, model)
    check_free(dest)
    try:
        inspect_drafter(path)
    except DrafterError as error:
        raise click.ClickException(f"{source} cannot be converted: {error}") from error
    tried = _try(path, trial, slot_convention, tap_shift) if probe else []
    advice = hint(tried) if tried else None
    if advice:
        click.echo(f"spec: {advice}", err=True)
    if tried:
        # What trying told is written down, where the file does not say.
        slot_convention = tried[0].slot_convention
    written = write(
        path,
        dest,
        slot_convention=slot_convention,
        tap_shift=tap_shift,
        target_layers=target_layers,
    )
    if as_json:
        click.echo(json.dumps(record(source, dest, written, tried, advice), indent=2))
    else:
        _print(dest, written)


def _refuse_unused(probe: bool, trial: Trial) -> None:
    given = {"--model": trial.model, "--prompts": trial.prompts, "--dtype": trial.dtype}
    unused = [name for name, value in given.items() if value is not None]
    if unused and not probe:
        raise click.UsageError(f"{' and '.join(unused)} need --probe, which tries the drafter")


def _find(source: str, model: str | None) -> Path:
    """The drafter's files: also a bare name beside the target."""
    from spec_drafters.resolve import resolve

    target = Path(bundled.target(model))
    return resolve(source, beside=target if target.is_dir() else None)


def _try(
    path: Path, trial: Trial, slot_convention: SlotConvention, tap_shift: int
) -> list[Reading]:
    """Every reading of the drafter, the one that is asked for first; progress on stderr."""
    from spec_drafters.readings import readings
    from spec_server import LoadOptions, Tokeniser
    from spec_server.loading import load_target_parts, locate_target

    options = LoadOptions(
        model=bundled.target(trial.model),
        dtype=trial.dtype,  # type: ignore[arg-type]
        mode="baseline",
    )
    folder = locate_target(options)
    click.echo("loading the target", err=True)
    parts = load_target_parts(options, folder)
    tokeniser = Tokeniser.load(folder)
    found = []
    for reading in readings(
        path,
        parts.target,
        _prompts(trial.prompts, tokeniser),
        slot_convention=slot_convention,
        tap_shift=tap_shift,
        tokens=trial.tokens,
        end_tokens=sorted(tokeniser.end_tokens),
        dtype=parts.dtype,
    ):
        click.echo(_line(reading), err=True)
        found.append(reading)
    return found


def _prompts(file: Path | None, tokeniser: Any) -> list[tuple[int, ...]]:
    from spec_cli.bench.prompts import bundled_set, prompt_file

    if file is not None:
        return list(prompt_file(file).tokenised(tokeniser))
    return [bundled_set(name).tokenised(tokeniser)[0] for name in PROBED_SETS]


def _line(reading: Reading) -> str:
    """One reading, for people."""
    how = [] if reading.slot_convention == "auto" else [f"slots {reading.slot_convention}"]
    if reading.tap_shift:
        how.append(f"taps {reading.tap_shift:+d}")
    shares = " ".join(f"{share:.2f}" for share in reading.acceptance.by_position)
    accepted = reading.acceptance.accepted
    return (
        f"{', '.join(how) or 'as read'}: {accepted:.2f} guesses a round accepted; by slot {shares}"
    )


def _print(dest: Path, written: Converted) -> None:
    spec = written.spec
    layout = "the source's own config" if written.layout == "own" else f"{written.layout}'s layout"
    click.echo(f"{dest}: a {spec.mode} drafter of up to {spec.max_block} tokens, in {layout}")


def record(
    source: str,
    dest: Path,
    written: Converted,
    tried: Sequence[Reading],
    advice: str | None,
) -> dict[str, Any]:
    """What --json prints."""
    spec = written.spec
    return {
        "source": source,
        "destination": str(dest),
        "packaging": spec.packaging,
        "layout": written.layout,
        "mode": spec.mode,
        "max_block": spec.max_block,
        "taps": list(spec.taps or ()),
        "readings": [
            {
                "slot_convention": reading.slot_convention,
                "tap_shift": reading.tap_shift,
                "rounds": reading.acceptance.rounds,
                "accepted": round(reading.acceptance.accepted, 4),
                "accept_by_position": [round(x, 4) for x in reading.acceptance.by_position],
            }
            for reading in tried
        ],
        "hint": advice,
    }
